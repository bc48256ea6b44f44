"""Tasks of a real Celery application, sent and run through busload. Its broker cannot be reached, or is a Redis."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import redis
from celery import Celery, Task, _state, chain, chord, current_app, group, signals
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Ignore, Reject, TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from busload import CommandBus, SyncCommandBus, Worker
from busload.errors import (
    CommandFailedError,
    DuplicateCommandError,
    HandlerAlreadyRegisteredError,
    InvalidCommandError,
    InvalidOperationError,
    PermanentCommandError,
)
from busload.imports import take_over
from busload.imports.celery import Celery as CeleryQueues
from busload.integrations.celery import CeleryBridge, CommandResult
from busload.testing import assert_sent, drain, travel
from tests.given import Database

NOWHERE = "amqp://nowhere.invalid"


@pytest.fixture
def app() -> Iterator[Any]:
    app = application()
    yield app
    closed(app)


@pytest.fixture
def app_on_redis(redis_url: str) -> Iterator[Any]:
    app = application(broker=redis_url, backend=None)
    yield app
    closed(app)


def application(broker: str = NOWHERE, backend: str | None = "redis://nowhere.invalid") -> Any:
    """Tasks as a team has them; `ran` has what each of them has seen."""
    app = Celery("shop", broker=broker, backend=backend, set_as_current=False)
    app.conf.task_routes = {"shop.mail": {"queue": "mail"}}
    app.ran, app.task = [], partial(app.task, shared=False)  # not with the applications of other tests

    @app.task(name="shop.add")
    def add(a: int, b: int = 0) -> int:
        app.ran.append((a, b))
        return a + b

    @app.task(name="shop.mail", bind=True, max_retries=2, default_retry_delay=30)
    def mail(self: Any, to: str, countdown: float | None = None, **how: Any) -> str:
        app.ran.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(exc=ConnectionError("no answer"), countdown=countdown, **how)
        return f"{to} by {self.request.delivery_info['routing_key']}"

    return app


def closed(app: Any) -> None:
    app.close()
    _state.set_default_app(None)


def statuses(bus: SyncCommandBus) -> list[tuple[str, str]]:
    return [(one.command_type, str(one.status)) for one in bus.list_commands()]


def wait(bus: SyncCommandBus, domain: str, command_id: str) -> float:
    """Seconds that a command still waits for its time."""
    found = bus.get_command(domain, UUID(command_id))
    assert found is not None
    assert found.run_at is not None
    return (found.run_at - datetime.now(UTC)).total_seconds()


def test_a_task_is_sent_as_a_command_and_run_as_it_is(app: Any, sync_bus: SyncCommandBus, database: Database) -> None:
    """`delay`, `apply_async`, a signature and a send by name; args stay args and kwargs stay kwargs."""
    CeleryBridge(app, sync_bus).register()
    add = app.tasks["shop.add"]

    sent = [add.delay(1, b=2), add.apply_async((3,), {"b": 4}), add.s(5).delay(6), app.send_task("shop.add", [7])]

    assert_sent(sync_bus, "celery", "shop.add", {"args": [1], "kwargs": {"b": 2}}, times=1)
    assert [one.state for one in sent] == ["PENDING"] * 4
    assert drain(sync_bus) == 4
    assert [one.get(timeout=5) for one in sent] == [3, 7, 11, 7]
    assert [(one.state, one.ready(), one.successful()) for one in sent] == [("SUCCESS", True, True)] * 4
    assert isinstance(sent[0], CommandResult)
    assert sorted(app.ran) == [(1, 2), (3, 4), (6, 5), (7, 0)]


def test_the_options_of_a_send_are_those_of_its_command(app: Any, sync_bus: SyncCommandBus) -> None:
    app.conf.timezone = "Europe/Paris"  # of a time without a zone, Celery's workers think that it is UTC all the same
    CeleryBridge(app, sync_bus, domains={"slow lane": "slow"})
    add, tomorrow, task_id = app.tasks["shop.add"], datetime.now(UTC) + timedelta(days=1), str(uuid4())
    about = {"task_id": task_id, "eta": tomorrow, "expires": tomorrow + timedelta(days=1), "priority": 7}

    result = add.apply_async(
        (1,), **about, queue="slow lane", headers={"tenant": "acme"}, retry=True, compression="zlib"
    )
    later = add.apply_async((2,), countdown=60, expires=120)
    naive = add.apply_async((3,), eta=datetime(2099, 7, 1, 12))

    [found] = assert_sent(sync_bus, "slow", "shop.add", times=1, priority=7, headers={"tenant": "acme"})
    assert (result.id, str(found.command_id)) == (task_id, task_id)
    assert (found.run_at, found.expires_at) == (tomorrow, tomorrow + timedelta(days=1))
    assert 55 < wait(sync_bus, "celery", later.id) <= 60
    in_utc = sync_bus.get_command("celery", UUID(naive.id))
    assert in_utc is not None and in_utc.run_at == datetime(2099, 7, 1, 12, tzinfo=UTC)


def test_the_routes_of_the_application_choose_the_domain(app: Any, sync_bus: SyncCommandBus) -> None:
    """A task may be sent to any queue, so it is a handler in the domain of each; queues may share a domain."""
    CeleryBridge(app, sync_bus, domains={"other": "shared", "third": "shared"}).register()
    for queue in (None, "other", "third"):
        app.tasks["shop.add"].apply_async((1,), queue=queue)
        app.tasks["shop.mail"].apply_async(("rosa",), queue=queue)
    found = sorted((one.domain, one.command_type) for one in sync_bus.list_commands())
    assert found == [
        ("celery", "shop.add"),
        ("mail", "shop.mail"),
        *[("shared", "shop.add")] * 2,
        *[("shared", "shop.mail")] * 2,
    ]
    assert sync_bus.handlers.domains == ["celery", "mail", "shared"]
    assert drain(sync_bus) == 6


@pytest.mark.parametrize(("broker", "priority"), [("redis://nowhere", -3), ("amqp://nowhere", 3), (None, -3)])
def test_a_priority_means_what_it_means_to_the_broker(
    sync_bus: SyncCommandBus, broker: str | None, priority: int
) -> None:
    """On Redis 0 is the most urgent; and the bridge can be told, so that nothing changes when the broker goes."""
    app = application(broker=broker or NOWHERE)
    CeleryBridge(app, sync_bus, zero_is_urgent=True if broker is None else None)
    app.tasks["shop.add"].apply_async((1,), priority=3)
    app.tasks["shop.add"].delay(2)
    assert sorted(one.priority for one in sync_bus.list_commands()) == sorted([0, priority])
    closed(app)


def test_a_task_sees_its_request(app: Any, sync_bus: SyncCommandBus) -> None:
    """Also an id that is no UUID, headers that are no texts, and the task that has sent it."""
    seen: dict[str, Any] = {}

    @app.task(name="shop.child", bind=True)
    def child(self: Any) -> None:
        seen["child"] = self.request

    @app.task(name="shop.parent", bind=True)
    def parent(self: Any) -> None:
        seen["parent"], seen["app"] = self.request, current_app.main
        seen["sent"] = child.delay()

    CeleryBridge(app, sync_bus).register()
    headers = {"tenant": "acme", "level": 3, "trace": {"id": "7"}}
    result = parent.apply_async(task_id="order-7", headers=headers, priority=4)
    drain(sync_bus)

    request = seen["parent"]
    assert seen["app"] == "shop"
    assert (result.id, result.state, request.id, request.root_id) == ("order-7", "SUCCESS", "order-7", "order-7")
    assert (request.headers, request.tenant, request.level) == (headers, "acme", 3)
    assert (request.called_directly, request.is_eager, request.retries) == (False, False, 0)
    assert request.delivery_info["priority"] == 4
    child_request = seen["child"]
    assert (child_request.id, child_request.parent_id) == (seen["sent"].id, "order-7")
    assert child_request.root_id == str(
        sync_bus.list_commands("celery", command_type="shop.parent").commands[0].command_id
    )


def test_arguments_and_results_are_the_json_of_celery(app: Any, sync_bus: SyncCommandBus) -> None:
    """Celery writes the type of a date, a UUID, a Decimal or bytes beside its value, and reads it back."""

    @app.task(name="shop.echo")
    def echo(*args: Any, **kwargs: Any) -> Any:
        app.ran.append(args)
        return [args, kwargs]

    CeleryBridge(app, sync_bus).register()
    values = [datetime(2026, 1, 2, tzinfo=UTC), date(2026, 1, 2), UUID(int=7), Decimal("1.50"), b"\xff", {"a": [None]}]
    result = echo.delay(*values, amount=Decimal(3))
    drain(sync_bus)
    assert result.get(timeout=5) == [values, {"amount": Decimal(3)}]
    assert app.ran == [tuple(values)]
    [found] = sync_bus.list_commands()
    assert found.data["kwargs"] == {"amount": {"__type__": "decimal", "__value__": "3"}}


def test_a_retry_is_another_attempt_when_celery_says(app: Any, sync_bus: SyncCommandBus) -> None:
    """By its own delay, or the one of the call, until max_retries; the error is in the audit trail."""
    CeleryBridge(app, sync_bus).register()
    result = app.tasks["shop.mail"].delay("rosa")
    for countdown, state in ((30, "RETRY"), (30, "RETRY"), (None, "SUCCESS")):
        drain(sync_bus)
        assert result.state == state
        if countdown:
            assert countdown - 5 < wait(sync_bus, "mail", result.id) <= countdown
            travel(sync_bus, timedelta(seconds=countdown))
    assert result.get(timeout=5) == "rosa by mail"
    assert app.ran == [0, 1, 2]
    [first, *_] = [one for one in sync_bus.get_audit_trail("mail", UUID(result.id)) if one.type == "FAILED_ATTEMPT"]
    assert (first.details["type"], first.details["code"]) == ("RetryError", "RETRY")
    assert first.details["message"] == "Retry in 30s: ConnectionError('no answer')"


def test_a_retry_may_say_when_and_how_often(app: Any, sync_bus: SyncCommandBus) -> None:
    CeleryBridge(app, sync_bus).register()
    result = app.tasks["shop.mail"].delay("rosa", countdown=500)
    once = app.tasks["shop.mail"].delay("ada", max_retries=0)
    drain(sync_bus)
    assert 490 < wait(sync_bus, "mail", result.id) <= 500
    with pytest.raises(CommandFailedError, match="ConnectionError: no answer"):
        once.get(timeout=5)
    assert once.state == "FAILURE"


def test_errors_that_a_task_is_retried_for_are_tried_again_and_others_are_not(
    app: Any, sync_bus: SyncCommandBus
) -> None:
    @app.task(name="shop.fetch", autoretry_for=(ConnectionError,), max_retries=1, retry_backoff=40, retry_jitter=False)
    def fetch(error: str) -> None:
        raise {"away": ConnectionError("away"), "wrong": ValueError("wrong")}[error]

    CeleryBridge(app, sync_bus).register()
    away, wrong = fetch.delay("away"), fetch.delay("wrong")
    drain(sync_bus)
    assert (away.state, wrong.state) == ("RETRY", "FAILURE")
    assert 35 < wait(sync_bus, "celery", away.id) <= 40
    travel(sync_bus, timedelta(seconds=40))
    drain(sync_bus)
    assert away.state == "FAILURE"
    items = sync_bus.troubleshooting.list("celery")
    assert {(one.reason, one.last_error_type, one.attempts) for one in items} == {
        ("EXHAUSTED", "ConnectionError", 2),
        ("EXHAUSTED", "ValueError", 1),
    }
    assert "raise {" in (wrong.traceback or "")


def test_ignore_reject_and_a_retry_that_does_not_throw(app: Any, sync_bus: SyncCommandBus) -> None:
    raised: dict[str, Any] = {
        "ignore": Ignore(),
        "reject": Reject("bad letter", requeue=False),
        "requeue": Reject("not now", requeue=True),
        "own": PermanentCommandError("ask a person", code="ASK"),
    }

    @app.task(name="shop.end", bind=True)
    def end(self: Any, how: str) -> str:
        if how == "quietly":
            self.retry(throw=False, countdown=70)
            return "went on"
        raise raised[how]

    CeleryBridge(app, sync_bus).register()
    sent = {how: end.delay(how) for how in (*raised, "quietly")}
    drain(sync_bus)
    found = {how: sync_bus.get_command("celery", UUID(one.id)) for how, one in sent.items()}
    assert {how: (str(one.status), one.last_error_code) for how, one in found.items() if one} == {
        "ignore": ("COMPLETED", None),
        "reject": ("IN_TROUBLESHOOTING_QUEUE", "REJECTED"),
        "requeue": ("SCHEDULED", None),
        "own": ("IN_TROUBLESHOOTING_QUEUE", "ASK"),
        "quietly": ("SCHEDULED", "RETRY"),
    }
    assert sent["ignore"].get(timeout=5) is None
    assert 60 < wait(sync_bus, "celery", sent["quietly"].id) <= 70


@pytest.mark.parametrize(
    ("how", "told"),
    [({"args": ["other"]}, "retries with other arguments"), ({"queue": "slow"}, "retries in the queue 'slow'")],
)
def test_a_retry_that_a_command_cannot_be_waits_for_a_person(
    app: Any, sync_bus: SyncCommandBus, how: dict[str, Any], told: str
) -> None:
    @app.task(name="shop.again", bind=True)
    def again(self: Any, to: str) -> None:
        self.retry(**how)

    CeleryBridge(app, sync_bus).register()
    result = again.delay("rosa")
    drain(sync_bus)
    with pytest.raises(CommandFailedError, match=told):
        result.get(timeout=5)


def test_hooks_and_signals_of_celery_are_called(app: Any, sync_bus: SyncCommandBus) -> None:
    """Those of the task, those around a run, around a send, and of the process; a base class may call super()."""
    seen: list[str] = []

    class Base(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append("call")
            return super().__call__(*args, **kwargs)

        def before_start(self, *args: Any) -> None:
            seen.append("before_start")

        def on_retry(self, *args: Any) -> None:
            seen.append("on_retry")

        def on_failure(self, *args: Any) -> None:
            seen.append("on_failure")

        def after_return(self, *args: Any) -> None:
            seen.append("after_return")

    @app.task(name="shop.hooked", bind=True, base=Base, max_retries=1)
    def hooked(self: Any) -> None:
        self.retry(countdown=0, exc=ConnectionError("away"))

    receivers = {name: _noting(seen, name) for name in ("task_prerun", "task_postrun", "task_retry", "task_failure")}
    receivers |= {name: _noting(seen, name) for name in ("worker_process_init", "worker_process_shutdown")}

    def add_tenant(headers: dict[str, Any], **_: Any) -> None:
        headers["tenant"] = "acme"

    receivers["before_task_publish"], receivers["after_task_publish"] = add_tenant, _noting(seen, "published")
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    try:
        CeleryBridge(app, sync_bus).register()
        hooked.delay()
        drain(sync_bus)
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)
    around = ["task_prerun", "before_start", "call"]
    assert seen == [
        "published",
        "worker_process_init",
        *(*around, "on_retry", "task_retry", "task_postrun"),
        *(*around, "on_failure", "task_failure", "after_return", "task_postrun"),
        "worker_process_shutdown",
    ]
    assert_sent(sync_bus, "celery", "shop.hooked", headers={"tenant": "acme"}, times=1)


def _noting(seen: list[str], name: str) -> Callable[..., None]:
    def note(**_: Any) -> None:
        seen.append(name)

    return note


def test_what_a_task_says_of_itself_holds_for_its_handler(app: Any, sync_bus: SyncCommandBus) -> None:
    def text(value: int) -> str:
        return str(value)

    app.task(name="shop.limited", time_limit=20, soft_time_limit=10, rate_limit="30/m")(text)
    app.task(name="shop.soft", soft_time_limit=10)(text)
    silent = app.task(name="shop.silent", ignore_result=True)(text)
    CeleryBridge(app, sync_bus).register()

    limited, soft = (sync_bus.handlers.find("celery", f"shop.{name}") for name in ("limited", "soft"))
    assert limited is not None and limited.timeout == 20
    assert limited.rate_limit is not None and limited.rate_limit.rate == 0.5
    assert soft is not None and soft.timeout == 10
    ignored, kept = silent.delay(1), silent.apply_async((2,), ignore_result=False)
    drain(sync_bus)
    assert (ignored.get(), kept.get(timeout=5)) == (None, "2")
    found = sync_bus.get_command("celery", UUID(ignored.id))
    assert found is not None and (found.status, found.result) == ("COMPLETED", None)


def test_results_are_waited_for_canceled_and_found_again(app: Any, sync_bus: SyncCommandBus) -> None:
    bridge = CeleryBridge(app, sync_bus)
    bridge.register()
    mail, add = app.tasks["shop.mail"], app.tasks["shop.add"]
    result, revoked = add.delay(1), mail.apply_async(("ada",), countdown=60)
    with pytest.raises(CeleryTimeoutError, match=r"has not ended after 0\.01 s: it is PENDING"):
        result.get(timeout=0.01)
    revoked.revoke()
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=5)
    drain(sync_bus)

    again = bridge.result(result.id)
    assert (again.get(timeout=5), again.name, again.args) == (1, "shop.add", [1])
    assert (bridge.result(revoked.id).state, bridge.result(revoked.id, queue="mail").state) == ("REVOKED", "REVOKED")
    with pytest.raises(InvalidOperationError, match="cannot be a domain"):
        add.apply_async((1,), queue="slow lane")  # Celery has it among its queues from now on
    assert bridge.result(result.id).get(timeout=5) == 1
    again.revoke()  # it has ended: nothing happens, as with Celery
    assert type(bridge.result(str(uuid4()))).__name__ == "AsyncResult"
    with pytest.raises(InvalidOperationError, match="cannot be terminated"):
        again.revoke(terminate=True)
    with pytest.raises(InvalidOperationError, match="Nobody calls back"):
        again.then(print)


def test_a_send_joins_the_transaction_that_is_offered(app: Any, sync_bus: SyncCommandBus, dsn: str) -> None:
    """By `conn` of the bridge, without a change of the call; or by `conn` of the call."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    current: list[Session] = []
    CeleryBridge(app, sync_bus, conn=lambda: current[-1] if current else None)
    add = app.tasks["shop.add"]
    with Session(engine) as session:
        current.append(session)
        lost = add.delay(1)
        session.rollback()
        add.delay(2)
        session.commit()
        current.clear()
    add.delay(3)
    with psycopg.connect(dsn) as conn:
        add.apply_async((4,), conn=conn)
        conn.rollback()
    engine.dispose()
    assert sorted(one.data["args"] for one in sync_bus.list_commands()) == [[2], [3]]
    assert (lost.state, lost.exists()) == ("PENDING", False)


@contextmanager
def logging_left_alone() -> Iterator[None]:
    """A worker of Celery sets the level of all loggers, unless somebody says that they are set up."""

    def set_up(**_: Any) -> None: ...

    level = logging.getLogger().level
    signals.setup_logging.connect(set_up, weak=False)
    try:
        yield
    finally:
        signals.setup_logging.disconnect(set_up)
    assert logging.getLogger().level == level


def test_some_tasks_stay_with_the_broker(app_on_redis: Any, sync_bus: SyncCommandBus) -> None:
    """A worker of Celery runs and retries one that stays, and one that was sent before there was a bridge."""
    app, done = app_on_redis, threading.Barrier(3)
    app.conf.update(task_default_queue="bridge-default", task_routes={}, broker_connection_retry_on_startup=True)

    def once_more(task: Any) -> None:
        if task.request.retries == 0:
            raise task.retry(countdown=0)
        moved.delay(task.request.retries)
        done.wait(30)

    stays = app.task(name="shop.stays", bind=True)(once_more)
    early = app.task(name="shop.early", bind=True)(once_more)

    @app.task(name="shop.moved")
    def moved(n: int) -> int:
        return n

    early.delay()
    CeleryBridge(app, sync_bus, tasks=[moved, "shop.early"]).register()
    first = moved.delay(7)
    assert not isinstance(stays.delay(), CommandResult)
    with pytest.raises(InvalidOperationError, match="goes to Celery's broker, which cannot join"):
        stays.apply_async(conn=object())
    worker = start_worker(app, pool="threads", concurrency=2, perform_ping_check=False, shutdown_timeout=30)
    with logging_left_alone(), worker:
        done.wait(30)
    assert drain(sync_bus) == 3
    assert first.get(timeout=5) == 7
    assert sorted((one.command_type, one.result) for one in sync_bus.list_commands()) == [
        ("shop.moved", 1),
        ("shop.moved", 1),
        ("shop.moved", 7),
    ]
    with redis.Redis.from_url(app.conf.broker_url) as client:
        client.delete("_kombu.binding.bridge-default")


def test_some_queues_stay_with_the_broker_and_the_bridge_can_be_removed(
    app_on_redis: Any, sync_bus: SyncCommandBus
) -> None:
    """What waits in Redis then is imported, and run by the bridge as what was sent through it."""
    app, queue = app_on_redis, "bridge-stays"
    app.conf.update(task_default_queue=queue, task_routes={"shop.mail": "mail"})
    bridge = CeleryBridge(app, sync_bus, queues=["mail", "bridge-slow"])
    add = app.tasks["shop.add"]
    with redis.Redis.from_url(app.conf.broker_url) as client:
        try:
            add.delay(1, b=1)
            add.apply_async((2,), queue="bridge-slow")
            app.tasks["shop.mail"].delay("rosa")
            bridge.remove()
            about = {"queue": "bridge-slow", "priority": 3, "headers": {"tenant": "acme", "level": 1}}
            removed = add.apply_async((3,), {"b": 4}, **about)
            app.tasks["shop.mail"].apply_async(("ada",), queue=queue, retries=2)
            assert [client.llen(key) for key in (queue, "bridge-slow\x06\x163")] == [2, 1]
            assert sorted(one.domain for one in sync_bus.list_commands()) == ["bridge-slow", "mail"]

            report = take_over(
                sync_bus, CeleryQueues(app.conf.broker_url, [queue, "bridge-slow"]), domain="bridge-slow"
            )
        finally:
            client.delete(queue, "bridge-slow\x06\x163", f"_kombu.binding.{queue}", "_kombu.binding.bridge-slow")
    assert (report.imported, report.skipped) == (3, [])
    [found] = assert_sent(sync_bus, "bridge-slow", "shop.add", {"args": [3], "kwargs": {"b": 4}}, priority=-3)
    assert (str(found.command_id), (found.headers or {})["tenant"]) == (removed.id, "acme")
    bridge.register()
    drain(sync_bus)
    assert sorted(app.ran, key=str) == [(1, 1), (2, 0), (3, 4), 0, 2]


def test_a_worker_of_an_async_bus_runs_tasks_too(app: Any, sync_bus: SyncCommandBus, dsn: str) -> None:
    bridge = CeleryBridge(app, sync_bus)

    async def run() -> int:
        async with CommandBus(dsn) as bus:
            bridge.register(bus)
            sent = app.tasks["shop.add"].delay(1, 2)  # in the event loop: as long as it takes
            assert await Worker(bus).drain() == 1
            result: int = await bus.wait_command("celery", UUID(sent.id))
            return result

    assert asyncio.run(run()) == 3


def test_arguments_that_are_not_json_are_refused(app: Any, sync_bus: SyncCommandBus) -> None:
    CeleryBridge(app, sync_bus)
    add = app.tasks["shop.add"]
    with pytest.raises(InvalidCommandError, match=r"UNSERIALISABLE at /data: the arguments of the task 'shop.add'"):
        add.delay(object())
    with pytest.raises(InvalidCommandError, match="NON_FINITE_NUMBER"):
        add.delay(float("nan"))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        add.delay()
    assert statuses(sync_bus) == []


def test_canvas_is_refused_before_anything_is_sent(sync_bus: SyncCommandBus) -> None:
    app = application(backend=None)  # which Celery itself asks for when it prepares a group
    CeleryBridge(app, sync_bus)
    add = app.tasks["shop.add"]
    canvas: dict[str, Callable[[], Any]] = {
        "a chain": lambda: chain(add.s(1), add.s(2))(),
        "a group": lambda: group([add.s(1), add.s(2)], app=app)(),
        "a chord": lambda: chord([add.s(1), add.s(2)], app=app)(add.s()),
        "link": lambda: add.apply_async((1,), link=add.s(2)),
        "link_error": lambda: add.apply_async((1,), link_error=add.s(2)),
        "'shop.add' is sent with map": lambda: add.map([1]).delay(),
        "starmap": lambda: add.starmap([(1, 2)]).delay(),
        "starmap or chunks": lambda: add.chunks([(1, 2), (3, 4)], 1).delay(),
    }
    for what, call in canvas.items():
        with pytest.raises((InvalidOperationError, NotImplementedError), match=what):
            call()
    assert statuses(sync_bus) == []
    closed(app)


def test_a_task_cannot_replace_itself(app: Any, sync_bus: SyncCommandBus) -> None:
    @app.task(name="shop.replaced", bind=True)
    def replaced(self: Any) -> Any:
        return self.replace(app.tasks["shop.add"].s(1))

    CeleryBridge(app, sync_bus).register()
    result = replaced.delay()
    drain(sync_bus)
    with pytest.raises(CommandFailedError, match=r"sent with self.replace\(\), which the bridge does not support"):
        result.get(timeout=5)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"serializer": "pickle"}, InvalidOperationError, "serializer 'pickle'; commands hold JSON alone"),
        ({"exchange": "all", "routing_key": "x"}, InvalidOperationError, "sent to an exchange"),
        ({"time_limit": 5}, InvalidOperationError, "time_limit=5, and its handler has None"),
        ({"message_group_id": "7"}, TypeError, "option 'message_group_id', which the bridge does not know"),
        ({"headers": "tenant"}, InvalidOperationError, "must be a dict, found a str"),
        ({"headers": {"by": object()}}, InvalidCommandError, "UNSERIALISABLE"),
        ({"queue": "slow lane"}, InvalidOperationError, "queue 'slow lane' cannot be a domain as it is: .* domains="),
        ({"conn": 7}, InvalidOperationError, "conn"),
    ],
)
def test_an_option_that_a_command_cannot_have_is_refused(
    app: Any, sync_bus: SyncCommandBus, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    CeleryBridge(app, sync_bus)
    with pytest.raises(error, match=told):
        app.tasks["shop.add"].apply_async((1,), **options)
    assert statuses(sync_bus) == []


def test_a_task_that_nobody_knows_is_refused(app: Any, sync_bus: SyncCommandBus) -> None:
    """Unless the bridge is told that another program has it."""
    CeleryBridge(app, sync_bus, tasks=["shop.*", "billing.charge"])
    with pytest.raises(InvalidOperationError, match=r"task 'shop.mial' is not registered with .* application 'shop'"):
        app.send_task("shop.mial", ["rosa"])
    app.send_task("billing.charge", [7], queue="billing")
    assert_sent(sync_bus, "billing", "billing.charge", {"args": [7], "kwargs": {}}, times=1)


def test_an_id_is_sent_once(app: Any, sync_bus: SyncCommandBus) -> None:
    CeleryBridge(app, sync_bus)
    app.tasks["shop.add"].apply_async((1,), task_id="order-7")
    with pytest.raises(DuplicateCommandError):
        app.tasks["shop.add"].apply_async((1,), task_id="order-7")


def test_data_that_is_no_call_of_a_task_waits_for_a_person(app: Any, sync_bus: SyncCommandBus) -> None:
    CeleryBridge(app, sync_bus).register()
    for data in ({"a": 1}, {"args": [{"__type__": "nonsense", "__value__": 1}], "kwargs": {}}):
        sync_bus.send("celery", "shop.add", data, headers={"celery": "no json"})
    drain(sync_bus)
    found = sync_bus.troubleshooting.list("celery")
    assert [(one.reason, one.last_error_code) for one in found] == [("PERMANENT", "INVALID_DATA")] * 2
    assert json.dumps(app.ran) == "[]"


def test_a_bridge_that_cannot_be_is_refused(app: Any, sync_bus: SyncCommandBus, dsn: str) -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: CeleryBridge("shop", sync_bus), "needs the Celery application, found a str"),
        (lambda: CeleryBridge(app, CommandBus(dsn)), "needs a SyncCommandBus, found a busload"),  # type: ignore[arg-type]
        (lambda: CeleryBridge(app, sync_bus, tasks="shop.add"), r"tasks must be a list, found 'shop.add'"),
        (lambda: CeleryBridge(app, sync_bus, tasks=[7]), "tasks must hold names, patterns or tasks of Celery, found 7"),
        (lambda: CeleryBridge(app, sync_bus, conn=7), "conn must be a function"),  # type: ignore[arg-type]
    ]
    for make, told in refused:
        with pytest.raises(ValueError, match=told):
            make()
    bridge = CeleryBridge(app, sync_bus, tasks=["other.*"])
    with pytest.raises(InvalidOperationError, match=r"'shop' has no task that fits tasks=\['other.\*'\]"):
        bridge.register()
    with pytest.raises(InvalidOperationError, match="'shop' has a bridge already"):
        CeleryBridge(app, sync_bus)


def test_a_type_with_a_handler_of_its_own_stays_with_it(app: Any, sync_bus: SyncCommandBus) -> None:
    sync_bus.handler("celery", "shop.add")(lambda command, ctx: None)
    with pytest.raises(HandlerAlreadyRegisteredError, match=r"'celery' / 'shop.add' is already handled"):
        CeleryBridge(app, sync_bus).register()


def test_the_bridge_can_be_imported_before_all_else() -> None:
    subprocess.run([sys.executable, "-c", "import busload.integrations.celery"], check=True)
