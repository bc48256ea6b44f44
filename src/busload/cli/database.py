"""Which database a CLI command works on, and in which domain an id is."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import click

from busload.bus import QUEUE_PREFIX, SyncCommandBus
from busload.errors import InvalidOperationError, TransportMisconfigured
from busload.settings import Settings
from busload.store import connection, job, report
from busload.store.embedded import EmbeddedPostgres
from busload.transport import find_transport

T = TypeVar("T")

domain_option = click.option("--domain", help="The domain to look in; default all.")


def _pass_transport_on(ctx: click.Context, param: click.Parameter, url: str | None) -> None:
    """Where every bus looks for it: in this process and, out of sight of other users, in its children."""
    if url is None:
        return
    try:
        find_transport(url)
    except TransportMisconfigured as error:  # which does not repeat it: it may hold a password
        raise click.BadParameter(str(error), param_hint="--transport") from None
    if urlsplit(url).password:
        click.echo(
            "Warning: --transport holds a password, which every user of this machine can see. "
            "Use BUSLOAD_TRANSPORT_URL instead.",
            err=True,
        )
    ctx.with_resource(_variable("BUSLOAD_TRANSPORT_URL", url))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


transport_option = click.option(
    "--transport",
    metavar="URL",
    callback=_pass_transport_on,
    expose_value=False,
    is_eager=True,
    help="The broker to announce commands by; default BUSLOAD_TRANSPORT_URL, else none.",
)


def _pass_prefix_on(ctx: click.Context, param: click.Parameter, prefix: str | None) -> None:
    if prefix is None:
        return
    if not QUEUE_PREFIX.fullmatch(prefix):
        message = f"wanted a letter, then up to 99 letters, digits, '_', '.' or '-', found {prefix!r:.80}"
        raise click.BadParameter(message, param_hint="--queue-prefix")
    ctx.with_resource(_variable("BUSLOAD_QUEUE_PREFIX", prefix))


queue_prefix_option = click.option(
    "--queue-prefix",
    metavar="TEXT",
    callback=_pass_prefix_on,
    expose_value=False,
    is_eager=True,
    help="The first part of the queues' names; default BUSLOAD_QUEUE_PREFIX, else busload.",
)


class _ListOne(Protocol[T]):
    def __call__(self, domain: str, *, limit: int, offset: int) -> list[T]: ...


@contextmanager
def open_bus(*, transport: bool = False) -> Iterator[SyncCommandBus]:
    """A bus on the database of `--dsn` or `BUSLOAD_DATABASE_URL`, else on the embedded one, which says so once.

    Only what announces needs the `transport`: for the rest it does not matter whether its URL can be used.
    """
    settings = Settings() if transport else replace(Settings(), transport_url=None)
    if settings.database_url is not None:
        reach(settings.database_url)
        with SyncCommandBus(settings.database_url, settings=settings) as bus:
            yield bus
        return
    with EmbeddedPostgres(settings.home, pg_bin=settings.pg_bin) as server:
        click.echo(server.info.notice, err=True)
        with SyncCommandBus(server.dsn(), settings=settings) as bus:
            yield bus


def reach(dsn: str) -> None:
    """Fail at once and say why, where a pool would go on trying."""
    with connection.connect(dsn) as conn:
        connection.refuse_server(conn)


def everywhere(
    bus: SyncCommandBus, domain: str | None, ask: _ListOne[T], *, newest: Callable[[T], Any], limit: int, offset: int
) -> list[T]:
    """A page of one domain or, without one, of all domains together, newest first."""
    if domain is not None:
        return ask(domain, limit=limit, offset=offset)
    found = [one for each in bus._read(report.domains()) for one in ask(each, limit=limit + offset, offset=0)]
    return sorted(found, key=newest, reverse=True)[offset : offset + limit]


def domain_of_batch(bus: SyncCommandBus, batch_id: UUID, domain: str | None) -> str:
    return domain or _only("batch", batch_id, bus._read(report.domains_of_batch(batch_id)))


def domain_of_command(bus: SyncCommandBus, command_id: UUID, domain: str | None) -> str:
    return domain or _only("command", command_id, bus._read(report.domains_of_command(command_id)))


def domain_of_job(bus: SyncCommandBus, job_id: UUID, domain: str | None) -> str:
    return domain or _only("job", job_id, bus._read(job.domains_of_job(job_id)))


def operator() -> str:
    """Who is at the shell; a user without a name goes by number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _only(noun: str, id: UUID, domains: Sequence[str]) -> str:
    if not domains:
        raise InvalidOperationError(f"There is no {noun} {id} in any domain. Check the id, and which database is used.")
    if len(domains) > 1:
        raise click.UsageError(f"{noun.capitalize()} {id} is in several domains: {', '.join(domains)}. Add --domain.")
    return domains[0]
