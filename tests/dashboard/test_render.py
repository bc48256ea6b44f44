"""What every page is made of: static files, templates without sinks, data and sentences."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

import busload.dashboard
from busload.dashboard.pages.overview import GAP
from busload.dashboard.render import MASKED, masked, prose
from busload.health.overview import Overview, Rates

FOLDER = Path(busload.dashboard.__file__).parent
OURS = [path for path in FOLDER.rglob("*") if path.suffix in (".html", ".js", ".py") and ".min." not in path.name]


def test_files_from_outside_are_the_ones_that_were_taken() -> None:
    text = (FOLDER / "static/VENDORED.txt").read_text()
    known = dict(re.findall(r"^([0-9a-f]{64})  (\S+)", text, re.M))
    found = {hashlib.sha256(path.read_bytes()).hexdigest(): path.name for path in FOLDER.glob("static/*.min.*")}
    assert found == known
    licences = {path.name.partition(".")[0] for path in FOLDER.glob("static/*.LICENSE.txt")}
    assert licences == {name.partition(".")[0] for name in known.values()}


@pytest.mark.parametrize(
    "sink",
    [
        "|safe",
        "| safe",
        "innerHTML",
        "outerHTML =",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "autoescape false",
        "hx-on",
        "javascript:",
    ],
)
def test_no_file_has_a_way_for_data_to_become_a_program(sink: str) -> None:
    assert OURS
    found = [path.name for path in OURS if sink in path.read_text().replace('hx-swap="outerHTML"', "")]
    assert found == []


def test_templates_have_no_inline_script_or_style() -> None:
    for path in FOLDER.glob("templates/*.html"):
        text = path.read_text()
        assert not re.search(r"\sstyle=|<style|\son\w+=", text), path.name
        assert not re.search(r"<script(?! src=)", text), path.name


def test_no_file_names_another_host() -> None:
    for path in [*OURS, FOLDER / "static/app.css"]:
        hosts = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text())
        assert [host for host in hosts if "www.w3.org" not in host] == [], path.name


def test_what_stands_between_backticks_is_code() -> None:
    assert prose("Run `busload <x>` now & then") == Markup("Run <code>busload &lt;x&gt;</code> now &amp; then")
    assert prose("a ` b <c>") == Markup("a ` b &lt;c&gt;")


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({"password": "x", "PassWord2": 1}, {"password": MASKED, "PassWord2": MASKED}),
        ([{"a": [{"my_password": {"b": 1}}]}], [{"a": [{"my_password": MASKED}]}]),
        ({"op": "add", "path": "/my_password", "value": 1}, {"op": "add", "path": "/my_password", "value": MASKED}),
        (
            [{"op": "add", "path": "/x/password~1a/0", "value": [1]}],
            [{"op": "add", "path": "/x/password~1a/0", "value": MASKED}],
        ),
        (
            {"op": "add", "path": "/x", "value": {"password": 1}},
            {"op": "add", "path": "/x", "value": {"password": MASKED}},
        ),
        ({"op": "add", "path": "/x", "value": 1}, {"op": "add", "path": "/x", "value": 1}),
        ({"path": "/password", "value": 1}, {"path": "/password", "value": 1}),
        ("password", "password"),
        (None, None),
        ({"pass": {"word": 1}}, {"pass": {"word": 1}}),
    ],
)
def test_keys_are_masked_at_any_depth(data: Any, shown: Any) -> None:
    assert masked(data, ["*password*"]) == shown


def overview(seconds: float, sent: int, attempts: int) -> Overview:
    at = datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    return Overview(at, None, None, None, 0, 0, 0, sent, attempts, ())


def test_rates_are_over_the_last_seconds() -> None:
    rates = Rates()
    assert rates.of(overview(0, 100, 0)) is None
    assert rates.of(overview(0.5, 200, 0)) is None
    assert rates.of(overview(10, 300, 50)) == (20, 5)
    for second in range(11, 40):
        rates.of(overview(second, 300, 50))
    assert rates.of(overview(40, 300, 50)) == (0, 0)


def test_rates_begin_again_where_the_server_counts_anew() -> None:
    rates = Rates()
    rates.of(overview(0, 1000, 1000))
    assert rates.of(overview(5, 0, 0)) is None
    assert rates.of(overview(7, 20, 10)) == (10, 5)


def test_rates_begin_again_where_nobody_has_looked_for_long() -> None:
    """Who opens a page in the morning sees how fast it is now, and not the average of the night."""
    rates = Rates(GAP)
    rates.of(overview(0, 0, 0))
    rates.of(overview(1, 100, 100))
    assert rates.of(overview(46, 1000, 100)) == (20, 0)
    assert rates.of(overview(3646, 37_000, 100)) is None
    assert rates.of(overview(3648, 37_010, 104)) == (5, 2)
