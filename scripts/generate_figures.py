"""Write the tables of a worker's figures and of the doctor's findings into the docs, from where they are declared."""

from __future__ import annotations

import re
from pathlib import Path

from busload.doctor.catalog import KNOWN
from busload.worker.metrics import docs_table
from busload.worker.stats import BrokerStats, CoalescerStats, HandlerStats, OutboxStats, WorkerStats

PAGE = Path(__file__).parent.parent / "docs/reference.md"
DOCTOR = PAGE.with_name("doctor.md")


def written(text: str) -> str:
    """The page with the tables that the figures have now, each below a comment with the name of its class."""
    for stats in (WorkerStats, HandlerStats, BrokerStats, OutboxStats, CoalescerStats):
        mark = f"<!-- figures: {stats.__name__} -->\n"
        [old] = re.findall(rf"{mark}(?:\n(?:\|.*\n)+)?", text)
        text = text.replace(old, f"{mark}\n{docs_table(stats)}\n")
    return text


def written_findings(text: str) -> str:
    """The page about the doctor with the table of its findings."""
    mark = "<!-- findings -->\n"
    [old] = re.findall(rf"{mark}(?:\n(?:\|.*\n)+)?", text)
    lines = ["| code | check | severity | why it matters | what to do |", "|---|---|---|---|---|"]
    for code, known in KNOWN.items():
        severity = " or ".join(known.severities)
        lines.append(f"| `{code.value}` | {known.check} | {severity} | {known.why} | {known.cure} |")
    table = "\n".join(lines)
    return text.replace(old, f"{mark}\n{table}\n")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    DOCTOR.write_text(written_findings(DOCTOR.read_text()))
