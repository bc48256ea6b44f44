"""What a person means who gives the beginning of an id, a domain, or no domain at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import click

from busload.cli import WrongInputError, did_you_mean
from busload.cli.output import aligned, shown
from busload.commands import search
from busload.commands.checks import check
from busload.commands.ids import JobId
from busload.commands.search import Found, IdRange, Noun
from busload.errors import InvalidOperationError
from busload.sync.bus import SyncCommandBus

T = TypeVar("T")
MOST_CANDIDATES = 10
"""Ids that are listed where the beginning of one is not enough."""


def id_or_beginning(text: str) -> IdRange:
    """A type of arguments and options: a UUID, or enough of its beginning to tell it from others."""
    digits = text.rstrip("…").replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{4,32}", digits):
        raise click.BadParameter(f"found {text!r:.80}, wanted a UUID, or at least its first 4 hex digits")
    return IdRange(digits)


def job_of_batches(bus: SyncCommandBus, text: str, domain: str | None) -> JobId:
    """The job whose batches are meant: a UUID or the beginning of one, or the whole of an id that is another text."""
    try:
        ids = id_or_beginning(text)
    except click.BadParameter:
        return text
    if any(bus.list_batches(each, job_id=text, limit=1) for each in domains_of(bus, domain)):
        return text  # a text may consist of hex digits, as many as a UUID has, too
    if ids.whole is not None:  # it need not be that of a job which has batches
        return ids.whole
    found: JobId = find_one(bus, "job of batches", ids, domain)[1]
    return found


def find_one(bus: SyncCommandBus, noun: Noun, ids: IdRange, domain: str | None) -> tuple[str, Any]:
    """The domain and id of the one batch, command or job whose id, or the beginning of it, was given."""
    if domain is not None and ids.whole is not None:
        return domain, ids.whole
    name = noun.partition(" ")[0]
    found = candidates(bus, noun, ids, domain, limit=MOST_CANDIDATES + 1)
    if not found:
        where = "in any domain" if domain is None else f"in domain {domain!r}"
        which = ids if ids.whole else f"that begins with {ids}"
        raise InvalidOperationError(f"There is no {name} {which} {where}. Check the id, and which database is used.")
    if len({one.id for one in found}) > 1:
        listed = aligned([["", str(one.id), one.domain, shown(one.about)] for one in found[:MOST_CANDIDATES]])
        more = ["  and more"] if len(found) > MOST_CANDIDATES else []
        several = "batches" if name == "batch" else f"{name}s"
        lines = [f"There are several {several} that begin with {ids}. Write more of the id:", *listed, *more]
        raise WrongInputError("\n".join(lines))
    if len(found) > 1:
        domains = ", ".join(one.domain for one in found)
        raise click.UsageError(f"{name.capitalize()} {found[0].id} is in several domains: {domains}. Add --domain.")
    return found[0].domain, found[0].id


def candidates(bus: SyncCommandBus, noun: Noun, ids: IdRange, domain: str | None, *, limit: int) -> list[Found]:
    """What the id, or the beginning of it, may mean: in the database of the domain or, without one, in any."""
    shards = bus.shards if domain is None else [bus.shard_of(domain)]
    plans = ((shard, search.find(noun, ids, domain=domain, limit=limit)) for shard in shards)
    return [one for shard, plan in plans for one in shard.database.read(plan)]


def newest(
    bus: SyncCommandBus, ask: Callable[..., list[T]], *by: str, domain: str | None, limit: int, offset: int
) -> list[T]:
    """A page of one domain or, without one, of all domains together, those with the highest attributes `by` first."""
    if domain is not None:
        return ask(domain, limit=limit, offset=offset)
    found = [one for each in domains_of(bus, None) for one in ask(each, limit=limit + offset, offset=0)]
    return sorted(found, key=attrgetter(*by), reverse=True)[offset : offset + limit]


def domains_of(bus: SyncCommandBus, domain: str | None) -> list[str]:
    """The domain that was named or, if none was, all of them."""
    if domain is not None:
        return [domain]
    return sorted({each for shard in bus.shards for each in shard.database.read(search.domains())})


def unknown_domain(bus: SyncCommandBus, domain: str) -> str | None:
    """What to say about a domain that nobody has heard of; most likely it is mistyped."""
    check(bus.settings.limits, writes=False, domain=domain)
    known = bus.shard_of(domain).database.read(search.known_domains())
    if domain in known:
        return None
    return f"No command was ever sent to {domain!r:.80}, and no worker serves it.{did_you_mean(domain, known)}"


def note_unknown_domain(bus: SyncCommandBus, domain: str | None) -> None:
    """Say it beside an empty list: the answer about a mistyped domain looks like the answer about an idle one."""
    if domain is not None and (unknown := unknown_domain(bus, domain)):
        click.echo(f"Note: {unknown}", err=True)
