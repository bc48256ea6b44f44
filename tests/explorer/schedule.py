"""Schedules: what happens in which order. They are drawn from a seed, carried out, shrunk and told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psycopg

from busload.batches import cancel as cancel_batches
from busload.batches import hold
from busload.commands import cancel, claim, rescue, send, settle
from busload.commands.execution import COMPLETED, Transition
from busload.dispatch import creation_state, outbox
from busload.postgres.plan import Plan
from busload.sync.plan import perform
from busload.troubleshooting import decisions
from busload.troubleshooting.decisions import Decision
from tests.explorer.operations import DOMAIN, REGISTER, TRANSPORT, numbered, repertoire
from tests.explorer.world import Actor, ViolationError, World

GOES_ON, UNANSWERED, LOST, IMPATIENT, DIES = (
    "goes on",
    "gets no answer",
    "loses its connection",
    "loses patience",
    "dies",
)
SILENT, DUE = "was silent for too long", "all is due"
TIME = "time"
AT_ONCE = "!"
"""Ends an action that is carried out to its end before anything else happens."""

SETTINGS: tuple[tuple[str, ...], ...] = (
    (),
    ("sender: create A 3!", "worker 1: claim 2!"),
    ("sender: create A 3!", "sender: create B 2!", "worker 1: claim 3 at-once!", "worker 2: claim 3!"),
    ("sender: create A 3!", "worker 1: claim 3!", "worker 1: settle first parked!"),
    ("sender: create A 3!", "worker 1: claim 3!", "worker 1: settle all parked!"),
    ("sender: create A 3!", "worker 1: claim 3!", f"worker 1 {SILENT}"),
    ("sender: create A 3!", "worker 1: claim 2!", "worker 1: settle first again!", f"{TIME}: {DUE}"),
    ("sender: create A 3!", "worker 1: claim 3!", f"worker 1 {SILENT}", "sweeper: rescue!"),
    ("sender: create A 3!", "worker 1: claim 3!", f"worker 1 {SILENT}", "sweeper: rescue!", "worker 1: beat!"),
    ("sender: create A 3!", "worker 1: claim 3!", "worker 1: settle first done!", f"worker 1 {SILENT}"),
    ("sender: create A 3!", "worker 1: claim 3!", "worker 1: give-back first", f"worker 1 {UNANSWERED}"),
    ("sender: create A 3!", "worker 1: claim 3!", "worker 1: settle first done", f"worker 1 {UNANSWERED}"),
    (
        *("sender: create A 3!", "worker 1: claim 3!", f"worker 1 {SILENT}", "sweeper: rescue!"),
        *("worker 1: beat!", "worker 2: claim 3", "worker 1: come-back", f"worker 1 {GOES_ON}"),
    ),
    (
        *("sender: open A!", "sender: add A 1!", "sender: add A 1!", "sender: open B!", "sender: add B 1!"),
        *("sender: add B 1!", "worker 1: claim 2!", "worker 2: claim 2!"),
        *("stranger: lock batch", "worker 1: settle all done", "worker 2: settle all done"),
    ),
    ("sender: create A 3!", "worker 1: claim 3!", "operator 1: cancel 2", "operator 2: cancel-in-pages A"),
    (
        *("sender: create A 3!", "operator 1: cancel 2", f"operator 1 {GOES_ON}"),
        *("operator 2: cancel-batch A", f"operator 2 {GOES_ON}"),
    ),
    (
        *("sender: create A 3!", "operator 2: cancel-in-pages A", f"operator 2 {GOES_ON}", f"operator 2 {GOES_ON}"),
        *("operator 1: cancel 2", f"operator 1 {GOES_ON}"),
    ),
    (
        *("sender: create A 3!", "worker 1: claim 3!", "worker 1: settle all parked!"),
        *("operator 1: complete 1", "operator 2: complete 1"),
    ),
    ("sender: create A 3!", "operator 1: cancel 3", f"operator 1 {GOES_ON}", "worker 1: claim 1"),
    ("sender: open B!", "sender: add B 1!", "sender: add B 1!", "worker 1: claim 1", "worker 2: claim 1"),
    (
        *("sender: create A 3!", "worker 2: claim 3!", f"worker 2 {SILENT}", "sweeper: rescue!", f"worker 2 {DIES}"),
        *("worker 2: register!", "worker 1: claim 1", "worker 2: claim 1"),
    ),
    (
        *("sender: create A 3!", "worker 1: claim 2!", "worker 1: settle all again!", f"{TIME}: {DUE}"),
        *("stranger: lock scheduled", "sweeper: promote"),
    ),
    (
        *("sender: create A 2 outbox!", "relay 1: relay confirms", f"relay 1 {GOES_ON}", f"relay 1 {GOES_ON}"),
        f"relay 1 {UNANSWERED}",
    ),
    (
        *("sender: create B 3 outbox!", "relay 1: relay confirms", f"relay 1 {GOES_ON}"),
        *("worker 1: claim-delivered", f"relay 1 {GOES_ON}"),
    ),
    (
        "sender: create B 3 outbox!",
        "relay 1: relay confirms!",
        "worker 1: claim-delivered",
        "worker 2: claim-delivered",
    ),
    ("sender: open B!", "sender: add B 2!", "worker 1: claim 2!"),
    ("sender: create A 2 outbox!",),
    ("sender: create A 2 outbox!", "relay 1: relay is-silent!", f"{TIME}: {DUE}"),
    ("sender: send-for key!",),
)
"""Where a schedule may begin: after this, in this order. Workers have registered before."""


# Time moves by moving rows; those that somebody has locked are left alone.
FREE = "ARRAY(SELECT {0} FROM busload.{1} WHERE {2} FOR UPDATE SKIP LOCKED)"
EVERYTHING_IS_DUE = [
    f"UPDATE busload.{table} SET {column} = now() WHERE {key} = ANY ({FREE.format(key, table, condition)})"
    for table, key, column, condition in (
        ("scheduled", "hi", "run_at", "run_at < 'infinity'"),
        ("outbox", "hi", "due_at", "true"),
        ("batch", "batch_id", "canceling_until", "canceling_until IS NOT NULL"),
    )
]
NOT_SEEN = (
    "UPDATE busload.worker SET seen_at = now() - lease_for - interval '1 s' WHERE worker = ANY ("
    + FREE.format("worker", "worker", "worker = %s AND stopped_at IS NULL")
    + ")"
)


@dataclass
class Run:
    """A schedule that was carried out: what was left out was not possible when its turn came."""

    actions: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    violation: str | None = None


def actor_of(world: World, action: str) -> tuple[Actor | None, str]:
    """Who acts, and what that one does."""
    for name, actor in world.actors.items():
        for separator in (": ", " "):
            if action.startswith(name + separator):
                return actor, action.removeprefix(name).lstrip(
                    ": "
                ) if separator == ": " else " " + action.removeprefix(name + " ")
    return None, action


def act(world: World, action: str) -> bool:
    """Carry out one action; False if that is not possible now."""
    if action == f"{TIME}: {DUE}":
        for statement in EVERYTHING_IS_DUE:
            world.rows(statement)
        return True
    actor, what = actor_of(world, action)
    if actor is None:
        return False
    if not what.startswith(" "):
        return begin(world, actor, what)
    verb = what[1:]
    if verb == SILENT:
        number = actor.memory.get("number")
        world.rows(NOT_SEEN, number)
        return number is not None
    if verb == DIES:
        world.die(actor)
        return True
    if actor.turns is None or verb == (GOES_ON if actor.waits else IMPATIENT):
        return False
    if verb == GOES_ON:
        world.go_on(actor)
    elif verb == IMPATIENT:
        world.lose_patience(actor)
    else:
        world.lose(actor, carried_out=verb == UNANSWERED)
    return True


def begin(world: World, actor: Actor, what: str) -> bool:
    if actor.turns is not None:
        return False
    words = what.removesuffix(AT_ONCE).split()
    operation = repertoire(actor)[words[0]]
    if not operation.can(world, actor):
        return False
    world.begin(actor, what.removesuffix(AT_ONCE), operation.turns(world, actor, *words[1:]))
    _take_turns(world, actor, whole=what.endswith(AT_ONCE))
    return True


def _take_turns(world: World, actor: Actor, *, whole: bool) -> None:
    """The first turn, or all."""
    while actor.turns is not None and not actor.waits and (whole or actor.taken == 0):
        world.go_on(actor)


def possible(world: World, rng: random.Random, faults: bool) -> str:
    """One of the things that can happen next."""
    actor = rng.choice([*world.actors.values()])
    if actor.turns is None:
        if actor.name.startswith("worker") and actor.memory and rng.random() < 0.12:
            return f"{actor.name} {rng.choice((SILENT, SILENT, DIES))}"
        if rng.random() < 0.05:
            return f"{TIME}: {DUE}"
        if "repeats" in actor.memory and rng.random() < 0.6:
            return f"{actor.name}: {actor.memory['repeats']}"
        operations = [(name, operation) for name, operation in repertoire(actor).items() if operation.can(world, actor)]
        if not operations:
            return possible(world, rng, faults)
        [(name, operation)] = rng.choices(operations, [operation.weight for _, operation in operations])
        return f"{actor.name}: {name} {rng.choice(operation.ways)}".strip()
    if faults and rng.random() < 0.12:
        return f"{actor.name} {rng.choice((LOST, UNANSWERED, UNANSWERED, DIES, IMPATIENT))}"
    if actor.waits:
        others = [one for one in world.actors.values() if one.turns is not None and not one.waits]
        return f"{(rng.choice(others) if others else actor).name} {GOES_ON}"
    return f"{actor.name} {GOES_ON}"


def explore(world: World, seed: int, length: int, *, faults: bool = True, look_every: int = 1) -> Run:
    """Draw a schedule from a seed, and carry it out."""
    world.look_every = look_every
    rng = random.Random(seed)
    actions = [f"{name}: register!" for name in world.actors if name.startswith("worker")]
    actions += SETTINGS[seed % len(SETTINGS)]
    draws = iter(range(length))

    def next_action() -> str | None:
        if actions:
            return actions.pop(0)
        return possible(world, rng, faults) if next(draws, None) is not None else None

    return carry_out(world, next_action)


def replay(world: World, actions: Sequence[str]) -> Run:
    """Carry out a schedule that is known."""
    world.look_every, left = 1, iter(actions)
    return carry_out(world, lambda: next(left, None))


def carry_out(world: World, next_action: Callable[[], str | None]) -> Run:
    run = Run(story=world.story)
    try:
        world.clear()
        run.story = world.story
        while (action := next_action()) is not None:
            world.tell(f"• {action}")
            run.actions.append(action)
            if not act(world, action):
                world.story.pop()
                run.actions.pop()
        finish(world)
    except ViolationError as violation:
        run.violation = str(violation)
    except psycopg.Error as error:  # what waits for nobody has failed
        run.violation = f"{type(error).__name__}: {error}"
    return run


def finish(world: World) -> None:
    """Everybody ends what was begun, and then workers, sweep, relay and operator go on until nothing is left."""
    world.tell("• everybody goes on to the end")
    while busy := [actor for actor in world.actors.values() if actor.turns is not None]:
        ready = [actor for actor in busy if not actor.waits]
        if not ready and not world.look_again():
            raise ViolationError(f"nobody can go on: {[(one.name, one.doing) for one in busy]}")
        if ready:
            world.go_on(ready[0])
    world.check()
    run_to_the_end(world)


def run_to_the_end(world: World) -> None:
    conn = world.watch

    def done(plan: Plan[object]) -> object:
        with conn.transaction():
            return perform(conn, plan)

    world.rows("UPDATE busload.worker SET seen_at = '-infinity' WHERE stopped_at IS NULL")
    worker = perform(conn, rescue.register(**REGISTER))
    for _ in range(12):
        act(world, f"{TIME}: {DUE}")
        done(rescue.rescue())
        for (batch_id,) in world.rows(
            "SELECT batch_id FROM busload.batch WHERE held_at IS NOT NULL AND completed_at IS NULL"
        ):
            done(hold.resume(DOMAIN, batch_id, operator="ada"))
        done(cancel_batches.cancel_stragglers())
        done(cancel.cancel_stopping())
        done(claim.promote())
        taken = perform(conn, outbox.take(TRANSPORT, numbered(0x9E00)))
        if taken:
            perform(conn, outbox.mark(numbered(0x9E00), [outbox.Piece(one.load) for one in taken]))
            done(creation_state.close())
        leased = perform(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=50, suspects=True)).leased
        if leased:
            perform(conn, settle.settle([Transition(one, COMPLETED) for one in leased], now=0.0, again=False))
        for (command_id,) in world.rows(
            "SELECT command_id FROM busload.troubleshooting t JOIN busload.command c ON c.id = t.command"
        ):
            decision = Decision(action="complete", result=None, operator="ada")
            done(decisions.decide_one(DOMAIN, command_id, decision))
        for (batch_id,) in world.rows("SELECT batch_id FROM busload.batch WHERE sealed_at IS NULL"):
            done(send.seal(DOMAIN, batch_id))
            done(send.complete_if_ended(batch_id))
        if not world.rows(LEFT):
            break
    else:
        raise ViolationError(f"there is no end: {world.rows(LEFT)}")
    world.check()
    if open_ones := world.rows(OPEN):
        raise ViolationError(f"it has not ended: {open_ones}")


LEFT = " UNION ALL ".join(
    f"SELECT '{place}', count(*) FROM busload.{place} HAVING count(*) > 0"
    for place in ("queue", "scheduled", "outbox", "lease", "troubleshooting")
)
OPEN = """
    SELECT 'batch', name FROM busload.batch WHERE completed_at IS NULL AND pruned_at IS NULL
    UNION ALL
    SELECT status, command_type FROM busload.command_status WHERE status NOT IN ('COMPLETED', 'FAILED', 'CANCELED')"""


def shrink(world: World, run: Run, *, tries: int = 400) -> Run:
    """The same violation with fewer actions: parts are left out as long as something still goes wrong."""
    kind = str(run.violation).split(":")[0]
    best, size = run, max(1, len(run.actions) // 2)
    while tries > 0:
        smaller = False
        for start in range(0, len(best.actions), size):
            candidate = best.actions[:start] + best.actions[start + size :]
            tries -= 1
            found = replay(world, candidate)
            if found.violation is not None and found.violation.split(":")[0] == kind:
                found.story = list(found.story)
                best, smaller = found, True
                break
        if not smaller:
            if size == 1:
                break
            size = max(1, size // 2)
    return best


def told(run: Run, again: str = "") -> str:
    """A failing run as a story, and as a test; `again` are the options that repeat it."""
    lines = [f"{run.violation}", ""]
    if again:
        lines += [f'Again: make explore EXPLORE="{again}"', ""]
    lines += [*run.story, "", "As a test:", "    replay(world, ["]
    lines += [f"        {action!r}," for action in run.actions]
    return "\n".join([*lines, "    ])"])
