"""`busload troubleshooting`: what waits for a person, and what that person does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

import click

from busload.bus import SyncCommandBus
from busload.cli.batch import follow
from busload.cli.database import domain_option, everywhere, find_command, id_or_beginning, note_unknown_domain, open_bus
from busload.cli.database import operator as operator_here
from busload.cli.output import as_json, echo_json, facts, paragraph, shown, table, tracebacks
from busload.domain.cause import FINGERPRINT, CauseGroup, GroupAction
from busload.domain.command import TroubleshootingItem
from busload.domain.counted import counted
from busload.domain.payload import decode_strict
from busload.errors import InvalidOperationError
from busload.store import operate, report
from busload.store.connection import Connection
from busload.store.find import IdRange

Act = Callable[[SyncCommandBus, str, UUID, Connection], None]
ActOnGroup = Callable[..., GroupAction]

command_ids = click.argument("command_ids", nargs=-1, type=id_or_beginning, metavar="[COMMAND_ID...]")
operator_option = click.option(
    "--operator", default=operator_here, show_default="your user name", help="Who; kept in the audit trail."
)


def group_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `--group` takes, for all three decisions alike."""
    for option in (
        click.option("--wait", is_flag=True, help="With --group: follow the batch until it completes."),
        click.option("--dry-run", is_flag=True, help="With --group: say what would be done, and do nothing."),
        click.option("--rate", type=float, metavar="N", help="With --group: so many commands a second."),
        click.option("--type", "command_type", help="With --group: only commands of this type."),
        click.option("--group", metavar="FINGERPRINT", help="All that wait for this cause, instead of ids."),
    ):
        command = option(command)
    return command


@click.group()
def troubleshooting() -> None:
    """Resolve what waits for a person. Several commands at once are resolved all or none.

    \b
        busload troubleshooting ls --domain payments
        busload troubleshooting retry 0198c5d2-8000
        busload troubleshooting groups
        busload troubleshooting retry --group 4f0c2b7a91de --dry-run
    """


@troubleshooting.command()
@domain_option
@click.option("--type", "command_type", help="Only commands of this type.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True)
@as_json
def groups(domain: str | None, command_type: str | None, limit: int, as_json: bool) -> None:
    """List what waits for a person by cause, the largest group first.

    \b
        busload troubleshooting groups
        busload troubleshooting groups --json | jq -r '.[0].fingerprint'
    """
    with open_bus() as bus:
        domains = [domain] if domain is not None else bus._read(report.domains())
        found = [
            (each, group)
            for each in domains
            for group in bus.troubleshooting.groups(each, command_type=command_type, limit=limit)
        ]
        if not found:
            note_unknown_domain(bus, domain)
    found = sorted(found, key=lambda one: -one[1].count)[:limit]
    if as_json:
        echo_json([{"domain": each, **asdict(group)} for each, group in found])
    else:
        print_groups(found)


@troubleshooting.command()
@domain_option
@click.option("--type", "command_type", help="Only commands of this type.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True)
@click.option("--offset", type=click.IntRange(0, 1_000_000), default=0, show_default=True)
@as_json
def ls(domain: str | None, command_type: str | None, limit: int, offset: int, as_json: bool) -> None:
    """List what waits for a person, newest first.

    \b
        busload troubleshooting ls
        busload troubleshooting ls --json | jq -r '.[].command_id' \\
            | xargs busload troubleshooting retry
    """
    with open_bus() as bus:

        def ask(domain: str, *, limit: int, offset: int) -> list[TroubleshootingItem]:
            return bus.troubleshooting.list(domain, command_type=command_type, limit=limit, offset=offset)

        found = everywhere(bus, domain, ask, newest=lambda item: item.since, limit=limit, offset=offset)
    if as_json:
        echo_json(found)
    else:
        print_queue(found)


@troubleshooting.command()
@click.argument("command", type=id_or_beginning, metavar="COMMAND_ID")
@domain_option
@as_json
def show(command: IdRange, domain: str | None, as_json: bool) -> None:
    """Show one command that waits for a person: its data, why it waits, and where its last attempt failed.

    \b
        busload troubleshooting show 0198c5d2-8000
        busload troubleshooting show 0198c5d2-8000 --json | jq -r .last_traceback
    """
    with open_bus() as bus:
        domain, command_id = find_command(bus, command, domain)
        item = bus.troubleshooting.get(domain, command_id)
    if item is None:
        raise InvalidOperationError(
            f"Command {command_id} in domain {domain!r} does not wait for a person. "
            f"`busload command show {command_id}` says where it is."
        )
    if as_json:
        echo_json(item)
        return
    facts(
        [
            ("command", item.command_id),
            ("domain", item.domain),
            ("type", item.command_type),
            ("data", item.data),
            ("reason", item.reason),
            ("since", item.since),
            ("attempts", item.attempts),
            ("error", ": ".join(filter(None, (item.last_error_type, item.last_error_code, item.last_error_message)))),
            ("details", item.details),
            ("cause", item.fingerprint),
            ("batch", item.batch_id),
            ("task key", item.task_key),
            ("correlation", item.correlation_id),
            ("reply to", item.reply_to),
        ]
    )
    for line in tracebacks([(item.attempts, item.last_traceback)]):
        click.echo(line)


@troubleshooting.command()
@command_ids
@group_options
@click.option("--patch", metavar="JSON|@FILE", help="With --group: a JSON patch (RFC 6902) of their data.")
@operator_option
@domain_option
@as_json
def retry(
    command_ids: Sequence[IdRange], patch: str | None, operator: str, domain: str | None, as_json: bool, **options: Any
) -> None:
    """Put commands back into the queue, with all their attempts to use again.

    With --group, all that wait for a cause are retried by a batch of its own, which workers carry out.

    \b
        busload troubleshooting retry 0198c5d2-8000
        busload troubleshooting retry --group 4f0c2b7a91de --rate 50 --wait
        busload troubleshooting retry --group 4f0c2b7a91de --dry-run \\
            --patch '[{"op": "replace", "path": "/currency", "value": "EUR"}]'
    """

    def act(bus: SyncCommandBus, domain: str, command_id: UUID, conn: Connection) -> None:
        bus.troubleshooting.retry(domain, command_id, operator=operator, conn=conn)

    def act_on_group(bus: SyncCommandBus, domain: str, fingerprint: str, **how: Any) -> GroupAction:
        value = None if patch is None else decode_strict(_text(patch), path="/patch")
        return bus.troubleshooting.retry_group(domain, fingerprint, patch=value, operator=operator, **how)

    if patch is not None and options["group"] is None:
        raise click.UsageError("--patch needs --group.")
    _decide("retry", "retried", act, act_on_group, command_ids, domain, as_json, **options)


@troubleshooting.command()
@command_ids
@group_options
@click.option("--result", metavar="JSON", help="What the handler would have returned.")
@operator_option
@domain_option
@as_json
def complete(
    command_ids: Sequence[IdRange], result: str | None, operator: str, domain: str | None, as_json: bool, **options: Any
) -> None:
    """Declare commands done, with a result if there is one.

    \b
        busload troubleshooting complete 0198c5d2-8000 --result '{"paid": true}'
        busload troubleshooting complete --group 4f0c2b7a91de --dry-run
    """
    value: Any = None if result is None else decode_strict(result, path="/result")

    def act(bus: SyncCommandBus, domain: str, command_id: UUID, conn: Connection) -> None:
        bus.troubleshooting.complete(domain, command_id, result=value, operator=operator, conn=conn)

    def act_on_group(bus: SyncCommandBus, domain: str, fingerprint: str, **how: Any) -> GroupAction:
        return bus.troubleshooting.complete_group(domain, fingerprint, result=value, operator=operator, **how)

    _decide("complete", "completed", act, act_on_group, command_ids, domain, as_json, **options)


@troubleshooting.command()
@command_ids
@group_options
@click.option("--reason", required=True, help="Why; it is kept in the audit trail.")
@operator_option
@domain_option
@as_json
def cancel(
    command_ids: Sequence[IdRange], reason: str, operator: str, domain: str | None, as_json: bool, **options: Any
) -> None:
    """Give commands up, with a reason.

    \b
        busload troubleshooting cancel 0198c5d2-8000 --reason 'paid twice'
        busload troubleshooting cancel --group 4f0c2b7a91de --reason 'paid twice'
    """

    def act(bus: SyncCommandBus, domain: str, command_id: UUID, conn: Connection) -> None:
        bus.troubleshooting.cancel(domain, command_id, reason=reason, operator=operator, conn=conn)

    def act_on_group(bus: SyncCommandBus, domain: str, fingerprint: str, **how: Any) -> GroupAction:
        return bus.troubleshooting.cancel_group(domain, fingerprint, reason=reason, operator=operator, **how)

    _decide("cancel", "canceled", act, act_on_group, command_ids, domain, as_json, **options)


def print_queue(found: Sequence[TroubleshootingItem]) -> None:
    columns = ("COMMAND", "DOMAIN", "TYPE", "REASON", "ATTEMPTS", "ERROR", "SINCE")
    rows = [
        (item.command_id, item.domain, item.command_type, item.reason, item.attempts, _error(item), item.since)
        for item in found
    ]
    table(columns, rows, nothing="Nothing waits for a person.", elastic="ERROR", spare=("SINCE", "TYPE"))


def print_groups(found: Sequence[tuple[str, CauseGroup]]) -> None:
    columns = ("GROUP", "COUNT", "DOMAIN", "TYPES", "REASONS", "ERROR", "OLDEST", "NEWEST")
    rows = list[tuple[object, ...]]()
    for domain, group in found:
        types, reasons = ", ".join(group.command_types), ", ".join(group.reasons)
        error = ": ".join(part for part in (group.error_code or group.error_type, group.message) if part) or None
        rows.append((group.fingerprint, group.count, domain, types, reasons, error, group.oldest, group.newest))
        rows += [("", "", "", "", "", f"also: {message}", "", "") for message in group.messages[1:]]
    table(columns, rows, nothing="Nothing waits for a person.", elastic="ERROR")


def _decide(
    do: str,
    done: str,
    act: Act,
    act_on_group: ActOnGroup,
    command_ids: Sequence[IdRange],
    domain: str | None,
    as_json: bool,
    *,
    group: str | None,
    command_type: str | None,
    rate: float | None,
    dry_run: bool,
    wait: bool,
) -> None:
    """About some commands, or about all that wait for a cause."""
    if (group is None) == (not command_ids):
        raise click.UsageError("Name commands, or a group with --group.")
    if group is not None:
        how = {"command_type": command_type, "rate": rate, "dry_run": dry_run}
        _decide_about_group(do, act_on_group, group, domain, as_json, wait=wait and not dry_run, **how)
        return
    for option, value in (("--type", command_type), ("--rate", rate), ("--dry-run", dry_run), ("--wait", wait)):
        if value:
            raise click.UsageError(f"{option} needs --group.")
    _resolve(done, act, command_ids, domain, as_json)


def _decide_about_group(
    do: str, act: ActOnGroup, fingerprint: str, domain: str | None, as_json: bool, *, wait: bool, **how: Any
) -> None:
    fingerprint = fingerprint.lower()
    with open_bus() as bus:
        domain = domain or _domain_of_group(bus, fingerprint)
        action = act(bus, domain, fingerprint, **how)
        if as_json:
            echo_json({"domain": domain, **asdict(action)})
        else:
            _print_action(do, domain, action, dry_run=how["dry_run"])
        if wait and action.batch_id is not None:
            follow(bus, domain, action.batch_id, as_json, explain=True)


def _domain_of_group(bus: SyncCommandBus, fingerprint: str) -> str:
    domains = bus._read(operate.domains_of_group(fingerprint)) if FINGERPRINT.match(fingerprint) else []
    if not domains:
        raise InvalidOperationError(
            f"Nothing waits for the cause {shown(fingerprint):.80} in any domain. "
            "List the causes with `busload troubleshooting groups`."
        )
    if len(domains) > 1:
        raise click.UsageError(f"Group {fingerprint} is in several domains: {', '.join(domains)}. Add --domain.")
    return domains[0]


def _print_action(do: str, domain: str, action: GroupAction, *, dry_run: bool) -> None:
    if action.count == 0:
        paragraph(f"Nothing waits for the cause {action.fingerprint} in {domain} any more.")
    elif dry_run:
        paragraph(f"Would {do} {counted(action.count, 'command')} in {domain}; nothing was done.")
        rows = [(item.command_id, item.before, item.after) for item in action.sample]
        table(("COMMAND", "DATA", "PATCHED"), rows, nothing="", elastic="DATA")
    else:
        paragraph(f"Batch {action.batch_id} will {do} {counted(action.count, 'command')} in {domain}.")


def _text(argument: str) -> str | bytes:
    """What was given at the shell, or stands in the file that it names."""
    if not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_bytes()
    except OSError as error:
        raise click.BadParameter(f"{argument[1:]} cannot be read: {error.strerror}", param_hint="--patch") from None


def _resolve(done: str, act: Act, command_ids: Sequence[IdRange], domain: str | None, as_json: bool) -> None:
    """Resolve all of them in one transaction: if one is refused, none has moved."""
    with open_bus() as bus:
        places = list(dict.fromkeys(find_command(bus, command_id, domain) for command_id in command_ids))
        with bus.pool.connection() as conn, conn.transaction():
            for each, command_id in sorted(places):  # as everybody does, so that nobody waits in a circle
                act(bus, each, command_id, conn)
    if as_json:
        echo_json([{"domain": each, "command_id": command_id, "done": done} for each, command_id in places])
        return
    for each, command_id in places:
        click.echo(f"{done.capitalize()} {command_id} in {each}.")


def _error(item: TroubleshootingItem) -> str | None:
    parts = (item.last_error_code or item.last_error_type, item.last_error_message)
    return ": ".join(part for part in parts if part) or None
