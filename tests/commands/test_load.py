"""The value that travels between places: its arithmetic holds for every load there can be."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies

from busload.commands.load import LOAD_SIZE, POSITIONS, Load, count_commands, first_id, number_of, position_of

NUMBERS = strategies.integers(min_value=0, max_value=2**53 - 1)
POSITION = strategies.integers(min_value=0, max_value=POSITIONS - 1)


@strategies.composite
def loads(draw: strategies.DrawFn) -> Load:
    first = first_id(draw(NUMBERS))
    lo, hi = sorted((draw(POSITION), draw(POSITION)))
    return Load(first + lo, first + hi)


@strategies.composite
def loads_with_parts(draw: strategies.DrawFn) -> tuple[Load, list[Load]]:
    """A load, and parts of its number that do not overlap: some inside, some outside, in any order."""
    load = draw(loads())
    marks = sorted(draw(strategies.sets(POSITION, max_size=12)))
    first = first_id(load.number)
    parts = [Load(first + lo, first + hi - 1) for lo, hi in zip(marks[::2], marks[1::2], strict=False)]
    return load, draw(strategies.permutations(parts))


def test_a_whole_load_holds_as_many_commands_as_travel_together() -> None:
    load = Load.of(7, LOAD_SIZE)
    assert load == Load(7 * POSITIONS, 7 * POSITIONS + LOAD_SIZE - 1)
    assert (load.number, load.size, len(load.ids)) == (7, LOAD_SIZE, LOAD_SIZE)


@given(NUMBERS, POSITION)
def test_an_id_tells_its_load_and_its_position(number: int, position: int) -> None:
    id = first_id(number) + position
    assert (number_of(id), position_of(id)) == (number, position)


@given(loads())
def test_a_load_has_one_number_and_counts_its_ids(load: Load) -> None:
    assert {number_of(load.lo), number_of(load.hi)} == {load.number}
    assert load.size == len(load.ids) == count_commands([load])
    assert (load.ids[0], load.ids[-1]) == load


@given(loads(), strategies.integers(min_value=1, max_value=2 * POSITIONS))
def test_the_parts_of_a_split_are_the_load_again(load: Load, count: int) -> None:
    part, rest = load.split(count)
    assert part.size == min(count, load.size)
    assert [*part.ids, *(rest.ids if rest else ())] == list(load.ids)
    assert rest is None or part.join(rest) == load


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Load(1028, 1030), id="a gap between them"),
        pytest.param(Load(1024, 1026), id="an overlap"),
        pytest.param(Load(1020, 1023), id="the load before"),
    ],
)
def test_only_neighbours_are_joined(other: Load) -> None:
    assert Load(1024, 1026).join(other) is None


def test_the_end_of_a_load_is_not_joined_with_the_beginning_of_the_next() -> None:
    assert Load(1024, 2047).join(Load(2048, 2048)) is None


@given(loads_with_parts())
def test_what_is_left_of_a_load_is_what_no_part_holds(found: tuple[Load, list[Load]]) -> None:
    load, parts = found
    held = {id for part in parts for id in part.ids}
    left = list(load.subtract(parts))
    assert [id for rest in left for id in rest.ids] == [id for id in load.ids if id not in held]
    assert all(rest.size > 0 for rest in left)


def test_parts_of_other_loads_take_nothing_away() -> None:
    load = Load(2048, 2050)
    assert list(load.subtract([Load(1024, 1030), Load(3072, 3080)])) == [load]
    assert list(load.subtract([load])) == []
