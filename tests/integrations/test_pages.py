"""What the pages about frameworks show works at the first try."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from litestar.testing import AsyncTestClient
from psycopg.conninfo import conninfo_to_dict

from busload import HandlerContext
from busload.testing import TestServer
from tests.given import Database, until
from tests.integrations.servers import ROOT, running, serving
from tests.integrations.test_fastapi import client
from tests.test_examples import blocks


def shown(page: str) -> list[str]:
    """The Python of a page, block by block."""
    return [block.text for block in blocks(ROOT / "docs" / page) if block.language == "python"]


@pytest.fixture
def application(request: pytest.FixtureRequest, server: TestServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names of the application that a page begins with, on an empty database."""
    with server.database(migrated=False) as dsn:
        monkeypatch.setenv("BUSLOAD_DATABASE_URL", dsn)
        module = ModuleType("app")
        monkeypatch.setitem(sys.modules, "app", module)
        page, _, part = request.param.partition(" ")
        exec(next(block for block in shown(page) if part in block), module.__dict__)
        yield vars(module)


async def _ships(http: Any) -> None:
    sent = await http.post("/orders/7")
    assert sent.status_code == 202, sent.text

    async def look() -> dict[str, Any]:
        found: httpx.Response = await http.get(f"/commands/{sent.json()['command_id']}")
        answer: dict[str, Any] = found.json()
        return answer

    found = await look()
    while found["status"] != "COMPLETED":
        found = await look()
    assert found == {"status": "COMPLETED", "result": {"shipped": 7}}
    assert (await http.get("/readyz")).json() == {"state": "HEALTHY", "reasons": []}


@pytest.mark.parametrize("application", ["fastapi.md"], indirect=True)
async def test_the_application_of_the_page_about_fastapi_works(application: dict[str, Any]) -> None:
    async with client(application["app"]) as http:
        await _ships(http)


@pytest.mark.parametrize("application", ["fastapi.md"], indirect=True)
async def test_data_that_does_not_fit_is_answered_as_the_page_about_fastapi_shows(application: dict[str, Any]) -> None:
    async def pay(cents: int, ctx: HandlerContext) -> None: ...

    async def payment(cents: Any) -> None:
        await application["bus"].send("shop", "Pay", cents)

    application["bus"].handler("shop", "Pay")(pay)
    application["app"].post("/payments/{cents}")(payment)
    exec(next(block for block in shown("fastapi.md") if "exception_handler" in block), application)
    async with client(application["app"]) as http:
        answer = await http.post("/payments/ten")
        assert (answer.status_code, answer.json()) == (
            422,
            {"detail": [{"path": "/data", "message": "does not fit int: Expected `int`, got `str`"}]},
        )


@pytest.mark.parametrize("application", ["fastapi.md sqlalchemy"], indirect=True)
async def test_the_application_with_sqlalchemy_on_the_page_about_fastapi_works(application: dict[str, Any]) -> None:
    async with client(application["app"]) as http:
        sent = await http.post("/orders")
        assert sent.status_code == 202, sent.text
        while not (found := (await http.get(f"/orders/{sent.json()['order']}")).json())["shipped"]:
            pass
    assert (sent.json(), found) == ({"order": 1}, {"shipped": True})


@pytest.mark.parametrize("application", ["litestar.md"], indirect=True)
async def test_the_application_of_the_page_about_litestar_works(application: dict[str, Any]) -> None:
    async with AsyncTestClient(application["app"]) as http:
        await _ships(http)


@pytest.mark.parametrize("application", ["flask.md"], indirect=True)
def test_the_application_of_the_page_about_flask_works(application: dict[str, Any]) -> None:
    app = application["create_app"]()
    assert "Applied" in app.test_cli_runner().invoke(args=["busload", "migrate"]).output
    http = app.test_client()
    try:
        sent = http.post("/orders/7").json
        until(lambda: http.get(f"/commands/{sent['command_id']}").json["status"] == "COMPLETED")
        assert http.get(f"/commands/{sent['command_id']}").json["result"] == {"shipped": 7}
    finally:
        application["busload"].stop_worker()
        application["bus"].close()


FILES = ("shop/models.py", "shop/bus.py", "shop/handlers.py", "shop/views.py", "mysite/urls.py")
FILES_OF_CELERY = ("mysite/celery.py", "mysite/__init__.py", "shop/tasks.py", "shop/handlers.py")


class DjangoProject:
    """The project that the page about Django begins with, in a folder of its own, on an empty database."""

    def __init__(self, path: Path, dsn: str) -> None:
        self.path, self.dsn = path, dsn
        begin = "from django.core.management import execute_from_command_line as run\n"
        self.python("-c", begin + "run(['', 'startproject', 'mysite', '.']); run(['', 'startapp', 'shop'])")
        settings, *files = shown("django.md")
        place = {name.upper(): value for name, value in conninfo_to_dict(dsn).items() if name != "dbname"}
        named = f'"NAME": "{conninfo_to_dict(dsn)["dbname"]}", **{place!r}'
        assert '"NAME": "shop"' in settings
        with (path / "mysite/settings.py").open("a") as end:
            end.write(settings.replace('"NAME": "shop"', named))
        self.write(dict(zip(FILES, files, strict=False)))

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.path / name).write_text(text)

    def write_celery(self) -> None:
        blocks = shown("celery.md")
        at = next(number for number, block in enumerate(blocks) if "autodiscover_tasks" in block)
        self.write(dict(zip(FILES_OF_CELERY, blocks[at : at + len(FILES_OF_CELERY)], strict=True)))

    def python(self, *words: str, quiet: bool = True) -> str:
        own = {**os.environ, "PYTHONWARNINGS": "error"}
        own.pop("BUSLOAD_DATABASE_URL", None)
        command = [sys.executable, *words]
        ran = subprocess.run(command, cwd=self.path, env=own, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        assert not (quiet and ran.stderr), ran.stderr
        return ran.stdout

    def migrate(self) -> None:
        self.python("manage.py", "makemigrations", "shop")
        self.python("manage.py", "migrate")


@pytest.fixture
def project(server: TestServer, tmp_path: Path) -> Iterator[DjangoProject]:
    with server.database(migrated=False) as dsn:
        yield DjangoProject(tmp_path, dsn)


def test_the_project_of_the_page_about_django_works(project: DjangoProject) -> None:
    told = json.loads(project.python(str(ROOT / "tests/integrations/django_page.py")).splitlines()[-1])
    assert told == [202, 1, {"shipped": True}, 200]


def test_the_celery_of_a_django_project_goes_through_the_bridge_as_the_page_shows(project: DjangoProject) -> None:
    """Django starts with the bridge, and so does Celery, which starts Django; a worker of the project runs a task."""
    project.write_celery()
    project.migrate()
    assert "no issues" in project.python("manage.py", "check", "--fail-level", "WARNING")
    domains = "from shop.handlers import bus; print(bus.handlers.names)"
    as_celery_does = f"from mysite.celery import app; app.loader.import_default_modules(); {domains}"
    assert project.python("-c", as_celery_does) == "[('celery', 'shop.tasks.ship_order')]\n"
    send = (
        "from shop.models import *; from shop.tasks import *; ship_order.delay(Order.objects.create(item='kettle').id)"
    )
    project.python("manage.py", "shell", "-c", send)
    with (
        running(["manage.py", "busload_worker"], project.dsn, project.path / "said.txt", cwd=project.path),
        Database(project.dsn) as database,
    ):
        until(lambda: database.value("SELECT status FROM busload.command_status") == "COMPLETED")
        assert database.rows("SELECT shipped FROM shop_order") == [(True,)]


def test_staff_of_a_django_project_see_the_dashboard_as_the_page_shows(project: DjangoProject) -> None:
    project.write({"mysite/asgi.py": next(block for block in shown("django.md") if "who(request)" in block)})
    project.migrate()
    users = "create_superuser('ada', password='x')", "create_user('grace', password='x', is_staff=True)"
    make = [f"User.objects.{one}" for one in (*users, "create_user('eve', password='x')")]
    project.python("manage.py", "shell", "-c", f"from django.contrib.auth.models import User; {'; '.join(make)}")
    words, said = ["-m", "uvicorn", "mysite.asgi:application", "--port", "PORT"], project.path / "said.txt"
    found = {}
    with serving(words, project.dsn, said, cwd=project.path) as site:
        assert site.get("/ops/busload/").status_code == 401
        assert site.post("/orders", data={"item": "kettle"}).status_code == 202
        host = {"Origin": str(site.base_url), "X-Busload": "1"}
        for name in ("ada", "grace", "eve"):
            site.cookies.clear()
            site.get("/admin/login/")
            form = {"username": name, "password": "x", "csrfmiddlewaretoken": site.cookies["csrftoken"]}
            assert site.post("/admin/login/", data=form).status_code == (200 if name == "eve" else 302)
            page = site.get("/ops/busload/domains")
            paused = site.post("/ops/busload/domains/pause", data={"domain": "shop", "reason": "x"}, headers=host)
            found[name] = page.status_code, name in page.text, paused.status_code
    assert found == {"ada": (200, True, 200), "grace": (200, True, 403), "eve": (401, False, 401)}, said.read_text()


BUFFER_IN_A_TRANSACTION = """
from busload.errors import CommandNotFoundError, InvalidOperationError
from busload.testing import drain
from django.test import TestCase
from shop.bus import bus
from shop.tasks import ship_order


class TransactionTest(TestCase):
    def test_events_that_are_flushed_are_not_passed_over(self):
        clicks = bus.buffer("clicks")
        clicks.handler()(lambda group, ctx: None)
        clicks.add({"page": 1})
        clicks.flush()
        with self.assertRaisesRegex(InvalidOperationError, "CommandsTestCase.* busload_django_bus"):
            drain(bus)

    def test_a_result_that_nobody_can_wait_for_says_why(self):
        self.addCleanup(bus.close)  # the wait has opened it
        with self.assertRaisesRegex(CommandNotFoundError, "the transaction which sends it is committed"):
            ship_order.delay(1).get()
"""


def test_tasks_are_tested_in_djangos_transaction_as_the_page_about_celery_shows(project: DjangoProject) -> None:
    project.write_celery()
    project.write({"shop/tests.py": next(block for block in shown("celery.md") if "TaskTest" in block)})
    project.write({"shop/test_more.py": BUFFER_IN_A_TRANSACTION})
    project.python("manage.py", "makemigrations", "shop")
    project.python("manage.py", "test", "--noinput", "--verbosity", "0", quiet=False)


TYPED = """
from busload import SyncHandlerContext
from django.http import HttpResponse
from django.urls import path
from shop.bus import bus
from shop.models import Order

@bus.handler("shop", "Pay")
def pay(cents: int, ctx: SyncHandlerContext) -> None: ...

def payment(request, cents):
    Order.objects.create(item=cents)
    bus.send("shop", "Pay", int(cents) if cents.isdigit() else cents)
    return HttpResponse(status=202)

urlpatterns.append(path("payments/<cents>", payment))
"""


def test_data_that_does_not_fit_is_answered_as_the_page_about_django_shows(project: DjangoProject) -> None:
    project.write({"shop/middleware.py": next(block for block in shown("django.md") if "process_exception" in block)})
    for name, more in (
        (
            "mysite/settings.py",
            'MIDDLEWARE += ["shop.middleware.RefuseData"]\nDATABASES["default"]["ATOMIC_REQUESTS"] = True\n',
        ),
        ("mysite/urls.py", TYPED),
    ):
        with (project.path / name).open("a") as end:
            end.write(more)
    project.migrate()
    ask = """
from django.test import Client
from django.test.utils import setup_test_environment
from shop.models import Order
setup_test_environment()
bad, good = (Client().get(f"/payments/{cents}") for cents in ("ten", 10))
print([bad.status_code, bad.json(), good.status_code, [one.item for one in Order.objects.all()]])
"""
    wrong = {"detail": [{"path": "/data", "message": "does not fit int: Expected `int`, got `str`"}]}
    assert project.python("manage.py", "shell", "-c", ask, quiet=False).splitlines()[-1] == str(
        [422, wrong, 202, ["10"]]
    )
