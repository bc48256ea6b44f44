"""Reads what stands behind the question mark of a broker's URL, and the files that TLS needs."""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from busload.errors import TransportMisconfigured

MOST_SECONDS = 86_400.0

TLS_FILES: Mapping[str, Callable[[str], str]] = {"ca": str, "cert": str, "key": str}
"""The authority that signed the broker's certificate, and our own certificate with its key."""

ENCODE = "If the password holds characters like '@', '/', '?', '#' or '%', percent-encode them: '@' is %40, '?' is %3F."


def refuse_open_password(url: str) -> None:
    """A password with an '@' that is not percent-encoded: what follows it would be taken for the host, and be shown."""
    parts = urlsplit(url)
    if parts.netloc.count("@") > 1 or "@" in parts.path:
        raise TransportMisconfigured(f"The URL of the transport has an '@' where none is wanted. {ENCODE}")


def read_options(url: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """The options of a URL; one we do not know, twice the same, or a value that does not fit is an error.

    Values are not shown: some transport's option may hold a secret.
    """
    found: dict[str, Any] = {}
    text = url.partition("?")[2]
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in known and ("@" in text or "@" in name):  # a piece of a password with a '?' in it
            raise TransportMisconfigured(
                f"The broker's URL has an option we do not know, wanted one of {', '.join(sorted(known))}. {ENCODE}"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TransportMisconfigured(
                f"The broker's URL has an option we do not know: found {name!r:.40}, "
                f"wanted one of {', '.join(sorted(known))}.{hint}"
            )
        if name in found:
            raise TransportMisconfigured(f"The broker's URL has the option {name!r} twice. Keep one of them.")
        try:
            found[name] = known[name](value)
        except ValueError as error:
            raise TransportMisconfigured(f"The broker's URL has an unusable option {name!r}: {error}.") from None
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


def connect_timeout(conninfo: Mapping[str, Any], timeout: float) -> int | str:
    """Seconds for each of PostgreSQL's hosts, so that one that says nothing leaves time for the others."""
    if given := conninfo.get("connect_timeout"):
        return str(given)
    hosts = str(conninfo.get("host") or conninfo.get("hostaddr") or "").count(",") + 1
    return max(2, int(timeout / hosts / 2))  # libpq takes less for 2


def tls_context(*, ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Checks the broker's certificate and name; shows ours if there is one."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise TransportMisconfigured(
            f"A file of the TLS options cannot be read: {error}. Found ca={ca!r}, cert={cert!r}, key={key!r}; "
            "wanted PEM files that this process may read."
        ) from error
    return context
