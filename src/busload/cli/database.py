"""Which database a CLI command works on, and what ids and domains given to it mean."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import click

from busload.bus import QUEUE_PREFIX, SyncCommandBus
from busload.cli import WAIT, WrongInput, did_you_mean
from busload.cli.output import aligned, shown
from busload.domain.command import check_name, refuse
from busload.errors import InvalidOperationError, TransportMisconfigured
from busload.settings import Settings
from busload.store import connection, find, report
from busload.store.embedded import EmbeddedPostgres
from busload.store.find import Found, IdRange
from busload.store.plan import Plan
from busload.transport import find_transport

T = TypeVar("T")

MOST_CANDIDATES = 10
"""Ids that are listed where the beginning of one is not enough."""

domain_option = click.option("--domain", help="The domain to look in; default all.")


def id_or_beginning(text: str) -> IdRange:
    """A type of arguments and options: a UUID, or enough of its beginning to tell it from others."""
    digits = text.rstrip("…").replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{4,32}", digits):
        raise click.BadParameter(f"found {text!r:.80}, wanted a UUID, or at least its first 4 hex digits")
    return IdRange(digits)


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
        with SyncCommandBus(settings.database_url, settings=settings).open(wait=None) as bus:
            wait = click.get_current_context().meta.get(WAIT, 0.0)
            connection.look(bus.dsn, wait, "`busload --wait 30` waits for it that many seconds")
            yield bus
        return
    with EmbeddedPostgres(settings.home, pg_bin=settings.pg_bin) as server:
        click.echo(server.info.notice, err=True)
        with SyncCommandBus(server.dsn(), settings=settings) as bus:
            yield bus


def everywhere(
    bus: SyncCommandBus, domain: str | None, ask: _ListOne[T], *, newest: Callable[[T], Any], limit: int, offset: int
) -> list[T]:
    """A page of one domain or, without one, of all domains together, newest first."""
    if domain is not None:
        page = ask(domain, limit=limit, offset=offset)
        if not page:
            note_unknown_domain(bus, domain)
        return page
    found = [one for each in bus._read(report.domains()) for one in ask(each, limit=limit + offset, offset=0)]
    return sorted(found, key=newest, reverse=True)[offset : offset + limit]


def find_batch(bus: SyncCommandBus, ids: IdRange, domain: str | None) -> tuple[str, UUID]:
    """The batch whose id was given, or the beginning of it, with its domain."""
    return _only(bus, "batch", "batches", find.batches, ids, domain)


def find_command(bus: SyncCommandBus, ids: IdRange, domain: str | None) -> tuple[str, UUID]:
    return _only(bus, "command", "commands", find.commands, ids, domain)


def find_job(bus: SyncCommandBus, ids: IdRange, domain: str | None) -> tuple[str, UUID]:
    return _only(bus, "job", "jobs", find.jobs, ids, domain)


def find_job_of_batches(bus: SyncCommandBus, ids: IdRange, domain: str | None) -> UUID:
    """The job id of some batches; a whole one need not be that of any."""
    return ids.whole or _only(bus, "job", "jobs", find.jobs_of_batches, ids, domain)[1]


def unknown_domain(bus: SyncCommandBus, domain: str) -> str | None:
    """What to say about a domain that nobody has heard of, which most likely is a mistyped one."""
    refuse(check_name(domain, "domain", bus.settings.limits), writes=False)
    known = bus._read(find.domains())
    if domain in known:
        return None
    return f"No command was ever sent to {domain!r:.80}, and no worker serves it.{did_you_mean(domain, known)}"


def note_unknown_domain(bus: SyncCommandBus, domain: str | None) -> None:
    """Say it beside an empty list: an answer about a mistyped domain looks like that about an idle one."""
    if domain is not None and (unknown := unknown_domain(bus, domain)):
        click.echo(f"Note: {unknown}", err=True)


def operator() -> str:
    """Who is at the shell; a user without a name goes by number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _only(
    bus: SyncCommandBus, noun: str, nouns: str, look: Callable[..., Plan[list[Found]]], ids: IdRange, domain: str | None
) -> tuple[str, UUID]:
    if domain is not None and ids.whole is not None:
        return domain, ids.whole
    found = bus._read(look(ids, domain=domain, limit=MOST_CANDIDATES + 1))
    if not found:
        where = "in any domain" if domain is None else f"in domain {domain!r}"
        check = "Check the id, and which database is used."
        which = ids if ids.whole else f"that begins with {ids}"
        raise InvalidOperationError(f"There is no {noun} {which} {where}. {check}")
    if len({one.id for one in found}) > 1:
        listed = aligned([["", str(one.id), one.domain, shown(one.about)] for one in found[:MOST_CANDIDATES]])
        more = ["  and more"] if len(found) > MOST_CANDIDATES else []
        lines = [f"There are several {nouns} that begin with {ids}. Write more of the id:", *listed, *more]
        raise WrongInput("\n".join(lines))
    if len(found) > 1:
        domains = ", ".join(one.domain for one in found)
        raise click.UsageError(f"{noun.capitalize()} {found[0].id} is in several domains: {domains}. Add --domain.")
    return found[0].domain, found[0].id
