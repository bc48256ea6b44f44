"""How a command id reaches a worker: finds the transport of a URL among those that are installed."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points

from busload.errors import TransportMisconfiguredError
from busload.transports.base import Delivery, Message, Transport

__all__ = ["Delivery", "Message", "Transport", "find_transport"]

GROUP = "busload.transports"
"""The entry points in which packages offer transports: a URL scheme, and the class for it."""


def find_transport(url: str) -> Transport:
    """The transport that a URL names; nothing is connected yet."""
    if not url.strip():
        raise TransportMisconfiguredError(
            "The URL of the transport is empty. Wanted e.g. amqp://user@host/; to have none, so that PostgreSQL "
            "delivers, unset BUSLOAD_TRANSPORT_URL or leave out --transport."
        )
    scheme, separator, _ = url.partition(":")
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if not separator or scheme not in offered:
        near = difflib.get_close_matches(scheme, offered, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        # A whole URL is not shown: it may hold a password.
        found = f"the scheme {scheme!r:.40}" if separator else "no scheme"
        raise TransportMisconfiguredError(
            f"No transport fits this URL: found {found}, wanted one of {', '.join(sorted(offered))}.{hint}"
        )
    try:
        kind = offered[scheme].load()
    except ImportError as error:
        extra = offered[scheme].value.partition(":")[0].rpartition(".")[2]
        raise TransportMisconfiguredError(
            f"The transport for {scheme}:// needs a library that is not installed: {error.name}. "
            f"Install it with `pip install 'busload[{extra}]'`."
        ) from error
    transport: Transport = kind.from_url(url)
    return transport
