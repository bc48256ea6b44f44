"""Reads the named statements of a `.sql` file: a line `-- name: claim` begins the statement `claim`."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

LONGEST = 4096
"""Bytes: a longer statement is read anew by psycopg for each call."""


class Statements:
    """The statements of one file, as attributes."""

    def __init__(self, subject: str) -> None:
        text = files("busload.store").joinpath(f"{subject}.sql").read_text(encoding="utf-8")
        _, *named = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
        self.subject = subject
        bodies = zip(named[::2], named[1::2], strict=True)
        self.by_name = {name: _shortened(_qualified(_in_one_line(body))).encode() for name, body in bodies}

    def __getattr__(self, name: str) -> bytes:
        try:
            return self.by_name[name]
        except KeyError:
            raise AttributeError(f"{self.subject}.sql has no statement named {name!r}") from None


def _in_one_line(statement: str) -> str:
    return " ".join(re.sub(r"--.*", "", statement).split())


def _qualified(statement: str) -> str:
    """With the schema of each function and operator of PostgreSQL's that a stranger's could fit better.

    A statement may run on a connection of a user's, under his search_path. Of functions and operators of one name
    PostgreSQL takes the one whose types fit best, wherever on that path it is, and it would run with the rights of
    whoever runs the statement. Its own cannot be outdone where the types are exactly right, as they are for `=` and
    `+`, which would bind differently if they were named with their schema, and for `_EXACT`.
    """

    def qualify(found: re.Match[str]) -> str:
        call, operator = found["call"], found["operator"]
        if operator is not None:
            return f"OPERATOR(pg_catalog.{operator})"
        return found[0] if call is None or call in _SYNTAX | _EXACT else f"pg_catalog.{found[0]}"

    return _CALL_OR_OPERATOR.sub(qualify, statement)


_CALL_OR_OPERATOR = re.compile(
    r"""
    '[^']*'                                               # a text, which stays as it is
    | (?<![\w.}]) unnest\( (?= %\(\w+\)[bs]::[^,)]+, )    # of several arrays: syntax, not a function
    | (?<![\w.}]) (?P<call> [a-z_]\w* ) \( (?! \*?\) )     # without arguments there is nothing to fit better
    | (?<=[ ]) (?P<operator> ->> | -> | \|\| | && | & | \| | \? ) (?=[ ])
    """,
    re.VERBOSE,
)
_SYNTAX = frozenset(("any", "array", "coalesce", "exists", "extract", "greatest", "in", "least", "nullif"))
_EXACT = frozenset(("left", "max", "min", "sum", "to_hex"))


def _shortened(statement: str) -> str:
    """Without spaces that separate nothing, if it is longer than what psycopg remembers how to read."""
    if len(statement) <= LONGEST:
        return statement
    return _NEEDLESS_SPACES.sub(lambda found: found["text"] or found[0].strip(" "), statement)


_NEEDLESS_SPACES = re.compile(
    r"""
    (?P<text> '[^']*' )
    | [ ]? [,()] [ ]?
    | (?<=[\w)'\] ]) [ ]? (?: <> | <= | >= | [=<>+*/-] ) [ ] (?=[\w('%])
    """,
    re.VERBOSE,
)


@cache
def statements(subject: str) -> Statements:
    return Statements(subject)
