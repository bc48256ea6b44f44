"""Made from busload.audit.actions by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import builtins
from datetime import datetime

from busload.audit.actions import (
    Action,
    ActionPage,
    ActionType,
    Cursor,
    _page,
    _rows,
)
from busload.commands.checks import check, given, refuse, wrong, wrong_time
from busload.settings import InputLimits
from busload.sync.database import Database


class Audit:
    """What operators did, on every face: the command line, the dashboard and programs that name an `operator`."""

    def __init__(self, database: Database, limits: InputLimits) -> None:
        self._database, self._limits = database, limits

    def list(
        self,
        domain: str | None = None,
        *,
        operator: str | None = None,
        action: ActionType | str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> ActionPage:
        """What operators did, newest first, at most `limit` actions.

        `domain`, `operator` and `action` leave out others, `since` and `until` bound the time. `after` is `next` of the
        page before. A page looks at no more than 2,000 rows, so it may have few actions, or none, and still a `next`.
        """
        check(self._limits, writes=False, **given(domain=domain), operator=operator, limit=limit)
        times = given(since=since, until=until)
        problems = [problem for name, time in times.items() for problem in wrong_time(time, name, self._limits)]
        wanted, cursor = None, None
        if action is not None:
            try:
                wanted = ActionType(action)
            except ValueError:
                problems.append(wrong(action, "action", f"one of {', '.join(ActionType)}"))
        if after is not None:
            try:
                cursor = Cursor.read(after)
            except (ValueError, OverflowError):
                problems.append(wrong(after, "after", "the `next` of the page before"))
        refuse(problems, writes=False)
        rows = self._database.read(_rows(cursor, since, until))
        fits: builtins.list[Action] = [
            row
            for row in rows
            if (domain is None or row.domain == domain)
            and (operator is None or row.operator == operator)
            and (wanted is None or row.type == wanted)
        ]
        return _page(rows, fits, limit)
