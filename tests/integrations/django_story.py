"""What a Django project does with busload, told by a process of its own: Django has one configuration per process.

It is run in examples/django_shop, and prints what it has found as JSON.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import django
import psycopg
from asgiref.sync import sync_to_async

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.integrations.django_story_settings"
django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.core.checks import run_checks  # noqa: E402
from django.core.management import CommandError, call_command  # noqa: E402
from django.db import IntegrityError, connection, connections, transaction  # noqa: E402
from django.db.migrations.recorder import MigrationRecorder  # noqa: E402
from django.test import Client, override_settings  # noqa: E402
from django.test.utils import setup_test_environment  # noqa: E402
from shop.bus import bus  # noqa: E402

from busload import (  # noqa: E402
    BatchCommand,
    BatchNotFoundError,
    Command,
    InvalidCommandError,
    PermanentCommandError,
    Stage,
    SyncHandlerContext,
)
from busload.errors import CommandNotFoundError, DatabaseUnavailableError, InvalidOperationError  # noqa: E402
from busload.integrations.django_app import DjangoCommandBus  # noqa: E402
from busload.integrations.django_app.testing import delete_all_commands, run_commands  # noqa: E402
from busload.postgres.schema.migrate import MIGRATIONS, script  # noqa: E402
from busload.testing import BreakableTransport, assert_sent, broker_down, drain  # noqa: E402

KNOWN = [f"{domain}/{name}" for domain, name in bus.handlers.names]
"""What a web process knows, which imports only the bus."""


@bus.handler("shop", "Break")
def break_it(command: Command, ctx: SyncHandlerContext) -> None:
    raise PermanentCommandError("It is <b>broken</b>.", code="BROKEN")


@bus.command("shop", "Count")
def count(ctx: SyncHandlerContext, items: int) -> int:
    return items


@bus.handler("shop", "SendAndFail")
def send_and_fail(command: Command, ctx: SyncHandlerContext) -> None:
    with transaction.atomic():
        bus.send("elsewhere", "Undone")
        ctx.send("elsewhere", "Undone")
        with bus.independent():
            ctx.send("elsewhere", "Done")
        raise PermanentCommandError("It has failed.", code="FAILED")


def call(*words: str, **options: Any) -> str:
    """What a command of the project prints, also if it ends the process as `--help` does."""
    said = io.TextIOWrapper(io.BytesIO(), write_through=True)
    with redirect_stdout(said), suppress(SystemExit):
        call_command(*words, stdout=said, **options)
    said.seek(0)
    return said.read()


def checks() -> list[str]:
    return [f"{one.id} {one.msg} {one.hint or ''}".strip() for one in run_checks(databases=["default"])]


def schema() -> dict[str, Any]:
    found: dict[str, Any] = {"empty": checks()}
    with psycopg.connect(os.environ["BUSLOAD_DATABASE_URL"], autocommit=True) as conn:
        conn.execute(script(0, MIGRATIONS[:-1]).encode())  # as an older release has left it
    MigrationRecorder(connection).record_applied("busload", "0001_initial")
    found["outdated"] = checks()
    found["upgrade"] = call("migrate")
    found["again"] = call("migrate")
    found["now"] = checks()
    found["backwards"] = call("migrate", "busload", "zero")
    call("migrate")
    found["kept"] = checks()
    return found


def wrong_settings() -> dict[str, list[str]]:
    found = {}
    for name, value in (
        ("unknown", {"BUSS": "shop.bus:bus"}),
        ("no dict", "shop.bus:bus"),
        ("wrong kind", {"BUS": "shop.bus:bus", "WORKER": "yes"}),
        ("no bus", {}),
        ("no colon", {"BUS": "shop.bus"}),
        ("no module", {"BUS": "shop.nowhere:bus"}),
        ("no attribute", {"BUS": "shop.bus:buss"}),
        ("no bus of ours", {"BUS": "shop.models:Order"}),
        ("no alias", {"BUS": "shop.bus:bus", "DATABASE": "other"}),
        ("no PostgreSQL", {"BUS": "shop.bus:bus", "DATABASE": "lite"}),
    ):
        with override_settings(BUSLOAD=value):
            found[name] = checks()
    return found


def pages() -> dict[str, Any]:
    setup_test_environment()
    client, found = Client(raise_request_exception=False), dict[str, Any]()
    client.force_login(User.objects.create_superuser("ada"))
    batch_id = bus.create_batch("shop", [BatchCommand("Break", task_key=f"t:{n}") for n in range(3)], name="March")
    with transaction.atomic():
        sent = bus.send("shop", "ShipOrder", {"order": 7}, conn=connection)
    counted = bus.send("shop", "Count", {"items": 3})
    found["attempts"] = run_commands()
    found["fields"] = bus.wait_command("shop", counted.command_id, timeout=1)
    of_commands, of_batches = "/admin/busload/command/", "/admin/busload/batch/"
    for name, path in (
        ("index", "/admin/"),
        ("batches", of_batches),
        ("batch by name", f"{of_batches}?q=Mar"),
        ("batch by id", f"{of_batches}?q={batch_id}"),
        ("batch by status", f"{of_batches}?status__exact=COMPLETED"),
        ("batch", f"{of_batches}{batch_id}/change/"),
        ("commands", of_commands),
        ("command by id", f"{of_commands}?q={sent.command_id}"),
        ("commands of a batch", f"{of_commands}?q={batch_id}"),
        ("command of a task", f"{of_commands}?q=t:1"),
        ("in troubleshooting", f"{of_commands}?waits=troubleshooting"),
        ("nothing", f"{of_commands}?q=nothing"),
    ):
        answer = client.get(path)
        listed = answer.context and answer.context.get("cl")
        found[name] = (answer.status_code, listed and sorted(str(one.pk) for one in listed.queryset))
    number = (
        connection.cursor()
        .execute("SELECT id FROM busload.command WHERE command_id = %s", [sent.command_id])
        .fetchone()[0]
    )
    page = client.get(f"{of_commands}{number}/change/")
    found["command"] = (page.status_code, None)
    found["escaped"] = "<b>broken</b>" not in client.get(f"{of_commands}?q=t:1").content.decode()
    found["refused"] = [
        client.post(f"{of_commands}{number}/delete/", {"post": "yes"}).status_code,
        client.post(f"{of_commands}add/", {}).status_code,
        client.post(f"{of_commands}{number}/change/", {"status": "COMPLETED"}).status_code,
    ]
    found["ids"] = {"batch": str(batch_id), "sent": number}
    found["readyz"] = [client.get("/readyz").status_code, client.get("/readyz").json()]
    found["healthz"] = [client.get("/healthz").status_code, client.post("/healthz").status_code]
    delete_all_commands()
    found["deleted"] = len(bus.list_commands("shop"))
    bus.send("shop", "ShipOrder", {"order": 8})
    found["still works"] = run_commands()
    return found


def worker_in_a_loop() -> str:
    async def run() -> str:
        try:
            call_command("busload_worker")
        except CommandError as error:
            return f"{error.returncode} {error}"
        return "it ran"

    return asyncio.run(run())


def command_line() -> dict[str, Any]:
    batch_id = bus.create_batch("shop", [BatchCommand("ShipOrder", data={"order": 1})])
    said = json.loads(call("busload", "batch", "show", str(batch_id), "--json"))
    found = {"batch": said["batch_id"] == str(batch_id), "help": "troubleshooting" in call("busload", "help")}
    for name, *words in (
        ("worker", "worker", "shop.handlers:bus"),
        ("unknown", "troubleshooting", "show", "0000"),
        ("usage", "batches"),
    ):
        try:
            call("busload", *words)
        except CommandError as error:
            found[name] = f"{error.returncode} {error}"
    delete_all_commands()
    return found


def worker_of_no_bus() -> str:
    with override_settings(BUSLOAD={"BUS": "shop.nowhere:bus"}):
        try:
            call_command("busload_worker")
        except CommandError as error:
            return f"{error.returncode} {error}"
    return "it ran"


def worker_with_a_wrong_option() -> str:
    try:
        call_command("busload_worker", "--concurrency", "none")
    except CommandError as error:
        return f"{error.returncode} {error}"
    return "it ran"


async def from_a_view_that_is_async() -> str:
    """Models and the bus are called in a thread there, as Django has it."""
    sent = await sync_to_async(bus.send)("shop", "ShipOrder", {"order": 9})
    command = await sync_to_async(bus.get_command)("shop", sent.command_id)
    return "" if command is None else command.status


class UndoError(Exception):
    """Rolls a block back."""


TABLES = """
SELECT pg_catalog.string_agg(pg_catalog.format('SELECT %L, t::text FROM %s AS t', relname, oid::regclass), ' UNION ')
  FROM pg_catalog.pg_class WHERE relnamespace = 'busload'::regnamespace AND relkind = 'r'
"""


def committed(statement: str) -> list[Any]:
    """What another connection sees."""
    with psycopg.connect(os.environ["BUSLOAD_DATABASE_URL"], autocommit=True) as conn:
        return conn.execute(statement.encode()).fetchall()


def contents() -> list[Any]:
    """All rows of our tables, as another connection sees them."""
    return sorted(committed(committed(TABLES)[0][0]))


def sent() -> list[str]:
    """The commands that are committed, by their type."""
    found = committed("SELECT command_type FROM busload.command ORDER BY command_type")
    delete_all_commands()
    return [command_type for (command_type,) in found]


def belongs_to_the_block(write: Callable[[], Any]) -> list[bool]:
    """Whether nobody sees it before the commit, a rollback undoes it, and a commit keeps it."""
    before = contents()
    with suppress(UndoError), transaction.atomic():
        write()
        hidden = contents() == before
        raise UndoError
    undone = contents() == before
    with transaction.atomic():
        write()
    return [hidden, undone, contents() != before]


def whatever_is_written() -> dict[str, list[bool]]:
    one, events = [BatchCommand("ShipOrder", data={"order": 1})], bus.buffer("events")
    events.add({"first": 1})
    bus.send("shop", "Break")
    run_commands()
    [stuck] = bus.troubleshooting.list("shop")
    batch_id = bus.create_batch("shop", one)

    def fill() -> None:
        with bus.open_batch("shop", checkpoint_size=1) as batch:
            batch.add("ShipOrder", {"order": 1})
            batch.add("ShipOrder", {"order": 2})

    writes: dict[str, Callable[[], Any]] = {
        "send": partial(bus.send, "shop", "ShipOrder", {"order": 1}),
        "send_many": partial(bus.send_many, "shop", one),
        "create_batch": partial(bus.create_batch, "shop", one),
        "open_batch": fill,
        "handle": partial(count.send, items=1),
        "buffer": partial(events.add, {"second": 2}),
        "jobs.create": partial(bus.jobs.create, "shop", [Stage("one", one)]),
        "troubleshooting.retry": partial(bus.troubleshooting.retry, "shop", stuck.command_id),
        "domains.pause": partial(bus.domains.pause, "shop", reason="because"),
        "cancel_batch": partial(bus.cancel_batch, "shop", batch_id, reason="because"),
    }
    return {name: belongs_to_the_block(write) for name, write in writes.items()}


def whatever_is_read() -> dict[str, bool]:
    """Whether a read in a block, on the connection that Django has set up, finds the same as one outside of it."""
    headers = {"of": "a test"}
    sent = bus.send("shop", "Count", {"items": 3}, task_key="t:1", headers=headers, delay=timedelta(hours=1))
    batch_id = bus.create_batch("shop", [BatchCommand("Break", data={"a": [1.5, None]})], custom_data={"b": "ü"})
    job_id = bus.jobs.create("shop", [Stage("one", [BatchCommand("Break")])], custom_data={"c": 1})
    events = bus.buffer("events")
    events.add({"first": 1})
    run_commands()
    reads: dict[str, Callable[[], Any]] = {
        "get_command": partial(bus.get_command, "shop", sent.command_id),
        "list_commands": partial(bus.list_commands, "shop"),
        "get_audit_trail": partial(bus.get_audit_trail, "shop", sent.command_id),
        "get_batch": partial(bus.get_batch, "shop", batch_id),
        "list_batches": partial(bus.list_batches, "shop"),
        "explain_batch": lambda: [one.code for one in bus.explain_batch("shop", batch_id).reasons],
        "jobs.get": partial(bus.jobs.get, "shop", job_id),
        "jobs.list": partial(bus.jobs.list, "shop"),
        "troubleshooting.list": partial(bus.troubleshooting.list, "shop"),
        "buffers": lambda: [one.name for one in bus.buffers.list()],
        "trace": partial(bus.trace, "t:1"),
    }
    found = {}
    for name, read in reads.items():
        with transaction.atomic():
            in_block = read()
        found[name] = bool(in_block) and in_block == read()
    return found


def joining() -> dict[str, Any]:
    """What becomes of what is sent without `conn`, in and out of a transaction of Django."""
    found: dict[str, Any] = {"whatever": whatever_is_written()}
    delete_all_commands()
    found["same"] = whatever_is_read()
    delete_all_commands()

    with transaction.atomic():
        bus.send("shop", "Kept")
        with suppress(UndoError), transaction.atomic():
            bus.send("shop", "Undone")
            raise UndoError
        with transaction.atomic():
            bus.send("shop", "KeptToo")
    found["savepoint"] = sent()

    with suppress(UndoError), transaction.atomic(using="second"):
        bus.send("shop", "Sent")
        raise UndoError
    connections["second"].close()
    found["other alias"] = sent()

    transaction.set_autocommit(False)
    bus.send("shop", "Undone")
    transaction.rollback()
    bus.send("shop", "Kept")
    transaction.commit()
    transaction.set_autocommit(True)
    with override_settings(BUSLOAD={"BUS": "shop.bus:bus", "DATABASE": "manual"}):
        bus.send("shop", "Undone")
        transaction.rollback(using="manual")
        connections["manual"].close()
    found["without autocommit"] = sent()

    connection.close()
    bus.send("shop", "Sent")
    made = connection.connection is not None
    found["outside"] = [sent(), made]

    with suppress(UndoError), transaction.atomic():
        with bus.independent():
            bus.send("shop", "Sent")
        bus.send("shop", "Undone")
        raise UndoError
    found["independent"] = sent()

    async def view() -> None:
        def sends_in_a_block() -> None:
            with suppress(UndoError), transaction.atomic():
                bus.send("shop", "Undone")
                raise UndoError
            connections.close_all()  # as at the end of a request

        await sync_to_async(sends_in_a_block)()
        await sync_to_async(bus.send)("shop", "Sent")
        bus.send("shop", "SentInTheLoop")

    asyncio.run(view())
    found["async"] = sent()

    bus.send("shop", "SendAndFail")
    run_commands()
    found["handler"] = sent()

    bus.send("shop", "Count", {"items": 1})
    run_commands()
    with suppress(UndoError), transaction.atomic():
        bus.prune(timedelta(microseconds=1))
        raise UndoError
    found["pruned"] = sent()

    with suppress(UndoError), transaction.atomic():
        command = bus.send("shop", "Count", {"items": 3})
        job_id = bus.jobs.create("elsewhere", [Stage("one", [BatchCommand("Count")])])
        batch_id = bus.create_batch("shop", [BatchCommand("Count", data={"items": 2})])
        seen = bus.get_command("shop", command.command_id), bus.jobs.get("elsewhere", job_id)
        found["reads"] = [one is not None for one in (*seen, bus.get_batch("shop", batch_id))]
        found["waits"] = []
        for wait in (
            lambda: bus.wait_command("shop", command.command_id, timeout=5),
            lambda: bus.wait_batch("shop", batch_id, timeout=5),
        ):
            try:
                wait()
            except (CommandNotFoundError, BatchNotFoundError) as error:
                found["waits"].append(type(error).__name__)
        assert_sent(bus, "shop", "Count", {"items": 3}, times=1)
        found["drained"] = drain(bus, domains=["shop"])
        raise UndoError
    found["after the test"] = sent()

    try:
        with transaction.atomic():
            with suppress(IntegrityError):
                User.objects.create(id=User.objects.get().id, username="bob")
            bus.send("shop", "Undone")
    except InvalidOperationError as error:
        found["failed block"] = str(error)
    found["after a failed block"] = sent()
    return found


def joining_with_a_broker() -> dict[str, Any]:
    own = DjangoCommandBus(transport=BreakableTransport(os.environ["BUSLOAD_DATABASE_URL"]))
    commands, found = [BatchCommand("Carried")] * 2, dict[str, Any]()
    waits = "SELECT count(*) FROM busload.outbox"
    with transaction.atomic():
        in_block = own.create_batch("carried", commands)
        with own.open_batch("carried") as batch:
            batch.add("Carried")
        try:
            own.create_batch("carried", commands, dispatch="two_phase")
        except InvalidCommandError as error:
            found["refused"] = str(error)
        found["before the commit"] = committed(waits)[0][0]
    found["after the commit"] = committed(waits)[0][0]
    alone = own.create_batch("carried", commands)
    reports = [own.get_dispatch("carried", one) for one in (in_block, alone)]
    found["strategies"] = [report and report.strategy for report in reports]
    with broker_down(own):
        own.create_batch("carried", commands)
    with transaction.atomic():
        own.recover()
        found["recovered"] = committed(waits)[0][0]
    own.close()
    delete_all_commands()
    return found


NOWHERE = "host=127.0.0.1 port=1 dbname=elsewhere"


def redirected() -> dict[str, Any]:
    """As a test of the application redirects it. What it does there never reaches the database of DATABASES."""
    found, before = dict[str, Any](), committed("SELECT count(*) FROM busload.command")
    with bus.redirected(NOWHERE):
        found["dsn"] = bus.dsn
        try:
            bus.send("shop", "Elsewhere")
        except DatabaseUnavailableError as error:
            found["sent"] = str(error)
    found["back"] = NOWHERE not in bus.dsn and bus.list_batches("shop") is not None
    found["written"] = committed("SELECT count(*) FROM busload.command") != before
    return found


TOLD = {
    "known": KNOWN,
    "schema": schema(),
    "settings": wrong_settings(),
    "pages": pages(),
    "worker in a loop": worker_in_a_loop(),
    "worker of no bus": worker_of_no_bus(),
    "worker with a wrong option": worker_with_a_wrong_option(),
    "command line": command_line(),
    "async": asyncio.run(from_a_view_that_is_async()),
    "joining": joining(),
    "joining with a broker": joining_with_a_broker(),
    "redirected": redirected(),
}
delete_all_commands()
bus.close()
json.dump(TOLD, sys.stdout, default=str)
