"""`PROMISES.md` names every promise with the tests that prove it, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

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


def test_a_promise_is_a_sentence() -> None:
    assert [promise for promise in promises() if not re.match(r"[A-Z`].+\.$", promise)] == []


def test_no_docstring_or_comment_cites_a_code_whose_key_is_elsewhere() -> None:
    files = [TESTS / "PROMISES.md", *TESTS.rglob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.sql")]
    cited = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if file != Path(__file__)
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if CODE.search(line) and ('"""' in line or "#" in line or "--" in line or file.suffix == ".md")
    ]
    assert cited == []
