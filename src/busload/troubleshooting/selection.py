"""What waits for a person by cause over all domains, and decisions that are bound to what a person has seen.

A person looks at a preview and confirms it. Between the two, others decide and new commands fail. So a preview has a
bound: how many commands it counted, up to which time and which command, and a digest of them. A decision with another
bound than what is there now does nothing. What fails later than the bound is never part of the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from busload.commands.checks import check, encoded, given
from busload.commands.data_type import DataTypes
from busload.commands.payload import decode, readable
from busload.errors import Problem
from busload.postgres.plan import ONE_MOMENT, Plan, execute, many
from busload.postgres.statements import statements
from busload.postgres.write import Write, patient
from busload.settings import InputLimits, PayloadLimits
from busload.troubleshooting import decisions
from busload.troubleshooting.causes import Reason, checked_patch
from busload.troubleshooting.decisions import PART, PART_BYTES, Action, Decision
from busload.troubleshooting.patch import Patch

SQL = statements(__name__)

HOURS = 24
"""Of the last day: how many failed in each is counted."""
MOST_KEPT = 100
"""Commands that a portion has not moved of which it says why."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which causes are listed. `text` is looked for in the error of the oldest command of each."""

    domain: str | None = None
    command_type: str | None = None
    reason: Reason | None = None
    batch_id: UUID | None = None
    text: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page of causes ends: its last cause, and how many waited for it."""

    count: int
    domain: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Cause:
    """Commands of one domain that wait for the same cause.

    The error is that of the oldest of them, `example`.
    """

    domain: str
    fingerprint: str
    reasons: tuple[str, ...]
    error_type: str | None
    error_code: str | None
    message: str | None
    command_types: tuple[str, ...]
    count: int
    oldest: datetime
    newest: datetime
    example: UUID
    hours: tuple[int, ...]
    """How many failed in each hour of the last day; the last one is the hour until now."""

    @property
    def place(self) -> Place:
        return Place(self.count, self.domain, self.fingerprint)


@dataclass(frozen=True, slots=True)
class Causes:
    """A page of causes, and how many causes and commands there are on all pages."""

    causes: list[Cause]
    total: int
    commands: int


@dataclass(frozen=True, slots=True)
class Selection:
    """What a decision is about: commands of a domain that wait for a cause.

    All of them, those of a type, a reason or a batch, or those that are named.
    """

    domain: str
    fingerprint: str
    command_type: str | None = None
    reason: Reason | None = None
    batch_id: UUID | None = None
    command_ids: tuple[UUID, ...] = ()

    @property
    def params(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "fingerprint": self.fingerprint,
            "command_type": self.command_type,
            "reason": self.reason,
            "batch_id": self.batch_id,
            "command_ids": list(self.command_ids) or None,
        }


@dataclass(frozen=True, slots=True)
class Item:
    """A command of a cause. `command` is the cursor that stands on it."""

    command: int
    command_id: UUID
    command_type: str
    batch_id: UUID | None
    task_key: str | None
    reason: str
    attempts: int
    since: datetime
    message: str | None


@dataclass(frozen=True, slots=True)
class Bound:
    """What a person has seen: so many commands, up to this time and this command. Another set has another digest."""

    count: int
    until: datetime
    last: int
    digest: int


@dataclass(frozen=True, slots=True)
class AffectedBatch:
    """A batch of which a decision touches so many commands. If nothing else of it is open, it is `completing`.

    If it is `held`, what is retried waits until somebody resumes it.
    """

    batch_id: UUID
    name: str | None
    count: int
    completing: bool
    held: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """What a decision would touch now. There is no `bound` if it would touch nothing.

    `kept` commands of canceled batches would stay, since nothing of these is tried again.
    """

    count: int
    kept: int
    oldest: datetime | None
    newest: datetime | None
    bound: Bound | None
    seen: int
    """How many of them are within the bound that was given."""
    seen_digest: int
    command_types: tuple[str, ...]
    reasons: tuple[str, ...]
    alone: int
    """How many are in no batch."""
    batches: int
    completing: int
    held_batches: int
    held: int
    """How many belong to batches that are held."""
    largest: tuple[AffectedBatch, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """What a person has seen is not what is there now: `gone` were decided on or moved, `newer` have come."""

    now: Preview
    gone: int
    newer: int


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a decision that was carried out. The next part begins `after` this command; None if it was the last."""

    passed: int
    """How many commands it was about."""
    moved: int
    kept: Mapping[UUID, str]
    """Why some were not moved; the first hundred of them."""
    others: int
    """How many more were not moved."""
    held: int
    """How many of those that were moved belong to batches that are held."""
    after: int | None


def list_causes(limits: InputLimits, wanted: Filter, *, limit: int, after: Place | None = None) -> Plan[Causes]:
    named = given(domain=wanted.domain, fingerprint=wanted.fingerprint, batch_id=wanted.batch_id)
    check(limits, writes=False, **named, command_type=wanted.command_type, limit=limit)
    return _list_causes(wanted, limit, after)


def _list_causes(wanted: Filter, limit: int, after: Place | None) -> Plan[Causes]:
    one = {} if wanted.fingerprint is None else {"fingerprint": wanted.fingerprint}
    rows = yield from execute(
        SQL.cause if one else SQL.causes,
        **one,
        domain=wanted.domain,
        command_type=wanted.command_type,
        reason=wanted.reason,
        batch_id=wanted.batch_id,
        text=wanted.text,
        after_count=None if after is None else after.count,
        after_domain=None if after is None else after.domain,
        after_fingerprint=None if after is None else after.fingerprint,
        limit=limit,
    )
    total, commands = rows[0][-2:] if rows else (0, 0)
    return Causes([_cause(*row[:-2]) for row in rows], total, commands)


def _cause(*row: Any) -> Cause:
    *values, hours, counts = row
    told: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
    by_hour: dict[int, int] = dict(zip(hours, counts, strict=True))
    told.append(tuple(by_hour.get(hour, 0) for hour in range(1, HOURS + 1)))
    return Cause(*told)


def find_cause(limits: InputLimits, chosen: Selection) -> Plan[Cause | None]:
    """The cause, as far as its filter lets it through; None if nothing waits for it."""
    wanted = Filter(chosen.domain, chosen.command_type, chosen.reason, chosen.batch_id, fingerprint=chosen.fingerprint)
    found = yield from list_causes(limits, wanted, limit=1)
    return found.causes[0] if found.causes else None


def cause_with_items(
    limits: InputLimits, chosen: Selection, *, limit: int, after: int = -1
) -> Plan[tuple[Cause | None, list[Item]]]:
    """The cause and commands of it, both of one moment; needs a transaction of its own."""
    yield ONE_MOMENT
    cause = yield from find_cause(limits, chosen)
    found = yield from items(chosen, limit=limit, after=after)
    return cause, found


def items(selection: Selection, *, limit: int, after: int = -1) -> Plan[list[Item]]:
    return many(Item, SQL.items, **selection.params, limit=limit, after=after)


def preview(limits: InputLimits, selection: Selection, action: Action, *, seen: Bound | None = None) -> Plan[Preview]:
    """What a decision would touch now, and how much of that is within the bound that was seen."""
    _check(limits, selection, writes=False)
    return _preview(selection, action, seen)


def _check(limits: InputLimits, selection: Selection, *, writes: bool) -> None:
    named = {"domain": selection.domain, "fingerprint": selection.fingerprint, **given(batch_id=selection.batch_id)}
    check(limits, writes=writes, **named, command_type=selection.command_type)


def _preview(selection: Selection, action: Action, seen: Bound | None) -> Plan[Preview]:
    [row] = yield from execute(
        SQL.preview,
        **selection.params,
        again=action == "retry",
        until=None if seen is None else seen.until,
        last=None if seen is None else seen.last,
    )
    count, kept, oldest, newest, last, digest, within, seen_digest, types, reasons, *of_batches = row
    alone, batches, completing, held_batches, held, largest = of_batches
    return Preview(
        count,
        kept,
        oldest,
        newest,
        None if newest is None else Bound(count, newest, last, digest),
        within,
        seen_digest,
        tuple(types),
        tuple(reasons),
        alone,
        batches,
        0 if action == "retry" else completing,
        held_batches,
        held,
        tuple(AffectedBatch(UUID(id), *of_batch) for id, *of_batch in decode(largest)),
    )


def compare(seen: Bound, now: Preview) -> Changed | None:
    """Say how what is there now differs from what was seen; None if it does not."""
    newer = now.count - now.seen
    same = (now.seen, now.seen_digest) == (seen.count, seen.digest)
    if same and not newer:
        return None
    gone, late = max(seen.count - now.seen, 0), max(now.seen - seen.count, 0)
    if gone or newer + late:
        return Changed(now, gone, newer + late)
    return Changed(now, 1, 1)  # as many have come as have gone


def check_seen(
    limits: InputLimits, selection: Selection, action: Action, seen: Bound, *, leave_newer: bool
) -> Plan[Changed | None]:
    """Say what has changed since a person has seen the preview. With `leave_newer` new failures are no change."""
    now = yield from preview(limits, selection, action, seen=seen)
    changed = compare(seen, now)
    if changed is not None and leave_newer and (now.seen, now.seen_digest) == (seen.count, seen.digest):
        return None
    return changed


@dataclass(frozen=True, slots=True)
class Order:
    """A decision of a person about a selection, bound to what that person has seen."""

    selection: Selection
    seen: Bound
    decision: Decision
    patch: Patch | None


def order(
    limits: InputLimits,
    selection: Selection,
    seen: Bound,
    action: Action,
    *,
    operator: str | None,
    patch: Sequence[dict[str, Any]] | None = None,
    result: Any = None,
    reason: str | None = None,
) -> Order:
    """Check what a person has decided."""
    _check(limits, selection, writes=True)
    because: dict[str, Any] = {"reason": reason} if action == "cancel" else {}
    check(limits, operator=operator, **because)
    if result is not None:
        result = decode(encoded(result, "/result", limits.payload))
    checked = None if patch is None else checked_patch(patch, limits.payload)
    decision = Decision(
        action=action,
        fingerprint=selection.fingerprint,
        operator=operator,
        patch=None if checked is None else checked.operations,
        result=result,
        reason=reason,
    )
    return Order(selection, seen, decision, checked)


def carry_out(order: Order, limits: PayloadLimits, types: DataTypes, *, after: int = -1, left: int) -> Write[Portion]:
    """Carry out the next part of an order, in a transaction of its own: at most `left` commands after the cursor.

    Whoever comes first decides about a command. What somebody else has decided on meanwhile is left out.
    """
    return patient(partial(_carry_out, order, limits, types, after, min(left, PART)))


def _carry_out(order: Order, limits: PayloadLimits, types: DataTypes, after: int, most: int) -> Plan[Portion]:
    selection, decision = order.selection, order.decision
    rows = yield from execute(
        SQL.portion,
        **selection.params,
        again=decision.action == "retry",
        with_data=order.patch is not None,
        until=order.seen.until,
        last=order.seen.last,
        after=after,
        limit=most,
    )
    taken, size, in_held = list[tuple[int, UUID]](), 0, set[UUID]()
    for command, command_id, bytes, held in rows:
        size += bytes or 0
        if taken and size > PART_BYTES:
            break
        taken.append((command, command_id))
        if held:
            in_held.add(command_id)
    if not taken:
        return Portion(0, 0, {}, 0, 0, None)
    ids = [command_id for _, command_id in taken]
    picked = yield from decisions.pick(selection.domain, ids, decision, until=order.seen.until)
    moved, kept = yield from decisions.move(selection.domain, decision, picked, limits, types)
    told = dict(list(kept.items())[:MOST_KEPT])
    more = len(taken) < len(rows) or len(rows) == most
    held = len(in_held.intersection(command_id for _, command_id, *_ in picked).difference(kept))
    return Portion(len(taken), moved, told, len(kept) - len(told), held, taken[-1][0] if more else None)


# -- patches before they are confirmed ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patched:
    """What a patch makes of the first commands of a selection.

    It was tried on `tried` of them. For `refused` it does not apply, or makes data that does not fit; `problems` says
    why, of the first few.
    """

    tried: int
    refused: int
    problems: tuple[Problem, ...]
    whole: bool
    """Whether it was tried on all of them."""


def try_patch(
    limits: InputLimits, selection: Selection, patch: Patch, types: DataTypes, *, most: int, few: int = 3
) -> Plan[Patched]:
    """Try a patch on at most so many commands of a selection, without writing anything."""
    _check(limits, selection, writes=False)
    tried, refused, after, problems = 0, 0, -1, list[Problem]()
    while True:
        rows = yield from execute(
            SQL.data_after, **selection.params, again=True, after=after, limit=PART, bytes=PART_BYTES
        )
        for command, command_id, command_type, text in rows:
            after, tried = command, tried + 1
            try:
                patch.apply(text, types.get((selection.domain, command_type)))
            except ValueError as error:
                refused += 1
                if len(problems) < few:
                    problems.append(Problem("INVALID_PATCH", "/patch", f"command {command_id}: {error}"))
        if not rows or tried >= most:
            return Patched(tried, refused, tuple(problems), not rows)


def patched(patch: Patch, text: str) -> Any:
    """The data of a command after a patch; raises `ValueError` if the patch does not apply."""
    return readable(patch.apply(text))
