"""What is done with single commands: the verbs of `bus` about one command, which every bus inherits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack
from uuid import UUID

from busload.commands import search, send
from busload.commands.checks import check, check_all, check_one, given
from busload.commands.command import AuditEvent, BatchCommand, CommandMetadata, SendOptions, SendResult, new_command
from busload.commands.dedup import Dedup
from busload.commands.execution import Execution
from busload.commands.send import Via
from busload.commands.send_together import Sending
from busload.postgres.connection import AnyConnection
from busload.postgres.database import Database
from busload.settings import InputLimits


class CommandVerbs:
    """Send commands, and follow each of them. What the methods share is said at `CommandBus`."""

    database: Database
    via: Via
    _limits: InputLimits
    _sending: Sending | None

    async def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        *,
        conn: AnyConnection | None = None,
        **options: Unpack[SendOptions],
    ) -> SendResult:
        """Send one command of this `command_type`, with `data` that JSON can hold.

        `SendOptions` says what else may be given. In async code, calls that are under way at once share a transaction,
        unless they have `batch_id`, `dedup` or `conn`: a thousand senders cost little more than ten. Each returns when
        its own command is committed, and fails alone.
        """
        dedup, batch_id = options.pop("dedup", None), options.pop("batch_id", None)
        command = new_command("send", command_type, data, options, SendOptions)
        checked, chosen = check_one(self._limits, domain, command, batch_id, dedup), command.command_id is not None
        if batch_id is not None:
            joining = send.write_many(domain, [checked], batch_id=batch_id, dedup=dedup, via=self.via)
            [result] = await self.database.write(joining, conn)
            return result
        if conn is not None or dedup is not None:
            return await self.database.write(send.write(domain, checked, dedup, self.via, chosen=chosen), conn)
        self.database.refuse_closed()
        assert self._sending is not None
        await self._sending.send(domain, checked, chosen=chosen)
        return SendResult(checked.command_id, created=True)

    async def send_many(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        batch_id: UUID | None = None,
        dedup: Dedup | None = None,
        conn: AnyConnection | None = None,
    ) -> list[SendResult]:
        """Send many `commands`, all or none; results come in the order of the input.

        With `batch_id` they join an open batch. With `dedup`, commands whose task key another command holds are left
        out, and their results name the holder.
        """
        checked = check_all(domain, commands, self._limits)
        check(self._limits, **given(batch_id=batch_id), dedup=dedup)
        chosen = not isinstance(commands, Sequence) or any(one.command_id is not None for one in commands)
        write = send.write_many(domain, checked, batch_id=batch_id, dedup=dedup, via=self.via, chosen=chosen)
        return await self.database.write(write, conn)

    async def get_command(self, domain: str, command_id: UUID) -> CommandMetadata | None:
        """A command and how far it has come; None if the domain has no such command."""
        check(self._limits, writes=False, domain=domain, command_id=command_id)
        return await self.database.read(search.command(domain, command_id))

    async def get_audit_trail(self, domain: str, command_id: UUID) -> list[AuditEvent]:
        """Everything that happened to a command, oldest first; empty for an unknown one."""
        check(self._limits, writes=False, domain=domain, command_id=command_id)
        return await self.database.read(search.audit_trail(domain, command_id))

    async def trace(self, task_key: str, *, domain: str | None = None) -> list[Execution]:
        """Every attempt of every command that was sent for a task, oldest first; empty for an unknown `task_key`.

        With `domain` only the commands of that domain.
        """
        check(self._limits, writes=False, task_key=task_key, **given(domain=domain))
        return await self.database.read(search.trace(task_key, domain=domain))
