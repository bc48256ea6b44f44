"""Facts in, reasons out: what an explanation says, without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from busload.batches.forecast import Forecast, NoForecast
from busload.commands.wording import span
from busload.explain.blockers import Blocker
from busload.explain.explanation import Explanation, explain
from busload.explain.facts import (
    Facts,
    Failure,
    Parked,
    Places,
    Ready,
    Running,
    Snapshot,
    Surroundings,
    Unconfirmed,
    Waiting,
    longer_than,
)
from busload.limits.pause import Pause

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
ID = UUID(int=7)
MINUTE = timedelta(minutes=1)
SERVED = Surroundings(workers=1)
NOWHERE = Places()


def facts(places: Places = NOWHERE, around: Surroundings = SERVED, **more: Any) -> Facts:
    """A sealed batch of ten, an hour old, of which what is in no place has ended."""
    ended = more.pop("ended", 10 - places.count)
    created = NOW - timedelta(hours=1)
    batch = Facts(
        now=NOW,
        domain="payments",
        batch_id=ID,
        status="IN_PROGRESS",
        total=10,
        ended=ended,
        created_at=created,
        started_at=created,
        sealed_at=created,
    )
    return replace(batch, places=places, around=around, **more)


def codes(explanation: Explanation) -> list[tuple[Blocker, int]]:
    return [(reason.code, reason.count) for reason in explanation.reasons]


READY = Places(ready=(Ready(0, 4, NOW - MINUTE),))
SNAPSHOT = Snapshot(4711, "report", NOW - 9 * MINUTE, 120_000)
PAUSE = Pause("payments", NOW - 2 * MINUTE, "rosa", "the bank is down")


def waiting(reason: str, **more: Any) -> Places:
    return Places(waiting=(Waiting(reason, 2, NOW - MINUTE, NOW + MINUTE, NOW + 2 * MINUTE, **more),))


def running(**more: Any) -> Places:
    one = Running("w1", 3, NOW - MINUTE, NOW - timedelta(seconds=1), NOW + timedelta(seconds=29), lost=False)
    return Places(running=(replace(one, **more),))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (facts(READY), []),
        (facts(running()), []),
        (facts(READY, Surroundings(workers=0)), [(Blocker.NO_WORKER, 4)]),
        (facts(READY, Surroundings(workers=1, pause=PAUSE)), [(Blocker.PAUSED, 4)]),
        (facts(READY, Surroundings(workers=0, pause=PAUSE)), [(Blocker.PAUSED, 4), (Blocker.NO_WORKER, 4)]),
        (facts(running(), Surroundings(workers=0, pause=PAUSE)), []),
        (facts(READY, Surroundings(workers=1, ahead=5, ahead_priority=1)), [(Blocker.BEHIND_PRIORITY, 4)]),
        (facts(READY, Surroundings(workers=1, ahead=5, ahead_priority=1, pause=PAUSE)), [(Blocker.PAUSED, 4)]),
        (facts(READY, Surroundings(workers=1, snapshot=SNAPSHOT)), [(Blocker.OLD_SNAPSHOT, 4)]),
        (facts(READY, Surroundings(workers=0, snapshot=SNAPSHOT)), [(Blocker.NO_WORKER, 4)]),
        (facts(running(), Surroundings(workers=1, snapshot=SNAPSHOT)), []),
        (facts(waiting("RUN_AT")), [(Blocker.RUN_AT, 2)]),
        (facts(waiting("RETRY")), [(Blocker.BACKOFF, 2)]),
        (facts(waiting("NO_HANDLER", command_types=("Refund",))), [(Blocker.NO_HANDLER, 2)]),
        (facts(running(long=2)), [(Blocker.RUNNING_LONG, 2)]),
        (facts(running(lost=True)), [(Blocker.WORKER_LOST, 3)]),
        (facts(running(lost=True, long=3)), [(Blocker.WORKER_LOST, 3)]),
        (facts(running(worker=None, seen_at=None, lease_ends_at=None, lost=True)), [(Blocker.WORKER_LOST, 3)]),
        (facts(running(), canceled_at=NOW), [(Blocker.CANCELING, 3)]),
        (facts(running(long=3), canceled_at=NOW), [(Blocker.CANCELING, 3)]),
        (facts(running(lost=True), canceled_at=NOW), [(Blocker.WORKER_LOST, 3)]),
        (facts(READY, Surroundings(workers=0, pause=PAUSE), canceled_at=NOW), [(Blocker.CANCELING, 4)]),
        (facts(ended=4), [(Blocker.IN_NO_PLACE, 6)]),
        (facts(READY, ended=4), [(Blocker.IN_NO_PLACE, 2)]),
        (facts(sealed_at=None), [(Blocker.NOT_SEALED, 10)]),
        (facts(READY, Surroundings(workers=0), sealed_at=None), [(Blocker.NOT_SEALED, 10), (Blocker.NO_WORKER, 4)]),
    ],
)
def test_each_fact_makes_its_reason_and_no_other(given: Facts, expected: list[tuple[Blocker, int]]) -> None:
    assert codes(explain(given)) == expected


def test_every_reason_has_words_and_advice() -> None:
    cause = Parked(2, NOW, "PERMANENT", "E", "CLOSED", "closed", ID, "abc")
    everything = Places(
        ready=READY.ready,
        waiting=tuple(
            Waiting(reason, 1, None, NOW, NOW, (Failure(1, None, None, None, ID),), ())
            for reason in ("RUN_AT", "RETRY")
        )
        + waiting("NO_HANDLER").waiting,
        running=running(long=1).running + running(lost=True).running,
        parked=(cause, replace(cause, count=1)),
        other_parked=3,
    )
    explanation = explain(facts(everything, Surroundings(workers=0, anybody=False), sealed_at=None, ended=0))
    for reason in explanation.reasons:
        assert reason.message.endswith(".") and reason.advice.endswith("."), reason
        assert "None" not in reason.message + reason.advice
    urgency = list(Blocker)
    places = [urgency.index(reason.code) for reason in explanation.reasons]
    assert places == sorted(places) and explanation.eta is None


@pytest.mark.parametrize(
    ("next_try", "anybody", "said", "advised"),
    [
        (timedelta(seconds=30), True, "The next try is in 30 s.", "busload outbox retry"),
        (-timedelta(seconds=9), True, "The next try is due now.", "busload outbox retry"),
        (-timedelta(seconds=11), True, "Nobody tries again: no worker relays to nats.", "busload worker MODULE:BUS"),
        (timedelta(seconds=30), False, "Nobody tries again: no worker lives.", "busload worker MODULE:BUS"),
    ],
)
def test_after_a_failed_round_it_is_said_whether_anybody_tries_again(
    next_try: timedelta, anybody: bool, said: str, advised: str
) -> None:
    held = Unconfirmed("nats", "UNREACHABLE", 2, NOW - MINUTE, 3, "nobody answers.", NOW + next_try)
    around = Surroundings(workers=int(anybody), anybody=anybody)
    [reason] = explain(facts(Places(unconfirmed=(held,)), around)).reasons
    assert (reason.code, reason.count) == (Blocker.NOT_CONFIRMED, 2)
    assert "UNREACHABLE: nobody answers." in reason.message and reason.message.endswith(said)
    assert advised in reason.advice and f"busload outbox reroute --batch {ID} --all" in reason.advice


def test_since_is_when_it_began_to_be_in_the_way() -> None:
    """A domain that was paused before a command was sent has held that command up since it was sent."""
    late = Places(ready=(Ready(0, 1, NOW),))
    [before] = explain(facts(READY, Surroundings(workers=1, pause=replace(PAUSE, since=NOW)))).reasons
    [after] = explain(facts(late, Surroundings(workers=1, pause=PAUSE))).reasons
    [gone] = explain(facts(READY, Surroundings(workers=0, last_seen=NOW - timedelta(seconds=9)))).reasons
    [never] = explain(facts(READY, Surroundings(workers=0))).reasons
    assert (before.since, after.since) == (NOW, NOW)
    assert (gone.since, never.since) == (NOW - timedelta(seconds=9), NOW - MINUTE)


def test_the_eta_of_a_healthy_batch_is_that_of_its_forecast() -> None:
    """If something is in the way, there is a forecast, but no eta."""
    made = Forecast(NOW, 0.1, NOW + 40 * MINUTE, NOW + 30 * MINUTE, NOW + 55 * MINUTE)
    explanation = explain(facts(READY, forecast=made))
    assert (explanation.eta, explanation.remaining, explanation.forecast) == (made.done_at, 4, made)
    assert explanation.summary == (
        "On its way: 6 of 10 commands have ended, 0 running, 4 ready; done in about 40 min (30 min to 55 min)."
    )
    stuck = explain(facts(READY, Surroundings(workers=0), forecast=made))
    assert (stuck.eta, stuck.forecast) == (None, made)
    assert explain(facts(READY, forecast=Forecast(NOW, 0.0, unknown=NoForecast.NOTHING_ENDED))).eta is None


def test_a_finished_batch_has_neither_reasons_nor_an_eta() -> None:
    done = facts(status="COMPLETED", completed_at=NOW - MINUTE)
    explanation = explain(done)
    assert (explanation.finished, explanation.reasons, explanation.eta, explanation.remaining) == (True, (), None, 0)
    assert explanation.summary == "COMPLETED: all 10 commands ended 60 s ago."


def test_explain_advises_no_retry_for_a_canceled_batch() -> None:
    cause = Parked(2, NOW, "PERMANENT", "E", None, None, ID, "abc")
    [reason] = explain(facts(Places(parked=(cause,)), canceled_at=NOW)).reasons
    assert "retry" not in reason.advice and "--group abc" in reason.advice
    [reason] = explain(facts(Places(parked=(cause,)))).reasons
    assert "troubleshooting retry --group abc --domain payments" in reason.advice


@pytest.mark.parametrize(
    ("usual", "expected"),
    [
        (None, timedelta(minutes=10)),
        (timedelta(0), timedelta(seconds=30)),
        (timedelta(seconds=3), timedelta(seconds=30)),
        (timedelta(seconds=4), timedelta(seconds=40)),
    ],
)
def test_long_is_ten_times_the_usual_but_never_less_than_thirty_seconds(
    usual: timedelta | None, expected: timedelta
) -> None:
    assert longer_than(usual) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (0.0125, "0.013 s"),
        (9.94, "9.9 s"),
        (90, "90 s"),
        (120, "2 min"),
        (7300, "2 h"),
        (2e6, "23 d"),
    ],
)
def test_a_span_is_said_in_its_largest_unit(seconds: float, expected: str) -> None:
    assert span(timedelta(seconds=seconds)) == expected
