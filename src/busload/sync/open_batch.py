"""Made from busload.batches.open_batch by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack
from uuid import UUID

from busload.batches.batch import facts_of_batch, with_priority
from busload.batches.open_batch import _ms_since, log
from busload.commands import send
from busload.commands.check_commands import check_one
from busload.commands.checks import check
from busload.commands.command import AddOptions, NewCommand, new_command
from busload.commands.data_type import DataTypes
from busload.commands.dedup import Dedup
from busload.commands.headers import with_context
from busload.commands.wording import counted
from busload.dispatch import creation_state
from busload.dispatch.creation_event import log_creation
from busload.errors import BatchSealedError, DuplicateCommandError, DuplicateTaskError, InvalidOperationError
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.write import Write, patient
from busload.settings import InputLimits
from busload.sync.database import Database


class SyncOpenBatch:
    """A batch that is being filled; made by `SyncCommandBus.open_batch`."""

    def __init__(
        self,
        database: Database,
        batch: send.NewBatch,
        *,
        limits: InputLimits,
        types: DataTypes,
        via: send.Via,
        checkpoint_size: int,
        dedup: Dedup | None,
        conn: AnySyncConnection | None,
        opened: Callable[[UUID], None],
    ) -> None:
        """`opened` is called with the batch's id once the batch exists."""
        check(limits, checkpoint_size=checkpoint_size)
        self.batch_id, self.domain, self.added, self.skipped = batch.batch_id, batch.domain, 0, 0
        self._database, self._conn, self._opened = database, conn, opened
        self._batch = replace(batch, way="open_batch")
        self._began, self._insert_ms = time.perf_counter(), 0.0
        self._limits, self._via, self._checkpoint_size, self._dedup = limits, via, checkpoint_size, dedup
        self._types = types
        self._waiting: dict[tuple[str, UUID], NewCommand] = {}
        self._writing = waiting.Lock()
        self._entered, self._sealed = False, False

    def add(
        self,
        command_type: str,
        data: Any = None,
        **options: Unpack[AddOptions],
    ) -> UUID:
        """Add one command of this `command_type` with its `data`, and return its id.

        `AddOptions` says what else may be given. Every `checkpoint_size` commands are written together. Until then
        a command is in the memory of this process only. It is durable when the next checkpoint has returned: by
        `checkpoint()`, by the call that completes the number, or by the end of the block.
        """
        command = new_command("add", command_type, data, options, AddOptions)
        if self._sealed:
            raise BatchSealedError(self.domain, self.batch_id)
        if not self._entered:
            raise InvalidOperationError("Add to an open batch within its `with` block; outside nothing would write it.")
        [checked] = with_priority(self._batch, [check_one(self._limits, self.domain, command, types=self._types)])
        domain, command_id = checked.domain or self.domain, checked.command_id
        if (domain, command_id) in self._waiting:
            raise DuplicateCommandError(domain, [command_id], in_the_list=True)
        self._waiting[domain, command_id] = checked
        if len(self._waiting) >= self._checkpoint_size:
            self.checkpoint()
        return command_id

    def checkpoint(self) -> None:
        """Write what was added so far; when this returns, it is durable.

        What exists already is refused; the rest is kept for the next checkpoint.
        """
        with self._writing:  # what others add meanwhile is for the next one
            some = dict(self._waiting)
            commands = list(some.values())
            write = send.write_many(self.domain, commands, batch_id=self.batch_id, dedup=self._dedup, via=self._via)
            began = time.perf_counter()
            try:
                sent = sum(result.created for result in self._database.write(write, self._conn))
                self._insert_ms += _ms_since(began)
            except (DuplicateCommandError, DuplicateTaskError) as duplicate:
                for refused in _refused(some, duplicate):
                    self._waiting.pop(refused, None)
                raise
            self.added += sent
            self.skipped += len(some) - sent
            for written in some:
                del self._waiting[written]

    def seal(self) -> None:
        """Write the rest and let the batch complete."""
        self.checkpoint()
        sealed = seal(self._database, self.domain, self.batch_id, self._via, self._conn)
        self._sealed = True
        if sealed:
            times = {"insert_ms": self._insert_ms, "total_ms": _ms_since(self._began)}
            strategy = None if self._via.transport is None else "relay"
            log_creation(self._batch, self.added, **times, transport=self._via.transport, strategy=strategy)

    def __enter__(self) -> Self:
        if (telemetry := self._database.telemetry) is not None:
            with telemetry.sending("open_batch", self.domain, **facts_of_batch(self._batch)) as context:
                self._batch = replace(self._batch, headers=with_context(self._batch.headers, context, self._limits))
                self._open()
        else:
            self._open()
        self._opened(self.batch_id)
        self._entered, self._began = True, time.perf_counter()
        return self

    def _open(self) -> None:
        opening = Write(send.open_batch(self._batch), self.batch_id, one_statement=self._batch.one_row)
        self._database.write(opening, self._conn)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.seal()
        else:
            self._entered = False
            commands = counted(self.added, "command")
            log.warning("Batch %s stays open with %s: %r", self.batch_id, commands, error)


def seal(database: Database, domain: str, batch_id: UUID, via: send.Via, conn: AnySyncConnection | None) -> bool:
    """Let an open batch complete. With a broker, its report ends here if all of it was published already."""
    plan, conn = partial(creation_state.seal, domain, batch_id, via), database.callers_connection(conn)
    sealed = database.write(patient(plan, batch_id), conn)
    if sealed and via.transport is not None and conn is None:
        database.in_transaction(creation_state.close([batch_id]))
    return sealed


def _refused(
    waiting: Mapping[tuple[str, UUID], NewCommand], duplicate: DuplicateCommandError | DuplicateTaskError
) -> list[tuple[str, UUID]]:
    """Which of them cannot be written; of several for one task, the first can."""
    if isinstance(duplicate, DuplicateCommandError):
        return [(duplicate.domain, command_id) for command_id in duplicate.command_ids]
    there = {key: command for key, command in waiting.items() if key[0] == duplicate.domain}
    held = {key: duplicate.holders.get(command.task_key or "") for key, command in there.items()}
    others = [key for key, holder in held.items() if holder is not None and holder != key[1]]
    return others or [key for key, holder in held.items() if holder == key[1]]
