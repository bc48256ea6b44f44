"""What users test their handlers and transports with, and we too: a fresh database in milliseconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from busload.testing.postgres import TestServer

if TYPE_CHECKING:
    from busload.testing.transport import TransportContract

__all__ = ["TestServer", "TransportContract"]


def __getattr__(name: str) -> Any:
    """The contract of transports is loaded when it is asked for: it needs pytest."""
    if name != "TransportContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    if "busload.testing.transport" not in sys.modules:
        pytest.register_assert_rewrite("busload.testing.transport")
    from busload.testing.transport import TransportContract

    return TransportContract
