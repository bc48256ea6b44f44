"""What operators do with commands that wait for a person: `bus.troubleshooting`, in both faces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from busload.domain.cause import CauseGroup, GroupAction
from busload.domain.command import TroubleshootingItem
from busload.store.connection import AsyncConnection, Connection

if TYPE_CHECKING:
    from busload.bus import CommandBus, SyncCommandBus


class Troubleshooting:
    """What operators do: `bus.troubleshooting`."""

    def __init__(self, bus: CommandBus) -> None:
        self._bus = bus

    async def groups(self, domain: str, *, command_type: str | None = None, limit: int = 100) -> list[CauseGroup]:
        """What waits for a person by cause, the largest group first: one look instead of a thousand."""
        return await self._bus._read(self._bus._requests.groups(domain, command_type=command_type, limit=limit))

    async def list(
        self, domain: str, *, command_type: str | None = None, limit: int = 100, offset: int = 0
    ) -> list[TroubleshootingItem]:
        """Commands that wait for a person, newest first, with their original data."""
        return await self._bus._read(
            self._bus._requests.troubleshooting(domain, command_type=command_type, limit=limit, offset=offset)
        )

    async def get(self, domain: str, command_id: UUID) -> TroubleshootingItem | None:
        """One command that waits for a person; None if it does not."""
        return await self._bus._read(self._bus._requests.troubleshooting_item(domain, command_id))

    async def retry(
        self,
        domain: str,
        command_id: UUID,
        *,
        operator: str | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> None:
        """Back into the queue, with all its attempts to use again."""
        await self._bus._write(self._bus._requests.retry(domain, command_id, operator=operator), conn)

    async def complete(
        self,
        domain: str,
        command_id: UUID,
        *,
        result: Any = None,
        operator: str | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> None:
        """Declare it done, with a result if there is one."""
        await self._bus._write(self._bus._requests.complete(domain, command_id, result=result, operator=operator), conn)

    async def cancel(
        self,
        domain: str,
        command_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> None:
        """Give it up, with a reason."""
        await self._bus._write(self._bus._requests.cancel(domain, command_id, reason=reason, operator=operator), conn)

    async def retry_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        command_type: str | None = None,
        patch: Sequence[dict[str, Any]] | None = None,
        rate: float | None = None,
        operator: str | None = None,
        dry_run: bool = False,
        conn: AsyncConnection | Connection | None = None,
    ) -> GroupAction:
        """Retry all that waits for a cause now, by a batch of its own that workers of the domain carry out.

        `patch` is a JSON patch (RFC 6902) of their data; it is refused unless it applies to every one of them, and the
        audit trail keeps it with the data before and after. `rate` is how many to retry a second. `dry_run` writes
        nothing and shows what would be done. To repeat this is harmless: what has moved is not moved again.
        """
        write = self._bus._requests.decide(
            domain,
            "retry",
            fingerprint,
            command_type=command_type,
            patch=patch,
            rate=rate,
            operator=operator,
            dry_run=dry_run,
        )
        return await self._bus._write(write, conn)

    async def complete_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        command_type: str | None = None,
        result: Any = None,
        rate: float | None = None,
        operator: str | None = None,
        dry_run: bool = False,
        conn: AsyncConnection | Connection | None = None,
    ) -> GroupAction:
        """Declare all done that waits for a cause now, each with this result; see `retry_group`."""
        write = self._bus._requests.decide(
            domain,
            "complete",
            fingerprint,
            command_type=command_type,
            result=result,
            rate=rate,
            operator=operator,
            dry_run=dry_run,
        )
        return await self._bus._write(write, conn)

    async def cancel_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        command_type: str | None = None,
        reason: str,
        rate: float | None = None,
        operator: str | None = None,
        dry_run: bool = False,
        conn: AsyncConnection | Connection | None = None,
    ) -> GroupAction:
        """Give all up that waits for a cause now, with a reason; see `retry_group`."""
        write = self._bus._requests.decide(
            domain,
            "cancel",
            fingerprint,
            command_type=command_type,
            reason=reason,
            rate=rate,
            operator=operator,
            dry_run=dry_run,
        )
        return await self._bus._write(write, conn)


class SyncTroubleshooting:
    """`Troubleshooting` for code without an event loop."""

    def __init__(self, bus: SyncCommandBus) -> None:
        self._bus = bus

    def groups(self, domain: str, *, command_type: str | None = None, limit: int = 100) -> list[CauseGroup]:
        """What waits for a person by cause, the largest group first: one look instead of a thousand."""
        return self._bus._read(self._bus._requests.groups(domain, command_type=command_type, limit=limit))

    def list(
        self, domain: str, *, command_type: str | None = None, limit: int = 100, offset: int = 0
    ) -> list[TroubleshootingItem]:
        """Commands that wait for a person, newest first, with their original data."""
        return self._bus._read(
            self._bus._requests.troubleshooting(domain, command_type=command_type, limit=limit, offset=offset)
        )

    def get(self, domain: str, command_id: UUID) -> TroubleshootingItem | None:
        """One command that waits for a person; None if it does not."""
        return self._bus._read(self._bus._requests.troubleshooting_item(domain, command_id))

    def retry(
        self, domain: str, command_id: UUID, *, operator: str | None = None, conn: Connection | None = None
    ) -> None:
        """Back into the queue, with all its attempts to use again."""
        self._bus._write(self._bus._requests.retry(domain, command_id, operator=operator), conn)

    def complete(
        self,
        domain: str,
        command_id: UUID,
        *,
        result: Any = None,
        operator: str | None = None,
        conn: Connection | None = None,
    ) -> None:
        """Declare it done, with a result if there is one."""
        self._bus._write(self._bus._requests.complete(domain, command_id, result=result, operator=operator), conn)

    def cancel(
        self,
        domain: str,
        command_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: Connection | None = None,
    ) -> None:
        """Give it up, with a reason."""
        self._bus._write(self._bus._requests.cancel(domain, command_id, reason=reason, operator=operator), conn)

    def retry_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        command_type: str | None = None,
        patch: Sequence[dict[str, Any]] | None = None,
        rate: float | None = None,
        operator: str | None = None,
        dry_run: bool = False,
        conn: Connection | None = None,
    ) -> GroupAction:
        """Retry all that waits for a cause now; see `Troubleshooting.retry_group`."""
        write = self._bus._requests.decide(
            domain,
            "retry",
            fingerprint,
            command_type=command_type,
            patch=patch,
            rate=rate,
            operator=operator,
            dry_run=dry_run,
        )
        return self._bus._write(write, conn)

    def complete_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        command_type: str | None = None,
        result: Any = None,
        rate: float | None = None,
        operator: str | None = None,
        dry_run: bool = False,
        conn: Connection | None = None,
    ) -> GroupAction:
        """Declare all done that waits for a cause now, each with this result."""
        write = self._bus._requests.decide(
            domain,
            "complete",
            fingerprint,
            command_type=command_type,
            result=result,
            rate=rate,
            operator=operator,
            dry_run=dry_run,
        )
        return self._bus._write(write, conn)

    def cancel_group(
        self,
        domain: str,
        fingerprint: str,
        *,
        command_type: str | None = None,
        reason: str,
        rate: float | None = None,
        operator: str | None = None,
        dry_run: bool = False,
        conn: Connection | None = None,
    ) -> GroupAction:
        """Give all up that waits for a cause now, with a reason."""
        write = self._bus._requests.decide(
            domain,
            "cancel",
            fingerprint,
            command_type=command_type,
            reason=reason,
            rate=rate,
            operator=operator,
            dry_run=dry_run,
        )
        return self._bus._write(write, conn)
