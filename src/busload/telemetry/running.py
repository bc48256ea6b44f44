"""Which command runs here: what a log line, or a span, within a handler can be about."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol


class Attempt(Protocol):
    """What runs: a command, or several for a bulk handler."""

    def facts(self) -> Mapping[str, Any]:
        """What there is to say about it, by name. Facts that it has not are left out."""

    def traceparent(self) -> str | None:
        """The trace that it was sent in, as W3C writes it."""


running: ContextVar[Attempt | None] = ContextVar("busload_running", default=None)
"""What the handler runs in whose context this is asked. A call sets it, and nobody has to take it back: each call has
a context of its own. It is a reference and no more, so a handler that logs nothing pays for nothing."""
