"""A batch as a person writes it: the fields of a form, read into commands, with the line of whatever is wrong."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec

from busload.batches.batch import CreateOptions, members, new_batch
from busload.batches.guards import Canary
from busload.commands.command import BatchCommand
from busload.commands.payload import PayloadRefusedError, decode_strict
from busload.commands.wording import counted
from busload.dashboard import asked
from busload.dashboard.problem import Problem
from busload.errors import InvalidCommandError
from busload.settings import InputLimits

MOST_TEXT = 1024 * 1024
"""Bytes of the data of one form."""
MOST_BODY = 4 * MOST_TEXT
"""Bytes of the form itself: browsers write a quote as three characters."""
MOST_COMMANDS = 10_000
MOST_PROBLEMS = 20
"""Problems that are shown at once."""

FIELDS = (
    *("domain", "type", "name", "format", "data", "callback", "callback_data", "canary", "budget", "at_least"),
    *("priority", "expires", "batch_id"),
)
OF_ITEM = ("type", "data", "task_key", "priority", "max_attempts")
"""What an item may say where the form names no type."""
LINE_END = re.compile(r"\r\n|\r|\n")
"""Not all that Python takes for the end of a line: JSON has some of those within its texts."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class WrongDraft(Exception):  # noqa: N818 - it is shown beside the form
    """What is wrong with a draft: up to so many sentences, each with its place, and how many there are."""

    def __init__(self, problems: list[str], total: int | None = None) -> None:
        super().__init__(problems[0])
        self.problems, self.total = problems[:MOST_PROBLEMS], total or len(problems)


@dataclass(frozen=True, slots=True)
class Draft:
    """A batch that could be created as it is."""

    domain: str
    commands: list[BatchCommand]
    callback: BatchCommand | None
    options: CreateOptions
    digest: str
    """Of everything that was written: who creates it creates what was previewed."""

    @property
    def types(self) -> dict[str, int]:
        """How many commands of which type, the most first."""
        return dict(Counter(command.command_type for command in self.commands).most_common())


@dataclass(frozen=True, slots=True)
class Item:
    """One value of the data, and where a person finds it."""

    place: str
    value: Any


def digest_of(fields: Mapping[str, str]) -> str:
    """Of what a person wrote, whatever way browsers end lines."""
    written = [fields.get(name, "").replace("\r\n", "\n") for name in FIELDS]
    return hashlib.sha256(msgspec.json.encode(written)).hexdigest()


def read(fields: Mapping[str, str], limits: InputLimits) -> Draft:
    """Check everything as the bus would, and write nothing; raises `WrongDraft`."""
    text = fields.get("data", "")
    if len(text.encode()) > MOST_TEXT:
        raise WrongDraft([f"The data has more than {MOST_TEXT // 1024:,} KiB. Send less at once, or write a program."])
    kind = fields.get("type") or None
    items = list(_csv(text) if fields.get("format") == "csv" else _json(text, limits))
    if len(items) > MOST_COMMANDS:
        raise WrongDraft(
            [f"The data has {counted(len(items), 'command')}; at most {MOST_COMMANDS:,} can be created here."]
        )
    commands = [_command(item, kind) for item in items]
    try:
        options, callback = _options(fields), _callback(fields, limits)
        domain = fields.get("domain", "")
        batch = new_batch("create_batch", limits, domain, options, callback, awaits=True, known=CreateOptions)
        members(limits, batch, commands)
    except InvalidCommandError as refused:
        raise WrongDraft(
            [
                f"{items[each.index].place}, {each.path}: {each.message}"
                if each.index is not None
                else f"{each.path.lstrip('/') or 'batch'}: {each.message}"
                for each in refused.problems
            ],
            refused.total,
        ) from None
    except Problem as problem:
        raise WrongDraft([f"{problem.happened} {problem.todo}"]) from None
    return Draft(domain, commands, callback, options, digest_of(fields))


def _options(fields: Mapping[str, str]) -> CreateOptions:
    """What the form says about the batch itself."""
    options: CreateOptions = {"batch_id": UUID(fields["batch_id"]), "name": fields.get("name") or None}
    if fields.get("canary"):
        options["canary"] = Canary(asked.whole_number(fields, "canary"))
    if (budget := asked.budget(fields)) is not None:
        options["budget"] = budget
    if fields.get("priority"):
        options["priority"] = asked.whole_number(fields, "priority")
    if fields.get("expires"):
        options["expires_in"] = _span(fields["expires"])
    return options


def _callback(fields: Mapping[str, str], limits: InputLimits) -> BatchCommand | None:
    if not fields.get("callback"):
        return None
    data = fields.get("callback_data")
    return BatchCommand(fields["callback"], data=_parsed(data, limits, "callback data") if data else None)


def _command(item: Item, kind: str | None) -> BatchCommand:
    """A command of a value: its data if the form names a type, else an object that says all of it."""
    if kind is not None:
        return BatchCommand(kind, data=item.value)
    value = item.value
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        wanted = 'wanted {"type": …, "data": …}, or a type for all commands in the field above'
        raise WrongDraft([f"{item.place}, /type: found no type; {wanted}."])
    if unknown := sorted(set(value) - set(OF_ITEM)):
        raise WrongDraft([f"{item.place}, /{unknown[0]}: is not known; wanted {', '.join(OF_ITEM)}."])
    more = {name: value[name] for name in ("task_key", "priority", "max_attempts") if value.get(name) is not None}
    return BatchCommand(value["type"], data=value.get("data"), **more)


def _json(text: str, limits: InputLimits) -> Iterator[Item]:
    """A list, or a value on each line."""
    if text.lstrip().startswith("["):
        found = _parsed(text, limits, "data")
        yield from (Item(f"Item {number}", value) for number, value in enumerate(found, 1))
        return
    for number, line in enumerate(LINE_END.split(text), 1):
        if line.strip():
            yield Item(f"Line {number}", _parsed(line, limits, f"Line {number}"))


def _csv(text: str) -> Iterator[Item]:
    """A line of names, and lines of texts. Columns `type`, `task_key`, … have their meaning where no type is given."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) < len(names) or not all(names):
            raise WrongDraft(["Line 1: a column has no name, or the name of another one; wanted different names."])
        for row in rows:
            if not row:
                continue
            if len(row) != len(names):
                raise WrongDraft([f"Line {rows.line_num}: found {len(row)} columns, wanted {len(names)} as in line 1."])
            yield Item(f"Line {rows.line_num}", dict(zip(names, row, strict=True)))
    except csv.Error as error:
        raise WrongDraft([f"Line {rows.line_num}: {error}."]) from None


def _parsed(text: str, limits: InputLimits, place: str) -> Any:
    try:
        return decode_strict(text, limits.payload, path="")
    except PayloadRefusedError as refused:
        at = refused.problem
        raise WrongDraft([f"{place}{f', {at.path}' if at.path else ''}: {at.message}"]) from None


def _span(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,6}) ?([smhd])", text.strip().lower(), re.ASCII)
    if found is None:
        raise WrongDraft([f"expires: found {text!r:.80}, wanted a number and a unit, such as 30m, 12h or 2d."])
    return timedelta(seconds=int(found[1]) * UNITS[found[2]])
