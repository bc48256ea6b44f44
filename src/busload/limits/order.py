"""Order: the commands of one key run one at a time, in the order in which they were sent.

Only workers know the key of a command, so a claim and the entry of its commands into the order are one transaction, and
one worker at a time claims in such a domain. A command that was ever claimed is then the first of its key, or it waits
behind the first. It stays the first until it has ended, whatever worker runs it: a retry runs before its successors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from busload.commands import claim
from busload.commands.execution import Leased
from busload.commands.ids import new_id
from busload.postgres.arrays import Bigints, Integers, Texts
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements
from busload.postgres.write import only

SQL = statements(__name__)

MOST = 500
"""Commands that one claim takes at most."""

DISOWNED = 2000
"""Loads that lose their owner at a time: it takes some 60 ms, in which nobody else claims in their domain."""

SWEPT = 5000
"""Keys that a sweep looks at."""

IDLE = 5000
"""Milliseconds after which the server disconnects a client that has frozen within its claim."""

PATIENCE = 200
"""Milliseconds that a claim waits for that of another worker."""


class Key(NamedTuple):
    """The name of a limit, and a value of its `by`."""

    name: str
    subject: str


@dataclass(frozen=True, slots=True)
class OrderedClaim(claim.Claim):
    """What a claim took: `first` may run, and `waiting` are not ours any more.

    `barred` means that more is ready, but behind a load that somebody has locked, or that is not published yet.
    """

    first: list[Leased] = field(default_factory=list)
    waiting: list[Leased] = field(default_factory=list)
    barred: bool = False

    def delivered(self, loads: Iterable[int]) -> claim.DeliveredClaim:
        """The same as the answer to messages about these loads: a message only says that a look is worth it."""
        passed_over = frozenset(loads) if self.barred or self.contended else frozenset[int]()
        taken = self.leases, self.leased, self.contended, self.refused
        return claim.DeliveredClaim(*taken, passed_over=passed_over)


NOTHING = OrderedClaim([], [], contended=False)
BUSY = OrderedClaim([], [], contended=True)
"""Nothing yet, but another look is worth it."""


class Look(NamedTuple):
    """Whether a claim of a domain may find something, and whether loads of it have owners, who would take turns."""

    ready: bool
    owned: bool


def register_domain(domain: str) -> Plan[None]:
    """Say that workers claim this domain in order, so that single sends keep to it as well.

    A worker says so at least every few days: what nobody says for a month is forgotten.
    """
    yield from execute(SQL.register_domain, domain=domain)


def forget_domains() -> Plan[None]:
    """Remove domains that no worker has claimed in order for a month: handlers come and go."""
    yield from execute(SQL.forget_domains)


def look(domain: str, *, suspects: bool) -> Plan[Look]:
    """Look at a domain before a claim: this needs no lock."""
    return only(many(Look, SQL.look, domain=domain, suspects=int(suspects)))


def claim_in_order(
    *,
    worker: int,
    domain: str,
    limit: int,
    suspects: bool,
    owned: bool,
    keys: Callable[[Sequence[Leased]], dict[Leased, Key]],
) -> Plan[OrderedClaim]:
    """Take up to `limit` commands in the order of sending, and enter those into the order that have a key.

    `keys` says which commands have one; the others may run. If loads are `owned`, they are disowned first. For a
    transaction of its own. `LockNotAvailable` if another worker takes long over its claim.
    """
    [(commit, *_)] = yield from execute(SQL.lock_domain, domain=domain, idle=IDLE, patience=PATIENCE)
    if owned:
        [(disowned,)] = yield from execute(SQL.disown, domain=domain, most=DISOWNED)
        if disowned == DISOWNED:  # there may be more, and to leap from owner to owner would take longer
            return BUSY
    [row] = yield from execute(
        SQL.claim_in_order,
        worker=worker,
        domain=domain,
        domains=[domain],
        limit=limit,
        suspects=int(suspects),
        lease=str(new_id()),
    )
    alive, locked, barred, leases, leased = *row[:3], *claim.read(row[3:16], *row[16:])
    asked = keys(leased)
    may_run = yield from _enter(asked, worker=worker, commit=commit)
    return OrderedClaim(
        leases,
        leased,
        contended=locked,
        refused=not alive,
        first=[one for one in asked if one in may_run],
        waiting=[one for one in asked if one not in may_run],
        barred=barred,
    )


def _enter(asked: dict[Leased, Key], *, worker: int, commit: str) -> Plan[set[Leased]]:
    """Enter claimed commands; returns those that are the first of their key."""
    if not asked:
        return set()
    ordinals: dict[UUID, int] = {}
    lease_ordinals = [ordinals.setdefault(one.lease.lease_id, len(ordinals) + 1) for one in asked]
    [(answers, _)] = yield from execute(
        SQL.enter,
        worker=worker,
        names=Texts.of([key.name for key in asked.values()]),
        subjects=Texts.of([key.subject for key in asked.values()]),
        commands=Bigints.of([one.id for one in asked]),
        leases=list(ordinals),
        lease_ordinals=Integers.of(lease_ordinals),
        commit=commit,
    )
    return {one for one, may_run in zip(asked, answers, strict=True) if may_run}


def advance(keys: Sequence[Key]) -> Plan[int]:
    """Let the next of each key run, if its first has ended or stepped out; return how many. Safe to repeat."""
    names, subjects = Texts.of([key.name for key in keys]), Texts.of([key.subject for key in keys])
    [(woken,)] = yield from execute(SQL.advance, names=names, subjects=subjects)
    return int(woken)


def sweep() -> Plan[int]:
    """Let the next of each key run whose first has ended or stepped out unnoticed; return how many.

    It looks at a page of keys, and the next one, whoever calls it, goes on behind it. For a transaction of its own.
    """
    [(names, subjects)] = yield from execute(SQL.stale, most=SWEPT)
    return (yield from advance([Key(*key) for key in zip(names, subjects, strict=True)])) if names else 0
