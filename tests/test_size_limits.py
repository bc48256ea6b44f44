"""The page about size limits tells the limits that the code has, and what happens beyond them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BatchNotFoundError,
    CommandBus,
    ConcurrencyLimit,
    InvalidCommandError,
    PermanentCommandError,
    RateLimit,
    WorkerSettings,
)
from busload.buffers import add, declaration, groups
from busload.commands import checks, load, send, traceback_text
from busload.commands.execution import describe
from busload.jobs import batch as job_batch
from busload.limits.concurrency import MOST_CALLS
from busload.limits.rate import KEY_BYTES
from busload.settings import LONGEST, LONGEST_FLUSH_EVERY, InputLimits, PayloadLimits
from busload.worker.coalescer import Coalescer
from busload.worker.settlement import capacity
from tests.given import DOMAIN, Database

PAGE = Path(__file__).parents[1] / "docs/size-limits.md"
ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<limit>[\d,]+) \| (?P<beyond>[^|]+) \|$", re.MULTILINE)


def largest(kind: Any) -> int:
    """The largest whole number that a rule accepts."""
    low, high = 1, 2**63
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if kind(middle, "x") else (middle, high)
    return low


def default_of(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def longest_reason() -> int:
    return max(n for n in range(4000, 4200) if not checks.RULES["reason"]("x" * n, "reason", InputLimits()))


LIMITS = InputLimits()
DECLARED: dict[str, int] = {
    "commands in a list for `create_batch`, at least": 1,
    "commands in a batch, at most": 2**31 - 1,
    "jobs in a batch of jobs": job_batch.MOST,
    "commands in a statement": send.SOME,
    "commands in a load": load.LOAD_SIZE,
    "commands between checkpoints of an open batch": largest(checks.RULES["checkpoint_size"]),
    "bytes of `custom_data` (setting)": LIMITS.payload.data_bytes,
    "bytes of a batch's name": LIMITS.name_bytes,
    "bytes of a command's data (setting)": LIMITS.payload.data_bytes,
    "bytes of data that the setting may allow": 16 * 1024 * 1024,
    "depth of data (setting)": LIMITS.payload.depth,
    "digits of an integer in data (setting)": LIMITS.payload.integer_digits,
    "bytes of a domain, type or `reply_to` (setting)": LIMITS.name_bytes,
    "bytes of a task key or task id (setting)": LIMITS.task_key_bytes,
    "bytes of the headers of a command or a batch, as JSON (setting)": LIMITS.headers_bytes,
    "characters of a text as `job_id`": checks.MOST_OF_JOB_ID,
    "bytes of an operator's name": LIMITS.name_bytes,
    "bytes of a reason": longest_reason(),
    "highest priority": largest(checks.RULES["priority"]),
    "attempts": largest(checks.RULES["max_attempts"]),
    "bytes of a result (setting)": LIMITS.payload.data_bytes,
    "bytes of an error's message": default_of(describe, "max_bytes"),
    "bytes of a traceback": traceback_text.MOST_BYTES,
    "days until a `run_at` or an `expires_at`": LONGEST.days,
    "bytes of a `fair_by`": LIMITS.name_bytes,
    "bytes of a `stage` that is a text": LIMITS.name_bytes,
    "highest `stage` that is a number": largest(partial(checks.wrong_stage, limits=LIMITS)),
    "days of an `expires_in`": LONGEST.days,
    "bytes of the text that a search looks for in errors": 4096,
    "bytes of the name that a limit is found by": 2 * LIMITS.name_bytes + 1,
    "bytes of the name that a limit is given": LIMITS.name_bytes,
    "bytes of the key that `by` returns": KEY_BYTES,
    "calls at a time in a `ConcurrencyLimit`": MOST_CALLS,
    "events in a group": largest(declaration.SIZES),
    "groups of a buffer at a time": largest(declaration.GROUPS),
    "bytes of an event's data (setting)": LIMITS.payload.data_bytes,
    "bytes of an event's key": add.KEY_BYTES,
    "failed items that one report lists": groups.MOST_LISTED,
    "results in a flush, by default": WorkerSettings().flush_size,
    "bytes of results in a flush": default_of(Coalescer.__init__, "max_bytes"),
    "seconds between flushes": int(LONGEST_FLUSH_EVERY.total_seconds()),
    "results that wait, by default": capacity(WorkerSettings()),
}
"""Every limit on the page, as the code has it."""


def test_the_page_tells_the_limits_that_the_code_has() -> None:
    told = {row["what"]: int(row["limit"].replace(",", "")) for row in ROW.finditer(PAGE.read_text())}
    assert told == DECLARED


OVER: dict[str, tuple[str, Callable[[CommandBus, int], Awaitable[object]]]] = {
    "bytes of `custom_data` (setting)": ("TOO_LARGE", lambda bus, n: batch(bus, custom_data={"x": "x" * n})),
    "bytes of a batch's name": ("TOO_LONG", lambda bus, n: batch(bus, name="x" * n)),
    "commands between checkpoints of an open batch": (
        "INVALID_OPTION",
        lambda bus, n: opened_and_sealed(bus, checkpoint_size=n),
    ),
    "bytes of a command's data (setting)": ("TOO_LARGE", lambda bus, n: bus.send(DOMAIN, "Debit", {"x": "x" * n})),
    "depth of data (setting)": ("TOO_DEEP", lambda bus, n: bus.send(DOMAIN, "Debit", nested(n))),
    "digits of an integer in data (setting)": (
        "NUMBER_TOO_LONG",
        lambda bus, n: bus.send(DOMAIN, "Debit", {"x": 10 ** (n - 1)}),
    ),
    "bytes of a domain, type or `reply_to` (setting)": ("INVALID_NAME", lambda bus, n: bus.send("x" * n, "Debit")),
    "bytes of a task key or task id (setting)": (
        "TOO_LONG",
        lambda bus, n: bus.send(DOMAIN, "Debit", task_key="x" * n),
    ),
    "characters of a text as `job_id`": ("TOO_LONG", lambda bus, n: batch(bus, job_id="x" * n)),
    "bytes of an operator's name": (
        "TOO_LONG",
        lambda bus, n: bus.cancel_batch(DOMAIN, uuid4(), reason="no", operator="x" * n),
    ),
    "bytes of a reason": ("TOO_LONG", lambda bus, n: bus.cancel_batch(DOMAIN, uuid4(), reason="x" * n)),
    "highest priority": ("INVALID_OPTION", lambda bus, n: bus.send(DOMAIN, "Debit", priority=n)),
    "attempts": ("INVALID_OPTION", lambda bus, n: bus.send(DOMAIN, "Debit", max_attempts=n)),
    "bytes of a `fair_by`": ("TOO_LONG", lambda bus, n: batch(bus, fair_by="x" * n)),
    "bytes of a `stage` that is a text": ("TOO_LONG", lambda bus, n: batch(bus, stage="x" * n, job_id="job")),
    "highest `stage` that is a number": ("INVALID_OPTION", lambda bus, n: batch(bus, stage=n, job_id="job")),
    "days of an `expires_in`": ("INVALID_OPTION", lambda bus, n: batch(bus, expires_in=timedelta(days=n))),
    "days until a `run_at` or an `expires_at`": (
        "INVALID_TIME",
        lambda bus, n: bus.send(DOMAIN, "Debit", expires_at=datetime.now(UTC) + timedelta(days=n)),
    ),
    "bytes of the text that a search looks for in errors": (
        "TOO_LONG",
        lambda bus, n: bus.list_commands(DOMAIN, error="x" * n),
    ),
    "bytes of the name that a limit is found by": ("TOO_LONG", lambda bus, n: bus.limits.list("x" * n)),
    "bytes of an event's key": ("TOO_LONG", lambda bus, n: bus.buffer("events").add({}, key="x" * n)),
}
"""What one more than the limit is refused with, and how to ask for it."""


async def batch(bus: CommandBus, **options: Any) -> None:
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", data={})], **options)


async def opened_and_sealed(bus: CommandBus, **options: Any) -> None:
    async with bus.open_batch(DOMAIN, **options):
        pass


def nested(depth: int) -> dict[str, Any]:
    value: Any = 0
    for _ in range(depth):
        value = {"x": value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("name", OVER)
async def test_beyond_a_limit_happens_what_the_page_says(bus: CommandBus, database: Database, name: str) -> None:
    """One more is refused by its code before anything is written; as much as the limit allows is accepted."""
    code, call = OVER[name]
    before = database.everything()
    with pytest.raises(InvalidCommandError) as refused:
        await call(bus, DECLARED[name] + 1)
    assert refused.value.code == code
    assert database.everything() == before
    beyond = {row["what"]: row["beyond"] for row in ROW.finditer(PAGE.read_text())}[name]
    assert beyond.startswith("refused") and (f"`{code}`" in beyond or "`" not in beyond)
    if name not in ROOM_FOR_MORE:
        with suppress(BatchNotFoundError):
            await call(bus, DECLARED[name])


ROOM_FOR_MORE = ("bytes of `custom_data` (setting)", "bytes of a command's data (setting)")
"""Limits of the whole JSON text, of which the value above is only a part."""


async def test_an_empty_list_makes_no_batch(bus: CommandBus, database: Database) -> None:
    with pytest.raises(ValueError):
        await bus.create_batch(DOMAIN, [])
    assert database.count("batch") == 0
    assert await bus.send_many(DOMAIN, []) == []


async def test_a_batch_that_is_full_stays_as_it_is(bus: CommandBus, database: Database) -> None:
    """Beyond the largest number that PostgreSQL counts in an integer."""
    most = DECLARED["commands in a batch, at most"]
    async with bus.open_batch(DOMAIN) as full:
        batch_id = full.batch_id
        database.rows("UPDATE busload.batch SET total_count = %s WHERE batch_id = %s", most, batch_id)
        with pytest.raises(psycopg.errors.NumericValueOutOfRange):
            await bus.send(DOMAIN, "Debit", batch_id=batch_id)
        assert database.value("SELECT total_count FROM busload.batch WHERE batch_id = %s", batch_id) == most
        assert database.count("command") == 0
        database.rows("UPDATE busload.batch SET total_count = 0 WHERE batch_id = %s", batch_id)


def test_a_limit_of_calls_beyond_its_ceiling_is_refused() -> None:
    longest, most = (
        DECLARED["bytes of the name that a limit is given"],
        DECLARED["calls at a time in a `ConcurrencyLimit`"],
    )
    for kind in (partial(RateLimit, 5, timedelta(seconds=1)), partial(ConcurrencyLimit, 5)):
        kind(name="x" * longest)
        with pytest.raises(InvalidCommandError, match=f"found {longest + 1} bytes, at most {longest} are allowed"):
            kind(name="x" * (longest + 1))
    ConcurrencyLimit(most)
    with pytest.raises(ValueError, match="calls must be"):
        ConcurrencyLimit(most + 1)
    by_text = ConcurrencyLimit(5, by=lambda command: "x" * command)
    assert len(by_text.subject_of(KEY_BYTES)) == KEY_BYTES
    with pytest.raises(PermanentCommandError, match="at most 512 bytes"):
        by_text.subject_of(KEY_BYTES + 1)


def test_a_setting_beyond_its_ceiling_is_refused() -> None:
    most = DECLARED["bytes of data that the setting may allow"]
    assert PayloadLimits(data_bytes=most).data_bytes == most
    with pytest.raises(ValueError, match="data_bytes"):
        PayloadLimits(data_bytes=most + 1)
