"""Numbers of things, for people."""

from __future__ import annotations

import re
from pathlib import Path

import busload
from busload.commands.wording import counted, per_second

SOURCES = Path(busload.__file__).parent
NOUNS = "commands|batches|events|items|results|leases|tasks|executions|attempts|flushes|loads|groups|workers|rows"
UNCOUNTED = re.compile(rf"(?<!of )(?:%d|\{{[^{{}}]*(?:len\([^{{}}]*\)|count|total)(?::,)?\}}) (?:more )?(?:{NOUNS})\b")
"""A number that is followed by a plural, whatever the number is."""


def test_one_is_one_and_all_else_is_several() -> None:
    assert [counted(n, "command") for n in (0, 1, 2, 1000)] == [
        "0 commands",
        "1 command",
        "2 commands",
        "1,000 commands",
    ]
    assert [counted(n, "batch is", "batches are") for n in (1, 2)] == ["1 batch is", "2 batches are"]


def test_a_rate_of_one_is_one_a_second() -> None:
    assert [per_second(rate, "call") for rate in (0.5, 1.0, 0.9999, 12.5, 12345.6)] == [
        "0.5 calls a second",
        "1 call a second",
        "1 call a second",
        "12.5 calls a second",
        "1.23e+04 calls a second",
    ]


def test_no_message_speaks_of_one_as_of_several() -> None:
    found = [
        f"{path.relative_to(SOURCES)}: {one}"
        for path in sorted(SOURCES.rglob("*.py"))
        for one in UNCOUNTED.findall(path.read_text())
    ]
    assert found == []
