"""`busload limit`: how often and how many at a time receivers may be called, and which of them refuse calls."""

from __future__ import annotations

import click

from busload.cli import did_you_mean, noun, options
from busload.cli.answer import Answer, answers, would
from busload.cli.complete import completes
from busload.cli.text_table import View
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.limits import rate
from busload.limits.concurrency import ConcurrencyStatus
from busload.limits.rate import LimitStatus
from busload.sync.bus import SyncCommandBus

LIMITS = View[LimitStatus](
    "NAME BY PER_SECOND ADAPTIVE BLOCKED_UNTIL CALLS REFUSED USED=used_at",
    {"BY": lambda one: one.subject or None, "PER SECOND": lambda one: f"{one.rate:.4g}"},
    nothing="No limit was used within a day.",
    elastic="BY",
    spare=("USED", "ADAPTIVE"),
)


CONCURRENCY = View[ConcurrencyStatus](
    "NAME BY MOST RUNNING WAITING SINCE WORKERS",
    {"BY": lambda one: one.subject or None, "WORKERS": lambda one: ", ".join(dict.fromkeys(one.workers)) or None},
    nothing="No call runs under a concurrency limit, and no command waits for one.",
    elastic="BY",
    spare=("WORKERS", "SINCE"),
)


limit = noun(
    "limit",
    "ls",
    "show crm",
    "concurrency crm",
    "reset crm",
    more=": the calls per second and at a time now, and which receivers refuse calls until when.",
)


@limit.command()
@options.limit(100)
@answers
def ls(bus: SyncCommandBus, limit: int) -> Answer:
    """List the limits that were used within a day.

    A limit without a name is called DOMAIN/COMMAND_TYPE, that of a buffer BUFFER/busload.Group.

        busload limit ls
        busload limit ls --json | jq -r '.[] | select(.blocked_until) | .name'
    """
    return LIMITS.list(bus.limits.list(limit=limit))


@limit.command()
@click.argument("name", shell_complete=completes("limit"))
@options.limit(100)
@answers
def show(bus: SyncCommandBus, name: str, limit: int) -> Answer:
    """Show one limit; where it has a `by`, each value that it was used with.

    busload limit show crm
    busload limit show payments/Debit --json
    """
    found = bus.limits.list(name, limit=limit)
    if not found:
        raise _unknown(bus, name)
    return LIMITS.list(found)


@limit.command()
@click.argument("name", shell_complete=completes("limit"))
@click.option("--by", help="Only for this value of its `by`.")
@options.operator
@options.dry_run
@answers
def reset(bus: SyncCommandBus, name: str, by: str | None, operator: str, dry_run: bool) -> Answer:
    """Allow calls again though the receiver has refused some. Commands that wait for the limit try again at once.

    busload limit reset crm
    busload limit reset crm --by 'tenant 1' --dry-run
    """
    found = [shard.database.read(rate.would_reset(name, by)) for shard in bus.shards] if dry_run else []
    limits, commands = sum(one for one, _ in found), sum(more for _, more in found)
    count = limits if dry_run else bus.limits.reset(name, by, operator=operator)
    if not count:
        raise _unknown(bus, name, by)
    if dry_run:
        what = f"reset {counted(limits, 'limit')} and let {counted(commands, 'command')} try again"
        return would(what, name=name, by=by, limits=limits, commands=commands)
    values = f" ({count} values)" if count > 1 else ""
    return Answer({"name": name, "by": by, "limits": count}, f"Calls under {name} may go again{values}.")


@limit.command()
@click.argument("name", required=False)
@options.limit(100)
@answers
def concurrency(bus: SyncCommandBus, name: str | None, limit: int) -> Answer:
    """List the concurrency limits in use: how many calls run, since when and where, and how many commands wait.

    busload limit concurrency
    busload limit concurrency crm --json | jq '.[].workers'
    """
    found = bus.limits.concurrency(name, limit=limit)
    nothing = None
    if name is not None and not found:
        likely = did_you_mean(name, {one.name for one in bus.limits.concurrency(limit=10_000)})
        nothing = (
            f"No call runs under a concurrency limit {name!r:.200}, and no command waits for it.{likely} "
            "Names are known only while they are in use, so this may be a limit that rests, or none."
        )
    return CONCURRENCY.list(found, nothing=nothing)


def _unknown(bus: SyncCommandBus, name: str, by: str | None = None) -> InvalidOperationError:
    value = "" if by is None else f" by {by!r:.200}"
    likely = did_you_mean(name, {one.name for one in bus.limits.list(limit=10_000)} - {name})
    return InvalidOperationError(
        f"No limit {name!r:.200}{value} was used within a day.{likely} See those that were with `busload limit ls`."
    )
