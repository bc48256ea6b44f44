"""What stands in the place of the one database, where a bus is over several: it knows whether they are open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from busload.errors import DatabaseUnavailableError, InvalidOperationError
from busload.postgres import dsn as dsns


class Databases:
    """Several databases: whoever needs one of them asks `bus.shard_of(domain)` for its bus."""

    telemetry = None

    def __init__(self, shards: Callable[[], Sequence[Any]]) -> None:
        self._shards = shards

    @property
    def is_open(self) -> bool:
        return any(shard.database.is_open for shard in self._shards())

    @property
    def was_forked(self) -> bool:
        return any(shard.database.was_forked for shard in self._shards())

    @property
    def given_dsn(self) -> None:
        """No text names several databases."""
        return None

    @property
    def pool(self) -> Pools:
        return Pools([shard.database.pool for shard in self._shards()])

    def refuse_closed(self) -> None:
        for shard in self._shards():
            shard.database.refuse_closed()

    def __getattr__(self, name: str) -> NoReturn:
        raise refusal(name)


class Pools:
    """The connections to several databases, which only their own buses hand out."""

    def __init__(self, pools: Sequence[Any]) -> None:
        self._pools = pools

    def exhaustions(self, look_back: float) -> int:
        """How often nobody gave a connection back in time, to any of the databases."""
        return sum(pool.exhaustions(look_back) for pool in self._pools)

    def __getattr__(self, name: str) -> NoReturn:
        raise refusal(name)


def refusal(name: str) -> Exception:
    if name.startswith("__"):  # what Python itself looks for
        return AttributeError(name)
    return InvalidOperationError(
        f"This bus is over several databases, and {name!r} needs one of them. Take its bus: bus.shard_of(domain), or "
        "one of bus.shards."
    )


def place(shard: Any) -> str:
    """Which database a bus has, for people."""
    return dsns.place(shard.database.given_dsn)


@contextmanager
def named(shard: Any) -> Iterator[None]:
    """Say which database is away: an answer without it would look like a whole one."""
    try:
        yield
    except DatabaseUnavailableError as error:
        raise DatabaseUnavailableError(
            f"{place(shard)} does not answer, so nothing can be told of all databases together. Name a domain of the "
            f"others, or ask their buses in bus.shards. {error}"
        ) from error
