"""Long tests are spread over the processes of a run, and each process begins with them."""

from __future__ import annotations

import pytest

from tests.order import dealt


@pytest.mark.parametrize(
    ("count", "long", "pieces"), [(20, 6, 3), (20, 7, 3), (8, 5, 1), (5, 5, 2), (3, 0, 4), (0, 0, 2)]
)
def test_each_process_begins_with_its_share_of_the_long_tests(count: int, long: int, pieces: int) -> None:
    order = dealt(range(count), pieces, lambda item: item >= count - long)

    assert sorted(order) == list(range(count))
    begins = 0
    for nth in range(pieces):  # as pytest-xdist cuts the list
        ends = begins + (count - begins) // (pieces - nth)
        kinds = [item >= count - long for item in order[begins:ends]]
        assert kinds == sorted(kinds, reverse=True)
        assert long // pieces <= sum(kinds) <= -(-long // pieces)
        begins = ends


def test_the_order_of_short_tests_stays() -> None:
    """It is by chance, and the same chance can be asked for again."""
    assert dealt([3, 10, 1, 2, 11, 0], 2, lambda item: item >= 10) == [10, 3, 1, 11, 2, 0]
