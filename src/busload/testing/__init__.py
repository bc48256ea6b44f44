"""What users test their handlers and transports with, and we too: a fresh database in a fraction of a second.

Nothing is imported before it is asked for: pytest loads the plugin into every run.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from busload.testing.eager_mode import eager
    from busload.testing.factories import (
        make_audit_event,
        make_batch_metadata,
        make_chunk,
        make_command,
        make_command_metadata,
        make_group,
        make_troubleshooting_item,
    )
    from busload.testing.faults import BreakableTransport, broker_down, fail_next, kill_worker
    from busload.testing.postgres import TestServer
    from busload.testing.run import drain, run_handler
    from busload.testing.sent import ANYTHING, assert_not_sent, assert_sent
    from busload.testing.time_travel import travel, travel_to
    from busload.testing.transport import TransportContract

__all__ = [
    "ANYTHING",
    "BreakableTransport",
    "TestServer",
    "TransportContract",
    "assert_not_sent",
    "assert_sent",
    "broker_down",
    "drain",
    "eager",
    "fail_next",
    "kill_worker",
    "make_audit_event",
    "make_batch_metadata",
    "make_chunk",
    "make_command",
    "make_command_metadata",
    "make_group",
    "make_troubleshooting_item",
    "run_handler",
    "travel",
    "travel_to",
]

_MODULES = {
    "eager_mode": ("eager",),
    "factories": tuple(name for name in __all__ if name.startswith("make_")),
    "faults": ("BreakableTransport", "broker_down", "fail_next", "kill_worker"),
    "postgres": ("TestServer",),
    "run": ("drain", "run_handler"),
    "sent": ("ANYTHING", "assert_not_sent", "assert_sent"),
    "time_travel": ("travel", "travel_to"),
    "transport": ("TransportContract",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "TransportContract" and _MODULE_OF[name] not in sys.modules:
        import pytest

        pytest.register_assert_rewrite(_MODULE_OF[name])
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value
