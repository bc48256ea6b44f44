"""What a DSN says, and what is wrong with one. Nothing here repeats its text: a mistyped one may show a password."""

from __future__ import annotations

import difflib
import re
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from busload.errors import DatabaseUnusableError

WANTED = "Wanted e.g. postgresql://user:password@host:5432/database."
ENCODE = "In a URL, write @ / ? : % of a user name or password as %40 %2F %3F %3A %25."


def read(dsn: str) -> dict[str, Any]:
    """Its parameters by name; `DatabaseUnusableError` says what is wrong."""
    if not dsn.strip():
        raise DatabaseUnusableError(
            f"The DSN is empty. {WANTED} For the embedded PostgreSQL name none at all: unset BUSLOAD_DATABASE_URL, "
            "leave out --dsn."
        )
    if driver := re.match(r"\s*(postgres(?:ql)?)(\+\w+)://", dsn):
        raise DatabaseUnusableError(
            f"The DSN begins with {driver[1]}{driver[2]}://, as SQLAlchemy names a driver. busload has its own: leave "
            f"out {driver[2]}, so that it begins with {driver[1]}://."
        )
    try:
        found = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise DatabaseUnusableError(f"The DSN is no connection string{_unknown(dsn)} {WANTED} {ENCODE}") from None
    if wrong := _nonsense(found):
        raise DatabaseUnusableError(f"The DSN has {wrong}. {ENCODE} {WANTED}")
    return found


def place(dsn: str) -> str:
    """Which database of which server, for people."""
    found = read(dsn)
    defaults = {one.keyword.decode(): (one.val or b"").decode() for one in Conninfo.get_defaults()}
    host = found.get("host") or found.get("hostaddr") or defaults["host"] or "the local socket"
    database = found.get("dbname") or defaults["dbname"] or "the default database"
    return f"{database} at {host}, port {found.get('port') or defaults['port']}"


def without_password(dsn: str) -> str:
    """The DSN as it may be shown: without the passwords that it holds, and otherwise as it was given."""
    found = read(dsn)
    secret = {one.keyword.decode() for one in Conninfo.get_defaults() if one.dispchar == b"*"}
    kept = {name: value for name, value in found.items() if name not in secret}
    return dsn if kept == found else make_conninfo(**kept) or "postgresql://"


def _nonsense(found: dict[str, Any]) -> str | None:
    """What a server or a resolver would repeat in its refusal, though it is none of theirs."""
    for port in str(found.get("port") or "").split(","):
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            return "a port that is no number from 1 to 65535"
    try:
        int(float(found.get("connect_timeout", 0)))  # as psycopg does, with an error of its own
    except (ValueError, OverflowError):
        return "a connect_timeout that is no number"
    for name, sign, wrong in (
        ("host", r"[@\s]|://", "a host with a sign that no host has"),
        ("dbname", r"@|://", "a URL, or a part of one, for the name of the database"),
        ("user", r"[:;/]", "a user with a sign that stands between user and password"),
    ):
        if re.search(sign, str(found.get(name) or "")):
            return wrong
    return None


def _unknown(dsn: str) -> str:
    """A hint if it has a parameter whose name is nearly one of PostgreSQL's."""
    known = [one.keyword.decode() for one in Conninfo.get_defaults()]
    for name in re.findall(r"(?:[?&\s]|^)(\w+)\s*=", dsn):
        if name not in known and (nearest := difflib.get_close_matches(name, known, n=1)):
            return f": it has a parameter that PostgreSQL does not know; did you mean {nearest[0]}?"
    return "."
