"""The handle of the look-alike of Azure Service Bus."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from azure.servicebus._pyamqp.aio import _client_async
from azure.servicebus._pyamqp.aio._connection_async import Connection
from azure.servicebus._pyamqp.constants import ConnectionState
from azure.servicebus.aio import _servicebus_receiver_async, _servicebus_sender_async

KEY_NAME, KEY = "RootManageSharedAccessKey", "bG9vay1hbGlrZS1rZXk="
PEEKED_AT_ONCE = 100
"""Messages that it shows at a time, as the real one has a limit that it does not tell."""


class ServiceBus:
    """The look-alike, as a process of its own: it ends when we do, since it reads what we write."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("servicebus.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._hear())

    @property
    def url(self) -> str:
        return self.url_with(KEY)

    def url_with(self, key: str) -> str:
        return f"servicebus://{KEY_NAME}:{quote(key, safe='')}@127.0.0.1:{self.port}/?emulator=true"

    def create(self, queue: str, **settings: Any) -> str:
        """As an administrator does: `lock_for`, `max_deliveries`, `drops_duplicates`, `refuses_batches`."""
        self._ask("create", queue=queue, **settings)
        return queue

    def fail(self, queue: str, *faults: str) -> None:
        """What happens to the transfers to come: none, busy, full, drop-before, drop-after, silent."""
        self._ask("fail", queue=queue, faults=faults)

    def hide(self, queue: str) -> None:
        """Already a token for it is refused, as for a queue that is not there."""
        self._ask("hide", queue=queue)

    def look(self, queue: str) -> dict[str, Any]:
        """What the broker has counted, and holds."""
        found: dict[str, Any] = self._ask("look", queue=queue)
        return {**found, "dead": [base64.b64decode(each) for each in found["dead"]]}

    def cut(self) -> None:
        """All connections break."""
        self._ask("cut")

    def unlock(self) -> None:
        """All locks have expired."""
        self._ask("unlock")

    def stop(self) -> None:
        self._process.communicate()

    def _ask(self, verb: str, **arguments: Any) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._hear())

    def _hear(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the look-alike of Service Bus has ended"
        return line


@pytest.fixture(scope="session")
def servicebus() -> Iterator[ServiceBus]:
    """One for each process of the run: tests in others cannot disturb its faults."""
    servicebus = ServiceBus()
    with pytest.MonkeyPatch.context() as patch:
        for module in (_client_async, _servicebus_receiver_async, _servicebus_sender_async):
            patch.setattr(module, "asyncio", Hasty())
        patch.setattr(Connection, "_disconnect", disconnect)
        yield servicebus
    servicebus.stop()


class Hasty:
    """asyncio for the SDK: it rests between two frames when it connects, and for a second when it closes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 50)


@pytest.fixture
def servicebus_url(servicebus: ServiceBus) -> str:
    """Its queues have to be made: `servicebus.create(...)`."""
    return servicebus.url


async def disconnect(connection: Any) -> None:
    """What the SDK forgets after a failure: to close the socket. The garbage collector does it, and warns."""
    await connection._set_state(ConnectionState.END)
    await connection._transport.close()
