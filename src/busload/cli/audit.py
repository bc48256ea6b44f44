"""`busload audit`: what operators did."""

from __future__ import annotations

from datetime import datetime

import click

from busload.audit.actions import Action, ActionType
from busload.cli import noun, options
from busload.cli.answer import Answer, answers
from busload.cli.text_table import View
from busload.commands.wording import counted
from busload.sync.bus import SyncCommandBus


def _action(action: Action) -> str:
    """What was done."""
    return f"{action.type} (patched)" if action.patched else action.type


def _what(action: Action) -> str | None:
    """What it was done to."""
    if action.commands > 1:
        many = counted(action.commands, "command")
        return many if action.command_id is None else f"{many}, the last {action.command_id}"
    if action.old_tracker is not None:
        return f"{action.old_tracker} to {action.phase}"
    named = (action.command_id, action.job_id, action.schedule, action.worker_name, action.limit, action.buffer)
    return next((str(name) for name in (*named, action.batch_id) if name is not None), None)


ACTIONS = View[Action](
    "AT OPERATOR ACTION DOMAIN WHAT REASON",
    {"ACTION": _action, "WHAT": _what},
    nothing="No operator did anything like that.",
    elastic="REASON",
)

audit = noun("audit", "ls --operator ada", "ls --domain payments --since 1d")


@audit.command()
@options.domain
@click.option("--operator", help="Only what this operator did.")
@click.option("--action", type=click.Choice([*ActionType], case_sensitive=False), metavar="ACTION", help="Only this.")
@options.moment("--since", "since", "Only what was done since then: 2h, 1d, or a time such as 2030-01-01T08:00.")
@options.moment("--until", "until", "Only what was done before.")
@options.limit(50)
@answers
def ls(
    bus: SyncCommandBus,
    domain: str | None,
    operator: str | None,
    action: str | None,
    since: datetime | None,
    until: datetime | None,
    limit: int,
) -> Answer:
    """List what operators did, newest first: at the shell, in the dashboard, or by programs that name an operator.

    An action on many commands is one line. The actions are those of the audit trails, in capital letters.

        busload audit ls
        busload audit ls --operator ada --since 1d
        busload audit ls --action BATCH_CANCELED --json | jq -r '.[].reason'
    """
    found: list[Action] = []
    after: str | None = None
    while len(found) < limit:
        page = bus.audit.list(
            domain,
            operator=operator,
            action=action,
            since=since,
            until=until,
            after=after,
            limit=limit - len(found),
        )
        found += page.actions
        after = page.next
        if after is None:
            break
    return ACTIONS.list(found)
