"""What is kept, and for how long."""

from busload.retention.kept import Retention
from busload.retention.prune import Pruned

__all__ = [
    "Pruned",
    "Retention",
]
