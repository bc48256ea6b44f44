"""What the bus does with a batch that exists: find it, seal it, hold and resume it, change its budget or priority."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from busload.batches import hold
from busload.batches.batch import (
    BatchMetadata,
    BatchStatus,
    BatchStatusName,
    BatchType,
    BatchTypeName,
    budget_columns,
    find_batch,
    list_batches,
)
from busload.batches.guards import FailureBudget
from busload.batches.open_batch import seal
from busload.batches.reprioritize import reprioritize
from busload.commands import search
from busload.commands.checks import FLAG, check, choice, given, refuse, wrong, wrong_time
from busload.commands.command import CommandMetadata, CommandStatus, CommandStatusName
from busload.commands.data_type import DataTypes
from busload.commands.ids import JobId
from busload.commands.send import Via
from busload.errors import InvalidCommandError
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.write import patient
from busload.settings import InputLimits


class BatchVerbs(ABC):
    """The methods of `CommandBus` for a batch that exists."""

    database: Database
    via: Via
    _limits: InputLimits

    @property
    @abstractmethod
    def data_types(self) -> DataTypes:
        """The types of data that handlers of this bus want, by domain and command type."""

    async def get_batch(self, domain: str | None, batch_id: UUID) -> BatchMetadata | None:
        """A batch with its counters; None if the domain, or no domain if it is None, has such a batch."""
        check(self._limits, writes=False, **given(domain=domain), batch_id=batch_id)
        return await self.database.read(find_batch(domain, batch_id))

    async def list_batches(
        self,
        domain: str | None,
        *,
        status: BatchStatus | BatchStatusName | None = None,
        job_id: JobId | None = None,
        batch_type: BatchType | BatchTypeName | None = None,
        name: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        limit: int = 100,
        offset: int = 0,
        after: UUID | None = None,
        forecast: bool = False,
    ) -> list[BatchMetadata]:
        """The batches of a domain, or of all domains if it is None, newest first.

        All of them, or those of one `status`, one `job_id` or one `batch_type`, or in whose name the text `name`
        occurs; capitals do not matter; or those created at `created_after` or later, and earlier than
        `created_before`. `after`, the last batch of the page before, pages without drift while batches
        are created; `offset` does not. With `forecast` each batch that has not ended comes with one, which costs a few
        more reads for each.
        """
        page: dict[str, Any] = {"limit": limit, "offset": offset, "after": after}
        about: dict[str, Any] = {"name": name, "forecast": forecast}
        check(self._limits, writes=False, **given(domain=domain, job_of_batch=job_id), **about, **page)
        times: dict[str, Any] = {"created_after": created_after, "created_before": created_before}
        refuse([problem for name, time in given(**times).items() for problem in wrong_time(time, name)], writes=False)
        kinds: dict[str, Any] = {
            "status": choice(BatchStatus, status),
            "batch_type": choice(BatchType, batch_type, "batch_type"),
        }
        plan = list_batches(domain, job_id=job_id, **about, **kinds, **times, **page)
        return await self.database.read(plan)

    async def list_batch_commands(
        self,
        domain: str,
        batch_id: UUID,
        *,
        status: CommandStatus | CommandStatusName | None = None,
        limit: int = 100,
        offset: int = 0,
        after: UUID | CommandMetadata | None = None,
    ) -> list[CommandMetadata]:
        """The commands of a batch in the order in which they were added: all, or those of one `status`.

        `after` is the last command of the page before, or its id. A batch in which two domains have a command of the
        same id is paged by the command, not by the id.
        """
        page: dict[str, Any] = {"limit": limit, "offset": offset}
        last = search.Last(domain, after)
        check(self._limits, writes=False, domain=domain, batch_id=batch_id, **page, after=last.command_id)
        plan = search.batch_commands(domain, batch_id, status=choice(CommandStatus, status), **page, after=last)
        return await self.database.read(plan)

    async def seal_batch(self, domain: str, batch_id: UUID, *, conn: AnyConnection | None = None) -> bool:
        """Let an open batch complete; returns False if it was sealed already."""
        check(self._limits, domain=domain, batch_id=batch_id)
        return await seal(self.database, domain, batch_id, self.via, conn)

    async def hold_batch(
        self,
        domain: str,
        batch_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AnyConnection | None = None,
    ) -> bool:
        """Start nothing more of a batch until it is resumed; returns False if it was held already.

        Running commands finish and count. Workers hand back what they have claimed and not begun. Commands may still be
        added to an open batch, and wait with the others. A held batch can be canceled; what is in troubleshooting can
        be decided, and a retry waits with the others. A batch that has ended, or was canceled, cannot be held.
        """
        check(self._limits, domain=domain, batch_id=batch_id, operator=operator, reason=reason)
        plan = partial(hold.hold, domain, batch_id, reason=reason, operator=operator)
        return await self.database.write(patient(plan, batch_id), conn)

    async def resume_batch(
        self,
        domain: str,
        batch_id: UUID,
        *,
        operator: str | None = None,
        budget: FailureBudget | None = None,
        end_canary: bool = False,
        conn: AnyConnection | None = None,
    ) -> bool:
        """Let a held batch go on, whatever holds it; returns False if nothing has changed.

        A failure budget that holds it counts from here on. With `budget`, a held batch has this one from here on. A
        canary that holds it is over, and all commands may start. If a person held it, and meanwhile its budget was
        exceeded or its canary has failed, that holds it at once. With `end_canary` a canary that still runs is over as
        well, also if the batch is not held: what waits for it may start.
        """
        check(self._limits, domain=domain, batch_id=batch_id, operator=operator)
        refuse(FLAG(end_canary, "end_canary"))
        raised = budget_columns(self._limits, domain, budget, self.data_types)
        plan = partial(hold.resume, domain, batch_id, operator=operator, budget=raised, end_canary=end_canary)
        return await self.database.write(patient(plan, batch_id), conn)

    async def set_batch_budget(
        self,
        domain: str,
        batch_id: UUID,
        budget: FailureBudget,
        *,
        operator: str | None = None,
        conn: AnyConnection | None = None,
    ) -> bool:
        """Give a batch that has not ended another failure `budget`; returns whether that holds it at once.

        What has failed since it was created, or since a resume, counts; of a budget for each cause that it did not have
        before, only what fails from here on. `on_exceeded` stays as it was if the new budget has none. A batch that is
        held stays held: `resume_batch` lets it go on, and takes a budget too.
        """
        check(self._limits, domain=domain, batch_id=batch_id, operator=operator)
        columns = budget_columns(self._limits, domain, budget)
        if columns is None:
            raise InvalidCommandError([wrong(budget, "budget", "a FailureBudget, for example FailureBudget(share=1)")])
        plan = partial(hold.set_budget, domain, batch_id, columns, operator=operator)
        return await self.database.write(patient(plan, batch_id), conn)

    async def reprioritize_batch(
        self,
        domain: str,
        batch_id: UUID,
        priority: int,
        *,
        operator: str | None = None,
        conn: AnyConnection | None = None,
    ) -> int:
        """Give everything that waits of a batch another `priority`, and return how many commands that changes.

        Running commands keep the priority that they were claimed with, also for their retries. Commands that are added
        later have their own.
        """
        check(self._limits, domain=domain, batch_id=batch_id, priority=priority, operator=operator)
        plan = partial(reprioritize, domain, batch_id, priority, operator=operator)
        return await self.database.write(patient(plan, batch_id), conn)
