"""`bus.statistics`: how much came in, ended and waited, minute by minute."""

from __future__ import annotations

from datetime import timedelta

from busload.commands.checks import check, given, refuse
from busload.postgres.database import Database
from busload.settings import InputLimits
from busload.statistics import statistics
from busload.statistics.statistics import Point


class Statistics:
    """What workers have counted, per minute and domain. It is kept in the database, also while no worker runs."""

    def __init__(self, database: Database, limits: InputLimits) -> None:
        self._database, self._limits = database, limits

    async def series(
        self,
        domain: str | None = None,
        *,
        last: timedelta = timedelta(hours=1),
        step: timedelta = timedelta(minutes=1),
    ) -> list[Point]:
        """The points of the `last` so many hours, oldest first and without gaps; the last one is still under way.

        A point covers a `step`, which is whole minutes, of one `domain` or of all. Minutes are kept for two days and
        hours for 90 days, so a series of more than two days has steps of whole hours. Workers tell every five seconds
        what they have settled: that late are the numbers, and a worker that is killed takes that much with it. Nobody
        looks while no worker runs: what came in meanwhile counts in the step of the next look.
        """
        check(self._limits, writes=False, **given(domain=domain))
        refuse(statistics.wrong_steps(last, step), writes=False)
        return await self._database.in_transaction(statistics.series(domain, last=last, step=step))
