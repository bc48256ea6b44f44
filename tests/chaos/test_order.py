"""Workers are killed and frozen while commands run in order: none overtakes its predecessors, and none runs beside."""

from __future__ import annotations

from collections.abc import Iterable

from busload import BatchCommand
from tests.chaos.ledger import Call, harmed_run
from tests.chaos.nursery import ORDERED
from tests.given import Database, short_and_long

TYPES = ["Plain", "InThread", "InTransaction", "Plain"]


@short_and_long("count, keys, commands, faults", (3, 10, 400, 4), (8, 200, 100_000, 60))
def test_no_command_overtakes_its_predecessors_though_workers_are_killed_and_frozen(
    count: int, keys: int, commands: int, faults: int
) -> None:
    work = [command(n, keys) for n in range(commands)]
    with harmed_run(ORDERED, work, count, faults, nobody_is_first, ordered=True, pause=0.01) as (_, ledger):
        inversions, beside = judge(ledger.calls.values())
        print(
            f"{ledger.count} calls: {inversions} out of order, {beside} beside another, "
            f"{ledger.strays} begun as the process froze"
        )
        assert (inversions, beside) == (0, 0)


def nobody_is_first(database: Database) -> bool:
    return database.count("first_in_order") == 0


def command(n: int, keys: int) -> BatchCommand:
    return BatchCommand(TYPES[n // keys % len(TYPES)], data={"key": n % keys, "n": n})


def judge(by_key: Iterable[list[Call]]) -> tuple[int, int]:
    """How many calls began after a later command of their key, and how many began beside another."""
    inversions = beside = 0
    for calls in by_key:
        highest, last_end = -1, 0.0
        for began, end, n in sorted(calls):
            inversions += n < highest
            beside += began < last_end
            highest, last_end = max(highest, n), max(last_end, end)
    return inversions, beside
