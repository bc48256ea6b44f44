"""Jobs of RQ become commands, each once. RQ itself has enqueued them."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from click.testing import CliRunner
from rq import Queue, Repeat
from rq.job import Job

from busload import SyncCommandBus
from busload.cli import main
from busload.imports import take_over
from busload.imports.rq import Rq
from busload.imports.take_over import Report
from busload.testing import assert_sent

TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def queue(client: redis.Redis) -> Iterator[Queue]:
    """One that uses JSON, and is gone afterwards."""
    queue = Queue(f"kit-{uuid4()}", connection=client, serializer="json")
    yield queue
    client.delete(f"rq:scheduled:{queue.name}", f"rq:deferred:{queue.name}")
    queue.delete(delete_jobs=True)


def imported(bus: SyncCommandBus, url: str, queue: Queue, *, dry_run: bool = False, **options: Any) -> Report:
    source = Rq(url, [queue.name], **options)
    try:
        return take_over(bus, source, dry_run=dry_run)
    finally:
        source.close()


def test_jobs_that_wait_or_are_scheduled_are_imported(
    sync_bus: SyncCommandBus, client: redis.Redis, queue: Queue, redis_url: str
) -> None:
    mail = queue.enqueue("shop.mail", 7, kind="welcome", ttl=3600)
    queue.enqueue("shop.named", job_id="daily")
    later = queue.enqueue_at(TOMORROW, "shop.later", [1, 2], ttl=60)
    dry = imported(sync_bus, redis_url, queue, dry_run=True)
    assert (dry.found, dry.imported, len(queue), sync_bus.list_commands().commands) == (3, 3, 2, ())

    report = imported(sync_bus, redis_url, queue)

    assert (report.found, report.imported, report.skipped, report.taken_meanwhile) == (3, 3, [], 0)
    data = {"args": [7], "kwargs": {"kind": "welcome"}}
    [sent] = assert_sent(sync_bus, queue.name, "shop.mail", data, times=1)
    assert (str(sent.command_id), sent.run_at) == (mail.id, None)
    assert sent.expires_at is not None
    assert timedelta(minutes=50) < sent.expires_at - datetime.now(UTC) <= timedelta(hours=1)
    [sent] = assert_sent(sync_bus, queue.name, "shop.later", {"args": [[1, 2]], "kwargs": {}}, times=1)
    assert (sent.run_at, sent.expires_at) == (TOMORROW, TOMORROW + timedelta(minutes=1))
    keys = [f"rq:job:{mail.id}", f"rq:job:{later.id}", f"rq:scheduled:{queue.name}"]
    assert (len(queue), client.exists(*keys)) == (0, 0)
    queue.enqueue("shop.named", job_id="daily")
    assert imported(sync_bus, redis_url, queue).imported == 1, "an id of the application may be used again"


def test_a_pickle_is_not_read_unless_its_redis_is_trusted(
    sync_bus: SyncCommandBus, queue: Queue, client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """One would make a file when it is read."""
    pickles = Queue(queue.name, connection=client)
    job = pickles.enqueue("shop.mail", 7, kind="welcome")
    pickles.enqueue("shop.set", {1})
    trap = pickles.enqueue("shop.trap")
    client.hset(f"rq:job:{trap.id}", "data", zlib.compress(pickle.dumps(Trap(tmp_path / "trapped"))))

    report = imported(sync_bus, redis_url, queue)

    assert (report.found, report.imported, len(queue)) == (3, 0, 3)
    assert all("It is a pickle, and reading a pickle runs the code in it" in one.reason for one in report.skipped)
    assert not (tmp_path / "trapped").exists()

    trusted = imported(sync_bus, redis_url, queue, dry_run=True, trusts_pickle=True)
    assert (trusted.imported, (tmp_path / "trapped").exists()) == (1, True)
    trusted = imported(sync_bus, redis_url, queue, trusts_pickle=True)
    assert (trusted.imported, [one.source_id for one in trusted.skipped][1]) == (1, trap.id)
    assert "set" in trusted.skipped[0].reason
    [sent] = assert_sent(sync_bus, queue.name, "shop.mail", {"args": [7], "kwargs": {"kind": "welcome"}}, times=1)
    assert str(sent.command_id) == job.id


class Trap:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_what_would_be_lost_stays(
    sync_bus: SyncCommandBus, queue: Queue, client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = queue.enqueue("shop.first")
    queue.enqueue("shop.second", depends_on=first)
    queue.enqueue("shop.repeated", repeat=Repeat(times=3, interval=60))
    gone = queue.enqueue("shop.gone")
    client.delete(f"rq:job:{gone.id}")
    other = queue.enqueue("shop.other")
    client.hset(f"rq:job:{other.id}", "data", b"nonsense")

    report = imported(sync_bus, redis_url, queue)

    assert (report.found, report.imported, len(queue)) == (4, 0, 4)
    waited, repeated, expired, nonsense = [one.reason for one in report.skipped]
    assert "It has jobs that wait for it, which would be lost" in waited
    assert "It has repeats, which would be lost" in repeated
    assert "Its data is gone" in expired
    assert "neither JSON nor a pickle" in nonsense

    monkeypatch.setenv("BUSLOAD_DATABASE_URL", sync_bus.dsn)
    command = ["import", "rq", redis_url, "--queue", queue.name, "--with-links"]
    ran = CliRunner().invoke(main, [*command, "--domain", "shop"])
    assert (ran.exit_code, ran.output.splitlines()[0]) == (0, "Imported 2 of 4 tasks.")
    assert "RQ keeps 1 job until other jobs have ended" in ran.output
    assert json.loads(CliRunner().invoke(main, [*command, "--json"]).output)["found"] == 2
    assert_sent(sync_bus, "shop", "shop.first", times=1)


@pytest.mark.parametrize(("due", "ttl"), [(1e18, b""), (float("inf"), b""), (4e9, b"long")])
def test_a_job_whose_time_is_none_stays_and_others_are_imported(
    sync_bus: SyncCommandBus, queue: Queue, client: redis.Redis, redis_url: str, due: float, ttl: bytes
) -> None:
    job = queue.enqueue_at(TOMORROW, "shop.when")
    client.zadd(f"rq:scheduled:{queue.name}", {job.id: due})
    client.hset(f"rq:job:{job.id}", "ttl", ttl)
    queue.enqueue_at(TOMORROW, "shop.fine")

    report = imported(sync_bus, redis_url, queue)

    assert (report.found, report.imported) == (2, 1)
    assert "The time for which it is scheduled, or its ttl, cannot be read" in report.skipped[0].reason
    assert_sent(sync_bus, queue.name, "shop.fine", times=1)


def test_an_import_that_died_is_resumed_and_a_taken_job_keeps_its_data(
    sync_bus: SyncCommandBus, queue: Queue, client: redis.Redis, redis_url: str
) -> None:
    """The first run dies after it has sent; in the second, a worker is quicker."""
    ids = [queue.enqueue(f"shop.{name}", job_id=f"{name}-{queue.name}").id for name in ("one", "two", "three")]
    source = Rq(redis_url, [queue.name])
    for page in source.pages(10, locked=True):
        with page as opened:
            sync_bus.send_many(queue.name, [task.command for task in opened.tasks if task.command is not None])

    first = next(iter(source.pages(10, locked=True)))
    with first as opened:
        assert client.lpop(queue.key) == ids[0].encode()
        assert opened.remove(opened.tasks[:2]) == 1
    assert Job.exists(ids[0], connection=client)
    assert not Job.exists(ids[1], connection=client)
    source.close()

    report = imported(sync_bus, redis_url, queue)
    assert (report.found, report.imported, report.already_there, len(queue)) == (1, 0, 1, 0)
    assert len(sync_bus.list_commands(domain=queue.name).commands) == 3
