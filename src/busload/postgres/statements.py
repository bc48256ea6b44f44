"""Reads the named statements of a `.sql` file.

A line `-- name: claim` begins the statement `claim`. A line `-- fragment: load` begins a fragment. Statements and later
fragments include it by its name in braces: `{load}`. A line `-- fragments of: busload.commands.load` at the top of a
file makes the fragments of another file known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.resources import files

LONGEST = 4096
"""Bytes. psycopg parses a longer statement anew for each call."""


class Statements:
    """The statements of one file, as attributes.

    The file is read at once, so that a process keeps its statements while another release is installed. Each statement
    is made from its text at its first use: most processes use few of them.
    """

    def __init__(self, module: str) -> None:
        folder, _, self.subject = module.rpartition(".")
        self._text = files(folder).joinpath(f"{self.subject}.sql").read_text(encoding="utf-8")

    @property
    def by_name(self) -> dict[str, bytes]:
        return {name: getattr(self, name) for name in self._parts[0]}

    @property
    def fragments(self) -> dict[str, str]:
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[dict[str, str], dict[str, str]]:
        """The bodies of the statements, and the fragments."""
        bodies: dict[str, str] = {}
        fragments: dict[str, str] = {}
        for other in re.findall(r"^-- fragments of: (\S+)$", self._text, flags=re.MULTILINE):
            fragments |= statements(other).fragments
        _, *parts = re.split(r"^-- (name|fragment): (\w+)\n", self._text, flags=re.MULTILINE)
        for kind, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            if kind == "fragment":
                fragments[name] = _expanded(_in_one_line(body), fragments)
            else:
                bodies[name] = body
        return bodies, fragments

    def __getattr__(self, name: str) -> bytes:
        body = self._parts[0].get(name)
        if body is None:
            raise AttributeError(f"{self.subject}.sql has no statement named {name!r}")
        made = _shortened(_qualified(_expanded(_in_one_line(body), self.fragments))).encode()
        setattr(self, name, made)  # found there from now on
        return made


def _expanded(statement: str, fragments: Mapping[str, str]) -> str:
    """The statement with its fragments. Other names in braces stay: buffers fill in those of their own table."""
    return re.sub(r"\{(\w+)\}", lambda found: fragments.get(found[1], found[0]), statement)


def _in_one_line(statement: str) -> str:
    return " ".join(re.sub(r"--.*", "", statement).split())


def _qualified(statement: str) -> str:
    """Name the schema of each function and operator that a function of a stranger could replace.

    A statement may run on a connection of a user, under the user's search_path. Among functions and operators of one
    name PostgreSQL takes the one whose types fit best, wherever on that path it is. A stranger's function would then
    run with the rights of whoever runs the statement. Where the types are exactly right, none fits better: so it is
    for `=` and `+`, which would bind differently with their schema, and for `_EXACT`.
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
    """Leave out needless spaces, if the statement is too long for psycopg to remember."""
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
def statements(module: str) -> Statements:
    """The statements of the `.sql` file beside a module: `statements(__name__)`."""
    return Statements(module)
