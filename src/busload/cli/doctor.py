"""`busload doctor`: what is wrong, why it matters, and what to do about it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

import click

from busload.cli import BUS, options
from busload.cli.answer import open_bus
from busload.cli.output import echo_json, echo_styled, paragraph, shown
from busload.commands.lines import BUSLOAD, called, line_as_called
from busload.doctor.catalog import finding
from busload.doctor.finding import Diagnosis, Finding, FindingCode, Severity
from busload.errors import TransportMisconfiguredError
from busload.health.health import SEVERITY, HealthState
from busload.postgres.dsn import without_password

STYLES = {HealthState.HEALTHY: "green", HealthState.DEGRADED: "yellow", HealthState.CRITICAL: "red"}
INDENT = "    "
DSN = "BUSLOAD_DATABASE_URL"
"""The variable that names the database; the context has what was given for --dsn under this name."""
OF_BUSLOAD = re.compile(r"(?:^|(?<=`))busload [^`]+")
"""A line that a shell can run, alone or between backticks in a sentence."""


@click.command()
@click.option("--quiet", is_flag=True, help="Print only what is DEGRADED or CRITICAL, and nothing if all is well.")
@options.transport
@options.queue_prefix
@options.as_json
@click.pass_context
def doctor(ctx: click.Context, /, quiet: bool, as_json: bool) -> None:
    """Look for faults, and say what to do about each.

    It looks at the server, the schema, rights, workers, stuck work and the broker. It writes nothing, and costs the
    queue nothing.

    Exit code 0: all is well, perhaps with notices. 1: DEGRADED, somebody should look. 2: CRITICAL, work stands still or
    may be lost.

        busload doctor
        busload doctor --quiet || echo somebody should look
        busload doctor --json | jq -r '.findings[] | .code, .sql[], .run[]'
    """
    found = _ask()
    found = replace(found, findings=tuple(_of_this_database(ctx, each) for each in found.findings))
    if as_json:
        echo_json(found)
    else:
        _show(ctx, found, quiet=quiet)
    ctx.exit(SEVERITY.index(found.state))


def _ask() -> Diagnosis:
    """A broker whose URL cannot be used keeps nobody from looking at the rest."""
    try:
        with open_bus(transport=True, check=False) as bus:
            return bus.doctor()
    except TransportMisconfiguredError as error:
        refused = finding(FindingCode.BROKER_REFUSES, str(error))
        with open_bus(check=False) as bus:
            found = bus.doctor()
        return Diagnosis.of([*found.findings, refused], [*found.checked, "broker"], found.skipped)


def _of_this_database(ctx: click.Context, found: Finding) -> Finding:
    """The finding with lines that name the database that was looked at, as it was named here."""
    cure = OF_BUSLOAD.sub(lambda line: _line(ctx, line[0]), found.cure)
    return replace(found, cure=cure, run=tuple(_line(ctx, line) for line in found.run))


def _line(ctx: click.Context, line: str) -> str:
    if not line.startswith("busload ") or " --dsn " in line:  # or a line that only another login can run
        return line
    if called.get() != BUSLOAD:  # which knows the database
        return line_as_called(line)
    application, dsn = ctx.meta.get(BUS), ctx.meta.get(DSN)
    if application is not None and "MODULE:BUS" in line:
        line = line.replace("MODULE:BUS", shlex.quote(application))
    elif application is not None:
        line += f" --bus {shlex.quote(application)}"
    return line if dsn is None else f"{line} --dsn {shlex.quote(without_password(dsn))}"


def _about_lines(ctx: click.Context, told: Sequence[Finding]) -> str | None:
    """What people have to know about the database of the lines, beyond what the lines say."""
    if called.get() != BUSLOAD:
        return None
    if not any(OF_BUSLOAD.search(each.cure) or any(map(OF_BUSLOAD.match, each.run)) for each in told):
        return None
    dsn = ctx.meta.get(DSN)
    if dsn is not None and without_password(dsn) != dsn:
        return "The lines leave out the password of --dsn: put it into PGPASSWORD or a ~/.pgpass file."
    if dsn is None and ctx.meta.get(BUS) is None and DSN in os.environ:
        return f"The lines act on the database that {DSN} names."
    return None


def _show(ctx: click.Context, found: Diagnosis, *, quiet: bool) -> None:
    told = [each for each in found.findings if not (quiet and each.severity is Severity.NOTICE)]
    if quiet and not told:
        return
    echo_styled((found.state.value, f"bold {STYLES[found.state]}"))
    for each in told:
        _show_finding(each)
    if about := _about_lines(ctx, told):
        click.echo()
        paragraph(about)
    if quiet:
        return
    faulty = {each.check for each in found.findings}
    if well := [check for check in found.checked if check not in faulty]:
        click.echo()
        paragraph(f"In order: {', '.join(well)}.")
    for why in dict.fromkeys(skipped.why for skipped in found.skipped):
        checks = ", ".join(skipped.check for skipped in found.skipped if skipped.why == why)
        paragraph(f"Not checked: {checks}. {shown(why)}")


def _show_finding(found: Finding) -> None:
    click.echo()
    paragraph(shown(found.found), first=f"{found.severity.value}  {found.code.value}  ", then=INDENT)
    paragraph(found.why, first=INDENT, then=INDENT)
    paragraph(found.cure, first=f"{INDENT}→ ", then=f"{INDENT}  ")
    for line in (line for text in (*found.sql, *found.run) for line in text.splitlines()):
        click.echo(f"{INDENT}  {shown(line)}")
