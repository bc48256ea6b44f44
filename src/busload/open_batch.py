"""A batch that is being filled: commands leave in checkpoints, and the seal lets it complete. In both faces."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from busload.domain.batch import BatchCompletionCallback, SyncBatchCompletionCallback
from busload.domain.command import BatchCommand, NewCommand
from busload.domain.counted import counted
from busload.domain.dedup import Dedup
from busload.errors import BatchSealedError, DuplicateCommandError, DuplicateTaskError, InvalidOperationError
from busload.requests import Write
from busload.store.connection import AsyncConnection, Connection

if TYPE_CHECKING:
    from busload.bus import CommandBus, SyncCommandBus

log = logging.getLogger("busload")


class OpenBatch:
    """A batch that is being filled; made by `CommandBus.open_batch`."""

    def __init__(
        self,
        bus: CommandBus,
        domain: str,
        opening: Write[UUID],
        on_complete: BatchCompletionCallback | BatchCommand | None,
        checkpoint_size: int,
        dedup: Dedup | None,
        conn: AsyncConnection | Connection | None,
    ) -> None:
        assert opening.batch_id is not None
        self.batch_id, self.domain, self.added, self.skipped = opening.batch_id, domain, 0, 0
        self._bus, self._opening, self._on_complete, self._conn = bus, opening, on_complete, conn
        self._checkpoint_size, self._dedup = _checkpoint_size(checkpoint_size), dedup
        self._waiting: dict[UUID, NewCommand] = {}
        self._writing = asyncio.Lock()
        self._entered, self._sealed = False, False

    async def add(
        self,
        command_type: str,
        data: Any = None,
        *,
        command_id: UUID | None = None,
        task_key: str | None = None,
        priority: int = 0,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        reply_to: str | None = None,
        correlation_id: UUID | None = None,
    ) -> UUID:
        """Add one command and return its id; every `checkpoint_size` commands are written together.

        Until then it is in the memory of this process only. It is durable when the next checkpoint has returned: by
        `checkpoint()`, by the call that completes the number, or by the end of the block.
        """
        command = BatchCommand(
            command_type,
            command_id,
            data,
            reply_to=reply_to,
            correlation_id=correlation_id,
            task_key=task_key,
            priority=priority,
            run_at=run_at,
            max_attempts=max_attempts,
        )
        if self._sealed:
            raise BatchSealedError(self.domain, self.batch_id)
        if not self._entered:
            raise InvalidOperationError("Add to an open batch within its `with` block; outside nothing would write it.")
        checked = self._bus._requests.check(self.domain, command)
        if checked.command_id in self._waiting:
            raise DuplicateCommandError(self.domain, [checked.command_id], in_the_list=True)
        self._waiting[checked.command_id] = checked
        if len(self._waiting) >= self._checkpoint_size:
            await self.checkpoint()
        return checked.command_id

    async def checkpoint(self) -> None:
        """Write what was added so far; when this returns, it is durable.

        What exists already is refused; the rest is kept for the next checkpoint.
        """
        async with self._writing:  # what others add meanwhile is for the next one
            waiting = dict(self._waiting)
            write = self._bus._requests.checkpoint(self.domain, list(waiting.values()), self.batch_id, self._dedup)
            try:
                sent = await self._bus._write(write, self._conn)
            except (DuplicateCommandError, DuplicateTaskError) as duplicate:
                for command_id in _refused(waiting, duplicate):
                    self._waiting.pop(command_id, None)
                raise
            self.added += sent
            self.skipped += len(waiting) - sent
            for command_id in waiting:
                del self._waiting[command_id]

    async def seal(self) -> None:
        """Write the rest and let the batch complete."""
        await self.checkpoint()
        await self._bus._write(self._bus._requests.seal(self.domain, self.batch_id), self._conn)
        self._sealed = True

    async def __aenter__(self) -> Self:
        await self._bus._write(self._opening, self._conn)
        self._bus._register(self.batch_id, self._on_complete)
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.seal()
        else:
            self._entered = False
            commands = counted(self.added, "command")
            log.warning("Batch %s stays open with %s: %r", self.batch_id, commands, error)


class SyncOpenBatch:
    """A batch that is being filled; made by `SyncCommandBus.open_batch`."""

    def __init__(
        self,
        bus: SyncCommandBus,
        domain: str,
        opening: Write[UUID],
        on_complete: SyncBatchCompletionCallback | BatchCommand | None,
        checkpoint_size: int,
        dedup: Dedup | None,
        conn: Connection | None,
    ) -> None:
        assert opening.batch_id is not None
        self.batch_id, self.domain, self.added, self.skipped = opening.batch_id, domain, 0, 0
        self._bus, self._opening, self._on_complete, self._conn = bus, opening, on_complete, conn
        self._checkpoint_size, self._dedup = _checkpoint_size(checkpoint_size), dedup
        self._waiting: dict[UUID, NewCommand] = {}
        self._writing = threading.Lock()
        self._entered, self._sealed = False, False

    def add(
        self,
        command_type: str,
        data: Any = None,
        *,
        command_id: UUID | None = None,
        task_key: str | None = None,
        priority: int = 0,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        reply_to: str | None = None,
        correlation_id: UUID | None = None,
    ) -> UUID:
        """Add one command and return its id; every `checkpoint_size` commands are written together.

        Until then it is in the memory of this process only. It is durable when the next checkpoint has returned: by
        `checkpoint()`, by the call that completes the number, or by the end of the block.
        """
        command = BatchCommand(
            command_type,
            command_id,
            data,
            reply_to=reply_to,
            correlation_id=correlation_id,
            task_key=task_key,
            priority=priority,
            run_at=run_at,
            max_attempts=max_attempts,
        )
        if self._sealed:
            raise BatchSealedError(self.domain, self.batch_id)
        if not self._entered:
            raise InvalidOperationError("Add to an open batch within its `with` block; outside nothing would write it.")
        checked = self._bus._requests.check(self.domain, command)
        if checked.command_id in self._waiting:
            raise DuplicateCommandError(self.domain, [checked.command_id], in_the_list=True)
        self._waiting[checked.command_id] = checked
        if len(self._waiting) >= self._checkpoint_size:
            self.checkpoint()
        return checked.command_id

    def checkpoint(self) -> None:
        """Write what was added so far; when this returns, it is durable.

        What exists already is refused; the rest is kept for the next checkpoint.
        """
        with self._writing:  # what others add meanwhile is for the next one
            waiting = dict(self._waiting)
            write = self._bus._requests.checkpoint(self.domain, list(waiting.values()), self.batch_id, self._dedup)
            try:
                sent = self._bus._write(write, self._conn)
            except (DuplicateCommandError, DuplicateTaskError) as duplicate:
                for command_id in _refused(waiting, duplicate):
                    self._waiting.pop(command_id, None)
                raise
            self.added += sent
            self.skipped += len(waiting) - sent
            for command_id in waiting:
                del self._waiting[command_id]

    def seal(self) -> None:
        """Write the rest and let the batch complete."""
        self.checkpoint()
        self._bus._write(self._bus._requests.seal(self.domain, self.batch_id), self._conn)
        self._sealed = True

    def __enter__(self) -> Self:
        self._bus._write(self._opening, self._conn)
        self._bus._register(self.batch_id, self._on_complete)
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.seal()
        else:
            self._entered = False
            commands = counted(self.added, "command")
            log.warning("Batch %s stays open with %s: %r", self.batch_id, commands, error)


def _refused(waiting: Mapping[UUID, NewCommand], duplicate: DuplicateCommandError | DuplicateTaskError) -> list[UUID]:
    """Which of them cannot be written; of several for one task, the first can."""
    if isinstance(duplicate, DuplicateCommandError):
        return list(duplicate.command_ids)
    held = {id: duplicate.holders.get(command.task_key or "") for id, command in waiting.items()}
    others = [id for id, holder in held.items() if holder is not None and holder != id]
    return others or [id for id, holder in held.items() if holder == id]


def _checkpoint_size(size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"checkpoint_size must be a whole number from 1 on, found {size!r}.")
    return size
