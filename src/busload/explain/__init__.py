"""Why a batch or a command is not finished."""

from busload.explain.blockers import Blocker, Reason
from busload.explain.explanation import Explanation

__all__ = [
    "Blocker",
    "Explanation",
    "Reason",
]
