"""Flask: an extension that gives an application its bus, commands for `flask`, and routes for probes.

bus = SelfOpeningBus()
busload = Busload(bus)

def create_app() -> Flask:
    app = Flask(__name__)
    busload.init_app(app)
    return app
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click
from flask import Flask, Response, current_app, jsonify

from busload.errors import InvalidOperationError, kind_of
from busload.integrations import probes
from busload.integrations.self_opening_bus import SelfOpeningBus
from busload.integrations.worker_thread import WorkerThread
from busload.telemetry.logs import set_up_logging
from busload.worker import Worker

__all__ = ["Busload", "SelfOpeningBus", "current_bus"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Busload:
    """The extension: one bus, for one application or several that are made of the same module.

    With `worker` a worker runs in a thread of the web process, from its first request on: for development. Each
    application has `/healthz` and `/readyz` below `health_prefix`, unless that is None.
    """

    def __init__(
        self, bus: SelfOpeningBus, app: Flask | None = None, *, worker: bool = False, health_prefix: str | None = ""
    ) -> None:
        if not isinstance(bus, SelfOpeningBus):
            raise ValueError(
                f"Flask needs a SelfOpeningBus, found {kind_of(bus)}: processes of a web server are forked, and each "
                "needs connections of its own. Make it with the same arguments."
            )
        self.bus, self._health_prefix = bus, health_prefix
        self._thread = WorkerThread(Worker(bus)) if worker else None
        self._app: Flask | None = None
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Make the bus known to an application. `BUSLOAD_WORKER` in its configuration wins over `worker`."""
        if "busload" in app.extensions:
            raise InvalidOperationError(f"The application {app.name!r} has a bus already. Call init_app once.")
        self._app = app
        app.extensions["busload"] = self
        app.cli.add_command(_commands(self))
        if app.config.get("BUSLOAD_WORKER", self._thread is not None):
            thread = self._thread = self._thread or WorkerThread(Worker(self.bus))
            app.before_request(thread.start_once)
        if self._health_prefix is not None:
            app.add_url_rule(f"{self._health_prefix}/healthz", "busload_healthz", self._healthz)
            app.add_url_rule(f"{self._health_prefix}/readyz", "busload_readyz", self._readyz)

    def with_app_context(self, handler: Function) -> Function:
        """Let a handler written with `def` run in the context of the application, as a view does.

        Extensions such as Flask-SQLAlchemy need it. It stands below the decorator of the bus:

            @bus.handler("shop", "Ship")
            @busload.with_app_context
            def ship(command, ctx): ...
        """

        @functools.wraps(handler)
        def call(*args: Any, **fields: Any) -> Any:
            if self._app is None:
                raise InvalidOperationError(
                    "No application has this bus yet. Start workers by `flask busload worker`, or call init_app first."
                )
            with self._app.app_context():
                return handler(*args, **fields)

        return cast(Function, call)

    def stop_worker(self) -> None:
        """Stop the worker inside this process, with its grace time; tests do so, and the end of the process does."""
        if self._thread is not None:
            self._thread.stop()

    def _healthz(self) -> Response:
        return _answer(probes.alive(self.bus.pool, self.bus.settings.health, self._worker))

    def _readyz(self) -> Response:
        return _answer(probes.ready(self.bus.health(timeout=probes.PATIENCE), self._worker))

    @property
    def _worker(self) -> Worker | None:
        return None if self._thread is None else self._thread.worker


def current_bus() -> SelfOpeningBus:
    """The bus of the application that serves this request."""
    found = current_app.extensions.get("busload")
    if not isinstance(found, Busload):
        raise InvalidOperationError(
            f"The application {current_app.name!r} has no bus. Call Busload(bus).init_app(app) where it is made."
        )
    return found.bus


def _answer(probe: probes.Probe) -> Response:
    response = jsonify(probe.body)
    response.status_code = probe.status
    response.headers["Cache-Control"] = "no-store"
    return response


def _commands(of: Busload) -> click.Group:
    """`flask busload`: what has to run within the application. `busload` does the rest."""
    group = click.Group("busload", help="Run workers of this application, and bring its schema up to date.")

    @group.command()
    @click.option("--concurrency", type=click.IntRange(1, 100_000), default=None, help="Commands at a time.")
    @click.option("--threads", type=click.IntRange(1, 10_000), default=None, help="Handlers with `def` at a time.")
    @click.option("--domains", default=None, metavar="D1,D2", help="Which domains to serve; default all with handlers.")
    def worker(concurrency: int | None, threads: int | None, domains: str | None) -> None:
        """Run the commands of this application until SIGTERM or Ctrl-C.

        `busload worker` has more options, such as --processes: give it a module in which the application is made.
        """
        set_up_logging("info", as_json=False)
        served = None if domains is None else [one.strip() for one in domains.split(",")]
        running = Worker(of.bus, domains=served, concurrency=concurrency, threads=threads)
        asyncio.run(running.run(signals=True))

    @group.command()
    def migrate() -> None:
        """Bring the schema of busload up to this release; safe to repeat."""
        applied = of.bus.migrate()
        click.echo("\n".join(f"Applied {one.version:04}_{one.name}" for one in applied) or "Nothing was missing.")

    return group
