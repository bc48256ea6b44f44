"""Every plan is interrupted at each of its turns, in each way; then what was begun comes to its end."""

from __future__ import annotations

import pytest

from busload.testing import TestServer
from tests.explorer.crash_points import CAST, PAGE, RECOVERY_TURNS, all_turns, interrupted, points, written
from tests.explorer.world import ViolationError
from tests.explorer.worlds import world_of
from tests.given import short_and_long


@pytest.mark.timeout(600)
@short_and_long("whole", (False,), (True,))
def test_a_crash_at_any_point_and_another_during_recovery_lose_and_double_nothing(
    server: TestServer, whole: bool
) -> None:
    """The short run has one crash of the recovery for each crash point, the long run has all."""
    with world_of(server, CAST) as world:
        for nth, point in enumerate(points(all_turns(world))):
            for recovery in (None, *range(RECOVERY_TURNS)) if whole else (nth % RECOVERY_TURNS,):
                try:
                    interrupted(world, point, recovery=recovery)
                except ViolationError as violation:
                    story = "\n".join(world.story)
                    pytest.fail(f"{point}, and the recovery at turn {recovery}: {violation}\n{story}")


def test_the_docs_count_the_crash_points_that_there_are(server: TestServer) -> None:
    with world_of(server, CAST) as world:
        page = PAGE.read_text()
        assert written(page, all_turns(world)) == page, "Run `make figures`."
