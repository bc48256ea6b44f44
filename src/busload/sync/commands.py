"""Made from busload.commands.api by scripts/generate_sync.py. Change the source instead."""

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
from busload.commands.send_together import SendingInThreads
from busload.postgres.connection import Connection
from busload.settings import InputLimits
from busload.sync.database import Database


class CommandVerbs:
    """Send commands, and follow each of them. What the methods share is said at `SyncCommandBus`."""

    database: Database
    via: Via
    _limits: InputLimits
    _sending: SendingInThreads | None

    def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        *,
        conn: Connection | None = None,
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
            [result] = self.database.write(joining, conn)
            return result
        if conn is not None or dedup is not None:
            return self.database.write(send.write(domain, checked, dedup, self.via, chosen=chosen), conn)
        self.database.refuse_closed()
        assert self._sending is not None
        self._sending.send(domain, checked, chosen=chosen)
        return SendResult(checked.command_id, created=True)

    def send_many(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        batch_id: UUID | None = None,
        dedup: Dedup | None = None,
        conn: Connection | None = None,
    ) -> list[SendResult]:
        """Send many `commands`, all or none; results come in the order of the input.

        With `batch_id` they join an open batch. With `dedup`, commands whose task key another command holds are left
        out, and their results name the holder.
        """
        checked = check_all(domain, commands, self._limits)
        check(self._limits, **given(batch_id=batch_id), dedup=dedup)
        chosen = not isinstance(commands, Sequence) or any(one.command_id is not None for one in commands)
        write = send.write_many(domain, checked, batch_id=batch_id, dedup=dedup, via=self.via, chosen=chosen)
        return self.database.write(write, conn)

    def get_command(self, domain: str, command_id: UUID) -> CommandMetadata | None:
        """A command and how far it has come; None if the domain has no such command."""
        check(self._limits, writes=False, domain=domain, command_id=command_id)
        return self.database.read(search.command(domain, command_id))

    def get_audit_trail(self, domain: str, command_id: UUID) -> list[AuditEvent]:
        """Everything that happened to a command, oldest first; empty for an unknown one."""
        check(self._limits, writes=False, domain=domain, command_id=command_id)
        return self.database.read(search.audit_trail(domain, command_id))

    def trace(self, task_key: str, *, domain: str | None = None) -> list[Execution]:
        """Every attempt of every command that was sent for a task, oldest first; empty for an unknown `task_key`.

        With `domain` only the commands of that domain.
        """
        check(self._limits, writes=False, task_key=task_key, **given(domain=domain))
        return self.database.read(search.trace(task_key, domain=domain))
