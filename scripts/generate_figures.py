"""Write the tables of a worker's figures into docs/reference.md, from where the figures are declared."""

from __future__ import annotations

import re
from pathlib import Path

from busload.worker.metrics import docs_table
from busload.worker.stats import BrokerStats, CoalescerStats, HandlerStats, OutboxStats, WorkerStats

PAGE = Path(__file__).parent.parent / "docs/reference.md"


def written(text: str) -> str:
    """The page with the tables that the figures have now, each below a comment with the name of its class."""
    for stats in (WorkerStats, HandlerStats, BrokerStats, OutboxStats, CoalescerStats):
        mark = f"<!-- figures: {stats.__name__} -->\n"
        [old] = re.findall(rf"{mark}(?:\n(?:\|.*\n)+)?", text)
        text = text.replace(old, f"{mark}\n{docs_table(stats)}\n")
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
