"""What PostgreSQL does: every statement we ever send."""

from busload.store import cancel, claim, explain, operate, pause, prune, report, rescue, send, settle, track

__all__ = ["cancel", "claim", "explain", "operate", "pause", "prune", "report", "rescue", "send", "settle", "track"]
