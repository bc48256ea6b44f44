"""What operators do with commands that wait for a person: `bus.troubleshooting`, in both faces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from busload.domain.command import TroubleshootingItem
from busload.store.connection import AsyncConnection, Connection

if TYPE_CHECKING:
    from busload.bus import CommandBus, SyncCommandBus


class Troubleshooting:
    """What operators do: `bus.troubleshooting`."""

    def __init__(self, bus: CommandBus) -> None:
        self._bus = bus

    async def list(
        self, domain: str, *, command_type: str | None = None, limit: int = 100, offset: int = 0
    ) -> list[TroubleshootingItem]:
        """Commands that wait for a person, newest first, with their original data."""
        return await self._bus._read(
            self._bus._requests.troubleshooting(domain, command_type=command_type, limit=limit, offset=offset)
        )

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


class SyncTroubleshooting:
    """`Troubleshooting` for code without an event loop."""

    def __init__(self, bus: SyncCommandBus) -> None:
        self._bus = bus

    def list(
        self, domain: str, *, command_type: str | None = None, limit: int = 100, offset: int = 0
    ) -> list[TroubleshootingItem]:
        """Commands that wait for a person, newest first, with their original data."""
        return self._bus._read(
            self._bus._requests.troubleshooting(domain, command_type=command_type, limit=limit, offset=offset)
        )

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
