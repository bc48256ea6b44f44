"""What a person does about commands in troubleshooting: retry, complete or cancel, one of them or all of a cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import psycopg

from busload.domain.cause import CHUNK_BYTES, WIDEST, CauseGroup, Chunk, Decision, GroupAction, GroupItem, Patch, chunks
from busload.domain.command import CommandStatus
from busload.domain.payload import PayloadLimits, Undecodable, decode, encode, storable
from busload.errors import CommandNotFoundError, InvalidCommandError, InvalidOperationError, Problem, Superseded
from busload.store import report, rescue, send
from busload.store.connection import is_away
from busload.store.plan import Plan, Savepoint, Script, execute, many
from busload.store.statements import statements

SQL = statements("operate")

PAGE = 500
REFUSED_HERE = "BUS01"
SAMPLE = 3
"""Items that a dry run shows."""


def retry(domain: str, command_id: UUID, *, operator: str | None) -> Plan[None]:
    [picked] = yield from _pick_one(domain, command_id, "retried")
    yield from execute(SQL.retry, commands=[picked], data=[], patch=None, operator=operator, action=None)


def complete(domain: str, command_id: UUID, *, result: str | None, operator: str | None) -> Plan[None]:
    [picked] = yield from _pick_one(domain, command_id, "completed")
    ended = execute(SQL.complete, commands=[picked], result=result, operator=operator, action=None)
    yield from _end_one(command_id, ended)


def cancel(domain: str, command_id: UUID, *, reason: str, operator: str | None) -> Plan[None]:
    [picked] = yield from _pick_one(domain, command_id, "canceled")
    ended = execute(SQL.cancel, commands=[picked], reason=reason, operator=operator, action=None)
    yield from _end_one(command_id, ended)


def groups(domain: str, *, command_type: str | None, limit: int) -> Plan[list[CauseGroup]]:
    return many(_group, SQL.groups, domain=domain, command_type=command_type, limit=limit)


def domains_of_group(fingerprint: str, command_type: str | None = None) -> Plan[list[str]]:
    rows = yield from execute(SQL.group_domains, fingerprint=fingerprint, command_type=command_type)
    return [domain for (domain,) in rows]


def decide(
    domain: str,
    decision: Decision,
    *,
    command_type: str | None,
    patch: Patch | None,
    rate: float | None,
    dry_run: bool,
    batch_id: UUID,
) -> Plan[GroupAction]:
    """Create the batch that carries out a decision about all that waits for a cause now; needs a transaction."""
    found = yield from _select(domain, decision, command_type=command_type, patch=patch, dry_run=dry_run)
    if not found.command_ids and domain not in (yield from domains_of_group(decision.fingerprint, command_type)):
        of_type = "" if command_type is None else f" of type {command_type!r}"
        raise InvalidOperationError(
            f"Nothing{of_type} in domain {domain!r} waits for the cause {decision.fingerprint}, and nobody has decided "
            "about it before. List the causes with `busload troubleshooting groups`."
        )
    action = GroupAction(None, decision.action, decision.fingerprint, len(found.command_ids), tuple(found.sample))
    if dry_run or found.until is None:
        return action
    [(now,)] = yield from execute(SQL.clock)
    custom_data = msgspec.to_builtins(decision)
    custom_data |= {"command_type": command_type} if command_type is not None else {}
    custom_data |= {"rate": rate} if rate is not None else {}
    batch = send.NewBatch(
        batch_id,
        domain,
        f"{decision.action} {storable(found.cause or 'failures', 200)} ({decision.fingerprint})",
        encode(custom_data, WIDEST),
        None,
    )
    how: dict[str, Any] = {"until": found.until, "rate": rate, "now": now}
    commands = list(chunks(decision, found.command_ids, found.sizes, **how))
    yield from send.create_batch(batch, commands)
    return GroupAction(batch_id, decision.action, decision.fingerprint, action.count, action.sample)


def resolve(
    domain: str, chunk: Chunk, *, action: UUID | None, lease_id: UUID, limits: PayloadLimits
) -> Plan[tuple[int, dict[UUID, str]]]:
    """Carry out a decision for some commands, in the transaction that completes the one that says so.

    Returns how many have moved, and why the others have not. The lease comes first, as in every settlement.
    """
    if not (yield from execute(rescue.SQL.hold, leases=[lease_id])):
        raise Superseded("Another worker has this part of the decision now.")
    decision = chunk.decision
    patch = None if decision.patch is None else Patch(decision.patch, limits)
    picked = yield from execute(
        SQL.pick,
        domain=domain,
        command_ids=chunk.command_ids,
        fingerprint=decision.fingerprint,
        until=chunk.until,
        again=decision.action == "retry",
        with_data=patch is not None,
        action=action,
    )
    commands = {command: command_id for command, command_id, _, _ in picked}
    data: dict[int, str] = {}
    left: dict[UUID, str] = {}
    if patch is not None:
        for command, command_id, text, _ in picked:
            try:
                data[command] = patch.apply(text)
            except ValueError as error:
                left[command_id] = f"the patch does not apply: {error}"
        commands = {command: commands[command] for command in data}
    if commands and decision.action == "retry":
        yield from _move(decision, list(commands), list(data.values()), action)
    elif commands:
        kept = yield from _end_all(decision, list(commands), action)
        left |= {commands.pop(command): why for command, why in kept.items()}
    gone = set(chunk.command_ids).difference(commands.values(), left)
    if gone:
        left |= yield from _left_behind(domain, chunk, gone)
    return len(commands), left


def _move(decision: Decision, commands: Sequence[int], data: Sequence[str], action: UUID | None) -> Plan[None]:
    about: dict[str, Any] = {"commands": list(commands), "operator": decision.operator, "action": action}
    match decision.action:
        case "retry":
            patch = None if decision.patch is None else encode(decision.patch, WIDEST)
            yield from execute(SQL.retry, **about, data=list(data), patch=patch)
        case "complete":
            result = None if decision.result is None else encode(decision.result, WIDEST)
            yield from execute(SQL.complete, **about, result=result)
        case "cancel":
            yield from execute(SQL.cancel, **about, reason=decision.reason)


def _end_all(decision: Decision, commands: Sequence[int], action: UUID | None) -> Plan[dict[int, str]]:
    """Complete or cancel these, but for groups whose events cannot be deleted; returns why not. Needs a transaction."""
    yield Script(b"SET CONSTRAINTS ALL IMMEDIATE")
    kept: dict[int, str] = {}
    parts = [list(commands)]
    while parts:
        part = parts.pop()
        try:
            yield Savepoint(_move(decision, part, [], action))
        except psycopg.Error as error:
            why = _why_kept(error)
            if why is None:
                raise
            if len(part) == 1:
                kept[part[0]] = why
            else:
                parts += [part[: len(part) // 2], part[len(part) // 2 :]]
    return kept


def _end_one(command_id: UUID, ended: Plan[Any]) -> Plan[None]:
    try:
        yield Savepoint(ended)
    except psycopg.Error as error:
        why = _why_kept(error)
        if why is None:
            raise
        raise InvalidOperationError(f"Group {command_id} stays as it is. {why}") from error


def _why_kept(error: psycopg.Error) -> str | None:
    """Why the events of a group cannot be deleted; None if that is not what the error is about."""
    said = error.diag
    if is_away(error) or "busload.end_groups" not in (said.context or ""):
        return None
    if error.sqlstate == REFUSED_HERE:
        return str(said.message_primary)
    details = f" ({said.message_detail})" if said.message_detail else ""
    return f"Its events cannot be deleted: {said.message_primary}{details}."


def _left_behind(domain: str, chunk: Chunk, command_ids: set[UUID]) -> Plan[dict[UUID, str]]:
    rows = yield from execute(SQL.left_behind, domain=domain, command_ids=list(command_ids), until=chunk.until)
    why = dict.fromkeys(command_ids, "it is not there any more")
    for command_id, status, fingerprint, later in rows:
        if fingerprint is None:
            why[command_id] = f"it is {status}"
        elif fingerprint != chunk.decision.fingerprint:
            why[command_id] = f"it waits for another cause now: {fingerprint}"
        else:
            why[command_id] = "it failed again after the decision" if later else "its batch was canceled"
    return why


@dataclass(slots=True)
class _Selection:
    """What waits for a cause now; `sizes` are the bytes of data that a patch reads and writes for each."""

    command_ids: list[UUID] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sample: list[GroupItem] = field(default_factory=list)
    until: datetime | None = None
    cause: str | None = None


def _select(
    domain: str, decision: Decision, *, command_type: str | None, patch: Patch | None, dry_run: bool
) -> Plan[_Selection]:
    """Everything that a decision would move; refused if its patch does not apply to each of them."""
    found, refusals, after = _Selection(), _Refusals(), -1
    while True:
        rows = yield from execute(
            SQL.group_items,
            domain=domain,
            fingerprint=decision.fingerprint,
            command_type=command_type,
            again=decision.action == "retry",
            after=after,
            limit=PAGE,
        )
        for command, command_id, since, cause in rows:
            after = command
            found.cause, found.until = cause, since if found.until is None else max(found.until, since)
            found.command_ids.append(command_id)
        items = [(command, command_id) for command, command_id, *_ in rows]
        if patch is not None:
            yield from _try_patch(patch, items, found, refusals, dry_run=dry_run)
        else:
            found.sizes += [0] * len(items)
            if dry_run and not found.sample:
                yield from _show(items[:SAMPLE], found)
        if len(rows) < PAGE:
            break
    if refusals.problems:
        raise InvalidCommandError(refusals.problems, refusals.count)
    return found


@dataclass(slots=True)
class _Refusals:
    """To which commands a patch does not apply; the first of them are told."""

    count: int = 0
    problems: list[Problem] = field(default_factory=list)

    def add(self, command_id: UUID, error: ValueError) -> None:
        self.count += 1
        if self.count <= 100:
            message = f"does not apply to command {command_id}: {error}"
            self.problems.append(Problem("INVALID_PATCH", "/patch", message))


def _try_patch(
    patch: Patch, items: Sequence[tuple[int, UUID]], found: _Selection, refusals: _Refusals, *, dry_run: bool
) -> Plan[None]:
    """Measure what a patch reads and makes of a page, a few megabytes at a time."""
    while items:
        texts = yield from execute(SQL.data_of, commands=[command for command, _ in items], bytes=CHUNK_BYTES)
        for (_, command_id), (text,) in zip(items, texts, strict=False):
            patched = None
            if text is not None:
                try:
                    patched = patch.apply(text)
                except ValueError as error:
                    refusals.add(command_id, error)
            found.sizes.append(len((text or "").encode()) + len((patched or "").encode()))
            if dry_run and len(found.sample) < SAMPLE:
                found.sample.append(GroupItem(command_id, _value(text), _value(patched)))
        items = items[len(texts) :]


def _show(items: Sequence[tuple[int, UUID]], found: _Selection) -> Plan[None]:
    texts = yield from execute(SQL.data_of, commands=[command for command, _ in items], bytes=WIDEST.data_bytes)
    found.sample += [
        GroupItem(command_id, _value(text)) for (_, command_id), (text,) in zip(items, texts, strict=False)
    ]


def _value(text: str | None) -> Any:
    """As people see it; what other hands wrote and cannot be decoded is shown as its text."""
    try:
        return None if text is None else decode(text)
    except Undecodable:
        return str(text)[:1000]


def _group(*row: Any) -> CauseGroup:
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in row]
    return CauseGroup(*values)


def _pick_one(domain: str, command_id: UUID, action: str) -> Plan[list[int]]:
    picked = yield from execute(
        SQL.pick,
        domain=domain,
        command_ids=[command_id],
        fingerprint=None,
        until=None,
        again=action == "retried",
        with_data=False,
        action=None,
    )
    if not picked:
        yield from _refuse(domain, command_id, action)
    return [command for command, *_ in picked]


def _refuse(domain: str, command_id: UUID, action: str) -> Plan[None]:
    """Say why nothing was moved."""
    found = yield from report.command(domain, command_id)
    if found is None:
        raise CommandNotFoundError(domain, command_id)
    if found.status is CommandStatus.IN_TROUBLESHOOTING_QUEUE:
        raise InvalidOperationError(
            f"Command {command_id} belongs to a canceled batch, of which nothing is tried again. Complete or cancel it."
        )
    raise InvalidOperationError(
        f"Command {command_id} is {found.status}; "
        f"only one that is IN_TROUBLESHOOTING_QUEUE can be {action} by an operator."
    )
