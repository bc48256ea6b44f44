"""What is shipped for Prometheus and Grafana, in the hands of a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from busload import BatchCommand, CommandBus
from busload.cli.metrics_server import Address, pages, serve_pages
from busload.dashboard import app
from busload.statistics import recorder
from tests.given import WITHIN, Database, Given, until
from tests.metrics.test_metrics import mixed
from tests.servers import free_ports, running, wait_for_port

ALERTS = files("busload.metrics").joinpath("alerts.yml").read_text()
GRAFANA = json.loads(files("busload.metrics").joinpath("grafana.json").read_text())
VARIABLES = {"$__rate_interval": "1m", "$domain": ".*"}
"""What Grafana fills in."""


def queries() -> list[str]:
    """The expressions of all panels, as Grafana would send them."""
    found = [target["expr"] for panel in GRAFANA["panels"] for target in panel.get("targets", ())]
    for name, filled in VARIABLES.items():
        found = [query.replace(name, filled) for query in found]
    return found


# -- alert rules


@dataclass(frozen=True, slots=True)
class Case:
    """Series of a value per minute that let a rule fire after so many minutes, and what it then says."""

    alert: str
    series: dict[str, str]
    minutes: int
    summary: str
    labels: dict[str, str]


WELL = {
    'busload_info{version="1"}': "1x90",
    'busload_commands{domain="a",place="ready"}': "5x90",
    'busload_commands{domain="a",place="running"}': "5x90",
    'busload_domain_workers{domain="a"}': "2x90",
    'busload_domain_paused{domain="a"}': "0x90",
    'busload_oldest_ready_seconds{domain="a"}': "800x90",
    'busload_oldest_troubleshooting_seconds{domain="a"}': "80000x90",
    'busload_oldest_unpublished_seconds{transport="nats"}': "50x90",
    'busload_schedule_late_seconds{domain="a",schedule="s"}': "110x90",
    'busload_schedule_paused{domain="a",schedule="s"}': "0x90",
    'busload_workers{state="silent"}': "0x90",
    "busload_slots": "10x90",
    'busload_commands_ended_total{domain="a",outcome="completed"}': "0+96x90",
    'busload_commands_ended_total{domain="a",outcome="failed"}': "0+2x90",
    'busload_commands_troubled_total{domain="a"}': "0+2x90",
    'busload_settlement_fullness_ratio{worker="w"}': "0.9x90",
    'busload_settlement_flushes_total{worker="w"}': "0+1000x90",
    'busload_settlement_failures_total{worker="w"}': "0+9x90",
    'busload_settlement_latency_seconds{quantile="0.99",worker="w"}': "4x90",
    'busload_worker_lost_leases_total{worker="w"}': "7x90",
}
"""All is well, but only just."""
A, W = {"domain": "a"}, {"worker": "w"}
CASES = [
    Case(
        "BusloadMetricsMissing",
        {'busload_info{version="1"}': "_x90"},
        6,
        "Nobody tells the metrics of the database.",
        {},
    ),
    Case(
        "BusloadNoWorker",
        {'busload_domain_workers{domain="a"}': "0x90"},
        6,
        "5 commands are ready in a, and no worker serves it.",
        A,
    ),
    Case(
        "BusloadCommandsLate",
        {'busload_oldest_ready_seconds{domain="a"}': "960x90"},
        6,
        "Commands of a wait for 16m 0s.",
        A,
    ),
    Case(
        "BusloadSlotsExhausted",
        {'busload_commands{domain="a",place="running"}': "10x90"},
        31,
        "All 10 slots have been busy for half an hour, and commands wait.",
        {},
    ),
    Case(
        "BusloadWorkersSilent",
        {'busload_workers{state="silent"}': "3x90"},
        3,
        "3 workers were not seen for as long as their leases last.",
        {},
    ),
    Case(
        "BusloadFailuresMany",
        {'busload_commands_troubled_total{domain="a"}': "0+6x90"},
        30,
        "More than one in twenty commands of a fails.",
        A,
    ),
    Case(
        "BusloadTroubleshootingForgotten",
        {'busload_oldest_troubleshooting_seconds{domain="a"}': "90000x90"},
        61,
        "A command of a has waited for a person for 1d 1h 0m 0s.",
        A,
    ),
    Case(
        "BusloadPublishingLate",
        {'busload_oldest_unpublished_seconds{transport="nats"}': "90x90"},
        6,
        "Commands have waited for 1m 30s to be published to nats.",
        {"transport": "nats"},
    ),
    Case(
        "BusloadDomainPaused", {'busload_domain_paused{domain="a"}': "1x1500"}, 1441, "a has been paused for a day.", A
    ),
    Case(
        "BusloadScheduleLate",
        {'busload_schedule_late_seconds{domain="a",schedule="s"}': "130x90"},
        3,
        "The schedule s has been due for 2m 10s and is not fired.",
        {**A, "schedule": "s"},
    ),
    Case(
        "BusloadSchedulePaused",
        {'busload_schedule_paused{domain="a",schedule="s"}': "1x1500"},
        1441,
        "The schedule s has been paused for a day.",
        {**A, "schedule": "s"},
    ),
    Case(
        "BusloadSettlementStuck",
        {'busload_settlement_flushes_total{worker="w"}': "1000x90"},
        5,
        "Results wait in worker w, and no flush ends.",
        W,
    ),
    Case(
        "BusloadSettlementRolledBack",
        {'busload_settlement_failures_total{worker="w"}': "0+11x90"},
        20,
        "More than 1 % of the flushes of worker w had to be repeated.",
        W,
    ),
    Case(
        "BusloadSettlementSlow",
        {'busload_settlement_latency_seconds{quantile="0.99",worker="w"}': "6x90"},
        6,
        "Counters lag 6s behind the handlers of worker w.",
        {**W, "quantile": "0.99"},
    ),
    Case(
        "BusloadLeasesLost",
        {'busload_worker_lost_leases_total{worker="w"}': "7x4 8x85"},
        8,
        "Worker w was frozen or cut off, and others run its commands.",
        W,
    ),
]


def declared(alert: str, name: str) -> str:
    """What the file says of an alert under this name."""
    rule = ALERTS.split(f"- alert: {alert}\n")[1].split("- alert: ")[0]
    [found] = re.findall(rf"\b{name}: ([^\n}}]+)", rule)
    return str(found).strip("'")


def test_the_alert_rules_fire_when_they_should(tmp_path: Path) -> None:
    """Each after its time and no rule without a reason, on series that are just beyond what is well."""
    assert [case.alert for case in CASES] == re.findall(r"- alert: (\w+)", ALERTS)
    tests: list[dict[str, Any]] = []
    for case in (None, *CASES):
        series = WELL | (case.series if case else {})
        ends = 1500 if case and case.minutes > 90 else 90
        minutes = case.minutes if case else ends
        expected = {case.alert} if case else set()
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values.replace("x90", f"x{ends}")} for name, values in series.items()
                ],
                "alert_rule_test": [
                    {
                        "eval_time": f"{minutes}m",
                        "alertname": other.alert,
                        "exp_alerts": [_expected(other)] if other.alert in expected else [],
                    }
                    for other in CASES
                ]
                + [{"eval_time": "0m", "alertname": case.alert, "exp_alerts": []} for case in filter(None, [case])],
            }
        )
    (tmp_path / "alerts.yml").write_text(ALERTS)
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}))  # JSON is YAML
    for check in ("check", "rules", "alerts.yml"), ("test", "rules", "test.yml"):
        done = subprocess.run(["promtool", *check], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def _expected(case: Case) -> dict[str, Any]:
    return {
        "exp_labels": {**case.labels, "severity": declared(case.alert, "severity")},
        "exp_annotations": {"summary": case.summary, "action": declared(case.alert, "action")},
    }


# -- the dashboard for Grafana


def test_the_dashboard_for_grafana_is_complete() -> None:
    """Grafana takes a file with parts missing, and shows an empty panel."""
    panels = GRAFANA["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["type"] for panel in panels} == {"row", "stat", "timeseries"}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    variables = {variable["name"]: variable for variable in GRAFANA["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(GRAFANA))) - {"__rate_interval", "__all"}
    assert used == set(variables)
    assert variables["datasource"]["type"] == "datasource"
    assert not [query for query in queries() if "$" in query]


# -- a Prometheus that scrapes


@contextmanager
def prometheus(home: Path, targets: list[str]) -> Iterator[str]:
    [port] = free_ports(1)
    (home / "alerts.yml").write_text(ALERTS)
    config = {  # a busy machine takes its time to answer
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [{"job_name": "busload", "static_configs": [{"targets": targets}]}],
    }
    (home / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus",
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with running(command, cwd=home, quickly=True) as process:
        wait_for_port(port, process)
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=WITHIN).is_success)  # it listens earlier
        yield f"http://127.0.0.1:{port}/api/v1"


class _Server(uvicorn.Server):
    """Leaves the signals of the test's process alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def dashboard(bus: CommandBus) -> AsyncIterator[str]:
    """The dashboard, served beside the test."""
    listening = Address("127.0.0.1", 0).listen()
    host, port = listening.getsockname()
    server = _Server(uvicorn.Config(app(bus), log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        await serving


async def test_prometheus_evaluates_every_query_on_what_it_has_scraped(
    bus: CommandBus, given: Given, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the Grafana dashboard and of the alert rules, from a worker and a dashboard that run."""
    monkeypatch.setattr(recorder, "EVERY", 0.1)
    await mixed(given)
    await given.drained()
    await bus.send("later", "Ship")
    await bus.send("unpublished", "Ship")
    bus.schedule("yearly", cron="0 0 1 1 *", domain="later", command=BatchCommand("Ship"))
    await bus.schedules.sync()
    database.rows(
        "WITH moved AS (DELETE FROM busload.queue WHERE domain = 'unpublished' RETURNING *)"
        "INSERT INTO busload.outbox (lo, hi, domain, transport) SELECT lo, hi, domain, 'nats' FROM moved"
    )
    listening = Address("127.0.0.1", 0).listen()
    scraped_worker = "{}:{}".format(*listening.getsockname())
    async with (
        dashboard(bus) as scraped_dashboard,
        given.running(name="one") as worker,
        serve_pages(pages(worker), listening),
        httpx.AsyncClient(timeout=30) as http,
    ):
        with prometheus(tmp_path, [scraped_worker, scraped_dashboard]) as api:

            async def ask(path: str, **params: str) -> Any:
                answer = (await http.get(f"{api}/{path}", params=params)).json()
                assert answer["status"] == "success", (params, answer)
                return answer["data"]

            rules = re.findall(r"expr: (?:>-\n((?: {10}.*\n)+)|(.*)\n)", ALERTS)
            named = {name for rule in rules for name in re.findall(r"\bbusload_\w+", "".join(rule))}
            missing = {*queries(), *named}
            assert len(missing) > 40

            async def answered() -> bool:
                await given.batch(4)
                for query in sorted(missing):
                    if (await ask("query", query=query))["result"]:
                        missing.discard(query)
                return not missing

            try:
                async with asyncio.timeout(2 * WITHIN):
                    while not await answered():
                        await asyncio.sleep(0.2)  # until the next scrape
            except TimeoutError:
                assert missing == set()

            async def evaluated() -> list[dict[str, Any]]:
                groups = (await ask("rules"))["groups"]
                return [rule for group in groups for rule in group["rules"]]

            found = await evaluated()
            async with asyncio.timeout(WITHIN):
                while any(rule["health"] == "unknown" for rule in found):
                    await asyncio.sleep(0.1)
                    found = await evaluated()
            assert {rule["name"]: rule["health"] for rule in found} == {case.alert: "ok" for case in CASES}
            up = (await ask("query", query="up"))["result"]
            assert {each["metric"]["instance"]: each["value"][1] for each in up} == {
                scraped_worker: "1",
                scraped_dashboard: "1",
            }
