"""Claims from their statement to the line: meanwhile a domain may be paused, or a batch held, that they bring."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID


@dataclass(slots=True, eq=False)
class UnderWay:
    """A claim from its statement to the line."""

    sent_at: float | None
    """None once it is answered."""
    paused: Collection[str]
    """The domains that were paused when it was sent."""
    held: set[UUID] = field(default_factory=set)
    """Batches that were held since: it may still bring commands of them."""

    def sent(self) -> float:
        assert self.sent_at is not None
        return self.sent_at


class ClaimsUnderWay:
    """The claims of a worker that are under way now."""

    def __init__(self) -> None:
        self._claims: list[UnderWay] = []

    def __iter__(self) -> Iterator[UnderWay]:
        return iter(self._claims)

    @property
    def sent_at(self) -> float | None:
        """When the oldest claim was sent that has no answer; None while there is none."""
        return min((one.sent_at for one in self._claims if one.sent_at is not None), default=None)

    @contextmanager
    def sending(self, paused: Collection[str]) -> Iterator[UnderWay]:
        """A claim is under way for as long as the block lasts."""
        claim = UnderWay(time.monotonic(), paused)
        self._claims.append(claim)
        try:
            yield claim
        finally:
            self._claims.remove(claim)

    def hear_of(self, held: Set[UUID]) -> None:
        """These batches are held now."""
        for one in self._claims:
            one.held |= held
