"""`busload metrics`: the metrics of the whole database, and what Prometheus and Grafana make of them."""

from __future__ import annotations

from importlib.resources import files

import click

from busload.cli import options
from busload.cli.answer import open_bus
from busload.cli.output import echo_json


@click.command()
@click.option("--alerts", "file", flag_value="alerts.yml", help="Print the alert rules for Prometheus instead.")
@click.option("--grafana", "file", flag_value="grafana.json", help="Print the dashboard for Grafana instead.")
@options.as_json
def metrics(file: str | None, as_json: bool) -> None:
    """Print the metrics of the whole database, as Prometheus reads them.

    A running `busload dashboard` serves the same at /metrics.

        busload metrics
        busload metrics --json | jq -r '.metrics[].name'
        busload metrics --alerts > busload-alerts.yml
        busload metrics --grafana > busload-grafana.json
    """
    if file is not None:
        if as_json:
            raise click.UsageError("--json is for the metrics: a file for Prometheus or Grafana is printed as it is.")
        click.echo(files("busload.metrics").joinpath(file).read_text(encoding="utf-8"), nl=False)
        return
    with open_bus() as bus:
        found = bus.metrics()
    if as_json:
        echo_json(found)
    else:
        click.echo(str(found), nl=False)
