"""`busload worker ls`: the workers that the database knows."""

from __future__ import annotations

import click

from busload.cli import options
from busload.cli.answer import Answer, answers
from busload.cli.text_table import View
from busload.commands import search
from busload.commands.search import KnownWorker
from busload.sync.bus import SyncCommandBus

WORKERS = View[KnownWorker](
    "NAME STATE DOMAINS CONCURRENCY COMMANDS LEASES SEEN=seen_at STARTED=started_at",
    {"DOMAINS": lambda worker: ", ".join(worker.domains)},
    nothing="No worker runs.",
    elastic="DOMAINS",
    spare=("STARTED", "LEASES"),
)


@click.command()
@options.domain
@click.option("--all", "stopped_too", is_flag=True, help="Also workers that have stopped or were lost.")
@options.limit(100)
@answers
def ls(bus: SyncCommandBus, domain: str | None, stopped_too: bool, limit: int) -> Answer:
    """List workers: which domains they serve, when they were seen, and what they hold. The newest come first.

    ALIVE was seen within the time that its leases last, SILENT was not, and others will take over what it holds.
    STOPPED has ended by itself, and LOST was declared dead.

        busload worker ls
        busload worker ls --all --json | jq -r '.[] | select(.state == "LOST").name'
    """
    return WORKERS.list(bus.database.read(search.workers(domain=domain, stopped_too=stopped_too, limit=limit)))
