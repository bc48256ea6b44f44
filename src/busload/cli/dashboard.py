"""`busload dashboard`: serves the dashboard to a browser, and makes its users."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import click

from busload.bus import CommandBus
from busload.cli import BUS, TYPES, WrongInputError, options
from busload.cli.answer import Answer, of_application
from busload.cli.with_verbs import WithVerbs
from busload.commands.data_type import DataTypes
from busload.settings import Settings, from_environment

PORT = 8484
USERS = "BUSLOAD_DASHBOARD_USERS"
PATIENCE = timedelta(seconds=3)
"""How long a page waits for a connection: less than a page may take, so that it can say that the database is away."""
LEAVE_WITHIN = 1
"""Seconds that live pages have to end once the dashboard is told to stop."""


@click.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["reader", "operator"]), default="reader", help="An operator may also act.")
@options.as_json
def user(name: str, role: str, as_json: bool) -> None:
    """Make a user of the dashboard: a secret to sign in with, shown once, and the entry to add to the environment.

    busload dashboard user ada --role operator
    """
    import_dashboard()
    from busload.dashboard.access import Role, User

    try:
        made, secret = User.create(name, Role(role))
    except ValueError as error:
        raise WrongInputError(str(error)) from None
    said = "\n".join(
        (
            f"Secret of {name}, shown only now:  {secret}",
            f"For scripts:  Authorization: Bearer {name}~{secret}",
            f"Add this entry to {USERS}, with a comma or a new line between entries:",
            str(made),
        )
    )
    value = {"name": name, "role": role, "secret": secret, "entry": str(made)}
    Answer(value, lambda: click.echo(said)).print(as_json)


class _WithUser(WithVerbs):
    verbs: ClassVar = {"user": user}


@click.command(cls=_WithUser)
@click.argument("application", metavar="[MODULE:BUS]", required=False)
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="The port to listen on; 0 is any free one.")
@click.option(
    "--allow-host", "hosts", multiple=True, metavar="NAME", help="A name that browsers call it by; repeat it."
)
@click.option("--hide-payloads", is_flag=True, help="Show readers no data, results or error texts.")
@click.option(
    "--mask", multiple=True, metavar="PATTERN", help="Hide values of keys like this, such as *iban*; repeat it."
)
@click.option("--allow-create", "create", is_flag=True, help="Let operators create batches by a form.")
@click.option("--title", default="busload", help="What the pages are called, to tell several dashboards apart.")
def dashboard(
    application: str | None,
    host: str,
    port: int,
    hosts: tuple[str, ...],
    hide_payloads: bool,
    mask: tuple[str, ...],
    create: bool,
    title: str,
) -> None:
    """Serve the dashboard to a browser, and make its users.

    With MODULE:BUS it is that of the bus of an application. If the bus is over several databases, lists have all of
    them together, and the navigation offers each by itself.

    Without users it serves only this machine, where everybody may do everything. For others, make users with
    `busload dashboard user`, put them into BUSLOAD_DASHBOARD_USERS, and let a proxy add TLS.

        busload dashboard
        busload dashboard app:bus
        busload dashboard --port 9000 --hide-payloads
        busload dashboard --host 0.0.0.0 --allow-host ops.example.com
        busload dashboard user ada --role operator
    """
    has_users = bool((from_environment(USERS) or "").strip(" ,\n"))
    if not is_loopback(host) and not has_users:
        raise WrongInputError(
            f"{host} can be reached from other machines, and the dashboard has no users. Make one with `busload "
            f"dashboard user NAME --role operator`, put the entry into {USERS}, and start again; or leave out --host."
        )
    app = import_dashboard()
    from busload.dashboard.app import MASK
    from busload.dashboard.guard import LOOPBACK

    application = application or click.get_current_context().meta.get(BUS)
    settings = replace(Settings(), transport_url=None, pool_timeout=PATIENCE)
    dsn: str | dict[str, str] | None = settings.database_url
    types: DataTypes = click.get_current_context().meta.get(TYPES, {})
    if application is not None:
        settings, dsn, types = of_application(application, pool_timeout=PATIENCE)
    bus = CommandBus(dsn, settings=settings)
    bus.handlers.data_types.update(types)
    try:
        served = app(
            bus,
            hosts=(*LOOPBACK, *hosts, *([] if _is_any(host) else [_bracketed(host)])),
            hide_payloads=hide_payloads,
            mask=(*MASK, *mask),
            title=title,
            create=create,
        )
    except ValueError as error:
        raise WrongInputError(str(error)) from None
    listening = _listen(host, port)
    shown = "localhost" if _is_any(host) else _bracketed(host)
    click.echo(f"The dashboard is at http://{shown}:{listening.getsockname()[1]}/  (Ctrl-C stops it)", err=True)
    serve(served, listening)


def serve(served: Any, listening: socket.socket) -> None:
    """Serve an application on a socket until somebody stops it."""
    import uvicorn

    config = uvicorn.Config(
        served,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=LEAVE_WITHIN,
    )
    uvicorn.Server(config).run(sockets=[listening])


@contextmanager
def serving(dsn: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A dashboard of this database in a process of its own, and its address, as long as the block lasts."""
    import_dashboard()
    with closing(_listen("127.0.0.1", _free_port())) as listening:
        port = listening.getsockname()[1]
    command = [sys.executable, "-m", "busload.cli", "dashboard", "--port", str(port)]
    environment = {**os.environ, "BUSLOAD_DATABASE_URL": dsn}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            yield f"http://localhost:{port}/", process
        finally:
            process.terminate()


def _free_port() -> int:
    """The usual port, or 0, which is any, if somebody has it."""
    try:
        with socket.create_server(("127.0.0.1", PORT)):
            return PORT
    except OSError:
        return 0


def import_dashboard() -> Any:
    """The module of the application, or what to install for it."""
    try:
        from busload.dashboard import app
    except ModuleNotFoundError as missing:
        raise WrongInputError(str(missing)) from None
    return app


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        said = f"Cannot listen on {_bracketed(host)}:{port}: {error.strerror or error}."
        raise click.ClickException(f"{said} Choose another --port, or 0 for any free one.") from None


def _is_any(host: str) -> bool:
    return host in ("0.0.0.0", "::")  # noqa: S104 - it is compared, not listened on


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
