"""How the answers of several databases become one: sums, and lists in one order. Nothing here asks a database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date, datetime
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, TypeVar

from busload.commands.checks import refuse, wrong
from busload.commands.command import TroubledDomain
from busload.dispatch.report import MOST, Day, PublishingReport
from busload.doctor.finding import CHECKS, Diagnosis
from busload.health.health import Health
from busload.health.overview import Overview
from busload.limits.pause import DomainOverview
from busload.metrics.database import Metrics
from busload.metrics.exposition import Metric, Sample
from busload.retention.kept import KeptTable, Old, Retention
from busload.statistics.statistics import Point

T = TypeVar("T")

BETWEEN, END = "~", "end"
"""A cursor over several databases has a part for each: where its next page begins, nothing at the start, or `end`."""


@dataclass(frozen=True)
class Page(Generic[T]):
    """What one database has found of a page: each item with the cursor behind it, and the `next` of the whole."""

    items: Sequence[T]
    cursors: Sequence[str]
    begin: str
    next: str | None

    def cursor(self, taken: int) -> str:
        """Where the next page of this database begins if so many of its items were taken."""
        if taken == len(self.items):
            return END if self.next is None else self.next
        return self.cursors[taken - 1] if taken else self.begin


def parts_of(after: str | None, count: int) -> list[str]:
    """The cursors of so many databases, as the `next` of a page has them."""
    if after is None:
        return [""] * count
    parts = after.split(BETWEEN) if isinstance(after, str) else []
    if len(parts) != count:
        refuse([wrong(after, "after", "the `next` of the page before, of the same databases")], writes=False)
    return parts


def joined(pages: Sequence[Page[T]], when: Callable[[T], Any], limit: int) -> tuple[list[T], str | None]:
    """The newest items of all pages, and the cursor behind them.

    A database that has looked at as many rows as a page may, and found fewer than asked for, may have newer ones still:
    the page ends before anything older of the others.
    """
    taken = [0] * len(pages)
    found: list[T] = []
    while len(found) < limit:
        heads = [number for number, page in enumerate(pages) if taken[number] < len(page.items)]
        looks_on = any(taken[n] == len(page.items) and page.next is not None for n, page in enumerate(pages))
        if not heads or looks_on:
            break
        first = max(heads, key=lambda number: when(pages[number].items[taken[number]]))
        found.append(pages[first].items[taken[first]])
        taken[first] += 1
    cursors = [page.cursor(count) for page, count in zip(pages, taken, strict=True)]
    return found, None if all(cursor == END for cursor in cursors) else BETWEEN.join(cursors)


def newest(found: Iterable[Sequence[T]], *by: str, limit: int, offset: int = 0) -> list[T]:
    """A page of all lists together, those with the highest attributes first."""
    return sorted(chain(*found), key=attrgetter(*by), reverse=True)[offset : offset + limit]


def together(found: Iterable[Iterable[T]], *by: str, limit: int | None = None) -> list[T]:
    """All lists together, by these attributes, which may be None."""

    def key(one: T) -> list[tuple[bool, Any]]:
        return [((value := getattr(one, name)) is not None, value or "") for name in by]

    return sorted(chain(*found), key=key)[:limit]


def added(found: Sequence[T], *, least: Sequence[str] = (), first: Sequence[str] = ()) -> T:
    """The sum of values of one kind, field by field: the `least` of some, and of some that of the first value."""
    sums: dict[str, Any] = {}
    for name in (one.name for one in fields(found[0])):  # type: ignore[arg-type]
        values = [value for one in found if (value := getattr(one, name)) is not None]
        if name in first or not values:
            sums[name] = getattr(found[0], name)
        else:
            sums[name] = min(values) if name in least else sum(values)
    return replace(found[0], **sums)  # type: ignore[type-var]


def by_key(found: Iterable[Iterable[T]], key: str, **how: Sequence[str]) -> list[T]:
    """The sum of what has the same key, in the order of the keys."""
    groups: dict[Any, list[T]] = {}
    for one in chain(*found):
        groups.setdefault(getattr(one, key), []).append(one)
    return [
        added(groups[name], first=(key, *how.get("first", ())), least=how.get("least", ())) for name in sorted(groups)
    ]


def domains(found: Iterable[Iterable[DomainOverview]]) -> list[DomainOverview]:
    return by_key(found, "domain", first=["pause"], least=["oldest_ready"])


def troubled(found: Iterable[Iterable[TroubledDomain]]) -> list[TroubledDomain]:
    """Those with most first, as one database tells them."""
    return sorted(chain(*found), key=lambda one: (-one.count, one.domain))


def overview(found: Sequence[Overview]) -> Overview:
    oldest = ("oldest_ready", "oldest_unpublished", "oldest_in_troubleshooting")
    whole = added([replace(one, domains=()) for one in found], least=(*oldest, "at"), first=["domains"])
    return replace(whole, at=max(one.at for one in found), domains=tuple(domains(one.domains for one in found)))


def series(found: Iterable[Iterable[Point]]) -> list[Point]:
    """Each step summed; the first command waits as long as in the database where it waits longest."""
    groups: dict[datetime, list[Point]] = {}
    for point in chain(*found):
        groups.setdefault(point.at, []).append(point)
    points = []
    for at in sorted(groups):
        waits = [one.oldest_ready for one in groups[at] if one.oldest_ready is not None]
        points.append(replace(added(groups[at], first=["at"]), oldest_ready=max(waits, default=None)))
    return points


def health(found: Iterable[tuple[str, Health]]) -> Health:
    """The worst of all; each reason names its database."""
    reasons = ((place, reason) for place, one in found for reason in one.reasons)
    return Health.of(replace(reason, message=f"{place}: {reason.message}") for place, reason in reasons)


def diagnosis(found: Sequence[tuple[str, Diagnosis]]) -> Diagnosis:
    """The findings of all, each with its database; a check counts as made if it was made everywhere."""
    findings = [replace(one, found=f"{place}: {one.found}") for place, whole in found for one in whole.findings]
    skipped = [replace(one, why=f"{place}: {one.why}") for place, whole in found for one in whole.skipped]
    checked = [one for one in CHECKS if all(one in whole.checked for _, whole in found)]
    return Diagnosis.of(findings, checked, skipped)


def metrics(found: Sequence[tuple[str, Metrics]]) -> Metrics:
    """The metrics of all, with one more label that names the database."""
    merged: dict[str, Metric] = {}
    for place, whole in found:
        for metric in whole.metrics:
            known = merged.get(metric.name, replace(metric, samples=()))
            named = (Sample({**one.labels, "database": place}, one.value, one.suffix) for one in metric.samples)
            merged[metric.name] = replace(known, samples=(*known.samples, *named))
    return Metrics(tuple(merged.values()))


def retention(found: Sequence[Retention]) -> Retention:
    """Sums, and of times the oldest: the database that was pruned longest ago, or never, is the one to look at."""
    tables: list[KeptTable] = by_key((one.tables for one in found), "name")
    old: list[Old] = by_key((one.old for one in found), "days")
    turns, lasts = [one.turn_at for one in found], [one.last for one in found]
    return Retention(
        tables,
        old,
        min((one.oldest_command for one in found if one.oldest_command is not None), default=None),
        min((one.oldest_batch for one in found if one.oldest_batch is not None), default=None),
        None if None in turns else min(turn for turn in turns if turn is not None),
        None if None in lasts else min((last for last in lasts if last is not None), key=attrgetter("at")),
        sum(one.under_way for one in found),
    )


def publishing(found: Sequence[PublishingReport]) -> PublishingReport:
    days: dict[date, list[Day]] = {}
    for day in chain(*(one.daily for one in found)):
        days.setdefault(day.day, []).append(day)
    retry = sorted(chain(*(one.retry for one in found)), key=lambda one: -one.commands)
    recent = sorted(chain(*(one.recent for one in found)), key=lambda one: (-one.pending, -one.queued, -one.processing))
    return PublishingReport(retry[:MOST], [_day(days[day]) for day in sorted(days, reverse=True)], recent[:MOST])


def _day(found: Sequence[Day]) -> Day:
    told = [(one.rounds, one.dispatched) for one in found if one.rounds is not None and one.dispatched]
    dispatched = sum(count for _, count in told)
    rounds = sum(rounds * count for rounds, count in told) / dispatched if dispatched else None
    return replace(added(found, first=["day"]), rounds=rounds)
