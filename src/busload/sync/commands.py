"""Made from busload.commands.api by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Unpack
from uuid import UUID

from busload.commands import search, send
from busload.commands.api import FIRST_PAUSE
from busload.commands.cancel import Cancellation, cancel
from busload.commands.check_commands import check_all, check_fair_by, check_one
from busload.commands.checks import check, given, refuse, seconds_of, wrong_list, wrong_time
from busload.commands.command import (
    AuditEvent,
    BatchCommand,
    CommandMetadata,
    NewCommand,
    SendOptions,
    SendResult,
    new_command,
)
from busload.commands.data_type import DataTypes
from busload.commands.dedup import Dedup
from busload.commands.execution import Execution
from busload.commands.headers import facts_of, in_context
from busload.commands.listing import CommandFilter, CommandPage, list_commands
from busload.commands.reschedule import reschedule
from busload.commands.search import has_ended, result_of
from busload.commands.send import Via
from busload.commands.send_middleware import SendMiddleware, around_send, with_headers
from busload.commands.send_together import SendingInThreads
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.plan import Plan
from busload.postgres.write import patient
from busload.settings import InputLimits, Settings
from busload.sync.database import Database


class CommandVerbs(ABC):
    """Send commands, and follow each of them. What the methods share is said at `SyncCommandBus`."""

    database: Database
    via: Via
    _limits: InputLimits
    _sending: SendingInThreads | None
    settings: Settings

    @staticmethod
    @abstractmethod
    def _give_up(domain: str, command_id: UUID, reason: str, operator: str | None) -> Plan[None]:
        """Cancel a command that waits for a person."""

    @property
    @abstractmethod
    def around_sends(self) -> Sequence[SendMiddleware]:
        """The middleware around every call that sends commands."""

    @property
    @abstractmethod
    def data_types(self) -> DataTypes:
        """The types of data that handlers of this bus want, by domain and command type."""

    @abstractmethod
    def _changes(self, id: UUID) -> AbstractContextManager[waiting.Event]:
        """An event that is set whenever this batch or job may have changed."""

    def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        *,
        conn: AnySyncConnection | None = None,
        **options: Unpack[SendOptions],
    ) -> SendResult:
        """Send one command of this `command_type`, with `data` that JSON can hold, or a model of it.

        A model is an instance of a dataclass, a class of attrs, a msgspec struct or a pydantic model. If this bus has a
        handler that wants another type of data, the command is refused.

        `SendOptions` says what else may be given. In async code, calls that are under way at once share a transaction,
        unless they have `batch_id`, `dedup`, `expires_at`, `delay` or `conn`: a thousand senders cost little more than
        ten. Each returns when its own command is committed, and fails alone.
        """
        if not self.around_sends:
            return self._check_and_send(domain, command_type, data, options, conn)
        headers = options.get("headers")
        with around_send(self.around_sends, "send", domain, headers, command_type) as call:
            options["headers"] = call.headers or headers
            call.result = sent = self._check_and_send(domain, command_type, data, options, conn)
        return sent

    def _check_and_send(
        self, domain: str, command_type: str, data: Any, options: SendOptions, conn: AnySyncConnection | None
    ) -> SendResult:
        dedup, batch_id = options.pop("dedup", None), options.pop("batch_id", None)
        fair_by = options.pop("fair_by", None)
        command = new_command("send", command_type, data, options, SendOptions)
        checked = check_one(self._limits, domain, command, batch_id, dedup, fair_by, self.data_types)
        chosen, telemetry = command.command_id is not None, self.database.telemetry
        if telemetry is None:
            return self._send(domain, checked, batch_id, dedup, chosen, conn)
        with telemetry.sending("send", domain, **facts_of(checked, batch_id)) as context:
            checked = in_context(checked, context, self._limits)
            return self._send(domain, checked, batch_id, dedup, chosen, conn)

    def _send(
        self,
        domain: str,
        checked: NewCommand,
        batch_id: UUID | None,
        dedup: Dedup | None,
        chosen: bool,
        conn: AnySyncConnection | None,
    ) -> SendResult:
        if batch_id is not None or checked.expires_at is not None or checked.delay is not None:
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
        fair_by: str | None = None,
        conn: AnySyncConnection | None = None,
    ) -> list[SendResult]:
        """Send many `commands`, all or none; results come in the order of the input.

        With `batch_id` they join an open batch. With `dedup`, commands whose task key another command holds are left
        out, and their results name the holder. `fair_by` says whose they are, such as a tenant: of equal priority,
        those with different keys take turns.
        """
        if not self.around_sends:
            return self._send_many(domain, commands, batch_id, dedup, fair_by, conn)
        with around_send(self.around_sends, "send_many", domain) as call:
            if call.headers:
                refuse(wrong_list(commands, "commands", "a list of BatchCommand"))
                commands = with_headers(commands, call.headers)
            call.result = sent = self._send_many(domain, commands, batch_id, dedup, fair_by, conn)
        return sent

    def _send_many(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        batch_id: UUID | None,
        dedup: Dedup | None,
        fair_by: str | None,
        conn: AnySyncConnection | None,
    ) -> list[SendResult]:
        checked = check_all(domain, commands, self._limits, self.data_types)
        check(self._limits, **given(batch_id=batch_id), dedup=dedup)
        check_fair_by(self._limits, fair_by, batch_id)
        chosen = not isinstance(commands, Sequence) or any(one.command_id is not None for one in commands)
        write_many = partial(
            send.write_many, domain, batch_id=batch_id, dedup=dedup, via=self.via, chosen=chosen, fair_by=fair_by
        )
        if (telemetry := self.database.telemetry) is None:
            return self.database.write(write_many(commands=checked), conn)
        with telemetry.sending("send_many", domain, count=len(checked), batch_id=batch_id) as context:
            checked = [in_context(one, context, self._limits) for one in checked]
            return self.database.write(write_many(commands=checked), conn)

    def cancel_command(
        self,
        domain: str,
        command_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AnySyncConnection | None = None,
    ) -> Cancellation:
        """Cancel a command that has not ended, and say what that came to.

        A command that waits, in the queue, for its time or to be published, is `CANCELED` at once, and so is one in
        troubleshooting. One that runs is `ASKED_TO_STOP`: its handler sees `ctx.cancelled`, and whatever it does ends
        the command. If it returns, the command is completed; if it raises, canceled and not tried again.

        A command that has ended is refused by `InvalidOperationError`.
        """
        check(self._limits, domain=domain, command_id=command_id, operator=operator, reason=reason)
        give_up = partial(self._give_up, domain, command_id, reason, operator)
        plan = partial(cancel, domain, command_id, reason=reason, operator=operator, give_up=give_up)
        return self.database.write(patient(plan, command_ids=[command_id]), conn)

    def reschedule_command(
        self,
        domain: str,
        command_id: UUID,
        run_at: datetime,
        *,
        operator: str | None = None,
        conn: AnySyncConnection | None = None,
    ) -> None:
        """Let a command that waits run at `run_at`, which must know its time zone; a time that is past means now.

        What is not scheduled yet is put off, and what is scheduled, also for a retry, is put off or brought forward. A
        command that runs, waits in troubleshooting or has ended is refused by `InvalidOperationError`.
        """
        check(self._limits, domain=domain, command_id=command_id, operator=operator)
        refuse(wrong_time(run_at, "run_at"))
        run_at = run_at if run_at.year > 1 else datetime.now(UTC)
        plan = partial(reschedule, domain, command_id, run_at, operator=operator)
        self.database.write(patient(plan, command_ids=[command_id]), conn)

    def wait_command(
        self,
        domain: str,
        command_id: UUID,
        timeout: timedelta | float | None = None,
        *,
        wait_for_operator: bool = True,
    ) -> Any:
        """Wait until a command has ended, and return what its handler has returned.

        If it has failed, `CommandFailedError` tells code and message of its error; if it was canceled, its subclass
        `CommandCanceledError` tells the reason. A command in troubleshooting has not ended: it is waited for until an
        operator has decided. Without `wait_for_operator`, it counts as failed.

        After `timeout`, in seconds if it is a number, a `TimeoutError` says where the command is.

        A command of a batch is looked at whenever its batch has changed, any other one after pauses that grow from 10
        ms to the `poll_every` of the settings.
        """
        about: dict[str, Any] = {"command_id": command_id, "wait_for_operator": wait_for_operator}
        check(self._limits, writes=False, domain=domain, **about)
        seconds, found = seconds_of(timeout), None
        try:
            with waiting.TimeLimit(seconds) as limit:
                found = self.database.read(search.ending(domain, command_id), within=limit.patience)
                batch_id, pause = found.batch_id, FIRST_PAUSE
                with nullcontext(waiting.Event()) if batch_id is None else self._changes(batch_id) as changed:
                    while not has_ended(found.status, wait_for_operator):
                        if not limit.left:
                            raise TimeoutError
                        changed.wait(min(limit.left, pause))
                        changed.clear()
                        found = self.database.read(search.ending(domain, command_id), within=limit.patience)
                        pause = min(pause * 1.5, self.settings.poll_every.total_seconds())
        except TimeoutError:
            where = "nothing was seen of it" if found is None else f"it is {found.status}"
            raise TimeoutError(f"Command {command_id} has not ended after {seconds} s: {where}.") from None
        return result_of(domain, command_id, found)

    def get_command(self, domain: str, command_id: UUID) -> CommandMetadata | None:
        """A command and how far it has come; None if the domain has no such command."""
        check(self._limits, writes=False, domain=domain, command_id=command_id)
        return self.database.read(search.command(domain, command_id))

    def list_commands(
        self, domain: str | None = None, *, limit: int = 100, after: str | None = None, **options: Unpack[CommandFilter]
    ) -> CommandPage:
        """Search the commands of a domain, or of all domains, newest first; `CommandFilter` says by what.

        A page has up to `limit` commands, and `next`, to be passed as `after` for the page behind it. It looks at no
        more than 20,000 commands, or 8,000 with `error`, so it may be short, or empty, though `next` says that there
        are more.
        """
        return self.database.read(list_commands(self._limits, domain, options, limit=limit, after=after))

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
