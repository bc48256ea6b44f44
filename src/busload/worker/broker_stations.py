"""What a worker runs beside its claims where a broker delivers: relay, receivers, recovery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import astuple
from functools import partial

from busload.commands.wording import counted
from busload.dispatch.deliveries import Deliveries, Receiver, prefetch_of
from busload.dispatch.relay import Recovery, Relay
from busload.worker.loop import Loop
from busload.worker.metrics import gathered
from busload.worker.shared import Shared
from busload.worker.stats import BrokerStats, OutboxStats

log = logging.getLogger("busload")


class Broker:
    """`on_delivery` is called when a message has come, and when messages come no longer."""

    def __init__(self, shared: Shared, on_delivery: Callable[[], None]) -> None:
        bus, settings, outage = shared.bus, shared.settings, shared.outage
        self._publisher, self._settings, self._on_delivery = bus.publisher, settings, on_delivery
        self.relay = Relay(self._publisher, shared.in_transaction, settings.poll_every)
        self._recovery = Recovery(
            self._publisher, shared.in_transaction, settings.recover_every, settings.publish_again_after
        )
        self.deliveries = Deliveries()
        prefetch = prefetch_of(shared.settings.concurrency)
        self._receivers = [Receiver(self._publisher, each, prefetch, self.deliveries) for each in shared.domains]
        self._relaying = Loop("Relaying", self.relay.once, outage)
        self._recovering = Loop("Recovering", self._recovery.once, outage)
        self._tasks: list[asyncio.Task[None]] = []
        self._receiving: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """Whether messages come for every domain; while they do not, the queue is polled as without a broker."""
        return all(receiver.connected for receiver in self._receivers)

    @property
    def poll_every(self) -> float:
        settings = self._settings
        return (settings.broker_poll_every if self.connected else settings.poll_every).total_seconds()

    def start(self) -> None:
        self._receiving = [asyncio.create_task(self._keep_receiving(receiver)) for receiver in self._receivers]
        self._receiving.append(asyncio.create_task(Loop("Acknowledging", self.deliveries.acknowledge).run()))
        self._tasks = [asyncio.create_task(loop.run()) for loop in (self._relaying, self._recovering)]

    def hear(self, transport: str | None) -> None:
        """Commands wait for this transport, or for any."""
        if transport in (None, self._publisher.transport.name):
            self._relaying.wake()

    async def stop_receiving(self, within: float) -> None:
        """Give back all messages that are on loan."""
        for task in self._receiving:
            task.cancel()
        if self._receiving:
            _, stubborn = await asyncio.wait(self._receiving, timeout=within)
            if stubborn:
                queues = counted(len(stubborn), "queue")
                log.warning("The broker takes long to take back the messages of %s; it will notice", queues)
        self._receiving = []

    async def stop_relaying(self, within: float) -> None:
        """The round under way may end; if it cannot, others publish its loads again."""
        for loop in (self._relaying, self._recovering):
            loop.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.stop_receiving(within=1)

    def stats(self) -> BrokerStats:
        parts = {
            "broker": self,
            "publisher": self._publisher,
            "deliveries": self.deliveries,
            "relay": self.relay,
            "recovery": self._recovery,
        }
        return gathered(
            BrokerStats,
            parts,
            transport=self._publisher.transport.name,
            refused=dict(self._publisher.refused),
            refused_messages=sum(receiver.refused for receiver in self._receivers),
            outbox=tuple(OutboxStats(*astuple(lag)) for lag in self.relay.lag),
        )

    async def _keep_receiving(self, receiver: Receiver) -> None:
        try:
            await Loop("Receiving", partial(self._receive, receiver)).run()
        finally:
            await receiver.close()

    async def _receive(self, receiver: Receiver) -> float:
        was_connected = receiver.connected
        pause = await receiver.once()
        if receiver.connected and not was_connected:
            self.relay.broker_is_back()
            self._relaying.wake()
        else:
            self._on_delivery()
        return pause
