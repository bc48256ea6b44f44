"""What stops a batch before it does harm: a canary, whose commands run first, and a budget for failures."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from busload.commands.checks import FLAG, TICK, between, whole, wrong
from busload.commands.command import BatchCommand
from busload.errors import InvalidCommandError, Problem
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements
from busload.settings import LONGEST

SQL = statements(__name__)

MOST = 2**31 - 1

NO_GUARDS: dict[str, Any] = dict.fromkeys(("canary", "within", "share", "at_least", "per_cause", "on_exceeded"))
"""The columns of both, where there is only one of them."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Run `size` commands, spread evenly over the batch, before all others.

    The others wait until these have completed. If one of them fails, goes to troubleshooting or is canceled, or if they
    have not completed `within` this time after the batch was created, the batch is held, and a person resumes or
    cancels it.
    """

    size: int
    within: timedelta = timedelta(hours=1)

    def __post_init__(self) -> None:
        longest = between(TICK, LONGEST, f"a timedelta of more than zero and at most {LONGEST.days} days")
        _refuse(whole(1, MOST)(self.size, "canary/size") + longest(self.within, "canary/within"))

    def columns(self) -> dict[str, Any]:
        return {"canary": self.size, "within": self.within}


@dataclass(frozen=True, slots=True)
class FailureBudget:
    """Hold the batch when more of it has failed or waits in troubleshooting than this `share` of all its commands.

    A small batch may have `at_least` so many failures before it is held. With `per_cause` each cause of failures has
    the whole budget for itself, and a failure counts again if its command fails again. `on_exceeded` is a command that
    is sent, in the domain of the batch, by the transaction that holds it, with the batch under the key "batch" of its
    data: also why it is held, how many failures its budget allows, and how many there are. After a resume the budget
    counts from there.
    """

    share: float
    at_least: int = 0
    per_cause: bool = False
    on_exceeded: BatchCommand | None = None

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if type(self.share) not in (int, float) or not 0 < self.share <= 1:
            problems.append(wrong(self.share, "budget/share", "a share of more than 0 and at most 1"))
        problems += whole(0, MOST)(self.at_least, "budget/at_least") + FLAG(self.per_cause, "budget/per_cause")
        asked: object = self.on_exceeded
        if not isinstance(asked, BatchCommand | None):
            problems.append(wrong(asked, "budget/on_exceeded", "a BatchCommand"))
        _refuse(problems)

    def columns(self, on_exceeded: str | None) -> dict[str, Any]:
        """What the row of the batch keeps; `on_exceeded` is the command as it was checked."""
        budget = {"share": float(self.share), "at_least": self.at_least, "per_cause": self.per_cause}
        return budget | {"on_exceeded": on_exceeded}


def hold_overdue() -> Plan[int]:
    """Hold batches whose canary has not ended well in its time; needs a transaction. Returns how many."""
    [(held,)] = yield from execute(SQL.hold_overdue)
    return int(held)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise InvalidCommandError(problems, writes=False)
