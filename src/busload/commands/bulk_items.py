"""What a bulk call gets, how it judges its items, and how bad ones are found among good ones."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, overload
from uuid import UUID

import msgspec

from busload.commands.command import Command, Data
from busload.errors import InvalidOperationError, TransientCommandError

T = TypeVar("T")

FRUITLESS, MOST_FRUITLESS = 3, 10
"""How many bad items may be found in a row without a part that passes. Then the search ends, because the receiver
itself seems to fail. The first number holds until a part has passed, the second one from then on."""


class Item(msgspec.Struct, Generic[Data], frozen=True, eq=False):  # a struct is made in a fifth of a dataclass's time
    """One event of a group, or one command of a chunk. `id` stays the same at every attempt."""

    id: Any
    data: Data
    key: str | None
    created_at: datetime
    command: Command[Data] | None = None
    """Of a chunk: the command itself."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """How each item of a call has ended. `results` holds what was said with a success, by item id."""

    done: list[Item]
    failed: list[tuple[Item, BaseException]]
    results: dict[Any, Any]
    answered: bool
    """Whether the call said something about its items. If not, it failed as a whole: nobody knows who is to blame."""


class Judged(Sequence[Item[Data]]):
    """Items that are judged together, or one by one."""

    def __init__(self, items: Sequence[Item[Data]]) -> None:
        self.items = tuple(items)
        self._by_id = {item.id: item for item in self.items}
        self._verdicts: dict[Any, BaseException | None] = {}
        self._results: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item[Data]]:
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> Item[Data]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Item[Data], ...]: ...

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def succeed(self, item: Item[Data], result: Any = None) -> None:
        """This one is done, whatever happens to the others. From then on, every item needs a verdict."""
        self._judge(item, None)
        if result is not None:
            self._results[item.id] = result

    def fail(self, item: Item[Data], error: BaseException | str) -> None:
        """This one is not: it is tried again or, after its last attempt or a permanent error, waits for a person."""
        if not isinstance(error, BaseException | str):
            raise InvalidOperationError(f"fail() wants an exception or a text, found {error!r:.80}.")
        self._judge(item, TransientCommandError(error) if isinstance(error, str) else error)

    def forget_verdicts(self) -> None:
        """Start anew: the same call is made again."""
        self._verdicts, self._results = {}, {}

    def _judge(self, item: Item[Data], error: BaseException | None) -> None:
        found = getattr(item, "id", item)
        if not isinstance(item, Item) or self._by_id.get(found) is not item:
            raise InvalidOperationError(
                f"There is no item {found!r:.80} among the {len(self)} of this call. Judge the items it was given."
            )
        if found in self._verdicts:
            raise InvalidOperationError(f"Item {found!r:.80} has its verdict already. Judge each item once.")
        self._verdicts[found] = error

    def judgement(self, error: BaseException | None = None) -> Judgement:
        """After the call has returned, or raised `error`: which items are done, and what happened to the others.

        Without a single verdict, they all share the call's fate. With some, the others fail: with what the call raised,
        or because nobody has said anything about them.
        """
        if not self._verdicts:
            if error is None:
                return Judgement(list(self.items), [], {}, answered=True)
            return Judgement([], [(item, error) for item in self.items], {}, answered=False)
        silent = error or TransientCommandError("The handler has judged others, but not this one.", code="NO_VERDICT")
        verdicts = [(item, self._verdicts.get(item.id, silent)) for item in self.items]
        done = [item for item, verdict in verdicts if verdict is None]
        failed = [(item, verdict) for item, verdict in verdicts if verdict is not None]
        return Judgement(done, failed, self._results, answered=True)


class Group(Judged[Data]):
    """A slice of a buffer, for one bulk call: return, and all items are done; raise, and all are tried again; or judge.

    `group_id` and the ids of the items stay the same at every attempt: give them to the receiver as idempotency keys.
    """

    def __init__(self, buffer: str, group_id: UUID, items: Sequence[Item[Data]], partition: str | None = None) -> None:
        super().__init__(items)
        self.buffer, self.group_id, self.partition = buffer, group_id, partition


class Chunk(Judged[Data]):
    """Commands of one type for one bulk call, judged as a `Group` is. `key` is what `by` has found in common."""

    def __init__(self, domain: str, command_type: str, items: Sequence[Item[Data]], key: Any = None) -> None:
        super().__init__(items)
        self.domain, self.command_type, self.key = domain, command_type, key


def isolate(items: Sequence[T]) -> Generator[list[T], bool, list[T]]:
    """Find the bad ones among items that have failed together: yields parts to try, is sent whether each passed.

    A part that passes leaves the blame with its other half, and a part that fails frees its other half of suspicion
    until the next round, so that each bad one costs log2(n) tries and one more for the rest. Returns the bad ones, and
    those nobody could tell: if several in a row were found without a single pass, nothing seems to work at all.
    """
    suspects, fruitless, patience = list(items), 0, FRUITLESS
    bad: list[T] = []
    unknown: list[T] = []
    while suspects:
        fruitless += 1
        while len(suspects) > 1:
            middle = len(suspects) // 2
            part, rest = suspects[:middle], suspects[middle:]
            if fruitless % 2 == 0:  # from the other end: where bad ones stand together, the good ones are there
                part, rest = suspects[middle:], suspects[:middle]
            if (yield part):
                suspects, fruitless, patience = rest, 0, MOST_FRUITLESS
            else:
                suspects, unknown = part, rest + unknown
        bad += suspects
        if not unknown or fruitless >= patience:
            break
        if (yield unknown):
            unknown = []
            break
        suspects, unknown = unknown, []
    return bad + unknown
