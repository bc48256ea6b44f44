"""What a Django project does with busload, told by a process of its own: Django has one configuration per process.

It is run in examples/django_shop, and prints what it has found as JSON.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from contextlib import redirect_stdout, suppress
from typing import Any

import django
import psycopg
from asgiref.sync import sync_to_async

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.integrations.django_story_settings"
django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.core.checks import run_checks  # noqa: E402
from django.core.management import CommandError, call_command  # noqa: E402
from django.db import connection, transaction  # noqa: E402
from django.db.migrations.recorder import MigrationRecorder  # noqa: E402
from django.test import Client, override_settings  # noqa: E402
from django.test.utils import setup_test_environment  # noqa: E402
from shop.bus import bus  # noqa: E402

from busload import BatchCommand, Command, PermanentCommandError, SyncHandlerContext  # noqa: E402
from busload.integrations.django_app.testing import delete_all_commands, run_commands  # noqa: E402
from busload.postgres.schema.migrate import MIGRATIONS, script  # noqa: E402

KNOWN = [f"{domain}/{name}" for domain, name in bus.handlers.names]
"""What a web process knows, which imports only the bus."""


@bus.handler("shop", "Break")
def break_it(command: Command, ctx: SyncHandlerContext) -> None:
    raise PermanentCommandError("It is <b>broken</b>.", code="BROKEN")


@bus.handler("shop", "Count")
def count(ctx: SyncHandlerContext, items: int) -> int:
    return items


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
}
delete_all_commands()
bus.close()
json.dump(TOLD, sys.stdout, default=str)
