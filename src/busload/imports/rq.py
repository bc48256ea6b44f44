"""Jobs of RQ that wait in its queues, or are scheduled."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from busload.commands.command import BatchCommand
from busload.commands.payload import PayloadRefusedError, decode_strict, encode
from busload.errors import InvalidOperationError
from busload.imports.take_over import WaitingTask, command_id_of
from busload.postgres.connection import Connection

PICKLE = b"\x80"
"""How a pickle begins. No JSON begins so."""

FOLLOWS = {
    "success_callback_name": "a callback",
    "failure_callback_name": "a callback",
    "stopped_callback_name": "a callback",
    "webhooks": "webhooks",
    "repeats_left": "repeats",
}
"""What RQ does after a job, by the field that says so."""


class Rq:
    """The queues of RQ at a Redis. A job becomes a command of the same id, with `args` and `kwargs` as its data.

    RQ pickles its jobs unless it is told to use JSON, and reading a pickle runs whatever code it holds. So pickles are
    read only if `trusts_pickle`: if nobody but you can write to this Redis.

    Stop the workers of RQ before: a job cannot be locked. Jobs that wait for other jobs are not imported.
    """

    name = "rq"

    def __init__(
        self, url: str, queues: Sequence[str] = (), *, with_links: bool = False, trusts_pickle: bool = False
    ) -> None:
        try:
            import redis
        except ModuleNotFoundError as error:
            raise InvalidOperationError("To read from Redis, run `pip install 'busload[redis]'`.") from error
        self._redis: Any = redis.Redis.from_url(url)
        self._chosen, self._with_links, self._trusts_pickle = list(queues), with_links, trusts_pickle

    def started(self) -> int:
        """How many jobs workers of RQ hold: these are not imported."""
        return sum(int(self._redis.zcard(f"rq:wip:{queue}")) for queue in self._queues())

    def deferred(self) -> int:
        """How many jobs wait for others to end: these are not imported."""
        return sum(int(self._redis.zcard(f"rq:deferred:{queue}")) for queue in self._queues())

    def close(self) -> None:
        self._redis.close()

    def pages(self, size: int, *, locked: bool) -> Iterator[AbstractContextManager[_Page]]:
        for queue in self._queues():
            yield from self._pages_of(queue, f"rq:queue:{queue}", size, scheduled=False)
            yield from self._pages_of(queue, f"rq:scheduled:{queue}", size, scheduled=True)

    def _queues(self) -> list[str]:
        keys = sorted(key.decode() for key in self._redis.smembers("rq:queues"))
        return self._chosen or [key.removeprefix("rq:queue:") for key in keys]

    def _pages_of(self, queue: str, key: str, size: int, *, scheduled: bool) -> Iterator[AbstractContextManager[_Page]]:
        """Jobs in the order in which they would run. What stays there is passed by."""
        kept = 0
        while True:
            if scheduled:
                found = self._redis.zrange(key, kept, kept + size - 1, withscores=True)
            else:
                found = [(id, None) for id in self._redis.lrange(key, kept, kept + size - 1)]
            if not found:
                return
            page = _Page(self._tasks(queue, found), self._redis, key, scheduled)
            yield nullcontext(page)
            kept += len(found) - page.gone

    def _tasks(self, queue: str, found: Sequence[tuple[bytes, float | None]]) -> list[WaitingTask]:
        with self._redis.pipeline(transaction=False) as pipeline:
            for id, _ in found:
                pipeline.hgetall(b"rq:job:" + id)
                pipeline.scard(b"rq:job:" + id + b":dependents")
                pipeline.pttl(b"rq:job:" + id)
            answers = pipeline.execute()
        jobs = zip(found, answers[::3], answers[1::3], answers[2::3], strict=True)
        return [self._task(queue, id, due, *about) for (id, due), *about in jobs]

    def _task(
        self, queue: str, id: bytes, due: float | None, job: Mapping[bytes, bytes], dependents: int, ttl_ms: int
    ) -> WaitingTask:
        source_id, name = id.decode(), "?"
        fields = {field.decode(): value for field, value in job.items()}
        try:
            name, data = self._call(fields)
            self._refuse_links(fields, dependents)
            run_at, expires_at = _times(due, fields, ttl_ms)
        except ValueError as refused:
            return WaitingTask(source_id, queue, name, None, str(refused), id)
        command = BatchCommand(name, _command_id(source_id, fields), data, run_at=run_at, expires_at=expires_at)
        return WaitingTask(source_id, queue, name, command, handle=id)

    def _call(self, fields: Mapping[str, bytes]) -> tuple[str, Any]:
        """The function that a job calls, and with what; raises ValueError with the reason if that is no command."""
        if "data" not in fields:
            raise ValueError("Its data is gone: it has expired, or it was deleted.")
        match self._loaded(fields["data"]):
            case [str(name), None, list() | tuple() as args, dict() as kwargs]:
                data = {"args": list(args), "kwargs": kwargs}
            case [str(), _, _, _]:
                raise ValueError("It is a method of an object, and an object cannot be sent.")
            case _:
                raise ValueError("It is no job of RQ: wanted a function, an object, args and kwargs.")
        encode(data)  # so that a dry run tells what cannot be sent
        return name, data

    def _loaded(self, raw: bytes) -> Any:
        with suppress(zlib.error):  # older jobs are not compressed
            raw = zlib.decompress(raw)
        if not raw.startswith(PICKLE):
            try:
                return decode_strict(raw)
            except PayloadRefusedError as refused:
                raise ValueError(f"It is neither JSON nor a pickle: {refused}") from refused
        if not self._trusts_pickle:
            raise ValueError(
                "It is a pickle, and reading a pickle runs the code in it. --trust-pickle reads it: say so only if"
                " nobody but you can write to this Redis."
            )
        try:
            return pickle.loads(raw)  # noqa: S301
        except Exception as error:
            raise ValueError(f"Its pickle cannot be read here: {error!r}.") from error

    def _refuse_links(self, fields: Mapping[str, bytes], dependents: int) -> None:
        links = {what: None for field, what in FOLLOWS.items() if fields.get(field)}
        if dependents:
            links["jobs that wait for it"] = None
        if links and not self._with_links:
            raise ValueError(f"It has {', '.join(links)}, which would be lost. --with-links imports the job alone.")


@dataclass(slots=True)
class _Page:
    tasks: Sequence[WaitingTask]
    redis: Any
    key: str
    scheduled: bool
    conn: Connection | None = None
    gone: int = 0
    """Jobs of the page that are not in their queue any more, whoever took them."""

    def remove(self, tasks: Sequence[WaitingTask]) -> int:
        """A job that a worker has taken meanwhile keeps its data."""
        self.gone = len(tasks)
        with self.redis.pipeline(transaction=False) as pipeline:
            for task in tasks:
                if self.scheduled:
                    pipeline.zrem(self.key, task.handle)
                else:
                    pipeline.lrem(self.key, 1, task.handle)
            removed = [task for task, count in zip(tasks, pipeline.execute(), strict=True) if count]
        if removed:
            self.redis.delete(*(b"rq:job:" + task.handle for task in removed))
        return len(removed)


def _command_id(source_id: str, fields: Mapping[str, bytes]) -> UUID:
    """That of the job. An id that an application has chosen may be used again: then the time tells them apart."""
    try:
        return UUID(source_id)
    except ValueError:
        return command_id_of(Rq.name, f"{source_id}:{fields.get('created_at', b'').decode()}")


def _times(due: float | None, fields: Mapping[str, bytes], ttl_ms: int) -> tuple[datetime | None, datetime | None]:
    """When a job may run, and when it expires; raises ValueError with the reason if that is no time."""
    try:
        run_at = None if due is None else datetime.fromtimestamp(due, UTC)
        return run_at, _expires_at(run_at, fields, ttl_ms)
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"The time for which it is scheduled, or its ttl, cannot be read: {error}.") from error


def _expires_at(run_at: datetime | None, fields: Mapping[str, bytes], ttl_ms: int) -> datetime | None:
    """RQ lets a job expire a while after it has come into its queue: a scheduled one has not come there yet."""
    if run_at is not None and fields.get("ttl"):
        return run_at + timedelta(seconds=int(fields["ttl"]))
    return datetime.now(UTC) + timedelta(milliseconds=ttl_ms) if ttl_ms > 0 else None
