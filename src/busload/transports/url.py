"""Reads the URL of a broker: its options, the files for TLS, and what libpq is to have of the URL of a PostgreSQL."""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from busload.errors import TransportMisconfiguredError

MOST_SECONDS = 86_400.0

TLS_FILES: Mapping[str, Callable[[str], str]] = {"ca": str, "cert": str, "key": str}
"""The authority that signed the broker's certificate, and our own certificate with its key."""

ENCODE = "If the password holds characters like '@', '/', '?', '#' or '%', percent-encode them: '@' is %40, '?' is %3F."


def read_options(url: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """The options of a URL; one we do not know, twice the same, or a value that does not fit is an error.

    Values are not shown: some transport's option may hold a secret.
    """
    found: dict[str, Any] = {}
    text = url.partition("?")[2]
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in known and ("@" in text or "@" in name):  # a piece of a password with a '?' in it
            raise TransportMisconfiguredError(
                f"The broker's URL has an option we do not know, wanted one of {', '.join(sorted(known))}. {ENCODE}"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TransportMisconfiguredError(
                f"The broker's URL has an option we do not know: found {name!r:.40}, "
                f"wanted one of {', '.join(sorted(known))}.{hint}"
            )
        if name in found:
            raise TransportMisconfiguredError(f"The broker's URL has the option {name!r} twice. Keep one of them.")
        try:
            found[name] = known[name](value)
        except ValueError as error:
            raise TransportMisconfiguredError(f"The broker's URL has an unusable option {name!r}: {error}.") from None
    return found


def seconds(text: str) -> float:
    """A time of more than zero and at most a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_SECONDS:
        raise ValueError(f"wanted seconds, more than 0 and at most {MOST_SECONDS:.0f}")
    return value


def whole_number(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"wanted a whole number from {least} to {most}")
        return int(text)

    return read


def one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"wanted one of {', '.join(words)}")
        return text

    return read


def read_libpq_url(url: str, own: Mapping[str, Callable[[str], Any]]) -> tuple[str, dict[str, Any]]:
    """The URL of a PostgreSQL as libpq reads it, and our own options, which libpq does not know."""
    try:
        parts = urlsplit(url)
        if parts.netloc.count("@") > 1 or "@" in parts.path:
            # What follows the '@' in the password would be taken for the host, and be shown.
            raise TransportMisconfiguredError(f"The URL of the transport has an '@' where none is wanted. {ENCODE}")
        theirs = [pair for pair in parse_qsl(parts.query, keep_blank_values=True) if pair[0] not in own]
        dsn = urlunsplit(parts._replace(scheme="postgresql", query=urlencode(theirs, quote_via=quote)))
        libpq: dict[str, Callable[[str], Any]] = {each.keyword.decode(): str for each in pq.Conninfo.get_defaults()}
        found = read_options(url, {**libpq, **own})
        ports = conninfo_to_dict(dsn).get("port") or "0"
        _ = [int(port) for port in str(ports).split(",") if port]
    except TransportMisconfiguredError:
        raise
    except (ValueError, psycopg.ProgrammingError):
        # What is wrong is not shown: it may be a piece of a password.
        raise TransportMisconfiguredError(
            "The URL of the transport cannot be read. Wanted one like postgresql://user:password@host:5432/database, "
            "with special characters percent-encoded."
        ) from None
    return dsn, {name: value for name, value in found.items() if name in own}


def connect_timeout(dsn: str, timeout: float) -> int | str:
    """Seconds for each of PostgreSQL's hosts, so that a host that says nothing leaves time for the others."""
    conninfo = conninfo_to_dict(dsn)
    if given := conninfo.get("connect_timeout"):
        return str(given)
    hosts = str(conninfo.get("host") or conninfo.get("hostaddr") or "").count(",") + 1
    return max(2, int(timeout / hosts / 2))  # libpq takes less than 2 for 2


def tls_files(url: str, options: Mapping[str, Any], *, wanted: str) -> dict[str, str | None]:
    """The files for TLS that a URL names; they make sense only with the scheme that means TLS."""
    files: dict[str, str | None] = {name: options.get(name) for name in TLS_FILES}
    scheme = url.partition(":")[0]
    if any(files.values()) and scheme != wanted:
        raise TransportMisconfiguredError(f"ca, cert and key are for TLS: found {scheme}://, wanted {wanted}://.")
    return files


def tls_context(*, ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Checks the broker's certificate and name; shows ours if there is one."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise TransportMisconfiguredError(
            f"A file of the TLS options cannot be read: {error}. Found ca={ca!r}, cert={cert!r}, key={key!r}; "
            "wanted PEM files that this process may read."
        ) from error
    return context
