"""What PostgreSQL does: every statement we ever send."""

from busload.store import cancel, claim, operate, report, rescue, send, settle

__all__ = ["cancel", "claim", "operate", "report", "rescue", "send", "settle"]
