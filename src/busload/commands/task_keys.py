"""Which commands may have the task key that they ask for, and what becomes of the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from uuid import UUID

import msgspec

from busload.commands.command import NewCommand, SendResult, by_domain
from busload.commands.dedup import Dedup
from busload.errors import DuplicateTaskError
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

log = logging.getLogger("busload")

SQL = statements(__name__)


def hold_task_keys(
    domain: str, commands: Sequence[NewCommand], dedup: Dedup, promised: Mapping[str, UUID] | None = None
) -> Plan[list[SendResult]]:
    """Hold the task keys that are free, for commands which the same transaction sends; says for each whether it may.

    If several commands have the same key, the first one gets it. A command without a key may always be sent. `promised`
    are keys that this transaction holds for commands it has not sent yet, which the database cannot know of. A command
    with a domain of its own holds its key there.
    """
    if any(command.domain is not None for command in commands):
        told: dict[tuple[str, UUID], SendResult] = {}
        for own, those in sorted(by_domain(domain, commands).items()):  # in order, as the keys of a domain are
            alike = [msgspec.structs.replace(command, domain=None) for command in those]
            found = yield from hold_task_keys(own, alike, dedup, promised if own == domain else None)
            told |= {(own, command.command_id): result for command, result in zip(those, found, strict=True)}
        return [told[command.domain or domain, command.command_id] for command in commands]
    promised = promised or {}
    first = dict(promised)
    for command in commands:
        if command.task_key is not None:
            first.setdefault(command.task_key, command.command_id)
    wanted = [task_key for task_key in first if task_key not in promised]
    held: set[str] = set()
    if wanted:
        ids = [first[task_key] for task_key in wanted]
        rows = yield from execute(SQL.hold, domain=domain, window=dedup.window, task_keys=wanted, command_ids=ids)
        held = {task_key for (task_key,) in rows}
    holders = first
    if taken := [task_key for task_key in wanted if task_key not in held]:
        holders = first | (yield from holders_of(domain, taken))
    duplicates = {
        command.command_id: command.task_key
        for command in commands
        if command.task_key is not None
        and (command.task_key not in held or first[command.task_key] != command.command_id)
    }
    answers = duplicate_results(domain, list(duplicates.values()), holders, dedup)
    others = dict(zip(duplicates, answers, strict=True))
    return [others.get(c.command_id) or SendResult(c.command_id, created=True) for c in commands]


def holders_of(domain: str, task_keys: Sequence[str]) -> Plan[dict[str, UUID]]:
    """The commands that hold these keys, by key."""
    return dict((yield from execute(SQL.holders, domain=domain, task_keys=task_keys)))


def duplicate_results(
    domain: str, task_keys: Sequence[str], holders: Mapping[str, UUID], dedup: Dedup
) -> list[SendResult]:
    """The results for commands whose task keys others hold."""
    if task_keys and dedup.on_conflict == "raise":
        raise DuplicateTaskError(domain, {task_key: holders[task_key] for task_key in task_keys})
    if task_keys and dedup.on_conflict == "skip":
        first = task_keys[0]
        more = f", and {len(task_keys) - 1} more" if len(task_keys) > 1 else ""
        log.info("Skipped a command in %s: task %r is held by %s%s", domain, first, holders[first], more)
    return [SendResult(holders[task_key], created=False) for task_key in task_keys]
