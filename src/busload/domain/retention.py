"""What is kept, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

LONGEST = timedelta(days=36525)


@dataclass(frozen=True, slots=True)
class Pruned:
    """How much was removed; with `dry_run`, how much would have been."""

    commands: int = 0
    executions: int = 0
    events: int = 0
    batches: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(
            self.commands + other.commands,
            self.executions + other.executions,
            self.events + other.events,
            self.batches + other.batches,
        )
