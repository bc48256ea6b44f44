"""Handlers that use Django's ORM in the threads of a worker, written as docs/handlers.md shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs/handlers.md"

APPLICATION = """
import asyncio, functools, os, time
from collections.abc import Callable
from typing import TypeVar

import django
import psycopg
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

from busload import Command, SyncCommandBus, SyncHandlerContext, Worker

T = TypeVar("T")
dsn = os.environ["BUSLOAD_DATABASE_URL"]
found = conninfo_to_dict(dsn)
place = {"HOST": found["host"], "PORT": found["port"], "USER": found["user"], "NAME": found["dbname"],
         "OPTIONS": {"application_name": "django"}}
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **place}})
django.setup()
from django.db import connection, models


class Order(models.Model):
    shipped = models.BooleanField(default=False)

    class Meta:
        app_label = "shop"
        db_table = "shop_order"


bus = SyncCommandBus()
DOCUMENTED

def send():
    sent = bus.send("shop", "Ship", {"order": Order.objects.create().id}, max_attempts=1)
    while not bus.get_command("shop", sent.command_id).status in ("COMPLETED", "IN_TROUBLESHOOTING_QUEUE"):
        time.sleep(0.01)
    connection.close()
    with psycopg.connect(dsn, autocommit=True) as conn:  # as an outage does
        conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'django'")


async def main():
    async with Worker(bus, threads=1):
        for _ in range(2):
            await asyncio.to_thread(send)


with bus:
    with connection.schema_editor() as editor:
        editor.create_model(Order)
    connection.close()
    asyncio.run(main())
    print([order.shipped for order in Order.objects.order_by("id")])
"""


def run(dsn: str, documented: str) -> str:
    environment = {**os.environ, "BUSLOAD_DATABASE_URL": dsn}
    command = [sys.executable, "-c", APPLICATION.replace("DOCUMENTED", documented)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_handler_wrapped_as_documented_outlives_the_connections_of_django(dsn: str) -> None:
    [documented] = re.findall(r"```python\n(from django.db import .*?)```", PAGE.read_text(), re.DOTALL)
    assert run(dsn, documented) == "[True, True]"
