"""What is kept, and for how long."""

from busload.retention.prune import Pruned

__all__ = [
    "Pruned",
]
