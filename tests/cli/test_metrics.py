"""`busload metrics`: text, JSON, and the files for Prometheus and Grafana."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from busload import SyncCommandBus
from tests.cli.conftest import Busload


def test_metrics_are_printed_as_text_and_as_json(busload: Busload, sync_bus: SyncCommandBus) -> None:
    sync_bus.send("payments", "Debit")
    printed = busload("metrics").stdout
    [ready] = [
        sample.value
        for family in text_string_to_metric_families(printed)
        for sample in family.samples
        if sample.name == "busload_commands" and sample.labels == {"domain": "payments", "place": "ready"}
    ]
    assert ready == 1
    as_json = {metric["name"]: metric for metric in json.loads(busload("metrics", "--json").stdout)["metrics"]}
    assert {"labels": {"domain": "payments", "place": "ready"}, "value": 1, "suffix": ""} in (
        as_json["busload_commands"]["samples"]
    )
    assert as_json["busload_commands"]["kind"] == "gauge"


def test_files_for_prometheus_and_grafana_need_no_database(offline: Busload) -> None:
    assert offline("metrics", "--alerts").stdout.startswith("# Alert rules of busload")
    assert json.loads(offline("metrics", "--grafana").stdout)["title"] == "busload"
    refused = offline("metrics", "--grafana", "--json")
    assert refused.exit_code == 2
    assert "--json is for the metrics" in refused.stderr
