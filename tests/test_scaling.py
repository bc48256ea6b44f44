"""The tables of docs/scaling.md are what the model makes of the measurements that are kept beside it."""

from __future__ import annotations

import time
from dataclasses import replace

import psycopg
import pytest

from bench.delay import far_away
from bench.scaling import BASE_BYTES, BEGIN, END, PAGE, Calibration, Costs, Model, Run, Setting, fit, text

TRUE = Model(
    {
        "send": Costs(100e-6, 50e-6, 300, round_trips=1, flushes=1, wait=400e-6),
        "create": Costs(4e-6, 4e-6, 250, client_byte=1e-9, server_byte=2e-9, wal_byte=1, overlap=1.6),
        "drain": Costs(10e-6, 9e-6, 200, round_trips=0.004, flushes=0.003, overlap=1.5),
    },
    Costs(500e-6, 0.0, 0, round_trips=2, flushes=1, wait=1e-3),
)


def _measured(at: Setting) -> Run:
    """What a machine would measure on which the model holds to the letter."""
    cost, more = TRUE.costs[at.what], at.payload - BASE_BYTES
    once = TRUE.call.client / at.count if at.what == "create" else 0.0
    client, server = cost.client + more * cost.client_byte + once, cost.server + more * cost.server_byte
    return Run(at, TRUE.seconds(at), client, server, cost.wal + more * cost.wal_byte)


def test_the_page_has_what_the_model_says_of_the_kept_measurements() -> None:
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert page.strip() == text(Calibration.read()), "run `python -m bench.scaling predict --write`"


def test_the_model_finds_the_costs_of_a_machine_on_which_it_holds() -> None:
    from bench.scaling import settings

    model = fit([_measured(at) for at in settings(1.0)])
    for at in settings(1.0):
        assert model.seconds(at) == pytest.approx(TRUE.seconds(at), rel=0.05), at
    unseen = Setting("drain", 10_000, cores=1, round_trip=0.01, disk=0.005)
    assert model.seconds(unseen) == pytest.approx(TRUE.seconds(unseen), rel=0.05)


def test_a_primary_ends_where_its_first_resource_does() -> None:
    bounds = TRUE.primary(32, 500e6)
    assert bounds["cores"] == pytest.approx(32 / 13e-6)
    assert bounds["log"] == pytest.approx(500e6 / 450)
    assert TRUE.primary(32, 500e6, 1_000)["log"] < bounds["log"]


def test_a_calibration_is_kept_as_it_was(tmp_path: object) -> None:
    kept = Calibration.read()
    assert kept.runs
    assert {run.setting.what for run in kept.runs} == {"send", "create", "drain"}
    changed = replace(kept, runs=[replace(run, client=2 * run.client) for run in kept.runs])
    assert text(changed) != text(kept)


def test_the_proxy_makes_each_round_trip_as_long_as_it_says(dsn: str) -> None:
    """A lower bound only: how much longer it takes is up to the machine."""
    with far_away(dsn, 0.05) as far, psycopg.connect(far, autocommit=True) as conn:
        began = time.perf_counter()
        for _ in range(4):
            conn.execute("SELECT")
        assert time.perf_counter() - began >= 4 * 0.05
    with far_away(dsn, 0.0) as near:
        assert near == dsn
