"""The harness measures something for every case that needs no peer; how fast it was is not a test's business."""

from __future__ import annotations

import json

from bench import report
from bench.run import Run, measure
from busload.testing import TestServer


def test_a_tiny_run_yields_a_sane_figure_for_every_case(server: TestServer) -> None:
    run = Run(sizes=[40], sends=5, samples=3, batch=40, peers=False)

    machine = report.describe_machine(server)
    found = json.loads(json.dumps(report.as_json(run, measure(server, run), machine)))

    results = {f"{one['subject']}/{one['metric']}": one for one in found["results"]}
    assert set(results) == {case.key for case, _ in run.jobs()}
    for one in results.values():
        assert one["seconds"] > 0
        assert one["client_cpu_ms_per_1000"] > 0
        assert one["server_cpu_ms_per_1000"] > 0
    assert 0 < results["busload/latency"]["p50_ms"] <= results["busload/latency"]["p99_ms"]
    assert {"limit/create", "limit/drain", "statements/drain"} <= {one["beside"] for one in found["ratios"]}
    assert all(one["ratio"] > 0 for one in found["ratios"])
