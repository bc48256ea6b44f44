"""RabbitMQ for one test alone: it may be killed and started again with the files it had."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Self

from tests.given import until
from tests.servers import EPMD, RABBITMQ, STOP_WITHIN, free_ports, listens, rabbitmq_environment, running, wait_for_port

CONTROL = RABBITMQ.with_name("rabbitmqctl")


class RabbitmqServer:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._port, distribution, self._names = free_ports(3)
        self._env = rabbitmq_environment(home, self._port, distribution, self._names)
        self._processes = contextlib.ExitStack()
        self.url = f"amqp://guest:guest@127.0.0.1:{self._port}/"

    def start(self) -> None:
        self._processes.enter_context(running([EPMD, "-port", str(self._names), "-address", "127.0.0.1"], quickly=True))
        self._broker = self._processes.enter_context(running([RABBITMQ], env=self._env, cwd=self._home, quickly=True))
        wait_for_port(self._port, self._broker)

    def kill(self) -> None:
        self._processes.close()
        until(lambda: not listens(self._port))

    def stop(self) -> None:
        """As an operator does: what it has in memory goes to its files."""
        os.killpg(self._broker.pid, signal.SIGTERM)
        self._broker.wait(STOP_WITHIN)
        self.kill()

    async def restart(self) -> None:
        """Not by a kill: release 3.10 then finds no leader for a quorum queue that was made in the second before."""
        await asyncio.to_thread(self.stop)
        await asyncio.to_thread(self.start)

    def control(self, *command: str) -> None:
        """As an administrator does; takes seconds."""
        subprocess.run([str(CONTROL), *command], env=self._env, check=True, capture_output=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
