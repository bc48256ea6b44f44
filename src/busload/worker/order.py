"""Claims of domains whose commands run in order, and what follows when a command has ended."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from psycopg.errors import LockNotAvailable

from busload.commands.execution import Leased, Transition
from busload.commands.wording import counted
from busload.dispatch import creation_state, outbox
from busload.handlers.registry import Handler
from busload.limits import order
from busload.limits.order import BUSY, NOTHING, Key, OrderedClaim
from busload.worker.call_handler import argument_of
from busload.worker.coalescer import Coalescer
from busload.worker.held_leases import HeldLeases
from busload.worker.settlement import Settlement
from busload.worker.shared import Shared

log = logging.getLogger("busload")

STUCK_FOR = timedelta(seconds=10)
"""How long commands wait behind an older one that nobody publishes, before PostgreSQL delivers that one."""

STUCK = 100
"""Loads of the outbox that are let go at a time, the oldest ones."""

ADVANCED_WITHIN = timedelta(milliseconds=2)
"""How long a key whose first command has ended waits for others, to be told together with them."""

REGISTERED_FOR = 24 * 3600.0
"""Seconds after which a worker says again that it claims a domain in order."""

KEYS_WITHIN = 1.0
"""Seconds that the keys of one claim may take: other workers wait meanwhile, and the server ends a claim that idles."""


class Order:
    """The commands of this worker that are the first of their key.

    `grant` is called with each of them and what its handler gets, `refuse` with those whose `by` fails, and
    `on_advanced` after others have become the first.
    """

    def __init__(
        self,
        shared: Shared,
        grant: Callable[[Leased, Key, Any, int], None],
        refuse: Callable[[Leased, BaseException, Handler], Transition],
        on_advanced: Callable[[], None],
    ) -> None:
        self._shared, self._grant, self._refuse, self._on_advanced = shared, grant, refuse, on_advanced
        self._keys: dict[Leased, Key] = {}
        self._registered: dict[str, float] = {}
        """When this worker has said that it claims a domain in order."""
        self._per_key = 0.0
        """Seconds that each key took when keys were found last."""
        self._flush_soon: Callable[[], None] = lambda: None
        self._ended: Coalescer[Key] = Coalescer(
            self._advance,
            max_size=1000,
            max_interval=ADVANCED_WITHIN,
            capacity=1_000_000,
            name="order",
            outage=shared.outage,
        )

    @property
    def advancing(self) -> int:
        """Keys whose first command has ended, though the database has not been told to let the next one run."""
        return self._ended.stats.waiting

    def follow(self, settlement: Settlement) -> None:
        """Heed what is settled: the successor of a command may run only after its result is in the database."""
        settlement.on_ended = self.ended
        self._flush_soon = settlement.flush_soon

    async def claim(self, domain: str, limit: int) -> tuple[OrderedClaim, list[Transition]]:
        """Claim in the order of sending. Returns also the results of those commands whose `by` fails."""
        shared, number, suspects = self._shared, self._shared.number, not self._shared.held.has_suspect
        if time.monotonic() - self._registered.get(domain, -math.inf) > REGISTERED_FOR:
            await shared.perform(order.register_domain(domain))
            self._registered[domain] = time.monotonic()
        look = await shared.perform(order.look(domain, suspects=suspects))
        if not look.ready:
            return NOTHING, []
        arguments: dict[Leased, Any] = {}
        refused: list[Transition] = []
        found: dict[Leased, Key] = {}

        def keys(leased: Sequence[Leased]) -> dict[Leased, Key]:
            began = time.monotonic()
            for one in leased:
                self._find_key(one, found, arguments, refused)
            if leased:
                self._per_key = (time.monotonic() - began) / len(leased)
            return found

        most = min(limit, order.MOST, int(KEYS_WITHIN / self._per_key) + 1 if self._per_key else limit)
        plan = order.claim_in_order(
            worker=number, domain=domain, limit=most, suspects=suspects, owned=look.owned, keys=keys
        )
        try:
            taken = await shared.in_transaction(plan)
        except LockNotAvailable:
            return BUSY, []
        freed = taken.barred and not taken.contended and await self._reroute_stuck(domain)
        if freed or (most < limit and len(taken.leased) >= most):
            taken = replace(taken, contended=True)  # there may be more, so the claimer looks again soon
        for one in taken.first:
            self._keys[one] = found[one]
            self._grant(one, found[one], arguments[one], number)
        return taken, refused

    async def _reroute_stuck(self, domain: str) -> bool:
        """Let PostgreSQL deliver what the broker has refused, or nobody publishes, as what was sent later is ready."""
        plan = outbox.reroute(domain=domain, failed=True, stuck_for=STUCK_FOR, limit=STUCK)
        rerouted = await self._shared.perform(plan)
        if rerouted:
            log.warning(
                "Rerouted %s of %s to PostgreSQL: they were not published, and later ones waited behind them",
                counted(rerouted, "command"),
                domain,
            )
            await self._shared.perform(creation_state.close())
        return rerouted > 0

    def _find_key(
        self, one: Leased, found: dict[Leased, Key], arguments: dict[Leased, Any], refused: list[Transition]
    ) -> None:
        domain = one.lease.domain
        handler = self._shared.bus.handlers.find(domain, one.command_type)
        if handler is None or (limit := handler.concurrency_limit) is None or not limit.ordered:
            return
        try:
            arguments[one] = argument_of(one)
            found[one] = Key(limit.name_for(domain, one.command_type), limit.subject_of(arguments[one]))
        except BaseException as error:
            refused.append(self._refuse(one, error, handler))

    def left(self) -> None:
        """A call has ended, or will not be made. Its result is settled at once, because its key waits for that."""
        asyncio.get_running_loop().call_soon(self._flush_soon)

    def ended(self, leased: Iterable[Leased]) -> None:
        """The results of these are in the database."""
        for one in leased:
            if (key := self._keys.pop(one, None)) is not None:
                self._ended.offer(key)

    def forget_gone(self) -> None:
        """Forget commands that are not ours any more: they were handed back, or others have them."""
        for one in [one for one in self._keys if one.settled or one.lease.lost]:
            del self._keys[one]

    async def close(self, deadline: timedelta) -> None:
        """Let the next ones run. What cannot be told in time is left to the sweep of others."""
        await self._ended.close(deadline)

    async def _advance(self, keys: Sequence[Key]) -> None:
        async with asyncio.timeout(self._shared.settings.deadline.total_seconds()):
            await self._shared.perform(order.advance(keys))
        self._on_advanced()


def parts_in_turn(domains: Sequence[str], ordered: Collection[str], turn: int) -> list[list[str]]:
    """Domains to claim together: each that is claimed in order by itself, then the others. They take turns to begin."""
    others = [domain for domain in domains if domain not in ordered]
    parts = [[domain] for domain in domains if domain in ordered] + ([others] if others else [])
    first = turn % len(parts)
    return parts[first:] + parts[:first]


def may_run(
    leased: list[Leased], waiting: Sequence[Leased], refused: Sequence[Transition], held: HeldLeases
) -> list[Leased]:
    """Leave out what waits for its predecessors, and is not ours any more, and what has failed at once."""
    if not waiting and not refused:
        return leased
    for one in waiting:
        one.lease.running -= 1
    held.settled(waiting)
    without = {*waiting, *(transition.leased for transition in refused)}
    return [one for one in leased if one not in without]
