"""Made from busload.dispatch.reconcile by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

from busload.commands.load import Load, count_commands
from busload.dispatch import outbox as store
from busload.dispatch.outbox import Seen
from busload.dispatch.publish_in_threads import ThreadPublisher
from busload.dispatch.reconcile import (
    EARLY,
    MOST_LOOKED_AT,
    SETTLED,
    _Message,
    _numbers,
    _readable,
    _sorted,
    compared,
)
from busload.dispatch.strategy import Reconciliation
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.write import Write
from busload.sync.database import Database
from busload.transports import Delivery


class Reconciler:
    """Compares one domain after the other."""

    def __init__(self, publisher: ThreadPublisher, database: Database) -> None:
        self._publisher, self._database = publisher, database

    def compare(self, domain: str, *, repair: bool) -> Reconciliation:
        """Say what both sides know of a domain; with `repair`, publish what is missing and remove what nobody needs."""
        publisher, transport = self._publisher, self._publisher.transport.name
        queue, began = publisher.queue(domain), time.monotonic()
        depth, bodies = publisher.depth(queue), publisher.peek(queue, limit=MOST_LOOKED_AT)
        told = Reconciliation(transport, domain, queue, published=0, depth=depth, looked_into=False)
        removed = 0
        if repair and (depth or bodies or (depth is None and bodies is None)):
            removed, seen = self._remove(told)
            bodies = seen if bodies is None else bodies
        elif repair:
            bodies = []
        before = SETTLED + timedelta(seconds=time.monotonic() - began)
        look = store.published(transport, domain, older_than=before, limit=MOST_LOOKED_AT)
        published = self._database.read(look)
        told = replace(told, published=count_commands(published), removed=removed)
        if bodies is None:
            return told
        told, missing = self._look_into(told, bodies, published)
        if repair and missing:
            loads = self._database.write(Write(store.publish_again(transport, missing), one_statement=True))
            again = publisher.publish(loads, again=True)
            told = replace(told, published_again=count_commands(p.load for p in again if p.reason is None))
        return told

    def _remove(self, told: Reconciliation) -> tuple[int, list[bytes]]:
        """Remove messages that nothing waits for; returns how many, and the bodies of all messages that came.

        What is waited for stays on loan until the end: whatever goes back earlier would come again at once. So does
        what is about nothing here, which may be early: it is looked up once more.
        """
        most = MOST_LOOKED_AT if told.depth is None else min(told.depth, MOST_LOOKED_AT)
        removed, bodies = 0, []
        unknown: list[_Message] = []
        on_loan = self._publisher.lend(told.queue, most)
        try:
            while page := on_loan.next_page():
                bodies += [delivery.body for delivery in page]
                readable, unreadable = _sorted(page, told.domain, self._publisher.key)
                for delivery, why in unreadable:
                    on_loan.reject(delivery, f"Refused a message: {why}")
                answered, doubtful = self._nothing_waits_for(readable)
                on_loan.acknowledge(answered)
                removed += len(unreadable) + len(answered)
                unknown += doubtful
            waiting.sleep(EARLY if unknown else 0)
            answered, doubtful = self._nothing_waits_for(unknown)
            late = answered + [delivery for delivery, _ in doubtful]
            on_loan.acknowledge(late)
        finally:
            on_loan.give_back()
        return removed + len(late), bodies

    def _nothing_waits_for(self, messages: Sequence[_Message]) -> tuple[list[Delivery], list[_Message]]:
        """The messages whose loads have nothing that waits, and the messages about loads that do not exist."""
        seen = self._look_up([loads for _, loads in messages])
        idle = [each for each in messages if not any(seen[load].waits for load in _numbers(each[1]))]
        answered = [delivery for delivery, loads in idle if all(seen[load].exists for load in _numbers(loads))]
        return answered, [each for each in idle if not all(seen[load].exists for load in _numbers(each[1]))]

    def _look_up(self, messages: Iterable[Sequence[Load]]) -> dict[int, Seen]:
        numbers = sorted({number for loads in messages for number in _numbers(loads)})
        found = self._database.read(store.look_up(numbers)) if numbers else []
        return dict(zip(numbers, found, strict=True))

    def _look_into(
        self, told: Reconciliation, bodies: Sequence[bytes], published: Sequence[Load]
    ) -> tuple[Reconciliation, Sequence[Load]]:
        messages = list(_readable(bodies, told.domain, self._publisher.key))
        seen = self._look_up(messages)
        whole = len(bodies) < MOST_LOOKED_AT
        return compared(told, len(bodies), messages, seen, published if whole else [])
