"""`busload worker ls` and `stop`: the workers that the database knows."""

from __future__ import annotations

import click

from busload.cli import options
from busload.cli.answer import Answer, answers
from busload.cli.text_table import View
from busload.commands.wording import counted
from busload.health.workers import KnownWorker
from busload.sync.bus import SyncCommandBus

WORKERS = View[KnownWorker](
    "NAME STATE DOMAINS CONCURRENCY COMMANDS LEASES HOST PROCESS=process_id VERSION SEEN=seen_at STARTED=started_at",
    {"DOMAINS": lambda worker: ", ".join(worker.domains)},
    nothing="No worker runs.",
    elastic="DOMAINS",
    spare=("STARTED", "LEASES", "HOST", "PROCESS", "VERSION"),
)


@click.command()
@options.domain
@click.option("--all", "stopped_too", is_flag=True, help="Also workers that have stopped or were lost.")
@options.limit(100)
@answers
def ls(bus: SyncCommandBus, domain: str | None, stopped_too: bool, limit: int) -> Answer:
    """List workers: which domains they serve, when they were seen, and what they hold. The newest come first.

    ALIVE was seen within the time that its leases last, SILENT was not, and others will take over what it holds.
    STOPPING was asked to stop. STOPPED has ended by itself, and LOST was declared dead.

        busload worker ls
        busload worker ls --all --json | jq -r '.[] | select(.state == "LOST").name'
    """
    return WORKERS.list(bus.workers.list(domain, stopped_too=stopped_too, limit=limit))


@click.command()
@click.argument("name")
@options.reason(required=False)
@options.operator
@answers
def stop(bus: SyncCommandBus, name: str, reason: str | None, operator: str) -> Answer:
    """Ask a worker to stop, as SIGTERM does, wherever it runs: what runs finishes, and the rest is handed back.

    It hears of it at once. `busload worker --processes` starts no other one in its place. Ends with exit code 1 if no
    worker of this name runs.

        busload worker stop web-1:4711:9f3ab2
        busload worker stop web-1:4711:9f3ab2 --reason 'the machine is replaced'
    """
    asked = bus.workers.stop(name, reason=reason, operator=operator)
    said = f"Asked {counted(asked, 'worker')} to stop." if asked else f"{name} was asked to stop already."
    return Answer({"name": name, "asked": asked}, said)
