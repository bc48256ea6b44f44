"""`busload health`: whether the database, the workers and the broker are well."""

from __future__ import annotations

import click

from busload.cli import options
from busload.cli.answer import open_bus
from busload.cli.output import echo_json, echo_styled, paragraph, shown
from busload.errors import DatabaseUnavailableError, DatabaseUnusableError
from busload.health.health import SEVERITY, Health, HealthCode, HealthState, critical

STYLES = {HealthState.HEALTHY: "green", HealthState.DEGRADED: "yellow", HealthState.CRITICAL: "red"}


@click.command()
@options.as_json
@click.pass_context
def health(ctx: click.Context, /, as_json: bool) -> None:
    """Say whether the database, the workers and the broker are well, and if not, why.

    Exit code 0: HEALTHY. 1: DEGRADED, somebody should look. 2: CRITICAL, work stands still.

        busload health
        busload health --json | jq -r '.reasons[].code'
    """
    found = _ask()
    if as_json:
        echo_json(found)
    else:
        _show(found)
    ctx.exit(SEVERITY.index(found.state))


def _ask() -> Health:
    try:
        with open_bus() as bus:
            return bus.health()
    except DatabaseUnavailableError as error:
        return critical(HealthCode.DATABASE_UNREACHABLE, " ".join(str(error).split()))
    except DatabaseUnusableError as error:
        return critical(HealthCode.DATABASE_UNUSABLE, str(error))


def _show(found: Health) -> None:
    echo_styled((found.state.value, f"bold {STYLES[found.state]}"))
    for reason in found.reasons:
        since = "" if reason.since is None else f" Since {shown(reason.since)}."
        paragraph(f"{reason.message}{since}", first=f"  {reason.state.value}  {reason.code.value}  ", then="    ")
