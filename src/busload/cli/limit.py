"""`busload limit`: how often receivers may be called, and which of them refuse calls."""

from __future__ import annotations

from collections.abc import Sequence

import click

from busload.bus import SyncCommandBus
from busload.cli import did_you_mean
from busload.cli.database import open_bus
from busload.cli.output import as_json, echo_json, table
from busload.domain.rate import LimitStatus
from busload.errors import InvalidOperationError

most = click.option("--limit", "most", type=click.IntRange(1, 10_000), default=100, show_default=True)


@click.group()
def limit() -> None:
    """See and reset rate limits: the calls per second now, and which receivers refuse calls until when.

    \b
        busload limit ls
        busload limit show crm
        busload limit reset crm
    """


@limit.command()
@most
@as_json
def ls(most: int, as_json: bool) -> None:
    """List the limits that were used within a day.

    A limit without a name is called DOMAIN/COMMAND_TYPE, that of a buffer BUFFER/busload.Group.

    \b
        busload limit ls
        busload limit ls --json | jq -r '.[] | select(.blocked_until) | .name'
    """
    with open_bus() as bus:
        _print(bus.list_limits(limit=most), as_json)


@limit.command()
@click.argument("name")
@most
@as_json
def show(name: str, most: int, as_json: bool) -> None:
    """Show one limit; where it has a `by`, each value that it was used with.

    \b
        busload limit show crm
        busload limit show payments/Debit --json
    """
    with open_bus() as bus:
        found = bus.list_limits(name, limit=most)
        if not found:
            raise _unknown(bus, name)
    _print(found, as_json)


@limit.command()
@click.argument("name")
@click.option("--by", help="Only for this value of its `by`.")
@as_json
def reset(name: str, by: str | None, as_json: bool) -> None:
    """Let calls go again though the receiver has refused them; what waits for the limit looks again at once.

    \b
        busload limit reset crm
        busload limit reset crm --by 'tenant 1'
    """
    with open_bus() as bus:
        count = bus.reset_limit(name, by)
        if not count:
            raise _unknown(bus, name, by)
    if as_json:
        echo_json({"name": name, "by": by, "limits": count})
    else:
        click.echo(f"Calls under {name} may go again" + (f" ({count} values)." if count > 1 else "."))


def _unknown(bus: SyncCommandBus, name: str, by: str | None = None) -> InvalidOperationError:
    value = "" if by is None else f" by {by!r:.200}"
    likely = did_you_mean(name, {one.name for one in bus.list_limits(limit=10_000)} - {name})
    return InvalidOperationError(
        f"No limit {name!r:.200}{value} was used within a day.{likely} See those that were with `busload limit ls`."
    )


def _print(found: Sequence[LimitStatus], as_json: bool) -> None:
    if as_json:
        echo_json(found)
        return
    columns = ("NAME", "BY", "PER SECOND", "ADAPTIVE", "BLOCKED UNTIL", "CALLS", "REFUSED", "USED")
    rows = [
        (
            one.name,
            one.subject or None,
            f"{one.rate:.4g}",
            one.adaptive,
            one.blocked_until,
            one.calls,
            one.refused,
            one.used_at,
        )
        for one in found
    ]
    table(columns, rows, nothing="No limit was used within a day.", elastic="BY", spare=("USED", "ADAPTIVE"))
