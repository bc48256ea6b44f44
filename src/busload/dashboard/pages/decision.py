"""A decision about commands that wait for a person: its preview, its patch with a live diff, and how it is carried out.

A decision is bound to its preview. It is carried out in portions: each request carries out as much as fits into a
second, and the page sends the next one by itself. So it ends with the portion under way if somebody leaves the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import jsonpatch
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from busload.commands.command import TroubleshootingItem
from busload.commands.payload import WIDEST, PayloadRefusedError, decode_strict, encode
from busload.commands.wording import counted
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.diff import compared
from busload.dashboard.pages.troubleshooting import (
    PATH,
    cli_of,
    names_of,
    nothing_waits,
    selection_of,
)
from busload.dashboard.problem import Problem, as_problem, wrong_input
from busload.dashboard.render import (
    MASKED,
    bus_of,
    dashboard_of,
    hides,
    holds_masked,
    keys_of,
    masked,
    principal_of,
    render,
    sees_payloads,
    url,
)
from busload.dashboard.route import action, page
from busload.errors import BusloadError, InvalidCommandError
from busload.troubleshooting import selection
from busload.troubleshooting.causes import checked_patch
from busload.troubleshooting.decisions import Action
from busload.troubleshooting.patch import Patch
from busload.troubleshooting.selection import Bound, Changed, Order, Preview, Selection

PORTION = 1.0
"""Seconds after which a request begins no further transaction. Each moves up to 500 commands."""
PATIENCE = 10.0
"""Seconds that one transaction may take before the page says that it is held up."""
MOST_TRIED = 2000
"""Commands on which a patch is tried before it is confirmed."""
MOST_TICKED = 100
DONE: dict[Action, str] = {"retry": "retried", "complete": "completed", "cancel": "canceled"}

FILLED_IN = ("result", "reason", "mode", "patch", "data", "example")
"""Fields that a person fills in: they survive a refusal."""
ACTIONS: dict[str, Action] = {"retry": "retry", "patch": "retry", "complete": "complete", "cancel": "cancel"}
"""What the page calls a decision, and what the engine does: a patch is a retry with other data."""


def _verb(request: Request) -> str:
    found = asked.text(request, "action")
    if found not in ACTIONS:
        raise wrong_input(f"There is no action {found!r:.80}.", f"Use one of {', '.join(ACTIONS)}.")
    return found


def _chosen(request: Request) -> Selection:
    """The commands that the address names: those that were ticked, or all that its filter lets through."""
    given = request.query_params.getlist("command")
    if len(given) > MOST_TICKED:
        many = f"{counted(len(given), 'command')} are ticked."
        raise wrong_input(many, f"Tick up to {MOST_TICKED}, or take the whole cause.")
    if not given and "ticked" in request.query_params:
        raise wrong_input("No command is ticked.", "Go back and tick some, or take all of the cause.")
    try:
        return selection_of(request, [UUID(one) for one in given])
    except ValueError:
        raise wrong_input("The address names a command by something that is no id.", "Use whole UUIDs.") from None


def _address(request: Request, name: str, chosen: Selection, verb: str) -> str:
    """The address of a route that names the same commands and the same action."""
    here = {"domain": chosen.domain, "fingerprint": chosen.fingerprint}
    found = url(request, name, {**names_of(chosen), "action": verb}, **here)
    return found + "".join(f"&command={command_id}" for command_id in chosen.command_ids)


# -- the preview -------------------------------------------------------------------------------------------------------


async def preview(request: Request) -> Response:
    verb, chosen = _verb(request), _chosen(request)
    bus = bus_of(request).shard_of(chosen.domain)
    now = await bus.database.read(selection.preview(bus.settings.limits, chosen, ACTIONS[verb]))
    return await _shown(request, verb, chosen, now)


async def _shown(
    request: Request,
    verb: str,
    chosen: Selection,
    now: Preview,
    *,
    fields: Mapping[str, str] | None = None,
    changed: Changed | None = None,
    seen: Bound | None = None,
    wrong: str | None = None,
    status: int = 200,
) -> Response:
    """The preview; after a refusal with what has changed or is wrong, and with what the person had filled in."""
    example = await _oldest(request, chosen) or await _oldest(request, replace(chosen, command_ids=()))
    if example is None:
        raise nothing_waits(chosen)
    filled_in = {name: (fields or {}).get(name, "") for name in FILLED_IN}
    edited = filled_in["mode"] == "data" and filled_in["example"] != str(example.command_id)
    if edited:  # in another example these edits would be the values of the one that is gone
        filled_in["data"] = ""
    kind = example.last_error_code or example.last_error_type or "No error"
    words = {"patch": ("--patch", "[…]"), "complete": ("--result", "…"), "cancel": ("--reason", "…")}.get(verb, ())
    return render(
        request,
        "preview.html",
        title=f"{verb.capitalize()} {counted(now.count, 'command')}?",
        verb=verb,
        action=ACTIONS[verb],
        done=DONE[ACTIONS[verb]],
        chosen=chosen,
        what=example.last_error_message if example.last_error_message and sees_payloads(request) else kind,
        kind=kind,
        now=now,
        changed=changed,
        seen=seen,
        wrong=wrong,
        fields=filled_in,
        edited_is_gone=edited,
        example=example,
        example_json=_text_of(request, example) if sees_payloads(request) else None,
        names=names_of(chosen),
        decide=_address(request, "cause.decide", chosen, verb),
        diff=_address(request, "cause.diff", chosen, verb),
        again=_address(request, "cause.preview", chosen, verb),
        cli=cli_of(chosen, ACTIONS[verb], *words) if not (chosen.command_ids and verb == "patch") else None,
        status=status,
    )


async def _oldest(request: Request, chosen: Selection) -> TroubleshootingItem | None:
    bus = bus_of(request).shard_of(chosen.domain)
    found = await bus.database.read(selection.items(chosen, limit=1))
    return await bus.troubleshooting.get(chosen.domain, found[0].command_id) if found else None


def _text_of(request: Request, example: TroubleshootingItem) -> str:
    """The data of a command as JSON to be edited, without the values that nobody sees."""
    return msgspec.json.format(encode(masked(example.data, dashboard_of(request).mask), WIDEST), indent=2)


# -- a patch, and what it would change ---------------------------------------------------------------------------------


class NotYet(Exception):  # noqa: N818 - it is shown while somebody types
    """A patch that is not one yet, or a result that is no JSON: the message says why."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a person has written: a patch, or data that was edited and differs by a patch."""

    patch: Patch
    derived: bool


def _written(request: Request, fields: Mapping[str, str], example: TroubleshootingItem | None) -> Written:
    limits = bus_of(request).settings.limits
    edits = fields.get("mode") == "data"
    text = fields.get("data" if edits else "patch", "")
    if not text:
        raise NotYet("Write a JSON patch, or edit the data of the example.")
    try:
        given = decode_strict(text, limits.payload)
    except PayloadRefusedError as refused:
        raise NotYet(f"This is not JSON that can be stored. {refused.problem}.") from None
    if edits:
        if example is None:
            raise NotYet("The example does not wait any more. Preview again.")
        shown = masked(example.data, dashboard_of(request).mask)
        _refuse_rearranged(example.data, shown, given, dashboard_of(request).mask)
        operations = jsonpatch.make_patch(shown, given).patch
        if not operations:
            raise NotYet("The data is as it was. Change something.")
    else:
        operations = given
    try:
        patch = checked_patch(operations, limits.payload)
    except InvalidCommandError as error:
        raise NotYet(f"This is no JSON patch. {error.problems[0]}.") from None
    _refuse_masked(request, patch)
    return Written(patch, edits)


def _refuse_rearranged(data: Any, shown: Any, given: Any, patterns: Sequence[str], at: str = "") -> None:
    """Refuse edits after which nobody can tell to which item of an array a masked value belongs.

    Its items have no names: if two have changed, they may have changed places.
    """
    if isinstance(given, dict) and isinstance(shown, dict):
        for key in shown.keys() & given.keys():
            if not hides(key, patterns):
                _refuse_rearranged(data[key], shown[key], given[key], patterns, f"{at}/{key}")
    if not isinstance(given, list) or not isinstance(shown, list) or given == shown:
        return
    if holds_masked(data, patterns):
        changed = sum(new != old for new, old in zip(given, shown, strict=False))
        if len(given) != len(shown):
            found = f"had {counted(len(shown), 'item')} and has {len(given):,} now"
        elif changed > 1:
            found = f"has {changed:,} items that differ from before, so they may have changed places"
        else:
            found = ""
        if found:
            raise NotYet(
                f"The array at {at or '/'!r:.200} {found}. It holds values that nobody sees here, which could come to "
                "another item. Edit one item at a time and keep their number, or write a JSON patch."
            )
    for index, (item, old, new) in enumerate(zip(data, shown, given, strict=False)):
        _refuse_rearranged(item, old, new, patterns, f"{at}/{index}")


def _refuse_masked(request: Request, patch: Patch) -> None:
    """A patch may set the value of a masked key, but not show, move or test one."""
    patterns = dashboard_of(request).mask
    for at, operation in enumerate(patch.operations):
        read = operation["path"] if operation["op"] == "test" else operation.get("from", "")
        if any(hides(key, patterns) for key in keys_of(read)):
            raise NotYet(f"Operation {at} reads {read!r:.200}, whose value nobody sees here. Use the command line.")
        if operation["op"] == "test" and holds_masked(operation.get("value"), patterns):
            raise NotYet(f"Operation {at} tests a key whose value nobody sees here. Use the command line.")
        if MASKED in encode(operation.get("value"), WIDEST):
            raise NotYet(f"Operation {at} writes {MASKED}, which stands for a value that nobody sees. Leave it out.")


async def _example(request: Request, fields: Mapping[str, str], chosen: Selection) -> TroubleshootingItem | None:
    """The command whose data is shown and edited; None if it does not wait for this cause any more."""
    try:
        command_id = UUID(asked.required(fields, "example"))
    except ValueError:
        raise wrong_input("The example is named by something that is no id.", "Preview again.") from None
    found = await bus_of(request).troubleshooting.get(chosen.domain, command_id)
    return found if found is not None and found.fingerprint == chosen.fingerprint else None


async def diff(request: Request) -> Response:
    """What a patch makes of the example, and whether it applies to the others: a part of the preview."""
    fields, chosen = await asked.form(request), _chosen(request)
    bus = bus_of(request).shard_of(chosen.domain)
    example = await _example(request, fields, chosen)
    written, lines, problem, tried = None, [], None, None
    try:
        written = _written(request, fields, example)
        if example is not None:
            text = encode(example.data, WIDEST)
            after = selection.patched(written.patch, text)
            mask = dashboard_of(request).mask
            lines = compared(masked(example.data, mask), masked(after, mask))
        plan = selection.try_patch(bus.settings.limits, chosen, written.patch, bus.data_types, most=MOST_TRIED)
        tried = await bus.database.read(plan)
    except NotYet as reason:
        problem = str(reason)
    except ValueError as error:
        problem = f"The patch does not apply to the example: {error}."
    return render(
        request,
        "diff.html",
        title="What the patch changes",
        lines=lines,
        problem=problem,
        tried=tried,
        derived=encode(written.patch.operations, WIDEST) if written is not None and written.derived else None,
    )


# -- carrying it out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a decision is. `after` is where it goes on; None at its end."""

    seen: Bound
    passed: int = 0
    moved: int = 0
    kept: int = 0
    held: int = 0
    """How many of those that were moved belong to batches that are held."""
    why: str | None = None
    """Why the first one that was kept was kept."""
    after: int | None = -1

    @property
    def gone(self) -> int:
        """How many somebody else has decided on meanwhile."""
        return self.seen.count - self.moved - self.kept

    @property
    def percent(self) -> int:
        return 100 if self.after is None else 100 * self.passed // max(self.seen.count, 1)


async def decide(request: Request) -> Response:
    fields, verb, chosen = await asked.form(request), _verb(request), _chosen(request)
    bus = bus_of(request).shard_of(chosen.domain)
    limits, state = bus.settings.limits, _progress(fields)
    if state.after == -1:  # first of all: data that was edited may be that of a command which is gone
        leave_newer = fields.get("leave_newer") == "1"
        changed = await bus.database.read(
            selection.check_seen(limits, chosen, ACTIONS[verb], state.seen, leave_newer=leave_newer)
        )
        if changed is not None:
            return await _shown(
                request, verb, chosen, changed.now, fields=fields, changed=changed, seen=state.seen, status=409
            )
    try:
        order = await _order(request, verb, chosen, state.seen, fields)
    except NotYet as why:
        now = await bus.database.read(selection.preview(limits, chosen, ACTIONS[verb]))
        return await _shown(request, verb, chosen, now, fields=fields, wrong=str(why), status=400)
    trouble, until = None, time.monotonic() + PORTION
    while state.after is not None and state.passed < state.seen.count:
        try:
            async with asyncio.timeout(PATIENCE):
                state = await _portion(request, order, state)
        except (BusloadError, TimeoutError) as error:
            if not state.passed:
                raise
            trouble = as_problem(error, "cause.decide")
            break
        if time.monotonic() >= until:
            break
    if trouble is None and state.passed >= state.seen.count:
        state = replace(state, after=None)
    return _told(request, verb, chosen, order, state, fields, trouble)


async def _portion(request: Request, order: Order, state: Progress) -> Progress:
    bus = bus_of(request).shard_of(order.selection.domain)
    assert state.after is not None
    left = state.seen.count - state.passed
    write = selection.carry_out(order, bus.settings.limits.payload, bus.data_types, after=state.after, left=left)
    portion = await bus.database.write(write)
    kept = len(portion.kept) + portion.others
    return replace(
        state,
        passed=state.passed + portion.passed,
        moved=state.moved + portion.moved,
        kept=state.kept + kept,
        held=state.held + portion.held,
        why=state.why or next(iter(portion.kept.values()), None),
        after=portion.after,
    )


async def _order(request: Request, verb: str, chosen: Selection, seen: Bound, fields: Mapping[str, str]) -> Order:
    """What the form says is to be done; raises `NotYet` for what cannot be done."""
    limits, patch, result, reason = bus_of(request).settings.limits, None, None, None
    if verb == "patch":
        example = await _example(request, fields, chosen) if fields.get("mode") == "data" else None
        patch = _written(request, fields, example).patch.operations
    if verb == "complete" and fields.get("result"):
        try:
            result = decode_strict(fields["result"], limits.payload, path="/result")
        except PayloadRefusedError as refused:
            said = f'The result cannot be stored: {refused.problem}. Use JSON, such as {{"paid": "by hand"}}.'
            raise NotYet(said) from None
    if verb == "cancel":
        reason = asked.required(fields, "reason")
    operator = principal_of(request).name
    return selection.order(
        limits, chosen, seen, ACTIONS[verb], operator=operator, patch=patch, result=result, reason=reason
    )


def _progress(fields: Mapping[str, str]) -> Progress:
    """The preview that was confirmed, and how far the decision is."""
    try:
        seen = Bound(
            int(fields["count"]), datetime.fromisoformat(fields["until"]), int(fields["last"]), int(fields["digest"])
        )
        passed, moved, kept, held = (int(fields.get(name) or 0) for name in ("passed", "moved", "kept", "held"))
        after = int(fields.get("after") or -1)
        huge = max(map(abs, (seen.last, seen.digest, after))) >= 2**63
        if huge or seen.until.tzinfo is None or min(seen.count, passed, moved, kept, held) < 0:
            raise ValueError
    except (KeyError, ValueError):
        raise Problem(
            409,
            "Preview it first",
            "The form names no preview that was seen, so nothing was done.",
            "Go back to the cause, and preview what is to be done.",
        ) from None
    return Progress(seen, passed, moved, kept, held, fields.get("why") or None, after)


def _told(
    request: Request,
    verb: str,
    chosen: Selection,
    order: Order,
    state: Progress,
    fields: Mapping[str, str],
    trouble: Problem | None,
) -> Response:
    """How far it is. While there is more to do, the page sends the next request by itself."""
    bound = {"count": state.seen.count, "until": state.seen.until.isoformat(), "last": state.seen.last}
    so_far: dict[str, Any] = {"passed": state.passed, "moved": state.moved, "kept": state.kept, "held": state.held}
    so_far |= {"why": state.why, "after": state.after}
    how: dict[str, Any] = {name: fields[name] for name in ("result", "reason") if fields.get(name)}
    if order.decision.patch is not None:  # the example may be gone by now, so edited data goes on as a patch
        how |= {"mode": "patch", "patch": encode(order.decision.patch, WIDEST)}
    return render(
        request,
        "deciding.html",
        title=f"{DONE[ACTIONS[verb]].capitalize()} {counted(state.moved, 'command')}",
        verb=verb,
        action=ACTIONS[verb],
        done=DONE[ACTIONS[verb]],
        chosen=chosen,
        names=names_of(chosen),
        state=state,
        why=state.why,
        hidden={**bound, "digest": state.seen.digest, **so_far, **how},
        decide=_address(request, "cause.decide", chosen, verb),
        again=_address(request, "cause.preview", chosen, verb),
        trouble=trouble,
        status=200 if trouble is None else trouble.status,
    )


ROUTES = (
    page("cause.preview", f"{PATH}/preview", preview, Permission.READ),
    action("cause.diff", f"{PATH}/diff", diff, Permission.OPERATE),
    action("cause.decide", f"{PATH}/decide", decide, Permission.OPERATE),
)
