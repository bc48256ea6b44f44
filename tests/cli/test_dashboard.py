"""`busload dashboard` at a shell: it serves, makes users, and refuses to be open to everybody."""

from __future__ import annotations

import base64
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from busload.dashboard.access import Users
from tests.cli.conftest import Busload, Spawn, Until
from tests.given import Given

ADDRESS = re.compile(r"http://[\w.\[\]:]+/")


@pytest.fixture(autouse=True)
def no_users_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUSLOAD_DASHBOARD_USERS", raising=False)


@pytest.fixture
def served(spawn: Spawn, until: Until, tmp_path: Path) -> Iterator[str]:
    """The address of a dashboard in a process of its own, which ends well when it is told to."""
    process = spawn("dashboard", "--port", 0)
    said = tmp_path / "said.txt"
    until(lambda: ADDRESS.search(said.read_text()))
    found = ADDRESS.search(said.read_text())
    assert found is not None
    address = found[0].replace("localhost", "127.0.0.1")
    until(lambda: _answers(address))
    yield address
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) in (0, 130), said.read_text()
    assert "Traceback" not in said.read_text()


def _answers(address: str) -> bool:
    try:
        return httpx.get(address).status_code == 200
    except httpx.TransportError:
        return False


async def test_it_serves_this_machine(given: Given, served: str) -> None:
    await given.batch(name="January")
    assert "January" in httpx.get(f"{served}batches").text
    assert httpx.get(served, headers={"Host": "evil.example"}).status_code == 421


def test_it_ends_though_a_page_is_live(served: str) -> None:
    with httpx.stream("GET", f"{served}live", timeout=60) as answer:
        assert next(answer.iter_lines()) == "event: values"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "ops.example.com"])
def test_it_does_not_start_where_others_could_reach_it_without_users(offline: Busload, host: str) -> None:
    result = offline("dashboard", "--host", host)
    assert result.exit_code == 2
    assert "the dashboard has no users. Make one with `busload dashboard user NAME --role operator`" in result.stderr


def test_wrong_users_are_refused_at_the_start(offline: Busload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_DASHBOARD_USERS", "ada:king:x")
    result = offline("dashboard")
    assert result.exit_code == 2
    assert "wanted name:role:hash" in result.stderr


def test_a_port_in_use_is_named(offline: Busload) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = offline("dashboard", "--port", taken.getsockname()[1])
    assert result.exit_code == 1
    assert "Choose another --port" in result.stderr


async def test_a_user_that_was_made_can_sign_in(offline: Busload) -> None:
    from starlette.requests import Request

    made = json.loads(offline("dashboard", "user", "ada", "--role", "operator", "--json").stdout)
    assert made["secret"] not in made["entry"]
    users = Users.read(made["entry"])
    assert users is not None
    basic = base64.b64encode(f"ada:{made['secret']}".encode())
    found = await users(Request({"type": "http", "headers": [(b"authorization", b"Basic " + basic)]}))
    assert found is not None and (found.name, found.role) == ("ada", "operator")


def test_a_user_is_shown_once_with_what_to_do(offline: Busload) -> None:
    said = offline("dashboard", "user", "ada").stdout
    assert "shown only now" in said
    assert "Add this entry to BUSLOAD_DASHBOARD_USERS" in said
    assert re.search(r"^ada:reader:scrypt\$\S+\$\S+$", said, re.M)


def test_a_name_that_cannot_be_is_refused(offline: Busload) -> None:
    result = offline("dashboard", "user", "a:b")
    assert result.exit_code == 2
    assert "wanted up to 64 letters" in result.stderr


@pytest.mark.timeout(300)
def test_the_demo_can_be_watched_in_a_browser(spawn: Spawn, until: Until, tmp_path: Path) -> None:
    process = spawn("demo", "--commands", 100, "--dashboard")
    said = tmp_path / "said.txt"
    until(lambda: "Ctrl-C stops the dashboard" in said.read_text(), 200)
    found = ADDRESS.search(said.read_text())
    assert found is not None
    until(lambda: _answers(found[0]))
    assert "100 invoices" in httpx.get(f"{found[0]}batches").text
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    until(lambda: not _answers(found[0]))


def test_the_demo_is_for_people_or_for_programs(busload: Busload) -> None:
    assert "choose one of them" in busload("demo", "--dashboard", "--json").stderr


HIDDEN = """
import sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hides())
{code}
"""


def without(missing: str, code: str) -> str:
    """What a program says that ends because a module is not installed."""
    words = [sys.executable, "-c", HIDDEN.format(missing=missing, code=code)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode, ran.stdout
    return ran.stderr


@pytest.mark.parametrize("missing", ["jinja2", "starlette"])
@pytest.mark.parametrize(
    "code",
    [
        "from busload.dashboard import app",
        "from busload.cli import main; main(['dashboard'])",
        "from busload.cli import main; main(['dashboard', 'user', 'ada'])",
    ],
)
def test_without_its_extra_the_error_says_what_to_install(missing: str, code: str) -> None:
    told = without(missing, code)
    said = f"Error: {missing} is not installed. Run: pip install 'busload[dashboard]'"
    assert told.splitlines()[-1].endswith(said), told
    assert ("Traceback" in told) == ("cli" not in code)


def test_another_module_that_is_missing_is_named_as_it_is() -> None:
    told = without("busload.dashboard.access", "import busload.dashboard")
    assert told.endswith("ModuleNotFoundError: No module named 'busload.dashboard.access'\n")
