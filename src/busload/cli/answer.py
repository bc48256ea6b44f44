"""A command asks an open bus and returns an `Answer`, which is printed: a text for people, a value for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeAlias

import click

from busload.cli import BUS, TYPES, WAIT, options
from busload.cli.find import find_one, note_unknown_domain
from busload.cli.output import echo_json, paragraph
from busload.commands.data_type import DataTypes
from busload.commands.search import Noun
from busload.errors import DatabaseUnavailableError, DatabaseUnusableError
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.settings import Settings
from busload.shards import ShardedBus, SyncShardedBus
from busload.sync.bus import SyncCommandBus
from busload.sync.connection import check_server

Command: TypeAlias = Callable[..., Any]

SEVERAL = (ShardedBus, SyncShardedBus)
"""Buses over several databases."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`value` is printed with `--json`; people read `show`, a text or a function that prints."""

    value: Any
    show: str | Callable[[], None]
    found: bool = True
    """Whether there was anything; if not, a note says whether the domain is known at all."""
    ok: bool = True
    """If not, the command ends with exit code 1."""

    def print(self, as_json: bool) -> None:
        if as_json:
            echo_json(self.value)
        elif isinstance(self.show, str):
            paragraph(self.show)
        else:
            self.show()


def would(what: str, **value: Any) -> Answer:
    """The answer of a dry run, the same for all commands: what would be done, to how many."""
    return Answer({**value, "dry_run": True}, f"Would {what}; nothing was done.")


def answers(function: Command | None = None, *, transport: bool = False, prints: bool = False) -> Command:
    """A command whose function is given an open bus, and whose `Answer` is printed, with `--json` for programs.

    Only a command that publishes needs the `transport`. With `prints` the function is told `as_json` and prints what
    it finds by itself, while it finds it.
    """
    if function is None:
        return partial(answers, transport=transport, prints=prints)

    @options.as_json
    @wraps(function)
    def command(*, as_json: bool, **given: Any) -> None:
        with open_bus(transport=transport) as bus:
            if prints:
                function(bus, as_json=as_json, **given)
                return
            answer: Answer = function(bus, **given)
            if not answer.found:
                note_unknown_domain(bus, given.get("domain"))
        answer.print(as_json)
        if not answer.ok:
            raise click.exceptions.Exit(1)

    return command


def about(noun: Noun, **how: bool) -> Callable[[Command], Command]:
    """A command about one batch, command or job: its function is given a bus, the domain and the id.

    People give the id, or the beginning of it, and the domain if they know it.
    """

    def decorate(function: Command) -> Command:
        @wraps(function)
        def ask(bus: Any, *, domain: str | None, **given: Any) -> Any:
            return function(bus, *find_one(bus, noun, given.pop(noun), domain), **given)

        return options.id_of(noun)(options.domain(answers(ask, **how)))

    return decorate


def of_application(
    application: str, *, transport: bool = False, **changed: Any
) -> tuple[Settings, str | dict[str, str] | None, DataTypes]:
    """The settings of the bus that `--bus` names, its DSN or those of its databases by domain, and its data types."""
    from busload.cli.worker import load_bus

    found = load_bus(application, handlers=False)
    kept: dict[str, Any] = {} if transport else {"transport_url": None}
    settings = replace(found.settings, **kept, **changed)
    dsn = found.routes.mapping if isinstance(found, SEVERAL) else found.database.given_dsn
    return settings, dsn, found.data_types


def _check_servers(bus: SyncCommandBus, wait: float) -> None:
    """Refuse a database that cannot be used. Of several, those that are away are named if another one answers."""
    away: list[DatabaseUnavailableError] = []
    for shard in bus.shards:
        try:
            check_server(shard.dsn, wait, "`busload --wait 30` waits for it that many seconds")
        except DatabaseUnavailableError as error:
            away.append(error)
    if len(away) == len(bus.shards):
        raise away[0]
    for one in away:
        click.echo(f"Warning: {one}", err=True)


@contextmanager
def open_bus(*, transport: bool = False, check: bool = True, **changed: Any) -> Iterator[SyncCommandBus]:
    """A bus on the database of `--dsn` or `BUSLOAD_DATABASE_URL`, else on the embedded one, which says so once.

    Only a command that publishes needs the `transport`: others work though its URL cannot be used. Without `check`, the
    bus is there though its server may be away, which is then waited for as long as `--wait` says.
    `changed` are settings that differ from those of other commands.
    """
    settings = replace(Settings(), **changed) if transport else replace(Settings(), transport_url=None, **changed)
    application = click.get_current_context().meta.get(BUS)
    types: DataTypes = click.get_current_context().meta.get(TYPES, {})
    if application is not None:
        settings, dsn, types = of_application(application, transport=transport, **changed)
    else:
        dsn = settings.database_url
    if dsn is not None:
        with SyncCommandBus(dsn, settings=settings).open(wait=None) as bus:
            bus.handlers.data_types.update(types)  # what is sent is checked as the application itself checks it
            wait = click.get_current_context().meta.get(WAIT, 0.0)
            with nullcontext() if check else suppress(DatabaseUnavailableError, DatabaseUnusableError):
                if check or wait:
                    _check_servers(bus, wait)
            yield bus
        return
    with EmbeddedPostgres(settings.home, pg_bin=settings.pg_bin) as server:
        click.echo(server.info.notice, err=True)
        with SyncCommandBus(server.dsn(), settings=settings) as bus:
            bus.handlers.data_types.update(types)
            yield bus
