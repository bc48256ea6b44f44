"""What busload sets out to reach, each a figure of one run beside another figure of the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.beside import TITLES
from bench.run import Result

Found = Callable[["Figures"], float | None]


@dataclass(frozen=True, slots=True)
class Goal:
    """`wanted` is the least that will do, or the most if `at_most`."""

    name: str
    wanted: float
    found: Found
    at_most: bool = False
    unit: str = "×"


AtMost = partial(Goal, at_most=True)


@dataclass(frozen=True, slots=True)
class Check:
    """A goal beside what a run found: nothing, if what it compares was not measured."""

    goal: Goal
    found: float | None

    @property
    def met(self) -> bool | None:
        if self.found is None:
            return None
        return self.found <= self.goal.wanted if self.goal.at_most else self.found >= self.goal.wanted

    @property
    def verdict(self) -> str:
        return {True: "met", False: "missed", None: "not measured"}[self.met]

    def as_dict(self) -> dict[str, object]:
        goal = self.goal
        bound = "at most" if goal.at_most else "at least"
        return {
            "name": goal.name,
            "wanted": goal.wanted,
            "bound": bound,
            "unit": goal.unit,
            "found": self.found,
            "verdict": self.verdict,
        }


class Figures:
    """The results of a run by their keys; of several sizes the largest counts."""

    def __init__(self, results: Sequence[Result]) -> None:
        measured = sorted((result for result in results if result.runs), key=lambda result: result.size)
        self._by_key = {result.case.key: result for result in measured}
        self.subjects = {result.case.subject for result in measured}

    def rate(self, key: str) -> float | None:
        result = self._by_key.get(key)
        return None if result is None else result.rate

    def latency(self, key: str, percent: int) -> float | None:
        result = self._by_key.get(key)
        return None if result is None else result.latency_ms(percent)

    def fact(self, key: str, name: str) -> float | None:
        result = self._by_key.get(key)
        return None if result is None else result.fact(name)


def check(results: Sequence[Result]) -> list[Check]:
    figures = Figures(results)
    return [Check(goal, goal.found(figures)) for goal in GOALS]


def _rates(key: str, beside: str) -> Found:
    return lambda figures: _ratio(figures.rate(key), figures.rate(beside))


def _latencies(key: str, beside: str) -> Found:
    return lambda figures: _ratio(figures.latency(key, 50), figures.latency(beside, 50))


def _latency(key: str, percent: int) -> Found:
    return lambda figures: figures.latency(key, percent)


def _fact(key: str, name: str) -> Found:
    return lambda figures: figures.fact(key, name)


def _ratio_of_facts(key: str, beside: str, name: str, figures: Figures) -> float | None:
    return _ratio(figures.fact(key, name), figures.fact(beside, name))


def _best_batch(figures: Figures) -> float | None:
    peers = [figures.rate(f"{subject}/batch") for subject in figures.subjects if subject != "busload"]
    return _ratio(figures.rate("busload/batch"), max((rate for rate in peers if rate is not None), default=None))


def _ratio(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None else mine / theirs


def _growth(figures: Figures) -> float | None:
    return _ratio(figures.fact("busload/memory", "peak_mb"), figures.fact("busload/memory", "tenth_peak_mb"))


FIRST_IDLE = "busload/first-start-idle"

GOALS = [
    Goal("drain, 1 process, beside PgQueuer", 3, _rates("busload/drain", "pgqueuer/drain")),
    Goal("drain, 1 process, beside Graphile Worker", 1.6, _rates("busload/drain", "graphile-worker/drain")),
    Goal("drain, 2 processes, beside Graphile Worker", 1.2, _rates("busload/drain-2", "graphile-worker/drain-2")),
    Goal("create, beside PgQueuer", 2.5, _rates("busload/create", "pgqueuer/create")),
    Goal("create, beside Graphile Worker", 2, _rates("busload/create", "graphile-worker/create")),
    Goal("batch with callback, beside the best peer that has batches", 15, _best_batch),
    Goal("sent one by one and drained, beside PgQueuer", 2, _rates("busload/singles", "pgqueuer/singles")),
    AtMost("latency p50, beside PgQueuer", 1, _latencies("busload/latency", "pgqueuer/latency")),
    AtMost("latency p50, beside Graphile Worker", 2, _latencies("busload/latency", "graphile-worker/latency")),
    AtMost("latency p99", 15, _latency("busload/latency", 99), unit="ms"),
    *(
        AtMost(
            f"transactions per send, {workers} idle",
            most,
            _fact(f"busload/wake-{workers}", "transactions_per_send"),
            unit="",
        )
        for workers, most in ((1, 3), (12, 3.5), (50, 4))
    ),
    AtMost("latency p50 with 12 idle workers, beside one", 1.3, _latencies("busload/wake-12", "busload/wake-1")),
    AtMost(
        "transactions of an idle worker per second", 1, _fact("busload/idle", "idle_transactions_per_second"), unit=""
    ),
    Goal("drain of one batch, beside none", 0.9, _rates("busload/drain", "busload/drain-unbatched")),
    Goal("drain of 1,000 batches, beside none", 0.85, _rates("busload/drain-1000-batches", "busload/drain-unbatched")),
    Goal("drain with a concurrency limit, beside none", 0.6, _rates("busload/drain-limited", "busload/drain")),
    *(
        AtMost(f"first start of 5 behind many{calls}, beside nothing", 3, _latencies(f"busload/{metric}", FIRST_IDLE))
        for calls, metric in (("", "first-start-behind"), (" calls of 5 ms", "first-start-behind-calls"))
    ),
    Goal("32 small workers on one batch, beside 32", 0.8, _rates("busload/crowd-1", "busload/crowd-32")),
    AtMost("claim with many waiting, beside few", 1.3, _latencies("busload/claim-many", "busload/claim-few")),
    AtMost(
        "claim of loads of one with many waiting, beside few",
        1.3,
        _latencies("busload/claim-many-ones", "busload/claim-few-ones"),
    ),
    Goal("drain with 1 % refused, beside none", 0.9, _rates("busload/drain-refused", "busload/drain-none")),
    Goal("drain with 1 % tried again, beside none", 0.9, _rates("busload/drain-retried", "busload/drain-none")),
    Goal("drain with task keys, beside none", 0.85, _rates("busload/drain-keys", "busload/drain")),
    AtMost("trace of 100 attempts, p50", 5, _latency("busload/trace", 50), unit="ms"),
    AtMost(
        "a group distributed with many waiting, beside few",
        1.3,
        _latencies("busload/buffer-many", "busload/buffer-few"),
    ),
    Goal(
        "relay to RabbitMQ in envelopes, beside a message per command",
        5,
        _rates("busload/dispatch-relay-envelopes", "busload/dispatch-relay-singles"),
    ),
    AtMost("a claim under a held snapshot, end beside start", 1.2, _fact("busload/torture", "claim_ms_growth")),
    AtMost("a settlement under a held snapshot, end beside start", 1.2, _fact("busload/torture", "settle_ms_growth")),
    *(
        AtMost(
            f"a claim under a held snapshot, growth beside {TITLES[peer]}'s",
            1,
            partial(_ratio_of_facts, "busload/torture", f"{peer}/torture", "claim_ms_growth"),
        )
        for peer in ("graphile-worker", "pg-boss", "pgqueuer")
    ),
    AtMost("bytes of a finished command, with indexes", 230, _fact("busload/bytes", "bytes"), unit="bytes"),
    AtMost("memory of a worker after a tenth", 120, _fact("busload/memory", "tenth_peak_mb"), unit="MB"),
    AtMost("memory of a worker, all beside a tenth", 1.1, _growth),
    AtMost("memory of open_batch", 150, _fact("busload/stream", "peak_mb"), unit="MB"),
]
