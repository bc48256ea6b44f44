"""Keeps three workers alive whose bulk handler dies right after its call, as often as it is allowed to.

Run as a script of its own, with its options as JSON; it ends, and kills what is left, when its stdin does.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from busload import CommandBus, Group, HandlerContext, RetryPolicy, Settings, Worker, WorkerSettings

WORKERS = 3
SETTINGS = WorkerSettings(
    lease_for=timedelta(seconds=1),
    poll_every=timedelta(milliseconds=100),
    sweep_every=timedelta(milliseconds=100),
    prefetch=timedelta(0),
)


async def serve(options: dict[str, Any]) -> None:
    deaths = Path(options["deaths"])
    async with CommandBus(options["dsn"], settings=Settings(pool_size=2)) as bus:
        events = bus.buffer("events", size=options["size"], max_age=timedelta(milliseconds=100))

        @events.handler(retry=RetryPolicy(max_attempts=3, backoff=(0.01,)))
        async def deliver(group: Group, ctx: HandlerContext) -> None:
            line = json.dumps({"group": str(group.group_id), "items": [item.id for item in group]})
            service = os.open(options["service"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(service, f"{line}\n".encode())
            os.close(service)
            if random.random() < 0.5 and len(list(deaths.iterdir())) < options["kills"]:
                deaths.joinpath(str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        await Worker(bus, concurrency=options["concurrency"], settings=SETTINGS).run(signals=True)


def start(options: dict[str, Any]) -> int:
    if (pid := os.fork()) == 0:
        random.seed()
        try:
            asyncio.run(serve(options))
        finally:
            os._exit(1)
    return pid


def main() -> None:
    options, children = json.loads(sys.argv[1]), set[int]()
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        children |= {start(options) for _ in range(WORKERS - len(children))}
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
