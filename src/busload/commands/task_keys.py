"""Which commands may have the task key that they ask for, and what becomes of the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import repeat
from uuid import UUID

import msgspec
from psycopg import errors as pg

from busload.commands.command import NewCommand, SendResult, by_domain
from busload.commands.dedup import Dedup
from busload.errors import DuplicateTaskError
from busload.postgres.arrays import Texts, Uuids
from busload.postgres.plan import Plan, Savepoint, execute
from busload.postgres.statements import statements

log = logging.getLogger("busload")

SQL = statements(__name__)


MANY = 100
"""From so many keys on, it is worth a savepoint to try first whether all of them are new."""


def hold_task_keys(
    domain: str, commands: Sequence[NewCommand], dedup: Dedup, promised: Mapping[str, UUID] | None = None
) -> Plan[list[SendResult]]:
    """Hold the task keys that are free, for commands which the same transaction sends; says for each whether it may.

    See `find_duplicates`.
    """
    duplicates = yield from find_duplicates(domain, commands, dedup, promised)
    told = [duplicates.get((c.domain or domain, c.command_id)) for c in commands] if duplicates else repeat(None)
    return [found or SendResult(c.command_id, created=True) for c, found in zip(commands, told, strict=False)]


def find_duplicates(
    domain: str, commands: Sequence[NewCommand], dedup: Dedup, promised: Mapping[str, UUID] | None = None
) -> Plan[dict[tuple[str, UUID], SendResult]]:
    """Hold the task keys that are free, and return the commands that may not be sent, by domain and id.

    If several commands have the same key, the first one gets it. A command without a key may always be sent. `promised`
    are keys that this transaction holds for commands it has not sent yet, which the database cannot know of. A command
    with a domain of its own holds its key there.
    """
    if any(command.domain is not None for command in commands):
        told: dict[tuple[str, UUID], SendResult] = {}
        for own, those in sorted(by_domain(domain, commands).items()):  # in order, as the keys of a domain are
            alike = [msgspec.structs.replace(command, domain=None) for command in those]
            told |= yield from find_duplicates(own, alike, dedup, promised if own == domain else None)
        return told
    promised = promised or {}
    first = dict(promised)
    for command in commands:
        if command.task_key is not None:
            first.setdefault(command.task_key, command.command_id)
    wanted = {task_key: first[task_key] for task_key in first if task_key not in promised} if promised else first
    taken = yield from _hold(domain, wanted, dedup)
    if not taken and len(wanted) == len(commands):
        return {}  # each has a key, and no two have the same
    holders = first | (yield from holders_of(domain, list(taken))) if taken else first
    duplicates = {
        command.command_id: command.task_key
        for command in commands
        if command.task_key is not None
        and (
            command.task_key in taken
            or command.task_key not in wanted
            or wanted[command.task_key] != command.command_id
        )
    }
    answers = duplicate_results(domain, list(duplicates.values()), holders, dedup)
    return dict(zip(((domain, command_id) for command_id in duplicates), answers, strict=True))


def _hold(domain: str, wanted: Mapping[str, UUID], dedup: Dedup) -> Plan[set[str]]:
    """Hold those of these keys that are free for these commands; return the others."""
    if not wanted:
        return set()
    about = {
        "domain": domain,
        "window": dedup.window,
        "task_keys": Texts.of(list(wanted)),
        "command_ids": Uuids.of(list(wanted.values())),
    }
    if len(wanted) >= MANY:
        try:
            [[all_held]] = yield Savepoint(execute(SQL.hold_new, **about))
            if all_held:
                return set()
        except pg.UniqueViolation:  # somebody else has held one of them a moment ago
            log.debug("Some of %d task keys were held by others meanwhile", len(wanted))
    rows = yield from execute(SQL.hold, **about)
    return set() if len(rows) == len(wanted) else wanted.keys() - {task_key for (task_key,) in rows}


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
