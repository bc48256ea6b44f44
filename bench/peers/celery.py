"""Celery on Redis or RabbitMQ, with what its optimizing guide has for many short tasks.

That is a large prefetch, no results where none are read, and one connection for many sends. Tasks are acknowledged when
they have run, and on RabbitMQ each message is confirmed, as with every other subject, so that a crash loses none.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

from celery import Celery, chord  # type: ignore[import, unused-ignore]

from bench.peers import talk

PREFETCH = 1_000
QUEUE = "celery"
ON_RABBITMQ = sys.argv[2].startswith("amqp:")

handled = talk.Handled()
app = Celery("bench", broker=sys.argv[2], backend=None if ON_RABBITMQ else sys.argv[2])
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=PREFETCH,
    broker_connection_retry_on_startup=True,
    worker_enable_remote_control=False,
    worker_redirect_stdouts=False,
    redis_socket_timeout=60,
    broker_transport_options={"confirm_publish": True} if ON_RABBITMQ else {},
)


def _nothing(n: int) -> None:
    handled.count += 1


def _stamp() -> None:
    talk.stamp()


def _callback(results: Any) -> None:
    talk.callback()


nothing = app.task(name="nothing", ignore_result=True)(_nothing)
member = app.task(name="member")(_nothing)
stamping = app.task(name="stamp", ignore_result=True)(_stamp)
callback = app.task(name="callback", ignore_result=True)(_callback)


async def install(url: str) -> None:
    with app.connection_for_write() as connection:
        if ON_RABBITMQ:
            connection.default_channel.queue_delete(QUEUE)
        else:
            connection.default_channel.client.flushall()


async def send(url: str) -> None:
    inputs: list[int] = []
    connection = app.connection_for_write()
    producer = app.amqp.Producer(connection, auto_declare=False)

    async def make(count: int) -> None:
        inputs[:] = range(count)

    async def enqueue(_: int) -> None:
        for n in inputs:
            nothing.apply_async((n,), producer=producer)

    async def one_by_one(count: int) -> None:
        for n in range(count):
            nothing.apply_async((n,), producer=producer)

    async def stamp(_: int) -> tuple[float, float]:
        called = time.monotonic()
        stamping.apply_async(producer=producer)
        return called, time.monotonic()

    async def batch(_: int) -> None:
        chord([member.s(n) for n in inputs])(callback.s())

    async def left(_: int) -> int:
        if ON_RABBITMQ:  # tells of what waits, not of what is on loan: that is what workers say they have handled
            return int(connection.default_channel.queue_declare(QUEUE, passive=True).message_count)
        client = connection.default_channel.client
        return int(client.llen(QUEUE)) + int(client.hlen("unacked"))

    await talk.answer(
        {"make": make, "enqueue": enqueue, "send": one_by_one, "stamp": stamp, "batch": batch, "left": left}
    )


def work() -> None:
    """The worker wants the main thread, so a second one listens for the end, and a third one tells."""
    talk.say(ready=1)
    if not sys.stdin.readline():
        return

    def end_with_input() -> None:
        while sys.stdin.readline():
            pass
        os._exit(0)

    def tell_on() -> None:
        while True:
            time.sleep(talk.SAY_EVERY)
            handled.tell()

    for target in (end_with_input, tell_on):
        threading.Thread(target=target, daemon=True).start()
    app.worker_main(["worker", "--pool=solo", "--loglevel=ERROR", "--without-gossip", "--without-mingle"])


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work()
    else:
        asyncio.run({"install": install, "send": send}[sys.argv[1]](sys.argv[2]))
