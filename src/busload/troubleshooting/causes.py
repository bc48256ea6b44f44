"""Commands that wait for a person by the cause of their failures, and decisions about all that wait for a cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, TypedDict
from uuid import UUID

import msgspec

from busload.commands import send
from busload.commands.checks import check, encoded
from busload.commands.command import refuse_unknown
from busload.commands.data_type import DataInvalidError, DataType, DataTypes
from busload.commands.ids import new_id
from busload.commands.payload import WIDEST, PayloadRefusedError, decode, encode, readable, storable
from busload.errors import InvalidCommandError, InvalidOperationError, Problem
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements
from busload.postgres.write import Write
from busload.settings import InputLimits, PayloadLimits
from busload.troubleshooting.decisions import PART_BYTES, Action, Decision, parts
from busload.troubleshooting.patch import Patch

SQL = statements(__name__)

PAGE = 500
SAMPLE = 3
"""Items that a dry run shows."""
FEW = 3
"""Batches that are held which the answer of a retry names."""
MOST_PROBLEMS = 100
"""Commands to which a patch does not apply that the error names."""


class Reason(StrEnum):
    """Why a command waits for a person."""

    PERMANENT = "PERMANENT"
    EXHAUSTED = "EXHAUSTED"
    CRASHED = "CRASHED"
    UNDECODABLE = "UNDECODABLE"
    RESULT_INVALID = "RESULT_INVALID"


@dataclass(frozen=True, slots=True)
class CauseGroup:
    """Commands that wait for a person for the same cause: one decision for all of them.

    `message` is that of the oldest command, of which `command_ids` names a few; `messages` are up to three different
    ones, to see in what they differ.
    """

    fingerprint: str
    reasons: tuple[str, ...]
    error_type: str | None
    error_code: str | None
    message: str | None
    command_types: tuple[str, ...]
    count: int
    oldest: datetime
    newest: datetime
    command_ids: tuple[UUID, ...]
    messages: tuple[str, ...]


class GroupOptions(TypedDict, total=False):
    """What may be said about a decision, whatever is decided."""

    command_type: str | None
    """Decide only about commands of this type."""
    rate: float | None
    """How many commands to move a second; as fast as it goes if it is left out."""
    operator: str | None
    """Who has decided; the audit trail of every command keeps it."""
    dry_run: bool
    """Write nothing, and show what would be done."""


@dataclass(frozen=True, slots=True)
class GroupItem:
    """One command of a group, as it is and, if a patch was given, as it would be."""

    command_id: UUID
    before: Any
    after: Any = None


@dataclass(frozen=True, slots=True)
class GroupAction:
    """What was decided about a group: `count` commands are moved by the batch `batch_id`.

    There is no batch after a dry run, nor if nothing waits any more. A dry run shows the first items in `sample`. Of a
    retry, `held` commands belong to batches that are held, of which `held_batches` names a few: these commands start
    when somebody resumes their batch.
    """

    batch_id: UUID | None
    action: Action
    fingerprint: str
    count: int
    sample: tuple[GroupItem, ...] = ()
    held: int = 0
    held_batches: tuple[UUID, ...] = ()


def groups(
    domain: str,
    *,
    command_type: str | None,
    reason: Reason | None = None,
    batch_id: UUID | None = None,
    text: str | None = None,
    limit: int,
) -> Plan[list[CauseGroup]]:
    wanted = {"command_type": command_type, "reason": reason, "batch_id": batch_id, "text": text}
    return many(_group, SQL.groups, domain=domain, **wanted, limit=limit)


def _group(*row: Any) -> CauseGroup:
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in row]
    return CauseGroup(*values)


def domains_of_group(fingerprint: str, command_type: str | None = None) -> Plan[list[str]]:
    rows = yield from execute(SQL.group_domains, fingerprint=fingerprint, command_type=command_type)
    return [domain for (domain,) in rows]


def held_batches(domain: str, command_ids: Sequence[UUID]) -> Plan[list[UUID]]:
    """The batch of each of these commands that belongs to a batch that is held."""
    rows = yield from execute(SQL.held_batches, domain=domain, command_ids=list(command_ids))
    return [batch_id for (batch_id,) in rows]


def decide_group(
    limits: InputLimits,
    domain: str,
    action: Action,
    fingerprint: str,
    options: GroupOptions,
    *,
    types: DataTypes | None = None,
    patch: Sequence[dict[str, Any]] | None = None,
    result: Any = None,
    reason: str | None = None,
) -> Write[GroupAction]:
    """Check what a person has decided about all that waits for a cause, and plan to carry it out.

    What a patch makes has to fit the `types` of handlers that are known.
    """
    refuse_unknown(f"{action}_group", options, GroupOptions)
    because: dict[str, Any] = {"reason": reason} if action == "cancel" else {}
    options = {"command_type": None, "rate": None, "operator": None, "dry_run": False, **options}
    check(limits, domain=domain, fingerprint=fingerprint, **options, **because)
    if result is not None:
        result = decode(encoded(result, "/result", limits.payload))
    checked = None if patch is None else checked_patch(patch, limits.payload)
    decision = Decision(
        action=action,
        fingerprint=fingerprint.lower(),
        operator=options["operator"],
        patch=None if checked is None else checked.operations,
        result=result,
        reason=reason,
    )
    batch_id = new_id()
    found = _Selection(checked, types or {}, dry_run=options["dry_run"])
    return Write(_decide(domain, decision, options, found, batch_id), batch_id)


def checked_patch(operations: Sequence[dict[str, Any]], limits: PayloadLimits) -> Patch:
    """A patch from a person; raises `InvalidCommandError` if it cannot be one."""
    encoded(operations, "/patch", limits)
    try:
        return Patch(operations, limits)
    except PayloadRefusedError as refused:
        raise InvalidCommandError([refused.problem]) from None


def _decide(
    domain: str, decision: Decision, options: GroupOptions, found: _Selection, batch_id: UUID
) -> Plan[GroupAction]:
    """Create the batch that carries out a decision about all that waits for a cause now; needs a transaction."""
    command_type, rate = options["command_type"], options["rate"]
    yield from found.read(domain, decision, command_type)
    if not found.command_ids and domain not in (yield from domains_of_group(decision.fingerprint, command_type)):
        of_type = "" if command_type is None else f" of type {command_type!r}"
        raise InvalidOperationError(
            f"Nothing{of_type} in domain {domain!r} waits for the cause {decision.fingerprint}, and nobody has decided "
            "about it before. List the causes with `busload troubleshooting groups`."
        )
    action = GroupAction(None, decision.action, decision.fingerprint, len(found.command_ids), tuple(found.sample))
    if decision.action == "retry":
        few = [batch_id for batch_id, _ in found.held.most_common(FEW)]
        action = replace(action, held=found.held.total(), held_batches=tuple(few))
    if found.dry_run or found.until is None:
        return action
    [(now,)] = yield from execute(SQL.clock)
    about = {"command_type": command_type, "rate": rate}
    custom_data = msgspec.to_builtins(decision) | {name: value for name, value in about.items() if value is not None}
    name = f"{decision.action} {storable(found.cause or 'failures', 200)} ({decision.fingerprint})"
    batch = send.NewBatch(batch_id, domain, name, encode(custom_data, WIDEST), None)
    commands = parts(decision, found.command_ids, found.sizes, until=found.until, rate=rate, now=now)
    yield from send.create_batch(batch, list(commands))
    return replace(action, batch_id=batch_id)


@dataclass(slots=True)
class _Selection:
    """What waits for a cause now. `sizes` are the bytes of data that a patch reads and writes for each command."""

    patch: Patch | None
    types: DataTypes
    dry_run: bool
    command_ids: list[UUID] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sample: list[GroupItem] = field(default_factory=list)
    held: Counter[UUID] = field(default_factory=Counter)
    """How many of them belong to each batch that is held."""
    until: datetime | None = None
    cause: str | None = None
    refused: int = 0
    problems: list[Problem] = field(default_factory=list)

    def read(self, domain: str, decision: Decision, command_type: str | None) -> Plan[None]:
        """Find every command that a decision would move; refuse if the patch does not apply to each of them."""
        after = -1
        while True:
            rows = yield from execute(
                SQL.group_items,
                domain=domain,
                fingerprint=decision.fingerprint,
                command_type=command_type,
                again=decision.action == "retry",
                after=after,
                limit=PAGE,
            )
            for command, command_id, since, cause, _, held_batch in rows:
                after, self.cause = command, cause
                self.until = since if self.until is None else max(self.until, since)
                self.command_ids.append(command_id)
                if held_batch is not None:
                    self.held[held_batch] += 1
            yield from self._look(domain, [(command, command_id, of) for command, command_id, _, _, of, _ in rows])
            if len(rows) < PAGE:
                break
        if self.refused:
            raise InvalidCommandError(self.problems, self.refused)

    def _look(self, domain: str, items: Sequence[tuple[int, UUID, str]]) -> Plan[None]:
        """Read the data of a page, if that is needed: all of it for a patch, a few for a dry run."""
        if self.patch is None:
            self.sizes += [0] * len(items)
            items = items[: SAMPLE - len(self.sample)] if self.dry_run else ()
        while items:
            texts = yield from execute(SQL.data_of, commands=[command for command, *_ in items], bytes=PART_BYTES)
            for (_, command_id, command_type), (text,) in zip(items, texts, strict=False):
                known = self.types.get((domain, command_type))
                patched = None if self.patch is None else self._apply(self.patch, command_id, text, known)
                if self.dry_run and len(self.sample) < SAMPLE:
                    self.sample.append(GroupItem(command_id, readable(text), readable(patched)))
            items = items[len(texts) :]

    def _apply(self, patch: Patch, command_id: UUID, text: str | None, known: DataType | None) -> str | None:
        """Measure what a patch reads and makes of the data of one command."""
        patched = None
        try:
            patched = None if text is None else patch.apply(text, known)
        except DataInvalidError as invalid:
            about = f"the patched data of command {command_id}"
            self._refuse([replace(one, message=f"{about} {one.message}") for one in invalid.problems])
        except ValueError as error:
            message = f"does not apply to command {command_id}: {error}"
            self._refuse([Problem("INVALID_PATCH", "/patch", message)])
        self.sizes.append(len((text or "").encode()) + len((patched or "").encode()))
        return patched

    def _refuse(self, problems: Sequence[Problem]) -> None:
        self.refused += 1
        if self.refused <= MOST_PROBLEMS:
            self.problems += problems
