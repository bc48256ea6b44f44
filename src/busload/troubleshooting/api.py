"""What operators do with commands that wait for a person: `bus.troubleshooting`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack
from uuid import UUID

from busload.commands import search
from busload.commands.checks import check, choice, encoded, given
from busload.commands.command import TroubledDomain, TroubleshootingItem
from busload.commands.data_type import KnowsTypes
from busload.commands.payload import decode
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.write import patient
from busload.settings import InputLimits
from busload.troubleshooting import causes, decisions
from busload.troubleshooting.causes import CauseGroup, GroupAction, GroupOptions, Reason
from busload.troubleshooting.decisions import Decision


class Troubleshooting:
    """Commands that wait for a person, and what an operator decides about them: `bus.troubleshooting`.

    `domain` and `command_id` name such a command, `fingerprint` names a cause, as `groups` shows it. `operator` is
    whoever decides: the audit trail keeps it. With `conn` the decision is made when that transaction commits.
    """

    def __init__(self, database: Database, limits: InputLimits, knows: KnowsTypes) -> None:
        self._database, self._limits, self._knows = database, limits, knows

    async def groups(
        self,
        domain: str,
        *,
        command_type: str | None = None,
        reason: Reason | None = None,
        batch_id: UUID | None = None,
        text: str | None = None,
        limit: int = 100,
    ) -> list[CauseGroup]:
        """What waits for a person by cause, the largest group first, at most `limit` of them.

        With `command_type`, `reason` or `batch_id` only such commands count. With `text` only groups whose oldest
        command has it in the type, the code or the message of its error.
        """
        named: dict[str, Any] = {"domain": domain, "command_type": command_type, "limit": limit}
        check(self._limits, writes=False, **named, **given(batch_id=batch_id, text=text))
        why = choice(Reason, reason, "reason")
        return await self._database.read(causes.groups(**named, reason=why, batch_id=batch_id, text=text))

    async def list(
        self, domain: str | None, *, command_type: str | None = None, limit: int = 100, offset: int = 0
    ) -> list[TroubleshootingItem]:
        """Commands that wait for a person, newest first, with their original data; of all domains if it is None.

        At most `limit` of them, after the first `offset`. With `command_type` only commands of that type. `count` tells
        how many there are.
        """
        page: dict[str, Any] = {"command_type": command_type, "limit": limit, "offset": offset}
        check(self._limits, writes=False, **given(domain=domain), **page)
        plan = search.troubleshooting(domain, **page)
        return await self._database.read(plan)

    async def count(self, domain: str | None = None, *, command_type: str | None = None) -> int:
        """How many commands wait for a person: in a domain or in all, of one `command_type` or of any."""
        check(self._limits, writes=False, **given(domain=domain), command_type=command_type)
        plan = search.troubleshooting_domains(domain, command_type=command_type)
        return sum(each.count for each in await self._database.read(plan))

    async def domains(self, *, command_type: str | None = None) -> Sequence[TroubledDomain]:
        """The domains in which commands wait for a person, and how many, those with most first.

        With `command_type` only commands of that type count.
        """
        check(self._limits, writes=False, command_type=command_type)
        return await self._database.read(search.troubleshooting_domains(None, command_type=command_type))

    async def find(self, command_id: UUID) -> Sequence[TroubleshootingItem]:
        """The command with this id that waits for a person, whatever its domain is; empty if there is none.

        Ids are unique in a domain only, so there may be several.
        """
        check(self._limits, writes=False, command_id=command_id)
        return await self._database.read(search.troubleshooting_find(command_id))

    async def get(self, domain: str, command_id: UUID) -> TroubleshootingItem | None:
        """One command that waits for a person; None if it does not."""
        check(self._limits, writes=False, domain=domain, command_id=command_id)
        return await self._database.read(search.troubleshooting_item(domain, command_id))

    async def retry(
        self,
        domain: str,
        command_id: UUID,
        *,
        operator: str | None = None,
        conn: AnyConnection | None = None,
    ) -> None:
        """Put a command back into the queue, with all its attempts to use again."""
        check(self._limits, domain=domain, command_id=command_id, operator=operator)
        await self._decide(domain, command_id, Decision(action="retry", operator=operator), conn)

    async def complete(
        self,
        domain: str,
        command_id: UUID,
        *,
        result: Any = None,
        operator: str | None = None,
        conn: AnyConnection | None = None,
    ) -> None:
        """Declare a command done, with a `result` if there is one."""
        check(self._limits, domain=domain, command_id=command_id, operator=operator)
        if result is not None:
            result = decode(encoded(result, "/result", self._limits.payload))
        await self._decide(domain, command_id, Decision(action="complete", operator=operator, result=result), conn)

    async def cancel(
        self,
        domain: str,
        command_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AnyConnection | None = None,
    ) -> None:
        """Give a command up; its audit trail keeps the `reason`."""
        check(self._limits, domain=domain, command_id=command_id, operator=operator, reason=reason)
        await self._decide(domain, command_id, Decision(action="cancel", operator=operator, reason=reason), conn)

    async def retry_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        patch: Sequence[dict[str, Any]] | None = None,
        conn: AnyConnection | None = None,
        **options: Unpack[GroupOptions],
    ) -> GroupAction:
        """Retry all that waits for a cause now, by a batch of its own that workers of the domain carry out.

        `patch` is a JSON patch (RFC 6902) of their data. It is refused unless it applies to every one of them and, if
        this bus knows their handler, makes data that fits it. The audit trail keeps it with the data before and after.
        `GroupOptions` says what the other options mean. To repeat this is harmless: a command that has moved is not
        moved again.
        """
        about: dict[str, Any] = {"patch": patch, "types": self._knows.data_types}
        write = causes.decide_group(self._limits, domain, "retry", fingerprint, options, **about)
        return await self._database.write(write, conn)

    async def complete_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        result: Any = None,
        conn: AnyConnection | None = None,
        **options: Unpack[GroupOptions],
    ) -> GroupAction:
        """Declare all done that waits for a cause now, each with this `result`; see `retry_group`."""
        write = causes.decide_group(self._limits, domain, "complete", fingerprint, options, result=result)
        return await self._database.write(write, conn)

    async def cancel_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        reason: str,
        conn: AnyConnection | None = None,
        **options: Unpack[GroupOptions],
    ) -> GroupAction:
        """Give all up that waits for a cause now, with a `reason`; see `retry_group`."""
        write = causes.decide_group(self._limits, domain, "cancel", fingerprint, options, reason=reason)
        return await self._database.write(write, conn)

    async def _decide(self, domain: str, command_id: UUID, decision: Decision, conn: AnyConnection | None) -> None:
        plan = partial(decisions.decide_one, domain, command_id, decision)
        await self._database.write(patient(plan, command_ids=[command_id]), conn)
