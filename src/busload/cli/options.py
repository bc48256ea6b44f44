"""The options that several commands share, each spelt once, and what their texts mean."""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import click

from busload.cli import check_transport, sets_variable
from busload.cli.complete import completes
from busload.cli.find import id_or_beginning
from busload.dispatch.envelope import check_settings
from busload.settings import LONGEST, Settings

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
"""In seconds."""


def _age(ctx: click.Context, param: click.Parameter, text: str | None) -> timedelta | None:
    """`30d`, `12h`, `90m`, `1w`, `45s`."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,10})([smhdw])", text.replace(" ", "").lower(), re.ASCII)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST.total_seconds():
        raise click.BadParameter(
            f"found {text!r:.80}, wanted a number and a unit, e.g. 30d, 12h, 90m or 1w, of at most {LONGEST.days} days"
        )
    return timedelta(seconds=seconds)


def user_here() -> str:
    """Who is at the shell; a user without a name goes by number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _check_prefix(prefix: str) -> None:
    check_settings(Settings(queue_prefix=prefix, message_key=None))


def _variable(option: str, variable: str, check: Callable[[str], str | None], metavar: str, help: str) -> Decorator:
    passed_on = sets_variable(variable, check)
    return click.option(option, callback=passed_on, expose_value=False, is_eager=True, metavar=metavar, help=help)


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
domain = click.option("--domain", shell_complete=completes("domain"), help="The domain to look in; default all.")
command_type = click.option("--type", "command_type", help="Only commands of this type.")
batch = click.option(
    "--batch",
    type=id_or_beginning,
    metavar="ID",
    shell_complete=completes("batch"),
    help="Only commands of this batch.",
)
dry_run = click.option("--dry-run", is_flag=True, help="Only say how much would be touched, and do nothing.")
operator = click.option(
    "--operator", default=user_here, show_default="your user name", help="Who does it; this is recorded."
)
transport = _variable(
    "--transport",
    "BUSLOAD_TRANSPORT_URL",
    check_transport,
    "URL",
    "The broker to publish to; default BUSLOAD_TRANSPORT_URL, else none.",
)
queue_prefix = _variable(
    "--queue-prefix",
    "BUSLOAD_QUEUE_PREFIX",
    _check_prefix,
    "TEXT",
    "The first part of the queues' names; default BUSLOAD_QUEUE_PREFIX, else busload.",
)


def limit(default: int) -> Decorator:
    return click.option("--limit", type=click.IntRange(1, 10_000), default=default)


def page(default: int) -> Decorator:
    """Which part of a long list to show, as `find.newest` wants to know it."""
    offset = click.option("--offset", type=click.IntRange(0, 1_000_000), default=0)
    return lambda function: domain(limit(default)(offset(function)))


def age(option: str, help: str, **more: Any) -> Decorator:
    return click.option(option, callback=_age, metavar="AGE", help=help, **more)


SPAN_OR_TIME = "a span such as 30s, 2h or 1d, or a time such as 2030-01-01T08:00+00:00"


def _time(ctx: click.Context, param: click.Parameter, text: str | None) -> datetime | None:
    """`now`, an age as `2h`, which is from now on, or a time in ISO format, of this place if it has no zone."""
    if text is None:
        return None
    if text.strip().lower() == "now":
        return datetime.now(UTC)
    try:
        if re.fullmatch(r"\d+ ?[smhdwSMHDW]", text.strip()):
            return datetime.now(UTC) + (_age(ctx, param, text) or timedelta(0))
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(f"found {text!r:.80}, wanted now, {SPAN_OR_TIME}") from None


def _time_to_come(ctx: click.Context, param: click.Parameter, text: str | None) -> datetime | None:
    """As `_time`, but not now."""
    if text is None or text.strip().lower() != "now":
        with suppress(click.BadParameter):
            return _time(ctx, param, text)
    raise click.BadParameter(f"found {text!r:.80}, wanted a time to come: {SPAN_OR_TIME}")


def text_of(argument: str, option: str) -> str | bytes:
    """What was given at the shell, stands in the file that it names with `@`, or comes by stdin for `-`."""
    if argument == "-":
        return sys.stdin.buffer.read()
    if not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_bytes()
    except OSError as error:
        raise click.BadParameter(f"{argument[1:]} cannot be read: {error.strerror}", param_hint=option) from None


def pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` as often as it was given, each name once."""
    found: dict[str, str] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name or name in found:
            problem = f"found {name!r} twice" if name in found else f"found {pair!r}"
            raise click.BadParameter(f"{problem}, wanted NAME=VALUE, each name once", param_hint=option)
        found[name] = value
    return found


def _moment(ctx: click.Context, param: click.Parameter, text: str | None) -> datetime | None:
    """As `_time`, but a span is from now back."""
    time, now = _time(ctx, param, text), datetime.now(UTC)
    is_span = text is not None and re.fullmatch(r"\d+ ?[smhdwSMHDW]", text.strip())
    return now - (time - now) if time is not None and is_span else time


def moment(option: str, name: str, help: str) -> Decorator:
    return click.option(option, name, callback=_moment, metavar="TIME", help=help)


def run_at(*, required: bool = False) -> Decorator:
    about = "When to run it: now, in so long (30s, 2h, 1d), or a time such as 2030-01-01T08:00."
    return click.option("--run-at", callback=_time, metavar="TIME", required=required, help=about)


def expires_at() -> Decorator:
    about = "Cancel it if it has not started by then: in so long (30s, 2h, 1d), or a time such as 2030-01-01T08:00."
    return click.option("--expires-at", callback=_time_to_come, metavar="TIME", help=about)


def status(statuses: type[StrEnum]) -> Decorator:
    """One of these; where they are too many for a line, the help has them below."""
    names = [status.value for status in statuses]
    choice, many = click.Choice(names, case_sensitive=False), len(names) > 6
    about = f"Only those with this status: {', '.join(names)}." if many else "Only those with this status."
    return click.option("--status", type=choice, metavar="STATUS" if many else None, help=about)


def reason(*, required: bool = True) -> Decorator:
    return click.option("--reason", required=required, help="Why; this is recorded.")


def id_of(noun: str) -> Decorator:
    return click.argument(noun, type=id_or_beginning, metavar=f"{noun.upper()}_ID", shell_complete=completes(noun))
