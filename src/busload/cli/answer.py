"""A command asks the bus and answers: a value for programs, and the same for people.

Here are the database that it asks, what the ids and domains that it is given mean, and how its answer is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from uuid import UUID

import click

from busload.cli import WAIT, WrongInputError, did_you_mean, options
from busload.cli.output import Cell, aligned, echo_json, facts, paragraph, shown, table
from busload.commands import search as report
from busload.commands.checks import check
from busload.commands.search import IdRange, Noun
from busload.errors import InvalidOperationError
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.settings import Settings
from busload.sync.bus import SyncCommandBus
from busload.sync.connection import check_server

T = TypeVar("T")
Command: TypeAlias = Callable[..., Any]
MOST_CANDIDATES = 10
"""Ids that are listed where the beginning of one is not enough."""


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


@dataclass(frozen=True)
class View(Generic[T]):
    """How values are shown to people: as the rows of a table, or one as a list of facts.

    Each word of `names` is a column and the attribute that it shows, as in `"BATCH=batch.batch_id DOMAIN"`. Without
    `=` the attribute has the column's own name. `cells` has functions for columns that show more than an attribute.
    """

    names: str
    cells: Mapping[str, Callable[[T], Cell]] = field(default_factory=dict)
    nothing: str = ""
    elastic: str | None = None
    spare: tuple[str, ...] = ()

    @property
    def columns(self) -> dict[str, Callable[[T], Cell]]:
        pairs = (word.partition("=") for word in self.names.split())
        return {
            (title := name.replace("_", " ")): self.cells.get(title) or partial(_attribute, attribute or name.lower())
            for name, _, attribute in pairs
        }

    def without(self, *names: str) -> View[T]:
        kept = [word for word in self.names.split() if word.partition("=")[0] not in names]
        return replace(self, names=" ".join(kept))

    def list(
        self,
        found: Sequence[T],
        *,
        value: Any = None,
        nothing: str | None = None,
        notes: Sequence[str] = (),
        ok: bool = True,
    ) -> Answer:
        """All of them as a table, and people get the `notes` on stderr; programs get `value` if it is given."""

        def show() -> None:
            self.print_table(found, nothing=nothing)
            for note in notes:
                click.echo(note, err=True)

        return Answer(found if value is None else value, show, found=bool(found), ok=ok)

    def one(self, found: T, *, below: Answer | None = None, lines: Sequence[str] = (), **more: Any) -> Answer:
        """One of them as facts, then what else there is; programs get `more` among its fields."""

        def show() -> None:
            self.print_facts(found)
            if below is not None:
                click.echo()
                below.print(False)
            for line in lines:
                click.echo(line)

        return Answer({**fields_of(found), **more} if more else found, show)

    def print_facts(self, found: T, **more: Cell) -> None:
        facts([*((name, cell(found)) for name, cell in self.columns.items()), *more.items()])

    def print_table(self, found: Sequence[T], *, nothing: str | None = None) -> None:
        columns = self.columns
        rows = [[cell(one) for cell in columns.values()] for one in found]
        nothing = self.nothing if nothing is None else nothing
        table([*columns], rows, nothing=nothing, elastic=self.elastic, spare=self.spare)


def _attribute(path: str, value: Any) -> Any:
    """An attribute of an attribute; None if there is none on the way."""
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def fields_of(found: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are."""
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


class _ListOne(Protocol[T]):
    def __call__(self, domain: str, *, limit: int, offset: int) -> list[T]: ...


@contextmanager
def open_bus(*, transport: bool = False) -> Iterator[SyncCommandBus]:
    """A bus on the database of `--dsn` or `BUSLOAD_DATABASE_URL`, else on the embedded one, which says so once.

    Only a command that publishes needs the `transport`: others work though its URL cannot be used.
    """
    settings = Settings() if transport else replace(Settings(), transport_url=None)
    if settings.database_url is not None:
        with SyncCommandBus(settings.database_url, settings=settings).open(wait=None) as bus:
            wait = click.get_current_context().meta.get(WAIT, 0.0)
            check_server(bus.dsn, wait, "`busload --wait 30` waits for it that many seconds")
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
        return ask(domain, limit=limit, offset=offset)
    found = [one for each in bus.database.read(report.domains()) for one in ask(each, limit=limit + offset, offset=0)]
    return sorted(found, key=newest, reverse=True)[offset : offset + limit]


def find_one(bus: SyncCommandBus, noun: Noun, ids: IdRange, domain: str | None) -> tuple[str, UUID]:
    """The domain and id of the one batch, command or job whose id, or the beginning of it, was given."""
    if domain is not None and ids.whole is not None:
        return domain, ids.whole
    name = noun.partition(" ")[0]
    found = bus.database.read(report.find(noun, ids, domain=domain, limit=MOST_CANDIDATES + 1))
    if not found:
        where = "in any domain" if domain is None else f"in domain {domain!r}"
        which = ids if ids.whole else f"that begins with {ids}"
        raise InvalidOperationError(f"There is no {name} {which} {where}. Check the id, and which database is used.")
    if len({one.id for one in found}) > 1:
        listed = aligned([["", str(one.id), one.domain, shown(one.about)] for one in found[:MOST_CANDIDATES]])
        more = ["  and more"] if len(found) > MOST_CANDIDATES else []
        nouns = "batches" if name == "batch" else f"{name}s"
        lines = [f"There are several {nouns} that begin with {ids}. Write more of the id:", *listed, *more]
        raise WrongInputError("\n".join(lines))
    if len(found) > 1:
        domains = ", ".join(one.domain for one in found)
        raise click.UsageError(f"{name.capitalize()} {found[0].id} is in several domains: {domains}. Add --domain.")
    return found[0].domain, found[0].id


def unknown_domain(bus: SyncCommandBus, domain: str) -> str | None:
    """What to say about a domain that nobody has heard of; most likely it is mistyped."""
    check(bus.settings.limits, writes=False, domain=domain)
    known = bus.database.read(report.known_domains())
    if domain in known:
        return None
    return f"No command was ever sent to {domain!r:.80}, and no worker serves it.{did_you_mean(domain, known)}"


def note_unknown_domain(bus: SyncCommandBus, domain: str | None) -> None:
    """Say it beside an empty list: the answer about a mistyped domain looks like the answer about an idle one."""
    if domain is not None and (unknown := unknown_domain(bus, domain)):
        click.echo(f"Note: {unknown}", err=True)
