"""Logs failed attempts: the first of a cause in full, the others of the same cause as a number."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from dataclasses import dataclass, field
from typing import TypeAlias

from busload.commands.execution import (
    COMPLETED,
    FAILED_ATTEMPT,
    RESULT_NOT_KEPT,
    TROUBLESHOOTING,
    Leased,
    Transition,
    deciding,
    summarise,
)
from busload.commands.payload import decode, safe_str
from busload.commands.traceback_text import traceback_text
from busload.commands.wording import counted

log = logging.getLogger("busload")

WINDOW = 10.0
"""Seconds in which failures that look like one that was logged are only counted."""

MOST_CAUSES = 500
"""Causes that are remembered at a time; beyond that, the oldest is summed up early."""

LEVELS = {TROUBLESHOOTING: logging.ERROR, FAILED_ATTEMPT: logging.WARNING}
"""The level of a failure: ERROR if a person must look, WARNING if it is tried again. Business rules are INFO."""

Cause: TypeAlias = tuple[str, ...]
"""The domain, the type, and what else failures have in common."""

_DIFFERS = re.compile(r"""'(?![^\W\d][^\W\d.]*')[^']*'|"(?![^\W\d][^\W\d.]*")[^"]*"|\b[0-9a-fA-F]*\d[\w-]*""")
"""What differs between commands: numbers, ids, and quoted text, unless the text looks like a name."""


class FailureLog:
    """One for each worker. The database keeps every failure in full; only the log has fewer lines."""

    def __init__(self) -> None:
        self._reported: dict[Cause, _Reported] = {}

    def report(
        self,
        transition: Transition,
        error: BaseException | None,
        then: str | None = None,
        level: int | None = None,
    ) -> None:
        """Log that an attempt has failed by this error. `then` says what happens next; otherwise the outcome does."""
        level = LEVELS.get(transition.outcome, logging.INFO) if level is None else level
        try:
            if log.isEnabledFor(level):
                self._report(level, transition, _cause(transition, error), "failed", then, error or "")
        except Exception:  # of somebody's filter or handler: what becomes of the command must not depend on it
            log.debug("A failure could not be logged", exc_info=True)

    def report_result(self, transition: Transition) -> None:
        """Log that the result of a handler could not be kept."""
        try:
            details = decode(transition.details or "{}")
            what = " " + str(details.get(RESULT_NOT_KEPT) or details.get("message"))
            then = "completed without a result" if transition.outcome == COMPLETED else None
            cause = (*_who(transition), _DIFFERS.sub("?", what))
            self._report(logging.ERROR, transition, cause, "returned what cannot be kept", then, what)
        except Exception:  # as above
            log.debug("A result that cannot be kept could not be logged", exc_info=True)

    def close(self) -> None:
        """Log what was only counted so far."""
        for cause in list(self._reported):
            self._forget(cause)

    def _report(
        self, level: int, transition: Transition, cause: Cause, did: str, then: str | None, why: BaseException | str
    ) -> None:
        """Log it, unless one like this was logged a moment ago: then it is only counted."""
        if (reported := self._reported.get(cause)) is not None:
            reported.more += 1
            return
        what = _headline(why) if isinstance(why, BaseException) else why
        while len(self._reported) >= MOST_CAUSES:
            self._forget(next(iter(self._reported)))
        self._reported[cause] = _Reported(level, what)
        asyncio.get_running_loop().call_later(WINDOW, self._forget, cause)
        words = (name(transition.leased), did, then or next_step(transition), what)
        file, line, function, _ = log.findCaller()
        record = log.makeRecord(
            log.name, level, file, line, "%s %s: %s.%s", words, None, function, extra=fields(transition)
        )
        # An answer that the business gives needs no traceback; the execution has it all the same.
        if isinstance(why, BaseException) and level > logging.INFO:
            record.exc_info = (type(why), why, why.__traceback__)
            record.exc_text = traceback_text(why).rstrip("\n")  # bounded, and without what no stream can write
        log.handle(record)

    def _forget(self, cause: Cause) -> None:
        reported = self._reported.pop(cause, None)
        if reported is None or not reported.more:
            return
        domain, command_type, *_ = cause
        log.log(
            reported.level,
            "... and %d more like this within %s: %s in %s.%s",
            reported.more,
            counted(math.ceil(time.monotonic() - reported.since), "second"),
            command_type,
            domain,
            reported.what,
            extra={"domain": domain, "command_type": command_type, "more": reported.more},
        )


@dataclass(slots=True)
class _Reported:
    """A failure that was logged, and how many like it came since."""

    level: int
    what: str
    since: float = field(default_factory=time.monotonic)
    more: int = 0


def next_step(transition: Transition) -> str:
    """What happens to a command after an attempt that failed."""
    match transition.outcome:
        case "FAILED_ATTEMPT":
            return f"tried again in {transition.delay:g} s" if transition.delay else "tried again at once"
        case "TROUBLESHOOTING":
            return f"waits in troubleshooting ({transition.reason})"
    return f"ended as {transition.outcome}"


def name(leased: Leased) -> str:
    """Which attempt of which command this is, for people."""
    lease = leased.lease
    batch = f", batch {lease.batch_id}" if lease.batch_id is not None else ""
    task = f", task {leased.task_key!r:.200}" if leased.task_key is not None else ""
    return f"{leased.command_type} {leased.command_id} in {lease.domain}, attempt {lease.round_attempt}{batch}{task}"


def fields(transition: Transition) -> dict[str, object]:
    """Which attempt of which command this is, and how it ended, for programs."""
    leased = transition.leased
    lease = leased.lease
    return {
        "domain": lease.domain,
        "command_id": str(leased.command_id),
        "command_type": leased.command_type,
        "batch_id": None if lease.batch_id is None else str(lease.batch_id),
        "task_key": leased.task_key,
        "execution_id": str(leased.execution_id),
        "attempt": lease.round_attempt,
        "outcome": transition.outcome,
        "reason": transition.reason,
        "retry_in": transition.delay,
    }


def _headline(error: BaseException) -> str:
    said = summarise(error, 1024)
    return f" {said['type']}: {said['message']}" if said["message"] else f" {said['type']}"


def _cause(transition: Transition, error: BaseException | None) -> Cause:
    """What failures have in common: who failed, what comes next, and the error without what differs in its message."""
    decisive = None if error is None else deciding(error)
    code = getattr(decisive, "code", None)
    return (
        *_who(transition),
        type(decisive).__qualname__,
        code if isinstance(code, str) else "",
        "" if decisive is None else _DIFFERS.sub("?", safe_str(decisive, 300)),
    )


def _who(transition: Transition) -> Cause:
    leased = transition.leased
    return leased.lease.domain, leased.command_type, transition.outcome, transition.reason or ""
