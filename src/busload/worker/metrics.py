"""A worker's stats as Prometheus reads them: text exposition format 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from busload.worker.stats import BrokerStats, WorkerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(stats: WorkerStats, *, worker: str, about: Mapping[str, str] | None = None) -> str:
    """Every figure with the label `worker`; `about` are the labels of one more metric that says which worker it is."""
    text = _Text({"worker": worker})
    text.gauge("worker_info", "What this worker is, in its labels.", 1, about)
    _worker(text, stats)
    _settlement(text, stats)
    if stats.broker is not None:
        _broker(text, stats.broker)
    return "".join(text.lines)


def _worker(text: _Text, stats: WorkerStats) -> None:
    text.counter("worker_claims_total", "Claim statements sent.", stats.claims)
    text.counter("worker_empty_claims_total", "Claims that found nothing.", stats.empty_claims)
    text.counter("worker_claimed_total", "Commands claimed.", stats.claimed)
    text.gauge("worker_concurrency", "Commands that may run at a time.", stats.concurrency)
    text.gauge("worker_in_hand", "Commands that run or stand in line.", stats.in_hand)
    text.gauge("worker_in_line", "Commands that wait for a slot.", stats.in_line)
    text.gauge("worker_prefetch", "Commands that should stand in line at this pace.", stats.prefetch)
    text.counter("worker_finished_total", "Attempts that came to a result.", stats.finished)
    outcomes = {
        "completed": stats.completed,
        "failed": stats.failed,
        "canceled": stats.canceled,
        "parked": stats.parked,
        "failed_attempt": stats.failed_attempts,
    }
    text.add(
        "worker_settled_total",
        "counter",
        "Attempts whose result is committed, by how they ended.",
        [("", {"outcome": outcome}, count) for outcome, count in outcomes.items()],
    )
    text.counter(
        "worker_in_transactions_total", "Attempts settled by the handler's own transaction.", stats.in_transactions
    )
    text.counter("worker_late_results_total", "Results that came after their lease was lost.", stats.late)
    text.counter("worker_handed_back_total", "Commands claimed and handed back without having run.", stats.handed_back)
    text.counter("worker_lost_leases_total", "Leases that others took over.", stats.lost_leases)
    text.counter("worker_bulk_calls_total", "Calls of bulk handlers and of those of buffers.", stats.bulk_calls)
    text.counter("worker_bulk_items_total", "Commands and events they were given.", stats.bulk_items)


def _settlement(text: _Text, stats: WorkerStats) -> None:
    settlement = stats.settlement
    text.counter("settlement_results_total", "Results that were flushed.", settlement.items)
    text.counter("settlement_flushes_total", "Flushes, one transaction each.", settlement.flushes)
    text.counter("settlement_failures_total", "Flushes that were rolled back and repeated.", settlement.failures)
    text.counter(
        "settlement_saved_transactions_total", "Transactions that one write per result adds.", settlement.saved
    )
    text.counter("settlement_flush_seconds_total", "Time spent in flushes.", settlement.flush_seconds)
    text.gauge("settlement_waiting", "Results that are not committed yet.", settlement.waiting)
    text.gauge("settlement_waiting_bytes", "Bytes of their details.", settlement.waiting_bytes)
    text.gauge("settlement_capacity", "Results that may wait; then claiming stops.", settlement.capacity)
    text.gauge("settlement_fullness_ratio", "The share of the capacity that is taken.", settlement.fullness)
    quantiles = (0.5, 0.95, 0.99)
    text.add(
        "settlement_latency_seconds",
        "summary",
        "Time from a result to its commit; a sample of the results is measured.",
        [
            *(
                ("", {"quantile": str(q)}, settlement.latency(100 * q) if settlement.measured else math.nan)
                for q in quantiles
            ),
            ("_sum", None, settlement.measured_seconds),
            ("_count", None, settlement.measured),
        ],
    )


def _broker(text: _Text, broker: BrokerStats) -> None:
    transport = {"transport": broker.transport}
    text.gauge("broker_connected", "Whether the broker delivers to this worker.", int(broker.connected), transport)
    results = {"confirmed": broker.confirmed, **broker.refused}
    text.add(
        "broker_messages_total",
        "counter",
        "Messages handed to the broker, by what became of them.",
        [("", {**transport, "result": result.lower()}, count) for result, count in sorted(results.items())],
    )
    text.counter("relay_rounds_total", "Rounds that had something to announce.", broker.rounds)
    text.counter("relay_failed_rounds_total", "Rounds that the broker ended.", broker.failed_rounds)
    text.counter("relay_commands_total", "Commands announced from the outbox.", broker.relayed)
    text.counter("relay_rung_again_total", "Commands announced again as nobody came.", broker.rung_again)
    text.counter("receive_rings_total", "Messages that came and could be read.", broker.rings)
    text.counter("receive_commands_total", "Commands claimed for them.", broker.rung)
    text.counter("receive_duplicates_total", "Messages that found nothing to claim.", broker.duplicates)
    text.counter("receive_unknown_total", "Loads in messages that are not in the database.", broker.unknown)
    text.counter("receive_refused_total", "Messages that cannot be read or are not ours.", broker.refused_messages)
    for name, help in OUTBOX.items():
        samples = [("", {"transport": one.transport}, getattr(one, name)) for one in broker.outbox]
        text.add(f"outbox_{name}{'_seconds' if name == 'oldest' else ''}", "gauge", help, samples)


OUTBOX = {
    "commands": "Commands that wait to be announced.",
    "failed": "Those of them after a failed round.",
    "oldest": "Time that the oldest of them has waited.",
    "rounds": "The most rounds that have failed for one of them.",
}


class _Text:
    """The lines of an exposition: each family with its help, its type and its samples."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self.lines: list[str] = []

    def counter(self, name: str, help: str, value: float) -> None:
        self.add(name, "counter", help, [("", None, value)])

    def gauge(self, name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        self.add(name, "gauge", help, [("", labels, value)])

    def add(
        self,
        name: str,
        kind: Literal["counter", "gauge", "summary"],
        help: str,
        samples: Iterable[tuple[str, Mapping[str, str] | None, float]],
    ) -> None:
        self.lines.append(f"# HELP busload_{name} {help}\n# TYPE busload_{name} {kind}\n")
        for suffix, labels, value in samples:
            pairs = {**self._labels, **(labels or {})}.items()
            shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in pairs)
            self.lines.append(f"busload_{name}{suffix}{{{shown}}} {'NaN' if math.isnan(value) else value}\n")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
