"""`PROMISES.md` names every promise with the tests that prove it, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests import proof

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PROMISE = re.compile(r"^- (?P<promise>.+)\n(?P<tests>(?:    - .+\n)*)", re.MULTILINE)
TEST = re.compile(r"    - `(?P<path>[\w/]+\.py)::(?P<name>test_\w+)`\n")
CODE = re.compile(r"\b(?:S\d-D?\d+|S0\d\d|[BFPZ]\d\d[ab]?)\b|§|\b[Ii]ssue \d|\brule \([a-z]\)")
"""What a code of a document outside of the repository looks like."""


def promises() -> dict[str, str]:
    """Return the text of each promise with the lines that name its tests."""
    found = PROMISE.findall((TESTS / "PROMISES.md").read_text())
    assert len(found) == len(dict(found)), "no promise is made twice"
    return dict(found)


@cache
def functions(path: str) -> set[str]:
    """Return the names of all functions in a file, also those of its classes."""
    file = (ROOT if path.startswith("src/") else TESTS) / path
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def test_every_promise_has_tests_that_exist() -> None:
    for promise, lines in promises().items():
        tests = TEST.findall(lines)
        assert tests and len(tests) == lines.count("\n"), promise
        assert [f"{path}::{name}" for path, name in tests if name not in functions(path)] == [], promise


ROW = re.compile(r"^\| (?P<number>(?:S\d|P|A)-D?\d+) \| (?P<promise>[A-Z`][^|]+\.) \| (?P<tests>`[^|]+`) \|$")
NAMED = re.compile(r"`(?P<path>[\w/]+\.py)::(?P<name>test_\w+)`")
ASKED = {"S1": 51, "S2": 29, "S3": 18, "S4": 37, "S5": 22, "P": 31, "A": 7}
"""How many things each founding document asks for, the stories of the command bus, and the additions."""
REPAIRED = {"S1": 11, "S2": 6, "S3": 6, "S4": 9, "S5": 9}
"""How many defects and gaps of the documents are repaired."""


def test_every_threat_has_a_measure_and_tests_that_exist() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition("## Threat model")[2]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for threat, measure, *tests in rows:
        named = NAMED.findall(tests[0]) if tests else []
        assert measure and named, threat
        assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == [], threat


def test_everything_that_the_founding_documents_asked_for_has_a_test() -> None:
    """Each number stands once, in a row of its own, with tests that exist."""
    assert sum(count for document, count in ASKED.items() if document.startswith("S")) == 157
    lines = [line for line in (TESTS / "PROMISES.md").read_text().splitlines() if re.match(r"\| [A-Z]", line)]
    assert [line for line in lines if not ROW.match(line)] == []
    rows = [row for line in lines if (row := ROW.match(line))]
    numbers = Counter(row["number"] for row in rows)
    asked = {
        f"{document}-{number:0{1 if document == 'A' else 2}}"
        for document, count in ASKED.items()
        for number in range(1, count + 1)
    }
    repaired = {f"{document}-D{number}" for document, count in REPAIRED.items() for number in range(1, count + 1)}
    assert set(numbers) == asked | repaired and set(numbers.values()) == {1}
    for row in rows:
        tests = NAMED.findall(row["tests"])
        assert row["tests"] == " ".join(f"`{path}::{name}`" for path, name in tests)
        assert [f"{path}::{name}" for path, name in tests if name not in functions(path)] == [], row["number"]


def sections_of_the_page() -> dict[str, str]:
    """What docs/promises.md says about each promise, by its heading."""
    told = (ROOT / "docs/promises.md").read_text().partition("## The promises\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^### (.+)\n((?:(?!### ).*\n?)*)", told, re.MULTILINE))


def test_the_page_of_promises_says_of_each_what_would_break_it_and_names_tests_that_exist() -> None:
    for promise, told in sections_of_the_page().items():
        assert "- **What would break it:** " in told and NAMED.search(told), promise
    named = NAMED.findall((ROOT / "docs/promises.md").read_text())
    assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == []


def test_every_promise_of_the_readme_is_on_the_page() -> None:
    table = (ROOT / "README.md").read_text().partition("| promised | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    promised = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert len(promised) >= 14
    assert {one.casefold() for one in promised} <= {heading.casefold() for heading in sections_of_the_page()}


def test_the_page_of_promises_counts_what_there_is() -> None:
    page = proof.PAGE.read_text()
    assert proof.written(page) == page, "Run `make figures`."


def test_a_promise_is_a_sentence() -> None:
    assert [promise for promise in promises() if not re.match(r"[A-Z`].+\.$", promise)] == []


def test_no_docstring_or_comment_cites_a_code_whose_key_is_elsewhere() -> None:
    files = [TESTS / "PROMISES.md", *TESTS.rglob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.sql")]
    cited = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if file != Path(__file__)
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if not ROW.match(line)  # which is the key
        and CODE.search(line)
        and ('"""' in line or "#" in line or "--" in line or file.suffix == ".md")
    ]
    assert cited == []
