"""Why a batch or a command is not finished."""

from busload.explain.explanation import Explanation
from busload.explain.reasons import Blocker, Reason

__all__ = [
    "Blocker",
    "Explanation",
    "Reason",
]
