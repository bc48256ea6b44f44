"""Every point at which a crash can come: each turn of each plan, before it, after it, and after it without an answer.

`python -m tests.explorer.crash_points` writes how many there are into docs/crash-points.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.explorer.operations import repertoire
from tests.explorer.schedule import act, finish
from tests.explorer.world import Actor, ViolationError, World

PAGE = Path(__file__).parents[2] / "docs/crash-points.md"
MARK = "<!-- crash points -->\n"
CAST = ("sender", "worker 1", "worker 2", "sweeper", "operator", "pruner", "relay 1")
BEFORE, DIES, UNANSWERED = "before", "after", "unanswered"
HOW = (BEFORE, DIES, UNANSWERED)
"""The process dies before a turn is carried out, or after it; or it lives, and the answer is lost."""

RUNNING = ("sender: create A 3", "worker 1: claim 3")
PARKED = (*RUNNING, "worker 1: settle first parked")
SILENT = (*RUNNING, "worker 1: settle first done", "worker 1 was silent for too long")
BOXED = ("sender: create A 2 outbox",)
PLANS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "send one command": ((), "sender: send"),
    "send one command through a broker": ((), "sender: send outbox"),
    "send one command for a task key": ((), "sender: send-for key"),
    "create a batch": ((), "sender: create A 3"),
    "create a batch through a broker": ((), "sender: create A 2 outbox"),
    "open a batch": ((), "sender: open B"),
    "add to an open batch": (("sender: open B",), "sender: add B 2"),
    "seal a batch": (("sender: open B", "sender: add B 2"), "sender: seal B"),
    "register a worker": ((), "worker 1: register"),
    "claim": (("sender: create A 3",), "worker 1: claim 2"),
    "claim what a message names": ((*BOXED, "relay 1: relay is-silent"), "worker 1: claim-delivered"),
    "settle, all done": (RUNNING, "worker 1: settle all done"),
    "settle, a part failed": (RUNNING, "worker 1: settle first failed"),
    "settle, a part to be tried again": (RUNNING, "worker 1: settle first again"),
    "settle, a part parked": (RUNNING, "worker 1: settle first parked"),
    "settle in the handler's transaction": (RUNNING, "worker 1: transact"),
    "heartbeat": (RUNNING, "worker 1: beat"),
    "come back from the dead": ((*SILENT, "sweeper: rescue", "worker 1: beat"), "worker 1: come-back"),
    "give a command back": (RUNNING, "worker 1: give-back first"),
    "release leases": (RUNNING, "worker 1: release"),
    "rescue": (SILENT, "sweeper: rescue"),
    "rescue what is free": (SILENT, "sweeper: rescue-free"),
    "promote": ((*RUNNING, "worker 1: settle all again", "time: all is due"), "sweeper: promote"),
    "cancel a batch": (RUNNING, "operator: cancel-batch A"),
    "cancel a batch in pages": (("sender: create A 3", "worker 1: claim 1"), "operator: cancel-in-pages A"),
    "cancel what came back": (
        (*RUNNING, "operator: cancel-batch A", "worker 1: give-back all"),
        "sweeper: stragglers",
    ),
    "hold a batch": (("sender: create A 3", "worker 1: claim 1"), "operator: hold A"),
    "resume a batch": (("sender: create A 3", "operator: hold A"), "operator: resume A"),
    "give a batch another priority": (("sender: create A 3",), "operator: reprioritize A"),
    "cancel a command that waits": (("sender: create A 3",), "operator: cancel 2"),
    "cancel a command that runs": (RUNNING, "operator: cancel 2"),
    "retry": (PARKED, "operator: retry 1"),
    "complete by hand": (PARKED, "operator: complete 1"),
    "give up": (PARKED, "operator: give-up 1"),
    "publish, confirmed": (BOXED, "relay 1: relay confirms"),
    "publish, refused": (BOXED, "relay 1: relay refuses"),
    "publish, unconfirmed": (BOXED, "relay 1: relay is-silent"),
    "prune": ((*RUNNING, "worker 1: settle all done"), "pruner: prune"),
}
"""What has happened before, and what is crashed."""


@dataclass(frozen=True, slots=True)
class Point:
    """A place where a plan is interrupted."""

    plan: str
    turn: int
    how: str


def prepared(world: World, plan: str) -> Actor:
    """Everything is as it is before the plan, and its actor is about to take the first turn."""
    before, action = PLANS[plan]
    world.clear()
    world.look_every = 1
    workers = [
        f"{name}: register" for name in world.actors if name.startswith("worker") and plan != "register a worker"
    ]
    for earlier in (*workers, *before):
        world.tell(f"• {earlier}")
        separate = ": " in earlier and not earlier.startswith("time")
        assert act(world, f"{earlier}!" if separate else earlier), earlier
    return started(world, action)


def started(world: World, action: str) -> Actor:
    name, _, what = action.partition(": ")
    actor = world.actors[name]
    words = what.split()
    world.tell(f"• {action}")
    world.begin(actor, what, repertoire(actor)[words[0]].turns(world, actor, *words[1:]))
    return actor


def turns_of(world: World, plan: str) -> int:
    """How many statements and commits a plan has, by carrying it out."""
    actor = prepared(world, plan)
    turns = 0
    while actor.turns is not None:
        world.go_on(actor)
        turns += 1
    finish(world)
    return turns


def points(turns: Mapping[str, int]) -> Iterator[Point]:
    for plan, count in turns.items():
        for turn in range(count):
            for how in HOW:
                yield Point(plan, turn, how)


def crash(world: World, actor: Actor, how: str) -> None:
    world.tell(f"• {actor.name} is interrupted: {how}")
    if how == BEFORE:
        world.die(actor)
    elif how == UNANSWERED:
        world.lose(actor, carried_out=True)
    else:
        world.go_on(actor)
        world.die(actor)


def interrupted(world: World, point: Point, *, recovery: int | None) -> None:
    """A plan is interrupted, and what was begun comes to its end; `recovery` is the turn that is interrupted, too.

    The recovery is what the database does for whoever is gone: a sweep finds the dead, and takes back what they held.
    An actor that has lost its connection and lives does its work again.
    """
    actor = prepared(world, point.plan)
    for _ in range(point.turn):
        world.go_on(actor)
    crash(world, actor, point.how)
    while actor.turns is not None:  # it lives, and goes on in its own way
        world.go_on(actor)
    if recovery is not None:
        for worker in ("worker 1", "worker 2"):
            act(world, f"{worker} was silent for too long")
        world.rows("UPDATE busload.worker SET seen_at = now() - lease_for - interval '1 s' WHERE stopped_at IS NULL")
        sweeper = started(world, "sweeper: rescue")
        for _ in range(recovery):
            if sweeper.turns is not None:
                world.go_on(sweeper)
        if sweeper.turns is not None:
            crash(world, sweeper, HOW[recovery % len(HOW)])
        while sweeper.turns is not None:
            world.go_on(sweeper)
    finish(world)


RECOVERY_TURNS = 3
"""A rescue: it declares workers dead, takes back what they held, and commits."""


def table(turns: Mapping[str, int]) -> str:
    """The table of the docs."""
    lines = ["| plan | statements and commits | crash points | with a crash during recovery |", "|---|---|---|---|"]
    for plan, count in turns.items():
        lines.append(f"| {plan} | {count} | {count * len(HOW)} | {count * len(HOW) * RECOVERY_TURNS} |")
    total = sum(turns.values())
    lines.append(
        f"| **all {len(turns)}** | **{total}** | **{total * len(HOW)}** | **{total * len(HOW) * RECOVERY_TURNS}** |"
    )
    return "\n".join(lines)


def written(page: str, turns: Mapping[str, int]) -> str:
    [old] = re.findall(rf"{MARK}(?:\n(?:\|.*\n)+)?", page)
    return page.replace(old, f"{MARK}\n{table(turns)}\n")


def all_turns(world: World) -> dict[str, int]:
    return {plan: turns_of(world, plan) for plan in PLANS}


__all__ = ["CAST", "PAGE", "Point", "ViolationError", "all_turns", "interrupted", "points", "table", "written"]


if __name__ == "__main__":
    from tests.explorer.__main__ import own_world

    with own_world(CAST) as world:
        PAGE.write_text(written(PAGE.read_text(), all_turns(world)))
