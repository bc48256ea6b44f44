"""What PostgreSQL does: every statement we ever send."""

from busload.store import (
    buffer,
    cancel,
    claim,
    explain,
    group,
    operate,
    pause,
    prune,
    rate,
    report,
    rescue,
    send,
    settle,
    track,
)

__all__ = [
    "buffer",
    "cancel",
    "claim",
    "explain",
    "group",
    "operate",
    "pause",
    "prune",
    "rate",
    "report",
    "rescue",
    "send",
    "settle",
    "track",
]
