"""A bus of which a test is told before each transaction, so that its process can end there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from busload import CommandBus
from busload.postgres.database import Database


class _SteppedDatabase(Database):
    step: Callable[[], None]

    async def write(self, *args: Any, **options: Any) -> Any:
        self.step()
        return await super().write(*args, **options)

    async def in_transaction(self, *args: Any, **options: Any) -> Any:
        self.step()
        return await super().in_transaction(*args, **options)


class SteppedBus(CommandBus):
    """Calls `step` before each transaction."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with patch("busload.bus.Database", _SteppedDatabase):
            super().__init__(*args, **options)
        assert isinstance(self.database, _SteppedDatabase)
        self.database.step = self.step

    def step(self) -> None:
        raise NotImplementedError
