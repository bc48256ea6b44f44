"""Every rule for input, by the name of its parameter, and the one way to refuse input that breaks a rule.

`check(limits, domain=domain, batch_id=batch_id)` looks up the rule of each parameter by its name, and raises one error
that names every problem it has found. Input of several parts (a new batch, a job, an event) is checked by the
capability that owns it, with the same rules, and commands by `check_commands`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from math import inf
from typing import Any, TypeVar
from uuid import UUID

from busload.commands.dedup import Dedup
from busload.commands.headers import encode_headers
from busload.commands.payload import PayloadRefusedError, encode
from busload.errors import InvalidCommandError, Problem
from busload.settings import LONGEST, InputLimits, PayloadLimits

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*\Z")
FINGERPRINT = re.compile(r"[0-9a-f]{12}\Z")
MOST_OF_JOB_ID = 255
"""Characters of a text that is the id of a job."""
RATES = 0.001, 1_000_000.0
"""Items a second: from one in a quarter of an hour to more than any database moves."""


def check(limits: InputLimits, *, writes: bool = True, **parameters: object) -> None:
    """Refuse parameters that break their rules; one error names all of them.

    `writes` is False for a call that only reads: then its error does not add that nothing was written.
    """
    refuse(problems_of(limits, **parameters), writes=writes)


def problems_of(limits: InputLimits, **parameters: object) -> list[Problem]:
    """Everything that is wrong with these parameters, in their order."""
    found: list[Problem] = []
    for name, value in parameters.items():
        if value is not None or name not in OR_NONE:
            found += RULES[name](value, name, limits)
    return found


def given(**parameters: object) -> dict[str, Any]:
    """The parameters that are not None, for a call in which they may be left out."""
    return {name: value for name, value in parameters.items() if value is not None}


def refuse(problems: Sequence[Problem], *, writes: bool = True) -> None:
    """Raise one error for these problems, if there are any; `writes` is as in `check`."""
    if problems:
        raise InvalidCommandError(problems, writes=writes)


def require(kind: Kind, **parameters: object) -> None:
    """Refuse a setting, or an argument of a constructor, that is not of this kind."""
    for name, value in parameters.items():
        if not kind.fits(value):
            raise ValueError(f"{name} must be {kind.wanted}, found {shown(value)}.")


Choice = TypeVar("Choice", bound=StrEnum)


def choice(kind: type[Choice], value: str | None, path: str = "status", *, writes: bool = False) -> Choice | None:
    """The member of an enum that the caller has named; None if the caller has named none."""
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        raise InvalidCommandError([wrong(value, path, f"one of {', '.join(kind)}")], writes=writes) from None


def seconds_of(timeout: timedelta | float | None, name: str = "timeout") -> float | None:
    """A time-out in seconds; None if there is none."""
    seconds: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None or (isinstance(seconds, int | float) and seconds >= 0):  # NaN is not
        return seconds
    raise ValueError(f"{name} must be a timedelta or seconds, 0 or more, found {timeout!r:.80}.")


def encoded(value: Any, path: str, limits: PayloadLimits) -> str:
    """A value as JSON text; `path` says where in the call the value stands."""
    try:
        return encode(value, limits, path=path)
    except PayloadRefusedError as refused:
        raise InvalidCommandError([refused.problem]) from None


def wrong_name(name: object, path: str, limits: InputLimits) -> list[Problem]:
    """Names of domains and types: ASCII letters, digits, `_`, `.` and `-`, beginning with a letter."""
    if not isinstance(name, str) or not NAME.match(name):
        wanted = "wanted a letter, then letters, digits, '_', '.' or '-'"
        return [Problem("INVALID_NAME", f"/{path}", f"found {shown(name)}, {wanted}")]
    if len(name) > limits.name_bytes:
        message = f"found {len(name)} bytes, at most {limits.name_bytes} are allowed"
        return [Problem("INVALID_NAME", f"/{path}", message, limit=limits.name_bytes)]
    return []


def wrong_domain(name: object, path: str, limits: InputLimits) -> list[Problem]:
    """Names of domains. A database of several refuses the domains that live in another one."""
    problems = wrong_name(name, path, limits)
    if limits.other_database is None or problems or (place := limits.other_database(str(name))) is None:
        return problems
    message = (
        f"found {name!r}, which lives in another database: {place}. A call writes to one database; wanted a domain of "
        "the same database, or a call for each"
    )
    return [Problem("OTHER_DATABASE", f"/{path}", message)]


def wrong_text(text: object, path: str, max_bytes: int) -> list[Problem]:
    """Free text that is stored in a column: task keys, batch names, reasons, operators."""
    if not isinstance(text, str) or not text or "\0" in text:
        return [Problem("INVALID_TEXT", f"/{path}", f"found {shown(text)}, wanted text without NUL that is not empty")]
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return [Problem("LONE_SURROGATE", f"/{path}", f"found {shown(text)}, wanted text that UTF-8 can hold")]
    if size > max_bytes:
        return [
            Problem("TOO_LONG", f"/{path}", f"found {size} bytes, at most {max_bytes} are allowed", limit=max_bytes)
        ]
    return []


def no_headers(found: object, path: str) -> Problem:
    return wrong(found, path, "a dict of texts, for example {'tenant': 'acme'}")


def wrong_headers(headers: object, path: str, limits: InputLimits) -> list[Problem]:
    """Texts by name beside the data; every name and value that breaks the rule is told."""
    if not isinstance(headers, Mapping):
        return [no_headers(headers, path)]
    problems: list[Problem] = []
    for name, value in headers.items():
        if found := wrong_text(name, path, limits.headers_bytes):
            problems += [replace(one, message=f"a name: {one.message}") for one in found]
        elif value != "" or not isinstance(value, str):
            problems += wrong_text(value, f"{path}/{name}", limits.headers_bytes)
    if not problems and (size := len((encode_headers(headers) or "").encode())) > limits.headers_bytes:
        message = f"found {size} bytes of JSON, at most {limits.headers_bytes} are allowed; put more into the data"
        problems.append(Problem("TOO_LONG", f"/{path}", message, limit=limits.headers_bytes))
    return problems


def wrong_id(value: object, path: str, limits: InputLimits | None = None) -> list[Problem]:
    """Ids of commands, batches, jobs and executions."""
    if isinstance(value, UUID) and value.int:
        return []
    instead = "; pass uuid.UUID(...) of the text" if isinstance(value, str) and len(value) == 36 else ""
    return [Problem("INVALID_ID", f"/{path}", f"found {shown(value)}, wanted a uuid.UUID that is not nil{instead}")]


def wrong_job(value: object, path: str, limits: InputLimits | None = None) -> list[Problem]:
    """The job that a batch is found by: one of busload's, or of the application's own, whose id may be any text."""
    if isinstance(value, str) and len(value) <= MOST_OF_JOB_ID:
        return wrong_text(value, "job_id", 4 * MOST_OF_JOB_ID)
    if isinstance(value, str):
        message = f"found {len(value)} characters, at most {MOST_OF_JOB_ID} are allowed"
        return [Problem("TOO_LONG", "/job_id", message, limit=MOST_OF_JOB_ID)]
    if isinstance(value, UUID) and value.int:
        return []
    return [Problem("INVALID_ID", "/job_id", f"found {shown(value)}, wanted a uuid.UUID that is not nil, or text")]


def wrong_stage(value: object, path: str, limits: InputLimits) -> list[Problem]:
    """The stage of a job that a batch is: its name, or its number."""
    if isinstance(value, str):
        return wrong_text(value, path, limits.name_bytes)
    number = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    return [] if number else [wrong(value, path, "text, or a whole number of at most 53 bits")]


def wrong_time(value: object, path: str, limits: InputLimits | None = None) -> list[Problem]:
    """Points in time; they must know their time zone."""
    if not isinstance(value, datetime):
        return [Problem("INVALID_TIME", f"/{path}", f"found {shown(value)}, wanted a datetime")]
    if value.tzinfo is None or value.utcoffset() is None:
        message = f"found {value.isoformat()} without a time zone; use e.g. datetime.now(UTC)"
        return [Problem("NAIVE_DATETIME", f"/{path}", message)]
    if value - datetime.now(UTC) > LONGEST:
        return [Problem("INVALID_TIME", f"/{path}", f"found {value.isoformat()}, which is over 100 years away")]
    return []


def wrong_list(items: object, path: str, wanted: str) -> list[Problem]:
    """Lists, and whatever else yields items; a text or a dict would yield the wrong ones."""
    if isinstance(items, Iterable) and not isinstance(items, str | bytes | Mapping):
        return []
    return [wrong(items, path, wanted)]


def wrong(value: object, path: str, wanted: str) -> Problem:
    """The problem of a parameter at this path that has this value."""
    return Problem("INVALID_OPTION", f"/{path}", f"found {shown(value)}, wanted {wanted}")


def shown(value: object) -> str:
    """A value as an error shows it: its repr, cut to 80 characters."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value may be: `fits` decides, and `wanted` says it in words. A kind can be called as a rule."""

    wanted: str
    fits: Callable[[Any], bool]

    def __call__(self, value: object, path: str, limits: InputLimits | None = None) -> list[Problem]:
        return [] if self.fits(value) else [wrong(value, path, self.wanted)]


def whole(first: int, last: float = inf) -> Kind:
    """Whole numbers from `first` to `last`; without `last`, they have no end."""
    to = "on" if last == inf else f"to {last}"
    return Kind(
        f"a whole number from {first} {to}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and first <= value <= last,
    )


def between(first: timedelta, last: timedelta, wanted: str = "") -> Kind:
    """Durations from `first` to `last`; `wanted` says it in other words."""
    from_first = "zero" if not first else str(first)
    return Kind(
        wanted or f"a timedelta from {from_first} to {last.days} days",
        lambda value: isinstance(value, timedelta) and first <= value <= last,
    )


def instance(kind: type, wanted: str) -> Kind:
    """Values of a class."""
    return Kind(wanted, lambda value: isinstance(value, kind))


FLAG = instance(bool, "True or False")
MAPPING = instance(dict, "a dict")
POSITIVE = Kind("a number of more than 0", lambda value: type(value) in (int, float) and 0 < value < inf)
ZERO, TICK = timedelta(0), timedelta.resolution
MORE_THAN_ZERO = between(TICK, timedelta.max, "a timedelta of more than zero")

EXPIRES_IN = Kind(
    f"a timedelta or seconds, of more than zero and at most {LONGEST.days} days",
    lambda value: (
        TICK <= value <= LONGEST
        if isinstance(value, timedelta)
        else type(value) in (int, float) and 1e-6 <= value <= LONGEST.total_seconds()
    ),
)

DELAY = Kind(
    f"a timedelta or seconds, from zero to {LONGEST.days} days",
    lambda value: (
        ZERO <= value <= LONGEST
        if isinstance(value, timedelta)
        else type(value) in (int, float) and 0 <= value <= LONGEST.total_seconds()
    ),
)

Rule = Callable[[object, str, InputLimits], list[Problem]]


def _text(max_bytes: Callable[[InputLimits], int]) -> Rule:
    return lambda value, path, limits: wrong_text(value, path, max_bytes(limits))


_short_text = _text(lambda limits: limits.name_bytes)
_key = _text(lambda limits: limits.task_key_bytes)
_page, _age = whole(0, 2**31 - 1), between(ZERO, LONGEST)

RULES: Mapping[str, Rule] = {
    "domain": wrong_domain,
    "queue": wrong_name,
    "command_type": wrong_name,
    "reply_to": wrong_domain,
    "batch_id": wrong_id,
    "command_id": wrong_id,
    "correlation_id": wrong_id,
    "execution_id": wrong_id,
    "job_id": wrong_id,
    "job_of_batch": wrong_job,
    "after": wrong_id,
    "task_key": _key,
    "task_id": _key,
    "name": _short_text,
    "stage": wrong_stage,
    "fair_by": _short_text,
    "headers": wrong_headers,
    "operator": _short_text,
    "reason": _text(lambda limits: 4096),
    "text": _text(lambda limits: 4096),
    "by": _text(lambda limits: 512),
    "limit_name": lambda value, _, limits: wrong_text(value, "name", 2 * limits.name_bytes + 1),
    "run_at": wrong_time,
    "expires_in": EXPIRES_IN,
    "priority": whole(-32768, 32767),
    "max_attempts": whole(1, 32767),
    "limit": _page,
    "offset": _page,
    "checkpoint_size": whole(1, 100_000),
    "custom_data": MAPPING,
    "metadata": MAPPING,
    "archive": FLAG,
    "dry_run": FLAG,
    "failed_only": FLAG,
    "forecast": FLAG,
    "wait_for_operator": FLAG,
    "continue_after_failures": FLAG,
    "older_than": between(TICK, LONGEST, f"a timedelta of more than zero and at most {LONGEST.days} days"),
    "publish_again_after": _age,
    "waiting_for": _age,
    "dedup": instance(Dedup, "a Dedup, for example Dedup(window=timedelta(minutes=5))"),
    "fingerprint": Kind(
        "the 12 hex digits that `busload troubleshooting groups` shows",
        lambda value: isinstance(value, str) and FINGERPRINT.match(value.lower()) is not None,
    ),
    "rate": Kind(
        f"from {RATES[0]:g} to {RATES[1]:,.0f} commands a second",
        lambda value: type(value) in (int, float) and RATES[0] <= value <= RATES[1],
    ),
}
"""What each parameter may be, in every call that has it."""

OR_NONE = frozenset(
    (
        *("after", "command_type", "correlation_id", "custom_data", "dedup", "expires_in", "fair_by", "headers"),
        *("max_attempts", "metadata", "name", "operator", "rate", "reply_to", "run_at", "stage", "task_key"),
    )
)
"""The parameters that may be None in every call that has them. `given` is for those that may be None in some."""
