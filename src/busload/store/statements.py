"""Reads the named statements of a `.sql` file: a line `-- name: claim` begins the statement `claim`."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


class Statements:
    """The statements of one file, as attributes."""

    def __init__(self, subject: str) -> None:
        text = files("busload.store").joinpath(f"{subject}.sql").read_text(encoding="utf-8")
        _, *named = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
        self.subject = subject
        self.by_name = {name: _shortened(body).encode() for name, body in zip(named[::2], named[1::2], strict=True)}

    def __getattr__(self, name: str) -> bytes:
        try:
            return self.by_name[name]
        except KeyError:
            raise AttributeError(f"{self.subject}.sql has no statement named {name!r}") from None


def _shortened(statement: str) -> str:
    """Without comments and indentation: psycopg remembers how to read statements of up to 4,096 bytes only."""
    return " ".join(re.sub(r"--.*", "", statement).split())


@cache
def statements(subject: str) -> Statements:
    return Statements(subject)
