"""What a worker that stops tells the log: what it still does, and what it leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta

from busload.commands.execution import Leased
from busload.commands.wording import counted

log = logging.getLogger("busload")

MOST_NAMED = 20
"""Commands that one line of the log names, at most."""


def log_stopping(in_hand: int, waiting: int, grace: timedelta) -> None:
    """Nothing more is claimed. So many commands are in hand, and so many results wait to be settled."""
    if not (in_hand or waiting):
        log.info("Stopping: nothing more is claimed, and nothing is in hand")
        return
    log.info(
        "Stopping: nothing more is claimed. %s in hand: what runs may take up to %g s more, the rest is handed "
        "back; %s to be settled",
        counted(in_hand, "command is", "commands are"),
        grace.total_seconds(),
        counted(waiting, "result is", "results are"),
    )


def log_left_behind(running: Iterable[Leased]) -> list[Leased]:
    """These handlers have not ended: they go on, but their commands were handed back. Returns each command once."""
    left = list({one.command_id: one for one in running}.values())
    if not left:
        return []
    named = [f"{one.command_type} {one.command_id}" for one in left[:MOST_NAMED]]
    more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
    log.warning(
        "Left behind and handed back %s that did not end in time: %s%s",
        counted(len(left), "command"),
        ", ".join(named),
        more,
    )
    return left
