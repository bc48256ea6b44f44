"""Transport → deliveries: which commands messages say are ready. The claim decides what runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from uuid import UUID

from busload.commands.claim import DeliveredClaim
from busload.commands.execution import Lease
from busload.commands.load import POSITIONS
from busload.commands.wording import counted
from busload.dispatch import envelope as message
from busload.dispatch.envelope import Envelope, UnreadableMessageError
from busload.dispatch.publish import Publisher
from busload.errors import TransportError, TransportMisconfiguredError
from busload.postgres.backoff import Backoff
from busload.transports import Delivery
from busload.transports.base import give_back

log = logging.getLogger("busload")

FEWEST, MOST = 2, 200
"""Messages of a domain that a worker has on loan at most."""

MOST_LOADS = 1000
"""Loads that one claim asks about."""

LOOK_AGAIN = 0.02
"""Seconds before the commands of a message are claimed once more if none were found: the creator may not have marked
them yet."""

EARLY = 3.0
"""Seconds for which commands that do not exist yet, or that others have locked, are claimed again."""

LONGEST_PAUSE, SLOW_PAUSE = 5.0, 30.0
"""Seconds between two tries to reach a broker that is away, and one that refuses us."""

SETTLED_CONNECTION = 5.0
"""Seconds after which a connection that breaks was a good one."""


class Delivered:
    """A message on loan: how many commands of which loads are still to be claimed for it, and what was."""

    __slots__ = ("delivery", "domain", "found", "looked", "not_before", "since", "tries", "unsettled", "wanted")

    def __init__(self, delivery: Delivery, domain: str, wanted: dict[int, int]) -> None:
        self.delivery, self.domain, self.wanted = delivery, domain, wanted
        self.since = time.monotonic()
        self.not_before = 0.0
        self.looked: set[int] = set()
        self.tries = self.unsettled = 0
        self.found = False


class Deliveries:
    """Messages on loan, from their delivery until their commands are settled; then they are acknowledged.

    Any command of a load will do for any message about that load. A claim that finds fewer commands than it asked
    for answers all messages about the load, so a message that comes a hundred times costs two claims.
    """

    def __init__(self) -> None:
        self.settled: list[Delivery] = []
        """Messages to be acknowledged."""
        self._any_settled = asyncio.Event()
        self._waiting: dict[str, dict[Delivered, None]] = defaultdict(dict)
        self._by_load: dict[int, dict[Delivered, None]] = defaultdict(dict)
        self._of_lease: dict[UUID, list[Delivered]] = {}
        self._turn = 0
        self._asked_at = 0.0
        self.received = self.claimed = self.duplicates = self.unknown = 0

    def add(self, delivery: Delivery, envelope: Envelope) -> None:
        wanted: dict[int, int] = {}
        for load in envelope.loads:
            wanted[load.number] = wanted.get(load.number, 0) + load.size
        delivered = Delivered(delivery, envelope.domain, wanted)
        self.received += 1
        self._waiting[delivered.domain][delivered] = None
        for number in wanted:
            self._by_load[number][delivered] = None

    def wanted(self, domains: Sequence[str], limit: int) -> dict[int, int]:
        """How many commands of which loads to claim, `limit` at most. The domains take turns in coming first."""
        wanted: dict[int, int] = {}
        now = self._asked_at = time.monotonic()
        self._turn += 1
        first = self._turn % len(domains)
        for domain in (*domains[first:], *domains[:first]):
            for delivered in self._waiting.get(domain, ()):
                if delivered.not_before > now:
                    continue
                for load, count in delivered.wanted.items():
                    if limit <= 0 or len(wanted) >= MOST_LOADS:
                        return wanted
                    more = min(count, limit, POSITIONS - wanted.get(load, 0))
                    if more > 0:
                        wanted[load] = wanted.get(load, 0) + more
                        limit -= more
        return wanted

    def next_look(self, domains: Iterable[str]) -> float | None:
        """Seconds until a claim may find something; None if no message waits."""
        waiting = [delivered.not_before for domain in domains for delivered in self._waiting.get(domain, ())]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def answer(self, wanted: Mapping[int, int], claim: DeliveredClaim) -> None:
        """Learn what a claim of these loads has taken."""
        if claim.refused:
            return
        by_load: dict[int, list[Lease]] = defaultdict(list)
        for lease in claim.leases:
            by_load[lease.load.number].append(lease)
        self.claimed += len(claim.leased)
        for load, asked in wanted.items():
            leases = by_load.get(load, [])
            found = sum(lease.load.size for lease in leases)
            self._share(load, leases)
            if found < asked:
                self._looked(load, unknown=load in claim.unknown, passed_over=load in claim.passed_over)

    def gone(self, lease: Lease) -> None:
        """A lease is settled, or not ours any more: then others find its commands."""
        for delivered in self._of_lease.pop(lease.lease_id, ()):
            delivered.unsettled -= 1
            self._end_if_done(delivered)

    def forget(self, domain: str) -> None:
        """The broker has taken back the messages of a domain; it delivers them again."""
        for delivered in self._waiting.pop(domain, ()):
            for load in delivered.wanted:
                self._leave(load, delivered)
            delivered.wanted.clear()

    async def acknowledge(self) -> float:
        """Wait until the commands of messages are settled, and acknowledge these messages.

        A message that is not acknowledged comes again, and costs a claim that finds nothing.
        """
        await self._any_settled.wait()
        self._any_settled.clear()
        settled, self.settled = self.settled, []
        results = await asyncio.gather(*(delivery.ack() for delivery in settled), return_exceptions=True)
        failed = [result for result in results if isinstance(result, Exception)]
        if failed:
            log.debug("Could not acknowledge %s: %r", counted(len(failed), "message"), failed[0])
        return 0

    def _share(self, load: int, leases: Sequence[Lease]) -> None:
        """Share leases among the messages about their load, in the order in which the messages came."""
        messages = iter(list(self._by_load.get(load, ())))
        delivered = next(messages, None)
        for lease in leases:
            left = lease.load.size
            while left and delivered is not None:
                part = min(left, delivered.wanted[load])
                left -= part
                delivered.wanted[load] -= part
                delivered.unsettled += 1
                delivered.found = True
                self._of_lease.setdefault(lease.lease_id, []).append(delivered)
                if not delivered.wanted[load]:
                    self._drop(load, delivered)
                    delivered = next(messages, None)

    def _looked(self, load: int, *, unknown: bool, passed_over: bool) -> None:
        now = time.monotonic()
        for delivered in list(self._by_load.get(load, ())):
            if delivered.since > self._asked_at:
                continue
            if (unknown or passed_over) and now - delivered.since < EARLY:
                delivered.tries += 1
                delivered.not_before = now + min(LOOK_AGAIN * 2 ** min(delivered.tries, 10), 1.0)
            elif load not in delivered.looked and not unknown:
                delivered.looked.add(load)
                delivered.not_before = now + LOOK_AGAIN
            else:
                self.unknown += unknown
                self._drop(load, delivered)

    def _drop(self, load: int, delivered: Delivered) -> None:
        """Claim nothing more of this load for this message."""
        self._leave(load, delivered)
        del delivered.wanted[load]
        if not delivered.wanted:
            self._waiting[delivered.domain].pop(delivered, None)
            self._end_if_done(delivered)

    def _leave(self, load: int, delivered: Delivered) -> None:
        messages = self._by_load.get(load)
        if messages is not None:
            messages.pop(delivered, None)
            if not messages:
                del self._by_load[load]

    def _end_if_done(self, delivered: Delivered) -> None:
        if not delivered.wanted and not delivered.unsettled:
            self.duplicates += not delivered.found
            self.settled.append(delivered.delivery)
            self._any_settled.set()


class Receiver:
    """Receives the messages of one domain.

    Messages for a paused domain stay on loan, unclaimed, until the domain is resumed: a few messages, no more. When the
    worker stops, all messages go back at once. Those whose commands still run cost others a claim.
    """

    def __init__(self, publisher: Publisher, domain: str, prefetch: int, deliveries: Deliveries) -> None:
        self._transport, self._key = publisher.transport, publisher.key
        self._domain, self._queue, self._prefetch = domain, publisher.queue(domain), prefetch
        self._deliveries = deliveries
        self._messages: AsyncIterator[Delivery] | None = None
        self._connected_at = 0.0
        self._away, self._refuses = Backoff(longest=LONGEST_PAUSE), Backoff(longest=SLOW_PAUSE)
        self._reported = False
        self.refused = 0
        """Messages that nobody can read."""

    @property
    def connected(self) -> bool:
        return self._messages is not None

    async def once(self) -> float:
        """Connect, or wait for one message; returns the seconds to wait before the next round."""
        try:
            if self._messages is None:
                await self._connect()
            else:
                await self._receive(self._messages)
            return 0
        except Exception as error:  # a fault of the transport must not end the receiving
            await self.close()
            self._report(error)
            return self._pause(error)

    async def close(self) -> None:
        """Give back all messages that are on loan."""
        messages, self._messages = self._messages, None
        self._deliveries.forget(self._domain)
        if messages is not None:
            await give_back(messages)

    async def _connect(self) -> None:
        await self._transport.declare([self._queue])
        self._messages = self._transport.deliveries(self._queue, prefetch=self._prefetch)
        self._connected_at = time.monotonic()
        if self._reported:
            log.info("The broker delivers commands of %s again", self._domain)
            self._reported = False

    async def _receive(self, messages: AsyncIterator[Delivery]) -> None:
        delivery = await anext(messages, None)
        if delivery is None:
            raise TransportError("The deliveries ended.")
        try:
            envelope = message.read(delivery.body, self._key, self._domain)
        except UnreadableMessageError as error:
            self.refused += 1
            await delivery.reject(f"Refused a message: {error}")
        else:
            self._deliveries.add(delivery, envelope)

    def _pause(self, error: Exception) -> float:
        if time.monotonic() - self._connected_at > SETTLED_CONNECTION and self._connected_at:
            self._away.reset()
            self._refuses.reset()
        self._connected_at = 0.0
        return (self._refuses if isinstance(error, TransportMisconfiguredError) else self._away).pause()

    def _report(self, error: Exception) -> None:
        if self._reported:
            return
        self._reported = True
        if not isinstance(error, TransportError):
            log.error("The transport %s failed in a way that it should not", self._transport.name, exc_info=error)
        level = logging.ERROR if isinstance(error, TransportMisconfiguredError) else logging.WARNING
        log.log(level, "The broker does not deliver commands of %s, polling until it does: %s", self._domain, error)


def prefetch_of(concurrency: int) -> int:
    """Messages to have on loan: one for each slot, since a message may be about a single command until that is settled.

    If messages are about more commands, other workers find these by their next poll, and then without a pause while
    there are more. Fewer messages on loan would share sooner, but a broker whose answers take long would be slow.
    """
    return max(FEWEST, min(MOST, concurrency))
