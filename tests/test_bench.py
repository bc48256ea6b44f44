"""The harness measures something for every case that needs no peer; how fast it was is not a test's business."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest
from rich.console import Console

from bench import (
    beside,
    brokers,
    buffers,
    chart,
    connections,
    dispatch,
    identity,
    limits,
    ours,
    reach,
    report,
    torture,
    variants,
)
from bench.beside import PEERS, Peer, Voice
from bench.case import Case, Measured, started
from bench.cases import ALL
from bench.run import Result, Run, measure
from busload.testing import TestServer

MACHINE = {"load_before": [0.0], "postgresql": {"server_version": "18"}, "python": "3", "processors": 2}


@pytest.mark.timeout(600)
def test_a_tiny_run_yields_a_sane_figure_for_every_case(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.run.ALL", [*limits.CASES, *ours.CASES])
    run = Run(sizes=[40], sends=5, singles=5, samples=3, batch=40, peers=False)

    machine = report.describe_machine(server)
    found = json.loads(json.dumps(report.as_json(run, measure(server, run), machine)))

    assert found["not_measured"] == {}
    results = {f"{one['subject']}/{one['metric']}": one for one in found["results"]}
    assert set(results) == {case.key for case, _ in run.jobs()}
    for one in results.values():
        assert one["seconds"] > 0
        assert one["client_cpu_ms_per_1000"] > 0
        assert one["server_cpu_ms_per_1000"] >= 0
    assert 0 < results["busload/latency"]["p50_ms"] <= results["busload/latency"]["p99_ms"]
    assert {"limit/create", "limit/drain", "statements/drain", "asyncio/drain"} <= {
        one["beside"] for one in found["ratios"]
    }
    assert all(one["ratio"] > 0 for one in found["ratios"])


@pytest.mark.parametrize(
    "case", [*variants.CASES, *identity.CASES, *connections.CASES, *buffers.CASES], ids=lambda case: case.metric
)
async def test_busload_is_measured_under_other_conditions(dsn: str, case: Case) -> None:
    size = 400 if case.extent in ("few", "many") else 40
    if case.prepare is not None:
        await case.prepare(dsn, size)

    measured = await case.measure(dsn, size)

    assert measured.count > 0
    assert measured.seconds > 0
    assert measured.client_cpu > 0
    assert all(megabytes > 0 for megabytes in measured.facts.values())


TINY = [case for case in dispatch.CASES if not case.metric.endswith(("-checkpoint", "-optimistic"))]
"""The other two strategies differ only in a word: they are measured tiny on one transport."""


@pytest.mark.parametrize(
    "case",
    [*TINY, *(case for case in dispatch.CASES if "postgresql" in case.metric and case not in TINY)],
    ids=lambda case: case.metric,
)
async def test_busload_is_measured_through_brokers(
    dsn: str, case: Case, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.broker is not None:
        monkeypatch.setenv(brokers.VARIABLE, request.getfixturevalue(f"{case.broker}_url"))
    if case.broker == "servicebus":
        request.getfixturevalue("servicebus").create(dispatch.queue_of(dsn))
    if case.prepare is not None:
        await case.prepare(dsn, 250)

    measured = await case.measure(dsn, 250)

    assert measured.count == 250
    assert measured.seconds > 0
    assert measured.client_cpu > 0
    if case.metric in dispatch.BASE.values():
        assert measured.facts == {}
    elif case.metric.endswith("-drain"):
        assert 0 < measured.facts["delivered"] <= 250
    elif case.broker != "servicebus":  # which does not count its messages for us
        assert measured.facts == {"messages": 250 if case.metric.endswith("-singles") else 3}


def test_the_processes_of_a_case_are_told_where_its_broker_is(server: TestServer, redis_url: str) -> None:
    run = Run(batch=20, peers=False, only=["dispatch-redis-two-phase", "dispatch-nats-two-phase"])
    found = brokers.Brokers({"redis": brokers.Broker(redis_url)}, {"nats": "nats could not be started: no room"})

    results = {result.case.broker: result for result in measure(server, run, brokers=found)}

    assert results["redis"].failure is None
    assert results["redis"].fact("messages") == 1
    assert results["nats"].failure == "nats could not be started: no room"


async def test_celery_is_measured_on_the_same_rabbitmq(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [peer] = [peer for peer in PEERS if peer.name == "celery-rabbitmq"]
    monkeypatch.setattr(Peer, "command", with_our_python)
    await beside.fill(peer, rabbitmq_url, 20)

    created = await beside.create(peer, rabbitmq_url, 20)
    drained = await beside.drain(peer, rabbitmq_url, 40)

    assert (created.count, drained.count) == (20, 40)
    assert min(created.seconds, drained.seconds) > 0


def with_our_python(peer: Peer, role: str, url: str) -> list[str]:
    """As if the environment of the tests were the peer's: it has Celery too."""
    return [sys.executable, "-m", f"bench.peers.{peer.program.removesuffix('.py')}", role, url]


def test_what_one_case_leaves_at_a_broker_does_not_reach_the_next() -> None:
    one, other = (dispatch.queue_of(f"postgresql://postgres@localhost/{name}") for name in ("test_1", "test_2"))

    assert one != other


def test_brokers_that_cannot_be_started_are_told_and_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> AbstractContextManager[brokers.Broker]:
        raise RuntimeError("nats-server is not installed")

    @contextmanager
    def there() -> Iterator[brokers.Broker]:
        yield brokers.Broker("redis://here")

    monkeypatch.setattr(brokers, "RECIPES", {"nats": broken, "redis": there})

    with brokers.own_brokers(["nats", "redis"]) as found:
        assert set(found.running) == {"redis"}
        assert found.missing == {"nats": "nats could not be started: nats-server is not installed"}


def test_a_broker_is_shown_beside_none_and_beside_others_on_it() -> None:
    results = [
        given("busload/dispatch-none-create", 40_000),
        given("busload/dispatch-rabbitmq-two-phase", 30_000),
        given("celery-rabbitmq/create", 1_000),
        given("busload/dispatch-rabbitmq-drain", 10_000),
        given("celery-rabbitmq/drain", 400, facts={"begun_per_second": 500}),
    ]

    said = shown(Run(only=["dispatch", "celery-rabbitmq"], peers=False), results)
    ratios = report.as_json(Run(), results, MACHINE)["ratios"]

    assert "30,000 (0.75×)" in said
    assert "1,000 (30.00×)" in said
    assert "500 (20.00×)" in said
    assert {(one["metric"], one["beside"], one["ratio"]) for one in ratios} == {
        ("dispatch-rabbitmq-two-phase", "busload/dispatch-none-create", 0.75),
        ("dispatch-rabbitmq-two-phase", "celery-rabbitmq/create", 30.0),
        ("dispatch-rabbitmq-drain", "celery-rabbitmq/drain", 20.0),
    }


def test_every_case_of_ours_has_a_place_in_the_tables() -> None:
    shown = {*report.COLUMNS, *report.VARIANTS, *report.THROUGH_BROKERS}

    assert {case.metric for case in ALL if case.subject == "busload"} <= shown


def test_a_goal_is_met_missed_or_not_measured() -> None:
    results = [given("busload/drain", 60_000), given("pgqueuer/drain", 15_000), given("graphile-worker/drain", 50_000)]

    verdicts = {check.goal.name: check.verdict for check in reach.check(results)}

    assert verdicts["drain, 1 process, beside PgQueuer"] == "met"
    assert verdicts["drain, 1 process, beside Graphile Worker"] == "missed"
    assert verdicts["create, beside PgQueuer"] == "not measured"


def test_a_latency_is_better_the_lower_it_is() -> None:
    ours, theirs = given("busload/latency", latency=0.002), given("pgqueuer/latency", latency=0.003)

    [found] = [one for one in reach.check([ours, theirs]) if one.goal.name == "latency p50, beside PgQueuer"]

    assert found.met
    assert report.ratio(ours, theirs) == pytest.approx(1.5)


def test_the_best_peer_with_batches_sets_the_goal() -> None:
    results = [given("busload/batch", 30_000), given("celery/batch", 600), given("reliable-cmd/batch", 1_000)]

    [found] = [one for one in reach.check(results) if one.goal.name.startswith("batch with callback")]

    assert found.found == pytest.approx(30)


def test_of_several_sizes_the_largest_counts() -> None:
    results = [given("busload/create", 100, size=50), given("busload/create", 10, size=5)]

    assert reach.Figures(results).rate("busload/create") == 100


def test_a_peer_that_is_missing_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUSLOAD_BENCH_HOME", str(tmp_path))
    (tmp_path / "pgqueuer").mkdir()
    (tmp_path / "pgqueuer" / "failed").write_text("`pip install` failed: no such version\n")
    run = Run(only=["drain"])
    results = [given("busload/drain", 60_000)]

    said = shown(run, results)

    assert "PgQueuer was not measured: `pip install` failed: no such version" in said
    assert "Procrastinate was not measured: not installed" in said
    assert set(report.as_json(run, results, MACHINE)["not_measured"]) == {peer.name for peer in PEERS}
    assert {case.subject for case, _ in run.jobs()}.isdisjoint(peer.name for peer in PEERS)


def test_a_peer_is_measured_once_its_environment_is_what_we_want(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BUSLOAD_BENCH_HOME", str(tmp_path))
    [peer] = [peer for peer in PEERS if peer.name == "pgqueuer"]
    peer.home.mkdir()
    (peer.home / "ready").write_text(peer.wanted)

    assert {case.subject for case, _ in Run(only=["pgqueuer", "pg-boss"]).jobs()} == {"pgqueuer"}

    (peer.home / "ready").write_text('["pgqueuer==0.1"]')
    assert peer.lacks is not None


def test_a_case_that_failed_is_told_and_the_others_are_shown() -> None:
    broken = given("busload/create", 1)
    broken.runs, broken.failure = [], "busload/create with 40: measure failed.\nTraceback\nOSError: [disk] full"

    said = shown(Run(only=["busload"]), [broken, given("busload/drain", 60_000)])

    assert "busload/create was not measured: busload/create with 40: measure failed. OSError: [disk] full" in said
    assert "60,000" in said


def test_the_table_shows_how_many_times_as_fast_we_are() -> None:
    said = shown(Run(), [given("busload/drain", 60_000), given("pgqueuer/drain", 15_000)])

    assert "15,000 (4.00×)" in said


def test_what_a_library_prints_is_not_taken_for_a_line_of_ours() -> None:
    assert beside.parse('{"done": 3}') == {"done": 3}
    assert beside.parse("celery@host ready.") == {}
    assert beside.parse("17") == {}


async def test_a_peers_program_is_asked_and_heard() -> None:
    async with started([sys.executable, "-c", PROGRAM]) as [helper]:
        voice = Voice(helper)
        await voice.hear("ready")
        assert await voice.ask("make 5") == "make 5"
        assert await voice.ask("left") == "left"


async def test_workers_are_done_when_all_of_them_together_are() -> None:
    program = "import json, sys; sys.stdin.readline()\nfor n in (1, 3): print(json.dumps({'done': n}), flush=True)"
    async with started([sys.executable, "-c", f"{program}\nsys.stdin.read()"], count=2) as helpers:
        workers = [Voice(helper) for helper in helpers]
        for worker in workers:
            worker.tell("drain")
        async with asyncio.timeout(30):
            begun = await beside.handled(workers, 6)
    assert 1 <= begun.count < 6


async def test_a_worker_that_dies_ends_the_wait_for_it() -> None:
    async with started([sys.executable, "-c", "raise SystemExit(3)"]) as [helper]:
        with pytest.raises(RuntimeError, match="exit code 3"):
            await beside.handled([Voice(helper)], 1)


def test_the_bars_are_in_the_same_order_in_every_panel() -> None:
    results = [
        given("pgqueuer/drain", 15_000),
        given("graphile-worker/drain", 25_000),
        given("graphile-worker/create", 50_000),
        given("busload/drain", 10_000),
        given("limit/drain", 160_000),
        given("pgqueuer/latency", latency=0.002),
    ]

    found = chart.bars(results)

    assert set(found) == set(chart.PANELS)
    assert {tuple(bar.subject for bar in panel) for panel in found.values()} == {
        ("busload", "graphile-worker", "pgqueuer")
    }
    assert [bar.rate for bar in found["create"]] == [None, 50_000, None]


def test_a_rate_is_labelled_so_that_it_can_be_read() -> None:
    assert [chart.label(rate) for rate in (153_400.0, 9_840.0, 620.0, 42.0, None)] == [
        "153k",
        "9.8k",
        "0.6k",
        "42",
        "–",
    ]


def test_the_chart_is_written_as_vectors_and_as_pixels(tmp_path: Path) -> None:
    results = [given("busload/drain", 60_000), given("pgqueuer/drain", 15_000)]

    if find_spec("matplotlib"):
        assert [path.name for path in chart.draw(results, tmp_path)] == ["bench.svg", "bench.png"]
        assert "<svg" in (tmp_path / "bench.svg").read_text()
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    else:
        with pytest.raises(ModuleNotFoundError):
            chart.draw(results, tmp_path)


def test_nothing_measured_is_nothing_drawn(tmp_path: Path) -> None:
    assert chart.draw([], tmp_path / "assets") == []
    assert not (tmp_path / "assets").exists()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_has_its_program_and_pinned_packages(peer: Peer) -> None:
    assert (Path(beside.__file__).parent / "peers" / peer.program).exists()
    assert all("==" in package or "@" in package for package in peer.packages)
    assert ("batch" in {case.metric for case in beside.cases(peer)}) == peer.batches


def given(
    key: str,
    rate: float = 1.0,
    *,
    size: int = 1000,
    latency: float | None = None,
    facts: Mapping[str, float] | None = None,
) -> Result:
    """A result as if it had been measured."""
    subject, metric = key.split("/")

    async def never(dsn: str, size: int) -> Measured:
        raise AssertionError("this is not measured")

    taken = () if latency is None else [latency] * 3
    return Result(
        Case(subject, metric, metric, never), size, [Measured(size, size / rate, 0.1, 0.1, taken, facts or {})]
    )


def shown(run: Run, results: list[Result]) -> str:
    text = io.StringIO()
    report.show(Console(file=text, width=250), run, results, MACHINE)
    return text.getvalue()


PROGRAM = """
import asyncio
from bench.peers import talk

async def make(count):
    return f"make {count}"

async def left(count):
    print("a library says hello")
    return "left"

asyncio.run(talk.answer({"make": make, "left": left}))
"""


def test_what_a_held_snapshot_costs_is_the_last_tenth_beside_the_first() -> None:
    windows = [
        torture.Window(
            float(n + 1),
            100,
            {"claim": torture.Cost(10, 10.0 + n, 300.0), "settle": torture.Cost(5, 5.0, 50.0)},
        )
        for n in range(20)
    ]
    facts = torture.facts_of(windows)
    assert facts["claim_ms_start"] == pytest.approx(1.05) and facts["claim_ms_end"] == pytest.approx(2.85)
    assert facts["claim_ms_growth"] == pytest.approx(2.85 / 1.05)
    assert (facts["settle_ms_growth"], facts["claim_pages_growth"], facts["per_second_end"]) == (1, 1, 100)
    assert torture.series(facts, "claim")[:2] == [(1.0, 100.0), (2.0, 110.0)]
    [ours] = [case for case in torture.CASES if case.subject == "busload"]
    result = Result(ours, 20, [Measured(2000, 20.0, 1.0, 1.0, facts=facts)])
    checks = {check.goal.name: check for check in reach.check([result])}
    assert checks["a claim under a held snapshot, end beside start"].verdict == "missed"
    assert checks["a settlement under a held snapshot, end beside start"].verdict == "met"


async def test_torture_holds_a_snapshot_and_a_slot_and_lets_go_of_both(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        with torture.held(dsn):
            slots = await conn.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'torture_%'")
            assert await slots.fetchone() == (1,)
            held = await conn.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND backend_xmin IS NOT NULL AND state = 'idle in transaction'"
            )
            assert await held.fetchone() == (1,)
        slots = await conn.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'torture_%'")
        assert await slots.fetchone() == (0,)
