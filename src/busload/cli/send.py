"""`busload send`: one command, sent from a shell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import click

from busload.cli import options
from busload.cli.answer import Answer, answers
from busload.cli.complete import completes
from busload.cli.find import find_one, id_or_beginning, unknown_domain
from busload.commands.command import SendOptions
from busload.commands.dedup import Dedup
from busload.commands.payload import decode_strict
from busload.commands.search import IdRange
from busload.sync.bus import SyncCommandBus


@click.command()
@click.argument("domain", shell_complete=completes("domain"))
@click.argument("command_type", metavar="TYPE")
@click.option("--data", metavar="JSON|@FILE|-", help="What the handler gets: JSON, a file with it, or - for stdin.")
@click.option("--id", "command_id", type=click.UUID, help="The id of the command; default a new one.")
@click.option("--task-key", metavar="KEY", help="The task that the command is for.")
@click.option("--dedup", is_flag=True, help="Send nothing if another open command has this --task-key.")
@click.option("--priority", type=click.IntRange(-32768, 32767), default=0, help="Higher runs earlier.")
@options.run_at()
@options.expires_at()
@click.option("--fair-by", metavar="KEY", help="Whose turn it is to run, such as a customer; default all single sends.")
@click.option("--max-attempts", type=click.IntRange(1, 32767), help="How often to try it; default as its handler says.")
@click.option("--reply-to", metavar="DOMAIN", help="The domain that gets the reply.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Beside the data; may be repeated.")
@click.option("--batch", type=id_or_beginning, metavar="ID", help="The open batch that the command joins.")
@options.transport
@answers(transport=True)
def send(
    bus: SyncCommandBus,
    domain: str,
    command_type: str,
    data: str | None,
    headers: Sequence[str],
    batch: IdRange | None,
    dedup: bool,
    **given: Any,
) -> Answer:
    """Send a command of TYPE to DOMAIN.

    busload send payments Debit --data '{"account": 4, "cents": 400}'
    busload send payments Debit --data @debit.json --run-at 2h
    busload send payments Quote --expires-at 15m --fair-by customer-7
    busload send payments Debit --header tenant=acme --header source=cli
    busload send payments Debit --json | jq -r .command_id \\
        | xargs busload command wait
    """
    value = None if data is None else decode_strict(options.text_of(data, "--data"), path="/data")
    sending = cast(SendOptions, given)
    if headers:
        sending["headers"] = options.pairs(headers, "--header")
    if dedup:
        sending["dedup"] = Dedup()
    if batch is not None:
        sending["batch_id"] = find_one(bus, "batch", batch, None)[1]
    if unknown := unknown_domain(bus, domain):
        click.echo(f"Note: {unknown}", err=True)
    sent = bus.send(domain, command_type, value, **sending)
    said = f"Sent {sent.command_id} to {domain}."
    if not sent.created:
        said = f"Sent nothing: command {sent.command_id} in {domain} has this task key."
    return Answer({"command_id": sent.command_id, "domain": domain, "created": sent.created}, said)
