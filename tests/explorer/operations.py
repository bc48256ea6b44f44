"""What each actor can do, by the plans of the product, and what it remembers of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

from busload import BusloadError, Dedup
from busload.batches import cancel as cancel_batches
from busload.batches import hold
from busload.batches.reprioritize import reprioritize
from busload.commands import cancel, claim, rescue, send, settle
from busload.commands.command import NewCommand
from busload.commands.execution import COMPLETED, FAILED, FAILED_ATTEMPT, TROUBLESHOOTING, Leased, Transition
from busload.dispatch import creation_state, outbox
from busload.errors import SupersededError
from busload.postgres.plan import Plan, Script
from busload.retention import prune
from busload.troubleshooting import decisions
from busload.troubleshooting.decisions import Decision
from tests.explorer.turns import BEGIN, COMMIT, ROLLBACK, LostError, Turn, Turns, each_alone, in_transaction
from tests.explorer.world import Actor, ViolationError, World

DOMAIN = "payments"
TRANSPORT = "explored"
DEDUP = Dedup(window=timedelta(0), on_conflict="skip")
LEASE_FOR = timedelta(seconds=30)
OUTCOMES = {"done": COMPLETED, "failed": FAILED, "again": FAILED_ATTEMPT, "parked": TROUBLESHOOTING}
REGISTER: dict[str, Any] = {"name": "w", "domains": [DOMAIN], "concurrency": 9, "lease_for": LEASE_FOR}


def numbered(number: int) -> UUID:
    """The same id in every run."""
    return UUID(int=0x0198_0000_0000_7000_8000_0000_0000_0000 | number << 64 | number)


def batch_id_of(name: str) -> UUID:
    return numbered(0xB000 + ord(name))


def new_command(world: World, **options: Any) -> NewCommand:
    number = world.facts["commands"] = world.facts.get("commands", 0) + 1
    return NewCommand(numbered(number).int, "Debit", "{}", **options)


def outcome_of(error: Exception) -> str:
    """In the words of a story. Only what is documented may come out of a plan."""
    if isinstance(error, LostError):
        return "unknown: the connection is lost"
    if isinstance(error, BusloadError) or type(error).__name__ == "LockNotAvailable":
        return f"refused: {type(error).__name__}"
    raise ViolationError(f"an error that nobody expects: {type(error).__name__}: {error}") from error


# -- sender --------------------------------------------------------------------------------------------------------


def accepting(world: World, commands: Sequence[NewCommand], turns: Turns[Any]) -> Turns[str]:
    """Sends these commands. If the call returns, they are there from then on."""
    ids = [command.command_id for command in commands]
    try:
        yield from turns
    except Exception as error:
        said = outcome_of(error)
        if isinstance(error, LostError):
            world.accepted |= dict.fromkeys(ids, False)
        return said
    world.accepted |= dict.fromkeys(ids, True)
    return f"{len(ids)} accepted"


def via_of(place: str) -> send.Via:
    return send.Via(TRANSPORT) if place == "outbox" else send.NO_BROKER


def create(world: World, actor: Actor, name: str, count: str, place: str = "queue") -> Turns[str]:
    """A sealed batch with its callback."""
    callback = {"command_id": str(numbered(0xCA00 + ord(name))), "command_type": "Tell", "data": {}, "priority": 0}
    batch = send.NewBatch(batch_id_of(name), DOMAIN, None, None, json.dumps(callback))
    commands = [new_command(world) for _ in range(int(count))]
    plan = (
        send.create_batch(batch, commands)
        if place == "queue"
        else creation_state.create(batch, commands, via_of(place))
    )
    return (yield from accepting(world, commands, in_transaction(plan)))


def send_one(world: World, actor: Actor, place: str = "queue") -> Turns[str]:
    command = new_command(world)
    world.facts["last"] = command
    return (yield from accepting(world, [command], each_alone(send.send(DOMAIN, command, via=via_of(place)))))


def send_again(world: World, actor: Actor) -> Turns[str]:
    """The same command once more, as somebody does who does not know whether it was accepted."""
    command = world.facts["last"]
    try:
        yield from each_alone(send.send(DOMAIN, command))
    except Exception as error:
        said = outcome_of(error)
        if said == "refused: DuplicateCommandError":
            world.accepted[command.command_id] = True
        return said
    world.accepted[command.command_id] = True
    return "accepted"


def send_for(world: World, actor: Actor, key: str) -> Turns[str]:
    """A command with a task key, which is sent only if nobody has the key."""
    command = new_command(world, task_key=key)
    created: list[bool] = []

    def plan() -> Plan[None]:
        created.append((yield from send.send_once(DOMAIN, command, DEDUP)).created)

    try:
        yield from each_alone(plan())
    except Exception as error:
        return outcome_of(error)
    if created[0]:
        world.accepted[command.command_id] = True
    return "accepted" if created[0] else "skipped: the key is held"


def open_batch(world: World, actor: Actor, name: str) -> Turns[str]:
    batch = send.NewBatch(batch_id_of(name), DOMAIN, None, None, None)
    return (yield from accepting(world, [], in_transaction(send.open_batch(batch))))


def add(world: World, actor: Actor, name: str, count: str) -> Turns[str]:
    commands = [new_command(world) for _ in range(int(count))]
    plan = send.send_many(DOMAIN, commands, batch_id_of(name))
    return (yield from accepting(world, commands, in_transaction(plan)))


def seal(world: World, actor: Actor, name: str) -> Turns[str]:
    return (yield from accepting(world, [], in_transaction(send.seal(DOMAIN, batch_id_of(name)))))


# -- worker --------------------------------------------------------------------------------------------------------


def held_by(actor: Actor) -> list[Leased]:
    held: list[Leased] = actor.memory.setdefault("held", [])
    return held


def register(world: World, actor: Actor) -> Turns[str]:
    try:
        actor.memory["number"] = yield from each_alone(rescue.register(**REGISTER))
    except Exception as error:
        return outcome_of(error)
    actor.memory["numbers"] = [actor.memory["number"]]
    return f"worker {actor.memory['number']}"


def claiming(world: World, actor: Actor, plan: Plan[claim.Claim]) -> Turns[str]:
    try:
        claimed = yield from each_alone(plan)
    except Exception as error:
        return outcome_of(error)
    held_by(actor).extend(claimed.leased)
    return "refused: declared dead" if claimed.refused else f"holds {[one.id for one in held_by(actor)]}"


def claim_some(world: World, actor: Actor, limit: str, way: str = "in turns") -> Turns[str]:
    number = actor.memory["number"]
    plan = claim.claim(worker=number, domains=[DOMAIN], limit=int(limit), no_turns=way != "in turns")
    return (yield from claiming(world, actor, plan))


def claim_delivered(world: World, actor: Actor) -> Turns[str]:
    """A message names a load; messages may come again."""
    messages = world.facts.get("messages", [])
    load = messages[world.facts.setdefault("delivered", 0) % len(messages)]
    world.facts["delivered"] += 1
    plan = claim.claim_delivered(worker=actor.memory["number"], domains=[DOMAIN], wanted={load: 2})
    return (yield from claiming(world, actor, plan))


def settle_some(world: World, actor: Actor, which: str, outcome: str) -> Turns[str]:
    """Results are kept until the commit is known: if the answer is lost, they are settled again."""
    some = chosen(held_by(actor), which)
    known: dict[int, Transition] = actor.memory.setdefault("results", {})
    transitions = [known.setdefault(id(one), result_of(one, outcome)) for one in some]
    try:
        credited = yield from each_alone(settle.settle(transitions, now=0.0, again=False))
    except Exception as error:
        actor.memory["repeats"] = actor.doing
        return outcome_of(error)
    actor.memory.pop("repeats", None)
    for one in some:
        held_by(actor).remove(one)
    noted(world, transitions, credited)
    return f"credited {sorted(credited)} of {[one.id for one in some]}"


def noted(world: World, transitions: Sequence[Transition], credited: set[int]) -> None:
    """An attempt that was credited is the last word about this attempt, whoever else has run it."""
    for transition in transitions:
        if transition.leased.id in credited:
            world.credited[transition.leased.id, transition.leased.lease.attempt] += 1


def result_of(one: Leased, outcome: str) -> Transition:
    kind = OUTCOMES[outcome]
    return Transition(
        one,
        kind,
        None if kind == COMPLETED else "{}",
        delay=0.0 if kind == FAILED_ATTEMPT else None,
        reason="EXHAUSTED" if kind == TROUBLESHOOTING else None,
    )


def chosen(held: list[Leased], which: str) -> list[Leased]:
    return {"first": held[:1], "last": held[-1:]}.get(which, list(held))


def beat(world: World, actor: Actor) -> Turns[str]:
    """A heartbeat. What the worker holds and does not know of, it hands back; what it has lost, it goes on with."""
    try:
        renewal = yield from each_alone(rescue.renew(worker=actor.memory["number"], settled=timedelta(0)))
        if renewal is None:
            actor.memory["dead"] = True
            return "it was declared dead"
        unknown = renewal.leases - {one.lease.lease_id for one in held_by(actor)}
        if not unknown:
            return "alive"
        returned = yield from in_transaction(rescue.release(sorted(unknown)))
    except Exception as error:
        return outcome_of(error)
    return f"handed back {returned.commands}, which it had not heard of"


def come_back(world: World, actor: Actor) -> Turns[str]:
    """A worker that was declared dead and still runs its commands."""
    leases = list({one.lease.lease_id: one.lease for one in held_by(actor)}.values())
    plan = rescue.come_back(dead=actor.memory["numbers"], leases=leases, **REGISTER)
    try:
        number, resumed = yield from in_transaction(plan)
    except Exception as error:
        return outcome_of(error)
    actor.memory["number"] = number
    actor.memory["numbers"].append(number)
    actor.memory.pop("dead")
    return f"worker {number} holds {len(resumed)} of {len(leases)} leases again"


def give_back(world: World, actor: Actor, which: str) -> Turns[str]:
    """Commands that it has not begun, one by one; repeated if the answer is lost."""
    parts: dict[Any, list[int]] = {}
    some = chosen(held_by(actor), which)
    for one in some:
        parts.setdefault(one.lease, []).append(one.id)
    try:
        yield from each_alone(claim.give_back(parts))
    except Exception as error:
        actor.memory["giving"] = actor.memory["repeats"] = actor.doing
        return outcome_of(error)
    for one in some:
        held_by(actor).remove(one)
    actor.memory.pop("giving", None)
    actor.memory.pop("repeats", None)
    return f"gave back {[one.id for one in some]}"


def release(world: World, actor: Actor) -> Turns[str]:
    """It stops: its leases go back as a whole."""
    leases = sorted({one.lease.lease_id for one in held_by(actor)})
    try:
        returned = yield from in_transaction(rescue.release(leases))
    except Exception as error:
        return outcome_of(error)
    return f"released {returned.commands}"


def transact(world: World, actor: Actor) -> Turns[str]:
    """The handler's own transaction, with the settlement at its end, as `ctx.transaction()` has it."""
    [one] = chosen(held_by(actor), "first")
    transition = Transition(one, COMPLETED)

    def plan() -> Plan[set[int]]:
        yield from settle.lock([one.lease], [])
        credited = yield from settle.settle([transition], now=0.0)
        if not credited:
            raise SupersededError("another worker has it")
        return credited

    try:
        credited = yield from in_transaction(plan())
    except Exception as error:
        return outcome_of(error)
    held_by(actor).remove(one)
    noted(world, [transition], credited)
    return f"credited {sorted(credited)}"


# -- sweeper, operators, pruner, relay -----------------------------------------------------------------------------


def doing(plan: Callable[[], Plan[Any]]) -> Callable[..., Turns[str]]:
    """A plan in a transaction of its own, of which nothing need be remembered."""

    def turns(world: World, actor: Actor) -> Turns[str]:
        try:
            found = yield from in_transaction(plan())
        except Exception as error:
            return outcome_of(error)
        return f"{found}"

    return turns


def start_batches(world: World, actor: Actor) -> Turns[str]:
    try:
        return f"{(yield from in_transaction(rescue.start_batches(worker=actor.memory['number'])))}"
    except Exception as error:
        return outcome_of(error)


def about_batch(plan: Callable[..., Plan[Any]], **options: Any) -> Callable[..., Turns[str]]:
    def turns(world: World, actor: Actor, name: str) -> Turns[str]:
        return (yield from doing(lambda: plan(DOMAIN, batch_id_of(name), **options))(world, actor))

    return turns


def cancel_in_pages(world: World, actor: Actor, name: str) -> Turns[str]:
    """As the bus does it: the mark is one transaction, each page another."""
    about = {"reason": "x", "operator": "ada"}
    begin = partial(cancel_batches.begin_to_cancel, DOMAIN, batch_id_of(name), in_pages=True, **about)
    try:
        begun = yield from in_transaction(begin())
        total, after = 0, cancel_batches.BEGINNING if begun.batch_ids else None
        while after is not None:
            plan = cancel_batches.page(begun.batch_ids, after, hold=timedelta(seconds=30), **about)
            more, after = yield from in_transaction(plan)
            total += more
    except Exception as error:
        return outcome_of(error)
    return f"{total} canceled"


def cancel_one(world: World, actor: Actor, number: str) -> Turns[str]:
    command_id = numbered(int(number))
    give_up = partial(decisions.give_up, DOMAIN, command_id, "x", "ada")
    plan = partial(cancel.cancel, DOMAIN, command_id, reason="x", operator="ada", give_up=give_up)
    return (yield from doing(plan)(world, actor))


def decide(world: World, actor: Actor, number: str, *, action: str) -> Turns[str]:
    decision = Decision(action=action, operator="ada", reason="x")  # type: ignore[arg-type]
    try:
        yield from in_transaction(decisions.decide_one(DOMAIN, numbered(int(number)), decision))
    except Exception as error:
        return outcome_of(error)
    world.decided += 1
    return "done"


def prune_all(world: World, actor: Actor) -> Turns[str]:
    world.facts["pruned"] = True
    pruning = prune.Pruning(timedelta(microseconds=1))
    try:
        for plan in pruning.plans():
            yield from in_transaction(plan)
    except Exception as error:
        return outcome_of(error)
    return f"{pruning.pruned}"


def relay(world: World, actor: Actor, broker: str) -> Turns[str]:
    """Take loads, publish them, and say what became of the messages; then close what is complete."""
    me = numbered(0x9E00 + ord(actor.name[-1]))
    try:
        taken = yield from each_alone(outbox.take(TRANSPORT, me))
        if not taken:
            return "nothing to publish"
        if broker != "refuses":
            messages: list[int] = world.facts.setdefault("messages", [])
            messages.extend(one.load.number for one in taken)
        reason, error = (None, None) if broker == "confirms" else ("UNCONFIRMED", "no answer")
        published = '{"transport": "explored", "publication": "%s"}'
        pieces = [
            outbox.Piece(one.load, reason, error, published=None if reason else published % one.load.lo)
            for one in taken
        ]
        try:
            ready, again = yield from each_alone(outbox.mark(me, pieces))
        except LostError:
            ready, again = yield from each_alone(outbox.mark(me, pieces))
        yield from in_transaction(creation_state.close())
    except Exception as error:
        return outcome_of(error)
    return f"{ready} ready, {again} to be tried again"


def lock_rows(world: World, actor: Actor, table: str) -> Turns[str]:
    """A transaction of a stranger that has locked rows of ours, and stays open."""
    yield BEGIN
    try:
        yield Turn(Script(f"SELECT FROM busload.{table} FOR UPDATE".encode()))
    except Exception as error:
        yield ROLLBACK
        return outcome_of(error)
    try:
        yield COMMIT
    except LostError:
        return "gone"
    return f"let the rows of {table} go"


# -- who can do what -----------------------------------------------------------------------------------------------

Can: TypeAlias = Callable[[World, Actor], bool]


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that an actor does. `ways` are the arguments that may be drawn."""

    turns: Callable[..., Turns[str]]
    ways: Sequence[str] = ("",)
    can: Can = lambda world, actor: True
    weight: int = 2


def lives(world: World, actor: Actor) -> bool:
    return "number" in actor.memory


def has_some(world: World, actor: Actor) -> bool:
    return bool(actor.memory.get("held")) and lives(world, actor)


def may_settle(world: World, actor: Actor) -> bool:
    """A worker does not run what it has given back, also if it does not know whether that was carried out."""
    return has_some(world, actor) and "giving" not in actor.memory


def runs_some(world: World, actor: Actor) -> bool:
    return may_settle(world, actor) and not actor.memory.get("results")


BATCHES = ("A", "B")
COMMANDS = ("1", "2", "3", "4")
SENDER = {
    "create": Operation(create, ("A 3", "B 2", "A 2 outbox", "B 3 outbox"), weight=3),
    "send": Operation(send_one, ("", "outbox")),
    "send-again": Operation(send_again, can=lambda world, actor: "last" in world.facts),
    "send-for": Operation(send_for, ("key",), weight=3),
    "open": Operation(open_batch, ("B",)),
    "add": Operation(add, ("B 1", "B 2")),
    "seal": Operation(seal, ("B",)),
}
WORKER = {
    "register": Operation(register, can=lambda world, actor: not lives(world, actor), weight=9),
    "claim": Operation(claim_some, ("1", "2", "3", "2 at-once"), lives, 4),
    "claim-delivered": Operation(
        claim_delivered, can=lambda world, actor: lives(world, actor) and bool(world.facts.get("messages")), weight=4
    ),
    "settle": Operation(
        settle_some,
        (
            "first done",
            "all done",
            "last done",
            "first failed",
            "all again",
            "first again",
            "all parked",
            "first parked",
        ),
        may_settle,
        8,
    ),
    "transact": Operation(transact, can=runs_some, weight=1),
    "give-back": Operation(
        give_back,
        ("first", "last", "all"),
        lambda world, actor: has_some(world, actor) and not actor.memory.get("results"),
        1,
    ),
    "release": Operation(
        release, can=lambda world, actor: has_some(world, actor) and not actor.memory.get("results"), weight=1
    ),
    "beat": Operation(beat, can=lives, weight=1),
    "come-back": Operation(come_back, can=lambda world, actor: bool(actor.memory.get("dead")), weight=6),
    "start": Operation(start_batches, can=lives, weight=1),
}
SWEEPER = {
    "rescue": Operation(doing(rescue.rescue), weight=6),
    "rescue-free": Operation(doing(partial(rescue.rescue, free_only=True))),
    "promote": Operation(doing(claim.promote)),
    "stragglers": Operation(doing(cancel_batches.cancel_stragglers)),
    "withhold": Operation(doing(hold.withhold_stragglers), weight=1),
    "stopping": Operation(doing(cancel.cancel_stopping), weight=1),
}
OPERATOR = {
    "cancel-batch": Operation(about_batch(cancel_batches.cancel_batch, reason="x", operator="ada"), BATCHES),
    "cancel-in-pages": Operation(cancel_in_pages, BATCHES, weight=1),
    "hold": Operation(about_batch(hold.hold, reason="x", operator="ada"), BATCHES),
    "resume": Operation(about_batch(hold.resume, operator="ada"), BATCHES),
    "reprioritize": Operation(about_batch(reprioritize, priority=5, operator="ada"), BATCHES, weight=1),
    "cancel": Operation(cancel_one, COMMANDS, weight=3),
    "retry": Operation(partial(decide, action="retry"), COMMANDS, weight=3),
    "complete": Operation(partial(decide, action="complete"), COMMANDS, weight=3),
    "give-up": Operation(partial(decide, action="cancel"), COMMANDS, weight=2),
}
PRUNER = {"prune": Operation(prune_all)}
RELAY = {"relay": Operation(relay, ("confirms", "refuses", "is-silent"))}
STRANGER = {"lock": Operation(lock_rows, ("batch", "lease", "queue", "worker", "troubleshooting", "task", "scheduled"))}
CAST = {
    "sender": SENDER,
    "worker": WORKER,
    "sweeper": SWEEPER,
    "operator": OPERATOR,
    "pruner": PRUNER,
    "relay": RELAY,
    "stranger": STRANGER,
}


def repertoire(actor: Actor) -> dict[str, Operation]:
    """What an actor can do; its name may end with a number."""
    return CAST[actor.name.split()[0]]
