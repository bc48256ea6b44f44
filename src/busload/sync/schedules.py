"""Made from busload.schedules.api by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from functools import partial
from uuid import UUID

from busload.commands.checks import check, given
from busload.commands.ids import new_id
from busload.commands.send import Via
from busload.commands.send_middleware import Sender, around_send
from busload.errors import ScheduleNotFoundError
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.write import Write, patient
from busload.schedules import declare, operate
from busload.schedules.api import log
from busload.schedules.fire import trigger
from busload.schedules.schedule import Fire, Schedule, ScheduleMetadata
from busload.settings import InputLimits
from busload.sync.database import Database


class Schedules:
    """Schedules as the database keeps them. `name` is that of a schedule; `bus.schedule` declares one."""

    def __init__(
        self, sender: Sender, database: Database, limits: InputLimits, via: Via, declared: Mapping[str, Schedule]
    ) -> None:
        self._sender = sender
        self._database, self._limits, self._via, self._declared = database, limits, via, declared

    def sync(self, *, conn: AnySyncConnection | None = None) -> builtins.list[str]:
        """Keep the schedules that this bus declares in the database; return the names of those that are new or changed.

        Workers do so when they start. This call makes its release the newest: workers of other releases that start
        later leave these declarations alone, as long as a worker of this release runs. Schedules that the bus does not
        declare stay as they are: `remove` ends them. With `conn` it is done when that transaction commits.
        """
        declared = [*self._declared.values()]
        if not declared:
            return []
        plan = partial(declare.declare, declared, newest=True)
        changed = self._database.write(patient(plan), conn)
        if changed:
            log.info("Declared the schedules %s", ", ".join(sorted(changed)))
        return changed

    def changes(self) -> builtins.list[str]:
        """The names of the schedules that `sync` would write: those that are new or have changed."""
        return self._database.read(declare.changes([*self._declared.values()]))

    def list(
        self, domain: str | None = None, *, limit: int = 100, after: str | None = None
    ) -> builtins.list[ScheduleMetadata]:
        """The schedules of a domain, or of all domains, by name, at most `limit` of them.

        `after` is the name of the last one of the page before.
        """
        check(self._limits, writes=False, **given(domain=domain, name=after), limit=limit)
        return self._database.read(operate.schedules(domain, limit=limit, after=after))

    def get(self, name: str) -> ScheduleMetadata | None:
        """A schedule with its next due times; None if there is no such schedule."""
        check(self._limits, writes=False, name=name)
        return self._database.read(operate.find(name))

    def pause(
        self,
        name: str,
        *,
        reason: str | None = None,
        operator: str | None = None,
        conn: AnySyncConnection | None = None,
    ) -> bool:
        """Let a schedule fire nothing until it is resumed; returns False if it was paused already.

        A deploy does not end the pause. `reason`, and `operator`, who pauses it, are for people to read. With `conn` it
        is paused when that transaction commits.
        """
        check(self._limits, name=name, operator=operator, **given(reason=reason))
        plan = partial(operate.pause, name, reason=reason, operator=operator)
        return self._database.write(patient(plan), conn)

    def resume(self, name: str, *, operator: str | None = None, conn: AnySyncConnection | None = None) -> bool:
        """Let a paused schedule go on; returns False if it was not paused.

        Due times that have passed meanwhile were missed: they are skipped, or caught up, as its `catch_up` says.
        `operator` names who resumes it. With `conn` it goes on when that transaction commits.
        """
        check(self._limits, name=name, operator=operator)
        return self._database.write(patient(partial(operate.resume, name, operator=operator)), conn)

    def trigger(self, name: str, *, operator: str | None = None, conn: AnySyncConnection | None = None) -> UUID:
        """Send the command of a schedule now, beside its due times, and return the id of the command.

        A paused schedule can be triggered, too. `operator` names who does it. With `conn` the command exists exactly if
        that transaction commits.
        """
        check(self._limits, name=name, operator=operator)
        if not self._sender.around_sends:
            return self._trigger(name, operator, None, conn)
        found = self._database.write(Write(operate.find(name)), conn)
        if found is None:
            raise ScheduleNotFoundError(name)
        about = found.domain, found.headers, found.command_type
        with around_send(self._sender.around_sends, "schedules.trigger", *about) as call:
            check(self._limits, headers=call.headers)
            call.result = command_id = self._trigger(name, operator, call.headers, conn)
        return command_id

    def _trigger(
        self, name: str, operator: str | None, headers: dict[str, str] | None, conn: AnySyncConnection | None
    ) -> UUID:
        command_id = new_id()
        plan = partial(trigger, name, command_id, self._via, operator=operator, headers=headers)
        return self._database.write(patient(plan, command_ids=[command_id]), conn)

    def remove(self, name: str, *, operator: str | None = None, conn: AnySyncConnection | None = None) -> None:
        """Remove a schedule; what it has fired stays, with its history.

        A worker whose code still declares the schedule brings it back when it starts: remove the declaration first, or
        pause the schedule. `operator` names who removes it. With `conn` it ends when that transaction commits.
        """
        check(self._limits, name=name, operator=operator)
        self._database.write(patient(partial(operate.remove_one, name, operator=operator)), conn)

    def undeclared(self, *domains: str) -> builtins.list[str]:
        """The names of schedules that this bus does not declare, of these domains or, without any, of its own ones.

        Its own domains are those of the schedules that it declares.
        """
        for domain in domains:
            check(self._limits, writes=False, domain=domain)
        own = domains or {one.domain for one in self._declared.values()}
        return self._database.read(declare.undeclared(self._declared.values(), own))

    def history(self, name: str | None = None, *, limit: int = 100) -> builtins.list[Fire]:
        """What a schedule has fired and skipped, newest first, at most `limit` rows; of all schedules without `name`.

        Each says which command was sent, how late, and how far the command has come. Rows are kept as long as commands
        are: see `prune`. A name that nothing was fired by, and that is no schedule, raises `ScheduleNotFoundError`.
        """
        check(self._limits, writes=False, **given(name=name), limit=limit)
        found = self._database.read(operate.history(name, limit=limit))
        if name is not None and not found and self.get(name) is None:
            raise ScheduleNotFoundError(name)
        return found
