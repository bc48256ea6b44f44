"""All orders of a few actors who each have something to do, with states that were seen before cut off."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.explorer.schedule import GOES_ON, LOST, SILENT, UNANSWERED, Run, act, finish
from tests.explorer.world import ViolationError, World

STATE = (
    "SELECT concat_ws('|', "
    + ", ".join(
        f"(SELECT string_agg(concat_ws(',', {columns}), ';' ORDER BY {order}) FROM busload.{table} AS t)"
        for table, columns, order in (
            ("queue", "lo, hi, priority, attempt, forgiven, crashes, published_at IS NULL", "hi"),
            ("scheduled", "lo, hi, attempt, reason, run_at <= now()", "hi"),
            ("outbox", "lo, hi, attempt, rounds, due_at <= now(), relay", "hi"),
            ("lease", "lo, hi, worker, attempt, forgiven, open, returned", "hi, attempt, worker"),
            ("troubleshooting", "command, attempt, reason", "command"),
            ("execution", "command, attempt, outcome, worker", "command, attempt"),
            ("event", "type, lo, hi, batch_id, attempt, worker, operator", "type, batch_id, lo, hi, attempt, worker"),
            ("stopping", "command, attempt", "command"),
            ("task", "task_key, command_id", "task_key"),
            ("command", "id, command_id", "id"),
            ("worker", "worker, lost, stopped_at IS NULL, seen_at < now() - lease_for", "worker"),
            (
                "batch",
                "batch_id, status, total_count, completed_count, failed_count, canceled_count, stalled_at IS NULL,"
                " sealed_at IS NULL, canceled_at IS NULL, held_at IS NULL, canceling_until IS NULL",
                "batch_id",
            ),
        )
    )
    + ")"
)
"""Everything that was committed, without times and without ids that differ from run to run."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Who does what, each in this order, after what has happened `before`; and how many connections may be lost."""

    before: tuple[str, ...]
    programs: dict[str, tuple[str, ...]]
    faults: int = 0

    @property
    def cast(self) -> tuple[str, ...]:
        named = [action.partition(": ")[0] for action in self.before if ": " in action]
        return tuple(dict.fromkeys([*named, *(name for name in self.programs if name != "time")]))


CREATED = ("worker 1: register!", "worker 2: register!", "sender: create A 3!")
SCOPES = {
    "a rescue, a late settlement and a cancel": Scope(
        (*CREATED, "worker 1: claim 2!", f"worker 1 {SILENT}"),
        {"worker 1": ("settle first done",), "sweeper": ("rescue",), "operator": ("cancel-batch A",)},
    ),
    "two workers, and a settlement whose answer is lost": Scope(
        (*CREATED, "worker 1: claim 2!"),
        {"worker 1": ("settle first done", "settle first done"), "worker 2": ("claim 1", "settle all done")},
        faults=1,
    ),
    "two operators and a parked command": Scope(
        (*CREATED, "worker 1: claim 2!", "worker 1: settle first parked!"),
        {"operator 1": ("retry 1",), "operator 2": ("complete 1",), "worker 2": ("claim 2",)},
    ),
}
"""Small enough for every run."""

LARGER = {
    "two workers, a sweeper, an operator, three commands": Scope(
        CREATED,
        {
            "worker 1": ("claim 2", "settle first done", "settle all done"),
            "worker 2": ("claim 3", "settle all again"),
            "sweeper": ("rescue", "promote"),
            "operator": ("cancel-batch A",),
            "time": (f"worker 1 {SILENT}",),
        },
        faults=1,
    ),
}


@dataclass
class Explored:
    """What an exploration has seen."""

    states: int = 0
    schedules: int = 0
    complete: bool = False
    failed: Run | None = None


@dataclass
class _Path:
    """A schedule in the making: how far each program is, and what every open transaction has seen so far."""

    done: dict[str, int] = field(default_factory=dict)
    faults: int = 0
    seen_by: dict[str, str] = field(default_factory=dict)


def explore_all(world: World, scope: Scope, *, most: int | None = None, seconds: float | None = None) -> Explored:
    """Try all orders, or as many schedules or seconds as asked."""
    explored, seen = Explored(), set[str]()
    stack: list[tuple[str, ...]] = [()]
    began = time.monotonic()
    while stack:
        if explored.schedules == most or (seconds is not None and time.monotonic() - began > seconds):
            break
        prefix = stack.pop()
        run = Run(story=world.story)
        try:
            _follow(world, scope, prefix, run, stack, seen)
        except ViolationError as violation:
            run.violation = str(violation)
            explored.failed = run
            break
        finally:
            run.story = world.story
            explored.schedules += 1
            explored.states = len(seen)
    else:
        explored.complete = True
    return explored


def _follow(
    world: World, scope: Scope, prefix: Sequence[str], run: Run, stack: list[tuple[str, ...]], seen: set[str]
) -> None:
    world.clear()
    world.look_every = 1
    run.story = world.story
    for action in scope.before:
        run.actions.append(action)
        world.tell(f"• {action}")
        assert act(world, action), action
    path = _Path()
    taken: list[str] = []
    for action in prefix:
        _take(world, path, action, run)
        taken.append(action)
    while True:
        key = _key(world, path)
        choices = _choices(world, scope, path)
        if key in seen:
            return
        seen.add(key)
        if not choices:
            finish(world)
            return
        stack.extend((*taken, other) for other in reversed(choices[1:]))
        _take(world, path, choices[0], run)
        taken.append(choices[0])


def _take(world: World, path: _Path, action: str, run: Run) -> None:
    before = _digest(world.rows(STATE)[0][0])
    turns = {name: actor.taken for name, actor in world.actors.items()}
    world.tell(f"• {action}")
    run.actions.append(action)
    name = action.partition(": ")[0] if ": " in action else "time" if action.endswith(SILENT) else ""
    if name:
        path.done[name] = path.done.get(name, 0) + 1
    if action.endswith((LOST, UNANSWERED)):
        path.faults += 1
    act(world, action)
    for actor_name, actor in world.actors.items():
        if actor.turns is None:
            path.seen_by.pop(actor_name, None)
        elif actor.taken != turns[actor_name] or action.startswith(actor_name):
            path.seen_by[actor_name] = _digest(path.seen_by.get(actor_name, "") + before)


def _choices(world: World, scope: Scope, path: _Path) -> list[str]:
    found = []
    for name, program in scope.programs.items():
        nth = path.done.get(name, 0)
        if name == "time":
            found += [program[nth]] if nth < len(program) else []
            continue
        actor = world.actors[name]
        if actor.turns is None:
            found += [f"{name}: {program[nth]}"] if nth < len(program) else []
        elif not actor.waits:
            found.append(f"{name} {GOES_ON}")
            if path.faults < scope.faults:
                found += [f"{name} {LOST}", f"{name} {UNANSWERED}"]
    return found


def _key(world: World, path: _Path) -> str:
    actors = [
        (
            name,
            actor.doing,
            actor.taken,
            actor.waits,
            path.done.get(name, 0),
            path.seen_by.get(name, ""),
            [(one.id, one.lease.attempt) for one in actor.memory.get("held", ())],
            sorted(key for key in actor.memory if key != "held"),
        )
        for name, actor in sorted(world.actors.items())
    ]
    return _digest(f"{world.rows(STATE)[0][0]}{actors}{path.done.get('time', 0)}{path.faults}")


def _digest(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()
