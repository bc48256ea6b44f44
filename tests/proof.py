"""What stands behind the promises, counted where it is declared: schedules, crash points, mutants, storms.

`python -m tests.proof` writes the numbers into docs/promises.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.explorer.exhaustive import SCOPES
from tests.explorer.test_explorer import SCHEDULES
from tests.mutants.mutants import MUTANTS

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = DOCS / "promises.md"
ALL_POINTS = re.compile(r"^\| \*\*all \d+\*\* \|(?P<figures>.+)\|$", re.MULTILINE)


def crash_points() -> Iterator[tuple[int, int]]:
    """Of each table of the page about them: how many, and how many with a crash during recovery."""
    for found in ALL_POINTS.finditer((DOCS / "crash-points.md").read_text()):
        *_, points, with_recovery = (int(figure.strip(" *")) for figure in found["figures"].split("|"))
        yield points, with_recovery


def proof() -> list[tuple[str, str, int]]:
    """What is counted, where it is, and how many there are."""
    (plans, plans_twice), (publishing, publishing_twice) = crash_points()
    explored = sum(mutant.test.startswith("tests/explorer/") for mutant in MUTANTS)
    return [
        ("schedules of many actors, explored in every run", "`tests/explorer/`", sum(SCHEDULES.values())),
        ("small scopes that are explored in all orders", "`tests/explorer/`", len(SCOPES)),
        ("crash points of plans", "[table](crash-points.md#every-crash-point)", plans),
        ("the same, with a crash during recovery", "[table](crash-points.md#every-crash-point)", plans_twice),
        ("crash points of publishing", "[table](crash-points.md#every-crash-point-of-publishing)", publishing),
        (
            "the same, with a crash during recovery",
            "[table](crash-points.md#every-crash-point-of-publishing)",
            publishing_twice,
        ),
        ("mutants, each with the test that must find it", "`tests/mutants/`", len(MUTANTS)),
        ("mutants that the explorer must find", "`tests/mutants/concurrency.py`", explored),
    ]


def storms() -> Iterator[tuple[str, str, str]]:
    """Each test of `tests/chaos` that has two sizes, with both."""
    for file in sorted((TESTS / "chaos").glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for sizes in filter(None, map(_sizes, node.decorator_list)):
                    names, short, long = sizes
                    yield f"{file.parent.name}/{file.name}::{node.name}", _told(names, short), _told(names, long)


def _sizes(decorator: ast.expr) -> tuple[str, Sequence[Any], Sequence[Any]] | None:
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "short_and_long"):
        return None
    names, short, long = map(ast.literal_eval, decorator.args)
    return names, short, long


def _told(names: str, sizes: Sequence[Any]) -> str:
    parts = zip(names.split(", "), sizes, strict=True)
    return ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in parts)


def written(page: str) -> str:
    """The page with the numbers of now, each table below its mark."""
    proofs = ["| what | where | how many |", "|---|---|--:|"]
    proofs += [f"| {what} | {where} | {count:,} |" for what, where, count in proof()]
    sizes = ["| storm | in every run | in `make chaos` |", "|---|---|---|"]
    sizes += [f"| `{test}` | {short} | {long} |" for test, short, long in storms()]
    for name, lines in (("proof", proofs), ("storms", sizes)):
        mark = f"<!-- {name} -->\n"
        [old] = re.findall(rf"{mark}(?:\n(?:\|.*\n)+)?", page)
        page = page.replace(old, f"{mark}\n" + "\n".join(lines) + "\n")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
