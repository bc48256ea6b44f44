"""Retention: what is kept, how much of it is old, and when it was pruned last. Pruning itself is for the shell."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.wording import counted, span
from busload.dashboard.access import Permission
from busload.dashboard.render import bus_of, cli, number, render
from busload.dashboard.route import Live, page
from busload.retention.kept import LastPrune, Retention

KEPT = {
    "command": "Commands",
    "execution": "Attempts",
    "event": "Events of the audit trail",
    "batch": "Batches",
    "job": "Jobs",
    "archive": "Archived commands",
    "archived_batch": "Archived batches",
    "archived_job": "Archived jobs",
    "buffer_archive": "Archived events of buffers",
}
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


async def show(request: Request) -> Response:
    found = await bus_of(request).retention()
    return render(
        request,
        "retention.html",
        title="Retention",
        found=found,
        tables=sorted(found.tables, key=lambda table: list(KEPT).index(table.name)),
        named=KEPT,
        last=None if found.last is None else _said(found.last),
        live=_values(found),
        cli=cli("prune", "--older-than", "30d", "--dry-run"),
    )


async def live(request: Request) -> Live:
    return _values(await bus_of(request).retention())


def _values(found: Retention) -> Live:
    ended = "" if found.last is None else found.last.at.isoformat()
    values: dict[str, str | list[str]] = {"under_way": number(found.under_way), "rows": [f"last:{ended}"]}
    for table in found.tables:
        values |= {f"{table.name}.rows": f"about {number(table.rows)}", f"{table.name}.size": size(table.bytes)}
    for old in found.old:
        more = "+" if old.capped else ""
        values |= {
            f"{old.days}.batches": number(old.batches) + more,
            f"{old.days}.commands": number(old.commands) + more,
        }
    return values


def size(amount: float) -> str:
    """`1.5 GiB`."""
    unit = 0
    while amount >= 1024 and unit < len(UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{number(amount)} {UNITS[unit]}"


def _said(last: LastPrune) -> str:
    done, pruned = "moved to the archive" if last.archive else "removed", last.pruned
    commands, batches = counted(pruned.commands, "command"), counted(pruned.batches, "batch", "batches")
    return f"{commands} and {batches} that had ended more than {span(last.older_than)} before were {done}"


ROUTES = (page("retention", "/retention", show, Permission.READ, label="Retention", live=live),)
