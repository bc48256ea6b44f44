"""What happened, one step after the other, with the gaps between them: of a batch, a command or a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from busload.commands.command import AuditEvent
from busload.commands.wording import span

WORTH_SAYING = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Fact:
    """A detail of what happened."""

    name: str
    value: Any

    @property
    def at(self) -> datetime | None:
        """The time that it is, if its name says that it is one."""
        if not self.name.endswith("_at"):
            return None
        try:
            return datetime.fromisoformat(self.value)
        except (TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happened, and how long nothing had happened before."""

    event: AuditEvent
    gap: str | None

    @property
    def at(self) -> datetime:
        return self.event.at

    @property
    def facts(self) -> list[Fact]:
        """The details that are known."""
        details = self.event.details
        known = details.items() if isinstance(details, dict) else ()
        return [Fact(name, value) for name, value in known if value is not None]

    @property
    def error(self) -> dict[str, Any] | None:
        """What was raised, if an attempt has failed here."""
        details = self.event.details
        return details if isinstance(details, dict) and "message" in details and "type" in details else None


def steps(events: Sequence[AuditEvent]) -> list[Step]:
    found, before = [], None
    for event in events:
        found.append(Step(event, None if before is None else _gap(event.at - before)))
        before = event.at
    return found


def _gap(time: timedelta) -> str | None:
    return span(time) if time >= WORTH_SAYING else None
