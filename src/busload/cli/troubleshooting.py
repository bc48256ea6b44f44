"""`busload troubleshooting`: what waits for a person, and what that person does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal
from uuid import UUID

import click

from busload.cli import noun, options
from busload.cli.answer import Answer, about, answers, would
from busload.cli.batch import follow
from busload.cli.complete import completes
from busload.cli.find import domains_of, find_one, id_or_beginning
from busload.cli.output import joined, paragraph, shown, tracebacks
from busload.cli.text_table import View, table
from busload.commands.checks import FINGERPRINT
from busload.commands.command import TroubledDomain, TroubleshootingItem
from busload.commands.payload import decode_strict
from busload.commands.search import IdRange
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.sync.bus import SyncCommandBus
from busload.troubleshooting import causes, decisions
from busload.troubleshooting.causes import CauseGroup, GroupAction, Reason

Verb = Literal["retry", "complete", "cancel"]
DONE: dict[Verb, str] = {"retry": "retried", "complete": "completed", "cancel": "canceled"}

ITEMS = View[TroubleshootingItem](
    "COMMAND=command_id DOMAIN TYPE=command_type REASON ATTEMPTS ERROR SINCE",
    {"ERROR": lambda item: joined(item.last_error_code or item.last_error_type, item.last_error_message)},
    nothing="Nothing waits for a person.",
    elastic="ERROR",
    spare=("SINCE", "TYPE"),
)
DOMAINS = View[TroubledDomain]("DOMAIN COUNT OLDEST NEWEST", nothing="Nothing waits for a person.")
ITEM = View[TroubleshootingItem](
    "command=command_id domain type=command_type data reason since attempts error details cause=fingerprint"
    " batch=batch_id task_key correlation=correlation_id reply_to",
    {"error": lambda item: joined(item.last_error_type, item.last_error_code, item.last_error_message) or ""},
)


troubleshooting = noun(
    "troubleshooting",
    "ls --domain payments",
    "retry 0198c5d2-8000",
    "groups",
    "retry --group 4f0c2b7a91de --dry-run",
    more=". Several commands at once are resolved all or none.",
)


@troubleshooting.command()
@options.domain
@options.command_type
@click.option("--reason", type=click.Choice(list(Reason)), metavar="REASON", help="Only commands that wait for this.")
@click.option("--error", "text", metavar="TEXT", help="Only causes in whose oldest error this text occurs.")
@options.batch
@options.limit(100)
@answers
def groups(bus: SyncCommandBus, domain: str | None, batch: IdRange | None, limit: int, **wanted: Any) -> Answer:
    """List what waits for a person by cause, the largest group first.

    REASON is PERMANENT, EXHAUSTED, CRASHED, UNDECODABLE or RESULT_INVALID.

        busload troubleshooting groups
        busload troubleshooting groups --reason EXHAUSTED --error 'timed out'
        busload troubleshooting groups --json | jq -r '.[0].fingerprint'
    """
    wanted["batch_id"] = None if batch is None else find_one(bus, "batch", batch, None)[1]
    found = [
        (each, group)
        for each in domains_of(bus, domain)
        for group in bus.troubleshooting.groups(each, limit=limit, **wanted)
    ]
    largest = sorted(found, key=lambda one: -one[1].count)[:limit]
    value = [{"domain": each, **asdict(group)} for each, group in largest]
    return Answer(value, partial(_print_groups, largest), found=bool(found))


@troubleshooting.command()
@options.command_type
@options.page(100)
@answers
def ls(bus: SyncCommandBus, domain: str | None, command_type: str | None, limit: int, offset: int) -> Answer:
    """List what waits for a person, newest first, in one domain or in all.

        busload troubleshooting ls
        busload troubleshooting ls --json | jq -r '.[].command_id' \\
            | xargs busload troubleshooting retry
    """
    found = bus.troubleshooting.list(domain, command_type=command_type, limit=limit, offset=offset)
    total = bus.troubleshooting.count(domain, command_type=command_type)
    notes = [f"{len(found):,} of {counted(total, 'command')}."] if len(found) < total else []
    return ITEMS.list(found, notes=notes)


@troubleshooting.command()
@options.command_type
@answers
def domains(bus: SyncCommandBus, command_type: str | None) -> Answer:
    """List the domains in which commands wait for a person, those with most first, and the total.

    busload troubleshooting domains
    busload troubleshooting domains --json | jq 'map(.count) | add'
    """
    found = bus.troubleshooting.domains(command_type=command_type)
    total = sum(each.count for each in found)
    notes = [f"{counted(total, 'command')} in {counted(len(found), 'domain')}."] if found else []
    return DOMAINS.list(found, notes=notes)


@troubleshooting.command()
@about("command")
def show(bus: SyncCommandBus, domain: str, command_id: UUID) -> Answer:
    """Show one command that waits for a person: its data, why it waits, and where its last attempt failed.

    busload troubleshooting show 0198c5d2-8000
    busload troubleshooting show 0198c5d2-8000 --json | jq -r .last_traceback
    """
    item = bus.troubleshooting.get(domain, command_id)
    if item is None:
        raise _does_not_wait(domain, command_id)
    return ITEM.one(item, lines=tracebacks([(item.attempts, item.last_traceback)]))


def decision(function: Callable[..., Any]) -> Callable[..., Any]:
    """What all three decisions take: ids, or a group with its options; who, where, and `--json`."""
    command = answers(function, prints=True)
    for option in (
        options.domain,
        options.operator,
        click.option(
            "--wait", is_flag=True, help="With --group: follow the batch until it completes; exit code 1 if any stay."
        ),
        options.dry_run,
        click.option("--rate", type=float, metavar="N", help="With --group: at most this many commands a second."),
        click.option("--type", "command_type", help="With --group: only commands of this type."),
        click.option(
            "--group",
            metavar="FINGERPRINT",
            shell_complete=completes("cause"),
            help="All commands that wait for this cause, instead of ids.",
        ),
        click.argument(
            "command_ids",
            nargs=-1,
            type=id_or_beginning,
            metavar="[COMMAND_ID...]",
            shell_complete=completes("troubled command"),
        ),
    ):
        command = option(command)
    return command


@troubleshooting.command()
@click.option("--patch", metavar="JSON|@FILE", help="With --group: a JSON patch (RFC 6902) of their data.")
@decision
def retry(bus: SyncCommandBus, patch: str | None, **given: Any) -> None:
    """Put commands back into the queue, with all their attempts to use again.

    With --group, a new batch retries all commands that wait for this cause. Workers run that batch.

        busload troubleshooting retry 0198c5d2-8000
        busload troubleshooting retry --group 4f0c2b7a91de --rate 50 --wait
        busload troubleshooting retry --group 4f0c2b7a91de --dry-run \\
            --patch '[{"op": "replace", "path": "/currency", "value": "EUR"}]'
    """
    operations = None if patch is None else decode_strict(options.text_of(patch, "--patch"), path="/patch")
    _decide(bus, "retry", {}, patch=operations, **given)


@troubleshooting.command()
@click.option("--result", metavar="JSON", help="What the handler would have returned.")
@decision
def complete(bus: SyncCommandBus, result: str | None, **given: Any) -> None:
    """Declare commands done, with a result if there is one.

    busload troubleshooting complete 0198c5d2-8000 --result '{"paid": true}'
    busload troubleshooting complete --group 4f0c2b7a91de --dry-run
    """
    value = None if result is None else decode_strict(result, path="/result")
    _decide(bus, "complete", {"result": value}, **given)


@troubleshooting.command()
@options.reason()
@decision
def cancel(bus: SyncCommandBus, reason: str, **given: Any) -> None:
    """Give commands up, with a reason.

    busload troubleshooting cancel 0198c5d2-8000 --reason 'paid twice'
    busload troubleshooting cancel --group 4f0c2b7a91de --reason 'paid twice'
    """
    _decide(bus, "cancel", {"reason": reason}, **given)


def _decide(
    bus: SyncCommandBus,
    verb: Verb,
    how: Mapping[str, Any],
    *,
    command_ids: Sequence[IdRange],
    domain: str | None,
    operator: str,
    group: str | None,
    wait: bool,
    as_json: bool,
    **of_group: Any,
) -> None:
    """Decide about some commands, or about all that wait for a cause; `how` is what this decision alone takes."""
    if (group is None) == (not command_ids):
        raise click.UsageError("Name commands, or a group with --group.")
    if group is None:
        for option, value in {**of_group, "wait": wait}.items():
            if value not in (None, False) and option != "dry_run":
                raise click.UsageError(f"--{option.removeprefix('command_').replace('_', '-')} needs --group.")
        places = list(dict.fromkeys(find_one(bus, "command", one, domain) for one in command_ids))
        resolve = (
            partial(_would_resolve, bus, verb, places)
            if of_group["dry_run"]
            else partial(_resolve, bus, verb, places, operator=operator, **how)
        )
        resolve().print(as_json)
        return
    domain = domain or _domain_of_group(bus, group.lower())
    act = getattr(bus.troubleshooting, f"{verb}_group")
    action: GroupAction = act(domain, group.lower(), operator=operator, **of_group, **how)
    show = partial(_print_action, verb, domain, action, dry_run=of_group["dry_run"], wait=wait)
    Answer({"domain": domain, **asdict(action)}, show).print(as_json)
    if wait and not of_group["dry_run"] and action.batch_id is not None:
        completed = follow(bus, domain, action.batch_id, as_json, explain=True)
        outcome = _outcome(bus, domain, action.batch_id, action.count)
        Answer(asdict(outcome), partial(_print_outcome, verb, outcome)).print(as_json)
        if not completed or outcome.moved < action.count:
            raise click.exceptions.Exit(1)


@dataclass(slots=True)
class Outcome:
    """How many commands a decision about a group has moved, how many stay, and the first of each of a few reasons.

    Of the `unknown`, no command of the batch has told anything: it did not complete, or its result was not kept.
    """

    moved: int = 0
    stay: int = 0
    unknown: int = 0
    reasons: dict[UUID, str] = field(default_factory=dict)


def _outcome(bus: SyncCommandBus, domain: str, batch_id: UUID, count: int) -> Outcome:
    outcome, last = Outcome(), None
    while parts := bus.list_batch_commands(domain, batch_id, limit=100, after=last):
        last = parts[-1]
        for told in filter(None, (decisions.read_summary(part.result) for part in parts)):
            outcome.moved += told.moved
            outcome.stay += len(told.left) + told.others
            for command_id, why in told.left.items():
                if len(outcome.reasons) < causes.FEW and why not in outcome.reasons.values():
                    outcome.reasons[command_id] = why
    outcome.unknown = max(count - outcome.moved - outcome.stay, 0)
    return outcome


def _would_resolve(bus: SyncCommandBus, verb: Verb, places: Sequence[tuple[str, UUID]]) -> Answer:
    """All of them have to wait for a person, or none would be resolved."""
    for domain, command_id in places:
        if bus.troubleshooting.get(domain, command_id) is None:
            raise _does_not_wait(domain, command_id)
    named = [{"domain": domain, "command_id": command_id} for domain, command_id in places]
    return would(f"{verb} {counted(len(places), 'command')}", commands=named)


def _does_not_wait(domain: str, command_id: UUID) -> InvalidOperationError:
    return InvalidOperationError(
        f"Command {command_id} in domain {domain!r} does not wait for a person. "
        f"`busload command show {command_id}` says where it is."
    )


def _resolve(bus: SyncCommandBus, verb: Verb, places: Sequence[tuple[str, UUID]], **how: Any) -> Answer:
    """Resolve all of them in one transaction: if one is refused, none has moved."""
    act, done = getattr(bus.troubleshooting, verb), DONE[verb]
    homes = {shard.database.given_dsn: shard for each, _ in places if (shard := bus.shard_of(each))}
    if len(homes) > 1:
        raise click.UsageError("These commands live in different databases: resolve those of each by themselves.")
    [home] = homes.values()
    held = Counter(_held_batches(bus, places)) if verb == "retry" else Counter[UUID]()
    with home.pool.connection() as conn, conn.transaction():
        for each, command_id in sorted(places):  # as everybody does, so that nobody waits in a circle
            act(each, command_id, conn=conn, **how)
    value = [{"domain": each, "command_id": command_id, "done": done} for each, command_id in places]
    lines = [f"{done.capitalize()} {command_id} in {each}." for each, command_id in places]
    if held:
        lines.append(_in_held_batches(held.total(), [batch_id for batch_id, _ in held.most_common(causes.FEW)]))
    return Answer(value, lambda: click.echo("\n".join(lines)))


def _held_batches(bus: SyncCommandBus, places: Sequence[tuple[str, UUID]]) -> Iterator[UUID]:
    for domain in {domain for domain, _ in places}:
        command_ids = [command_id for of, command_id in places if of == domain]
        yield from bus.shard_of(domain).database.read(causes.held_batches(domain, command_ids))


def _in_held_batches(count: int, batches: Sequence[UUID]) -> str:
    """What has to be done as well, so that what was retried starts."""
    whose, waits = ("1 belongs", "It waits") if count == 1 else (f"{count:,} belong", "They wait")
    held, go = ("batches that are held", "these go") if len(batches) > 1 else ("a batch that is held", "the batch goes")
    lines = ", ".join(f"`busload batch resume {batch_id}`" for batch_id in batches)
    return f"Of these, {whose} to {held}. {waits} until {go} on: {lines}."


def _domain_of_group(bus: SyncCommandBus, fingerprint: str) -> str:
    domains = list[str]()
    if FINGERPRINT.match(fingerprint):
        for shard in bus.shards:
            domains += shard.database.read(causes.domains_of_group(fingerprint))
    if not domains:
        raise InvalidOperationError(
            f"Nothing waits for the cause {shown(fingerprint):.80} in any domain. "
            "List the causes with `busload troubleshooting groups`."
        )
    if len(domains) > 1:
        raise click.UsageError(f"Group {fingerprint} is in several domains: {', '.join(domains)}. Add --domain.")
    return domains[0]


def _print_groups(found: Sequence[tuple[str, CauseGroup]]) -> None:
    columns = ("GROUP", "COUNT", "DOMAIN", "TYPES", "REASONS", "ERROR", "OLDEST", "NEWEST")
    rows = list[tuple[object, ...]]()
    for domain, group in found:
        types, reasons = ", ".join(group.command_types), ", ".join(group.reasons)
        error = joined(group.error_code or group.error_type, group.message)
        rows.append((group.fingerprint, group.count, domain, types, reasons, error, group.oldest, group.newest))
        rows += [("", "", "", "", "", f"also: {message}", "", "") for message in group.messages[1:]]
    table(columns, rows, nothing="Nothing waits for a person.", elastic="ERROR")


def _print_action(verb: Verb, domain: str, action: GroupAction, *, dry_run: bool, wait: bool) -> None:
    commands = counted(action.count, "command")
    if action.count == 0:
        paragraph(f"Nothing waits for the cause {action.fingerprint} in {domain} any more.")
    elif dry_run:
        paragraph(f"Would {verb} {commands} in {domain}; nothing was done.")
        rows = [(item.command_id, item.before, item.after) for item in action.sample]
        table(("COMMAND", "DATA", "PATCHED"), rows, nothing="", elastic="DATA")
    else:
        paragraph(f"Batch {action.batch_id} will {verb} {commands} in {domain}.")
        if not wait:
            look = f"`busload command ls --batch {action.batch_id} --json`"
            paragraph(
                f"The results in {look} say how many have moved, and which stay and why; `--wait` tells it at once."
            )
    if action.held:
        paragraph(_in_held_batches(action.held, action.held_batches))


def _print_outcome(verb: Verb, outcome: Outcome) -> None:
    count = outcome.moved + outcome.stay + outcome.unknown
    said = f"{outcome.moved:,} of {counted(count, 'command')} {DONE[verb]}."
    if outcome.stay:
        said += f" {outcome.stay:,} {'stays as it is' if outcome.stay == 1 else 'stay as they are'}, for example:"
    paragraph(said)
    for command_id, why in outcome.reasons.items():
        paragraph(f"{command_id}: {why}", first="  ", then="    ")
    if outcome.unknown:
        them = "it" if outcome.unknown == 1 else "them"
        paragraph(f"Nothing is known of {outcome.unknown:,}: the batch has no result about {them}.")
