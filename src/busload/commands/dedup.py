"""What a task is called, and what happens to a second command for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args
from uuid import UUID

from busload.errors import InvalidCommandError, Problem
from busload.settings import LONGEST

OnConflict = Literal["skip", "raise", "return_existing"]


@dataclass(frozen=True, slots=True)
class Dedup:
    """One open command per task key and domain.

    A key is held while its command is open, whatever its age, and in any case for `window` after it was sent. Who sends
    another one meanwhile gets the id of the holder: with "skip" and a line in the log, with "return_existing" without
    one; with "raise" gets a `DuplicateTaskError` and nothing is written.
    """

    window: timedelta = timedelta(minutes=5)
    on_conflict: OnConflict = "skip"

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.window, timedelta) or not timedelta(0) <= self.window <= LONGEST:
            message = f"found {self.window!r:.80}, wanted a timedelta from zero to {LONGEST.days} days"
            problems.append(Problem("INVALID_OPTION", "/dedup/window", message))
        if self.on_conflict not in get_args(OnConflict):
            message = f"found {self.on_conflict!r:.80}, wanted one of {', '.join(get_args(OnConflict))}"
            problems.append(Problem("INVALID_OPTION", "/dedup/on_conflict", message))
        if problems:
            raise InvalidCommandError(problems, writes=False)


def task_key(*parts: str | int | UUID) -> str:
    """A readable key from its parts: `task_key("invoices", 2026, "A:7")` is `invoices:2026:A%3A7`.

    A colon within a part is escaped, so that different parts never make the same key.
    """
    problems = [
        Problem("INVALID_TEXT", f"/task_key/{index}", f"found {part!r:.80}, wanted a str, an int or a UUID, not empty")
        for index, part in enumerate(parts)
        if isinstance(part, bool) or not isinstance(part, str | int | UUID) or part == ""
    ]
    if problems or not parts:
        none = [Problem("INVALID_TEXT", "/task_key", "found no parts, wanted some")]
        raise InvalidCommandError(problems or none, writes=False)
    return ":".join(str(part).replace("%", "%25").replace(":", "%3A") for part in parts)
