"""For tests of a Django project: the bus is on the test database, as models are; here is what else they need."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from django.db import connections
from django.test import TransactionTestCase

from busload.integrations.django_app.conf import configuration, load_bus
from busload.worker import Worker

_KEPT = ("migration", "turn", "order_sweep", "identity")
"""Tables whose rows belong to the schema."""

_TABLES = """
SELECT pg_catalog.string_agg(c.oid::pg_catalog.regclass::text, ', ')
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = 'busload' AND c.relkind IN ('r', 'p') AND c.relname <> ALL (%s)
"""


def run_commands() -> int:
    """Run whatever is ready or due, by a real worker, and return how many attempts there were.

    It sees what is committed. So use it in a `TransactionTestCase`, or call handlers directly in a `TestCase`.
    """
    answers: list[Any] = []

    def drain() -> None:  # in a thread: the test may have an event loop
        try:
            answers.append(asyncio.run(Worker(load_bus()).drain()))
        except BaseException as error:
            answers.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=drain, name="busload-drain")
    thread.start()
    thread.join()
    [answer] = answers
    if isinstance(answer, BaseException):
        raise answer
    return int(answer)


def delete_all_commands() -> None:
    """Delete all commands, batches and events of the test database."""
    with connections[configuration().database].cursor() as cursor:
        cursor.execute(_TABLES, [list(_KEPT)])
        cursor.execute(f"TRUNCATE {cursor.fetchone()[0]}")


class CommandsTestCase(TransactionTestCase):
    """A `TransactionTestCase` that also deletes all commands at the end of each test, and closes the bus."""

    def _fixture_teardown(self) -> None:
        load_bus().close()  # whose connections would keep the test database from being dropped
        delete_all_commands()
        super()._fixture_teardown()
