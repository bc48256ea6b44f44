"""How schedules are declared in code, checked, and kept in the database."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, Unpack

import msgspec

from busload.batches.batch import callback_of
from busload.commands.check_commands import check_all
from busload.commands.checks import (
    EXPIRES_IN,
    between,
    choice,
    refuse,
    seconds_of,
    whole,
    wrong,
    wrong_domain,
    wrong_name,
)
from busload.commands.command import BatchCommand, Command, refuse_unknown
from busload.commands.data_type import DataTypes
from busload.commands.headers import decode_headers
from busload.errors import InvalidCommandError, InvalidOperationError, Problem
from busload.handlers.registry import DUE, Handlers, refuse_function
from busload.limits.handler_options import PolicyOptions
from busload.limits.rate import is_async
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements
from busload.schedules.planned import plan_batch
from busload.schedules.rule import Calendar, rule
from busload.schedules.schedule import MOST_AT_ONCE, CatchUp, CatchUpName, Policy, Schedule, ScheduledCommand
from busload.settings import InputLimits
from busload.sync.planned import plan_batch as plan_batch_in_thread

log = logging.getLogger("busload")

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
"""Schedules that were due since then may be declared: an application whose schedule has ended starts as before."""

SQL = statements(__name__)

NAME_BYTES = 200

MISSED_AFTER = between(timedelta(seconds=1), timedelta(days=1), "a timedelta from 1 second to 1 day")


PER_DUE_TIME = {
    "command_id": "leave it out",
    "task_key": "leave it out",
    "run_at": "leave it out",
    "expires_at": "pass expires_in to the schedule",
}
"""What the command of a schedule cannot have, and what to do instead."""


class ScheduleOptions(PolicyOptions, total=False):
    """What may be said about a schedule. `retry` and `timeout` are for its planner."""

    cron: str | None
    """When it is due: a cron expression of five fields, or six with seconds first, or "@daily" and the like."""
    every: timedelta | None
    """How long from one due time to the next, from 1 second on. They are counted from `starts_at`, or from 1970."""
    calendar: Calendar | None
    """When it is due: times of the day, on some days."""
    timezone: str
    """Whose clock `cron` and `calendar` go by: "Europe/Paris". UTC if it is left out."""
    starts_at: datetime | None
    """It is not due before this time, which must know its time zone."""
    ends_at: datetime | None
    """It is not due after this time, which must know its time zone."""
    command: BatchCommand | None
    """What is sent at each due time."""
    planner: Callable[..., Any] | None
    """Instead of a command: a function that returns the commands of a batch, one batch for each due time."""
    on_complete: BatchCommand | None
    """What is sent when the batch of a planner completes; the batch is under the key `batch` of its data."""
    domain: str | None
    """The domain that runs the command, or the planner and its batch."""
    catch_up: CatchUp | CatchUpName
    """What happens to due times that were missed: "skip", "one" or "all"; "one" if it is left out."""
    catch_up_limit: int
    """How many missed due times are fired at most with "all", the newest of them; 100 if it is left out."""
    missed_after: timedelta
    """How late a due time may be fired before it counts as missed; 1 minute if it is left out."""
    expires_in: timedelta | float | None
    """Cancel the command if it has not started so long after it was sent, in seconds if it is a number."""


class ScheduleDeclarations:
    """The declaration of schedules on a bus."""

    handlers: Handlers
    _limits: InputLimits
    declared_schedules: dict[str, Schedule]

    def schedule(self, name: str, **options: Unpack[ScheduleOptions]) -> Schedule:
        """Declare the schedule `name`: at each due time exactly one command is sent, or one batch is planned.

        It says when by `cron`, `every` or `calendar`, and what by `command` or `planner`; `ScheduleOptions` says what
        the options mean. A planner is called with a `DueTime` and a `HandlerContext`, as a handler is, and returns the
        `BatchCommand`s of its batch. Nothing is written yet: workers keep the declarations in the database when they
        start, and so do `bus.schedules.sync()` and `busload schedule sync`.
        """
        refuse_unknown("schedule", options, ScheduleOptions)
        made = schedule(name, options, self._limits, self.handlers.data_types)
        if name in self.declared_schedules:
            raise InvalidOperationError(
                f"The schedule {name!r} was declared before. Declare it once, or give one of the two another name."
            )
        if (planner := options.get("planner")) is not None:
            policy: PolicyOptions = {"retry": options.get("retry"), "timeout": options.get("timeout")}
            refuse_function(planner, "plan(due, ctx)", kind="planner")
            if inspect.isasyncgenfunction(planner):
                raise ValueError(
                    f"The planner of {name!r} is an `async def` with a `yield`. Return a list of BatchCommand."
                )
            self.handlers.add(made.domain, DUE + name, **policy)(_handler(planner, options.get("on_complete")))
        self.declared_schedules[name] = made
        return made


def schedule(name: str, options: ScheduleOptions, limits: InputLimits, types: DataTypes) -> Schedule:
    """Check a declaration. What is wrong is refused, and nothing is declared. `types` are those that handlers want."""
    command, planner = options.get("command"), options.get("planner")
    problems = wrong_name(name, "name", replace(limits, name_bytes=NAME_BYTES))
    problems += _wrong_what(options)
    domain = options.get("domain")
    if domain is None and isinstance(command, BatchCommand):
        domain = command.domain
    if domain is None:
        problems.append(wrong(None, "domain", "the domain that runs it: domain=..."))
    else:
        problems += wrong_domain(domain, "domain", limits)
    policy = Policy()
    limit = options.get("catch_up_limit", policy.limit)
    problems += whole(1, MOST_AT_ONCE)(limit, "catch_up_limit")
    missed_after = options.get("missed_after", policy.missed_after)
    problems += MISSED_AFTER(missed_after, "missed_after")
    if (expires_in := options.get("expires_in")) is not None:
        problems += EXPIRES_IN(expires_in, "expires_in")
    refuse(problems, writes=False)
    assert domain is not None
    if (on_complete := options.get("on_complete")) is not None:
        callback_of(limits, domain, on_complete)  # refuses what could not be sent
    catch_up = choice(CatchUp, options.get("catch_up", policy.catch_up), "catch_up") or policy.catch_up
    when = rule(
        cron=options.get("cron"),
        every=options.get("every"),
        calendar=options.get("calendar"),
        timezone=options.get("timezone", "UTC"),
        starts_at=options.get("starts_at"),
        ends_at=options.get("ends_at"),
        now=LONG_AGO,
    )
    if planner is not None:
        command = BatchCommand(DUE + name)
    assert command is not None
    seconds = seconds_of(expires_in)
    return Schedule(
        name,
        domain,
        when,
        _stored(command, domain, limits, types),
        Policy(catch_up, limit, missed_after),
        None if seconds is None else timedelta(seconds=seconds),
    )


def release_of(schedules: Sequence[Schedule]) -> str | None:
    """A fingerprint of all that an application declares: two releases that declare the same have the same."""
    if not schedules:
        return None
    declarations = sorted(f"{one.name} {one.declaration}" for one in schedules)
    return hashlib.sha256("\n".join(declarations).encode()).hexdigest()[:16]


def declare(schedules: Sequence[Schedule], *, newest: bool = False) -> Plan[list[str]]:
    """Keep these declarations in the database; returns the names of those that are new or have changed.

    What a newer release has declared stays, as long as a worker of that release is alive. With `newest`, this release
    is the newest from now on. If nothing is new or has changed, nothing is written but the release itself.
    """
    now, changed = yield from _changed(schedules)
    release = release_of(schedules)
    if changed or newest:
        yield from execute(SQL.see_release, release=release, newest=newest)
    if not changed:
        return []
    columns = {
        "names": [one.name for one in changed],
        "domains": [one.domain for one in changed],
        "rules": [msgspec.json.encode(one.rule.to_json()).decode() for one in changed],
        "commands": [one.command for one in changed],
        "expires_ins": [one.expires_in for one in changed],
        "catch_ups": [one.policy.catch_up.value for one in changed],
        "catch_up_limits": [one.policy.limit for one in changed],
        "missed_afters": [one.policy.missed_after for one in changed],
        "declarations": [one.declaration for one in changed],
        "next_due_ats": [one.rule.next(now) for one in changed],
        "release": release,
    }
    for one in changed:
        if one.rule.next(now) is None:
            log.warning("The schedule %r has ended: nothing is due after %s", one.name, one.rule.ends_at)
    rows = yield from execute(SQL.declare, **columns)
    domains = {one.name: one.domain for one in changed}
    for name, before, _ in rows:
        if before not in (None, domains[name]):
            log.warning(
                "The schedule %r was of the domain %r and is of %r now. Names of schedules are of the whole database: "
                "if another application has declared this one, give one of the two another name",
                *(name, before, domains[name]),
            )
    return [name for name, *_ in rows]


def changes(schedules: Sequence[Schedule]) -> Plan[list[str]]:
    """The names of the schedules that `declare` would write."""
    _, changed = yield from _changed(schedules)
    return [one.name for one in changed]


def _changed(schedules: Sequence[Schedule]) -> Plan[tuple[datetime, list[Schedule]]]:
    """The clock of the database, and the schedules that it knows otherwise or not at all."""
    [(now, known)] = yield from execute(SQL.known, names=[one.name for one in schedules])
    return now, [one for one in schedules if f"{one.name} {one.declaration}" not in known]


def undeclared(schedules: Iterable[Schedule], domains: Iterable[str]) -> Plan[list[str]]:
    """The schedules of these domains that are not among the declared ones."""
    rows = yield from execute(SQL.undeclared, domains=sorted(domains), names=[one.name for one in schedules])
    return [name for (name,) in rows]


def _handler(planner: Callable[..., Any], on_complete: BatchCommand | None) -> Callable[..., Any]:
    """A handler that creates the batch of a due time with what the planner returns, and its callback."""

    @wraps(planner)
    async def plan(command: Command, ctx: Any) -> dict[str, Any]:
        return await plan_batch(planner, command, ctx, on_complete)

    @wraps(planner)
    def plan_in_thread(command: Command, ctx: Any) -> dict[str, Any]:
        return plan_batch_in_thread(planner, command, ctx, on_complete)

    return plan if is_async(planner) else plan_in_thread


def _wrong_what(options: ScheduleOptions) -> list[Problem]:
    command, planner = options.get("command"), options.get("planner")
    on_complete: object = options.get("on_complete")
    if (command is None) == (planner is None):
        found = "none of them" if command is None else "both"
        message = f"found {found}, wanted either a command or a planner"
        return [Problem("INVALID_SCHEDULE", "/command", message)]
    if planner is not None:
        if not isinstance(on_complete, BatchCommand | None):
            return [wrong(on_complete, "on_complete", "a BatchCommand, which any worker can run")]
        if on_complete is not None and on_complete.command_id is not None:
            message = "found command_id, but each due time has its own; leave it out"
            return [Problem("INVALID_OPTION", "/on_complete/command_id", message)]
        return []
    if not isinstance(command, BatchCommand):
        return [wrong(command, "command", "a BatchCommand")]
    problems = [
        Problem("INVALID_OPTION", f"/command/{name}", f"found {name}, but each due time has its own; {instead}")
        for name, instead in PER_DUE_TIME.items()
        if getattr(command, name) is not None
    ]
    domain = options.get("domain")
    if domain is not None and command.domain is not None and domain != command.domain:
        message = f"found {command.domain!r}, but the schedule has domain={domain!r}; name one of them"
        problems.append(Problem("INVALID_OPTION", "/command/domain", message))
    for name in ("retry", "timeout"):
        if options.get(name) is not None:
            message = "is for a planner; the handler of a command has its own"
            problems.append(Problem("INVALID_OPTION", f"/{name}", message))
    if on_complete is not None:
        message = "is for the batch of a planner; a command has none. Pass planner= instead of command="
        problems.append(Problem("INVALID_OPTION", "/on_complete", message))
    return problems


def _stored(command: BatchCommand, domain: str, limits: InputLimits, types: DataTypes) -> str:
    try:
        [checked] = check_all(domain, [command], limits, types)
    except InvalidCommandError as refused:
        problems = [replace(one, path=f"/command{one.path}", index=None) for one in refused.problems]
        raise InvalidCommandError(problems, writes=False) from None
    what = ScheduledCommand(
        checked.command_type,
        msgspec.Raw(checked.data.encode()),
        checked.reply_to,
        checked.correlation_id,
        checked.priority,
        checked.max_attempts,
        decode_headers(checked.headers),
    )
    return msgspec.json.encode(what).decode()
