"""Transport → rings: what messages say is ready, for the claim to decide."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from busload.announcer import Announcer
from busload.domain import message
from busload.domain.counted import counted
from busload.domain.execution import Lease
from busload.domain.ids import POSITIONS
from busload.domain.message import Envelope, UnreadableMessage
from busload.errors import TransportError, TransportMisconfigured
from busload.settings import WorkerSettings
from busload.store.claim import Rung
from busload.transport import Delivery
from busload.transport.base import give_back

log = logging.getLogger("busload")

FEWEST, MOST = 2, 200
"""Messages of a domain that a worker has on loan at most."""

MOST_LOADS = 1000
"""Loads that one claim asks about."""

LOOK_AGAIN = 0.02
"""Seconds before a ring that found nothing is looked at once more: mark and claim may have passed each other."""

EARLY = 3.0
"""Seconds for which a ring about commands that are not there yet, or that others hold, is looked at again."""

LONGEST_PAUSE, SLOW_PAUSE = 5.0, 30.0
"""Seconds between two tries to reach a broker that is away, and one that refuses us."""

SETTLED_CONNECTION = 5.0
"""Seconds after which a connection that breaks was a good one."""


class Ring:
    """A message on loan: how many commands of which loads are still to be claimed for it, and what was."""

    __slots__ = ("delivery", "domain", "found", "looked", "not_before", "since", "tries", "unsettled", "wanted")

    def __init__(self, delivery: Delivery, domain: str, wanted: dict[int, int]) -> None:
        self.delivery, self.domain, self.wanted = delivery, domain, wanted
        self.since = time.monotonic()
        self.not_before = 0.0
        self.looked: set[int] = set()
        self.tries = self.unsettled = 0
        self.found = False


class Rings:
    """Rings from their delivery until their commands are settled; then the message may be forgotten.

    Any command of a load will do for any ring about it. A look that finds fewer commands than were asked for answers
    all rings about that load, so that a message which comes a hundred times costs two looks.
    """

    def __init__(self, acknowledge: Callable[[Delivery], None]) -> None:
        self._acknowledge = acknowledge
        self._waiting: dict[str, dict[Ring, None]] = defaultdict(dict)
        self._by_load: dict[int, dict[Ring, None]] = defaultdict(dict)
        self._of_lease: dict[UUID, list[Ring]] = {}
        self._turn = 0
        self._asked_at = 0.0
        self.rings = self.claimed = self.duplicates = self.unknown = 0

    def add(self, delivery: Delivery, envelope: Envelope) -> None:
        wanted: dict[int, int] = {}
        for lo, hi in envelope.ranges:
            load = lo // POSITIONS
            wanted[load] = wanted.get(load, 0) + hi - lo + 1
        ring = Ring(delivery, envelope.domain, wanted)
        self.rings += 1
        self._waiting[ring.domain][ring] = None
        for load in wanted:
            self._by_load[load][ring] = None

    def wanted(self, domains: Sequence[str], limit: int) -> dict[int, int]:
        """How many commands of which loads to claim, `limit` at most; the domains take turns in coming first."""
        wanted: dict[int, int] = {}
        now = self._asked_at = time.monotonic()
        self._turn += 1
        first = self._turn % len(domains)
        for domain in (*domains[first:], *domains[:first]):
            for ring in self._waiting.get(domain, ()):
                if ring.not_before > now:
                    continue
                for load, count in ring.wanted.items():
                    if limit <= 0 or len(wanted) >= MOST_LOADS:
                        return wanted
                    more = min(count, limit, POSITIONS - wanted.get(load, 0))
                    if more > 0:
                        wanted[load] = wanted.get(load, 0) + more
                        limit -= more
        return wanted

    def next_look(self, domains: Iterable[str]) -> float | None:
        """Seconds until a ring can be looked at; None if none waits."""
        waiting = [ring.not_before for domain in domains for ring in self._waiting.get(domain, ())]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def answer(self, wanted: Mapping[int, int], rung: Rung) -> None:
        """What a claim of these has brought."""
        if rung.refused:
            return
        by_load: dict[int, list[Lease]] = defaultdict(list)
        for lease in rung.leases:
            by_load[lease.hi // POSITIONS].append(lease)
        self.claimed += len(rung.leased)
        for load, asked in wanted.items():
            leases = by_load.get(load, [])
            found = sum(lease.hi - lease.lo + 1 for lease in leases)
            self._share(load, leases)
            if found < asked:
                self._looked(load, unknown=load in rung.unknown, passed_over=load in rung.passed_over)

    def gone(self, lease: Lease) -> None:
        """It is settled, or not ours any more: then its commands are where others find them."""
        for ring in self._of_lease.pop(lease.lease_id, ()):
            ring.unsettled -= 1
            self._end_if_done(ring)

    def forget(self, domain: str) -> None:
        """The broker has taken its messages back; it delivers them again."""
        for ring in self._waiting.pop(domain, ()):
            for load in ring.wanted:
                self._leave(load, ring)
            ring.wanted.clear()

    def _share(self, load: int, leases: Sequence[Lease]) -> None:
        """Each lease goes to the rings whose commands it holds, in the order in which they came."""
        rings = iter(list(self._by_load.get(load, ())))
        ring = next(rings, None)
        for lease in leases:
            left = lease.hi - lease.lo + 1
            while left and ring is not None:
                part = min(left, ring.wanted[load])
                left -= part
                ring.wanted[load] -= part
                ring.unsettled += 1
                ring.found = True
                self._of_lease.setdefault(lease.lease_id, []).append(ring)
                if not ring.wanted[load]:
                    self._drop(load, ring)
                    ring = next(rings, None)

    def _looked(self, load: int, *, unknown: bool, passed_over: bool) -> None:
        now = time.monotonic()
        for ring in list(self._by_load.get(load, ())):
            if ring.since > self._asked_at:
                continue
            if (unknown or passed_over) and now - ring.since < EARLY:
                ring.tries += 1
                ring.not_before = now + min(LOOK_AGAIN * 2 ** min(ring.tries, 10), 1.0)
            elif load not in ring.looked and not unknown:
                ring.looked.add(load)
                ring.not_before = now + LOOK_AGAIN
            else:
                self.unknown += unknown
                self._drop(load, ring)

    def _drop(self, load: int, ring: Ring) -> None:
        """Nothing more of this load is to be claimed for this ring."""
        self._leave(load, ring)
        del ring.wanted[load]
        if not ring.wanted:
            self._waiting[ring.domain].pop(ring, None)
            self._end_if_done(ring)

    def _leave(self, load: int, ring: Ring) -> None:
        rings = self._by_load.get(load)
        if rings is not None:
            rings.pop(ring, None)
            if not rings:
                del self._by_load[load]

    def _end_if_done(self, ring: Ring) -> None:
        if not ring.wanted and not ring.unsettled:
            self.duplicates += not ring.found
            self._acknowledge(ring.delivery)


class Receiver:
    """One consumer per domain, and what they have brought.

    What comes for a paused domain stays on loan, unclaimed, until it is resumed: a few messages, no more. When the
    worker stops, all messages go back at once: those whose commands still run cost others a look.
    """

    def __init__(
        self,
        announcer: Announcer,
        domains: Sequence[str],
        prefetch: int,
        settings: WorkerSettings,
        on_ring: Callable[[], None],
        on_connect: Callable[[], None],
    ) -> None:
        self._transport, self._key, self._prefetch = announcer.transport, announcer.key, prefetch
        self._queues = {domain: announcer.queue(domain) for domain in domains}
        self._poll_every = settings.poll_every.total_seconds()
        self._broker_poll_every = settings.broker_poll_every.total_seconds()
        self._on_ring, self._on_connect = on_ring, on_connect
        self._acks: list[Delivery] = []
        self._to_ack = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._connected: set[str] = set()
        self._said: set[str] = set()
        self.rings = Rings(self._acknowledge)
        self.refused = 0

    @property
    def connected(self) -> bool:
        """Whether messages come for every domain; while they do not, the queue is polled as without a broker."""
        return len(self._connected) == len(self._queues)

    @property
    def poll_every(self) -> float:
        return self._broker_poll_every if self.connected else self._poll_every

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._receive(domain), name=f"busload-receive-{domain}") for domain in self._queues
        ]
        self._tasks.append(asyncio.create_task(self._keep_acknowledging(), name="busload-acknowledge"))

    async def stop(self, within: float) -> None:
        """Give back all messages that are on loan."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, stubborn = await asyncio.wait(self._tasks, timeout=within)
            if stubborn:
                queues = counted(len(stubborn), "queue")
                log.warning("The broker takes long to take back the messages of %s; it will notice", queues)
        self._tasks = []

    async def _receive(self, domain: str) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._consume(domain)
                error: Exception = TransportError("The deliveries ended.")
            except Exception as found:  # an adapter's fault must not end the receiving
                error = found
            finally:
                self._connected.discard(domain)
                self.rings.forget(domain)
            failures = 1 if time.monotonic() - began > SETTLED_CONNECTION else failures + 1
            self._say(domain, error)
            self._on_ring()  # from now on the queue is polled
            longest = SLOW_PAUSE if isinstance(error, TransportMisconfigured) else LONGEST_PAUSE
            await asyncio.sleep(min(longest, 0.05 * 2 ** min(failures, 10)) * random.uniform(0.5, 1))  # noqa: S311

    async def _consume(self, domain: str) -> None:
        queue = self._queues[domain]
        await self._transport.declare([queue])
        deliveries = self._transport.deliveries(queue, prefetch=self._prefetch)
        try:
            self._connect(domain)
            async for delivery in deliveries:
                await self._ring(domain, delivery)
        finally:
            await give_back(deliveries)

    def _connect(self, domain: str) -> None:
        self._connected.add(domain)
        if domain in self._said:
            log.info("The broker delivers commands of %s again", domain)
            self._said.discard(domain)
        self._on_connect()

    def _say(self, domain: str, error: Exception) -> None:
        if domain in self._said:
            return
        self._said.add(domain)
        if not isinstance(error, TransportError):
            log.error("The transport %s failed in a way that it should not", self._transport.name, exc_info=error)
        level = logging.ERROR if isinstance(error, TransportMisconfigured) else logging.WARNING
        log.log(level, "The broker does not deliver commands of %s, polling until it does: %s", domain, error)

    async def _ring(self, domain: str, delivery: Delivery) -> None:
        try:
            envelope = message.read(delivery.body, self._key)
            if envelope.domain != domain:
                raise UnreadableMessage("it is about another domain than its queue")
        except UnreadableMessage as error:
            self.refused += 1
            await delivery.reject(f"Refused a message: {error}")
            return
        self.rings.add(delivery, envelope)
        self._on_ring()

    def _acknowledge(self, delivery: Delivery) -> None:
        self._acks.append(delivery)
        self._to_ack.set()

    async def _keep_acknowledging(self) -> None:
        """What is not acknowledged comes again, and costs a look."""
        while True:
            await self._to_ack.wait()
            self._to_ack.clear()
            settled, self._acks = self._acks, []
            results = await asyncio.gather(*(delivery.ack() for delivery in settled), return_exceptions=True)
            failed = [result for result in results if isinstance(result, Exception)]
            if failed:
                log.debug("Could not acknowledge %s: %r", counted(len(failed), "message"), failed[0])


def prefetch_of(concurrency: int) -> int:
    """Messages to have on loan: one for each slot, as it may be about a single command and stays until it is settled.

    If they are about more, others come to what is on loan here by their next poll, and then without a pause while there
    is more. Fewer on loan would share sooner, and cost a broker whose answers take long most of its speed.
    """
    return max(FEWEST, min(MOST, concurrency))
