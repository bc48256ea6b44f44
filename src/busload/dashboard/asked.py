"""What a request asks for: filters in its address, and fields of its form. Wrong ones become a page that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar
from urllib.parse import parse_qsl
from uuid import UUID

from starlette.requests import Request

from busload.batches.guards import FailureBudget
from busload.dashboard.problem import Problem, wrong_input

Choice = TypeVar("Choice", bound=StrEnum)
LONGEST, LONGEST_KEY = 500, 512
"""Characters of a filter, and of a task key."""
FORM = "application/x-www-form-urlencoded"


def text(request: Request, name: str) -> str | None:
    """A filter; None if it is empty or not there."""
    return _checked(name, request.query_params.get(name, "").strip(), LONGEST)


def key(request: Request, name: str) -> str | None:
    """A task key: blanks around it are a part of it. None if it is empty or not there."""
    return _checked(name, request.query_params.get(name, ""), LONGEST_KEY)


def _checked(name: str, found: str, most: int) -> str | None:
    if len(found) > most or "\0" in found:
        raise wrong_input(
            f"The filter {name} has {len(found)} characters, or one that PostgreSQL cannot hold.",
            f"Use a text of up to {most} characters.",
        )
    return found or None


def one_of(request: Request, name: str, kind: type[Choice]) -> Choice | None:
    found = text(request, name)
    try:
        return None if found is None else kind(found)
    except ValueError:
        raise wrong_input(f"There is no {name} {found!r:.80}.", f"Use one of {', '.join(kind)}.") from None


def choice(kind: type[Choice]) -> Callable[[Request, str], Choice | None]:
    """Reads one of these."""
    return lambda request, name: one_of(request, name, kind)


def flag(request: Request, name: str) -> bool | None:
    """True if a box is ticked, else None."""
    return True if text(request, name) is not None else None


def id_of(request: Request, name: str) -> UUID | None:
    found = text(request, name)
    try:
        return None if found is None else UUID(found)
    except ValueError:
        raise wrong_input(f"{name} is {found!r:.80}, which is no id.", "Use a whole UUID.") from None


def moment(request: Request, name: str) -> datetime | None:
    """A time in ISO format. One without a zone, as a field gives it in a browser without scripts, is UTC."""
    found = text(request, name)
    if found is None:
        return None
    try:
        time = datetime.fromisoformat(found)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        raise wrong_input(f"{name} is {found!r:.80}, which is no time.", "Use a time like 2030-01-31T08:00.") from None


async def form(request: Request, *, exact: str = "") -> Mapping[str, str]:
    """The fields of a form that was sent, without the blanks around them; only the field `exact` is as it stands."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM:
        raise Problem(415, "Not a form", f"The request has a body of type {kind or 'none'!r:.80}.", "Use the pages.")
    try:
        fields = parse_qsl((await request.body()).decode(), keep_blank_values=True, max_num_fields=100)
    except ValueError:
        raise wrong_input("The form cannot be read.", "Send it again from its page.") from None
    return {name: value if name == exact else value.strip() for name, value in fields}


def required(fields: Mapping[str, str], name: str) -> str:
    if not fields.get(name):
        raise wrong_input(f"The field {name} is empty. Nothing was done.", f"Fill in {name}: the audit trail keeps it.")
    return fields[name]


def budget(fields: Mapping[str, str]) -> FailureBudget | None:
    """A failure budget: a share in percent, and how many may fail in any case; None if no share is given."""
    if not fields.get("budget"):
        return None
    try:
        share = float(fields["budget"]) / 100
    except ValueError:
        raise wrong_input(
            f"The failure budget is {fields['budget']!r:.80}. Nothing was done.",
            "Use a number of percent, such as 2.5.",
        ) from None
    return FailureBudget(share, whole_number({"at_least": "0", **{k: v for k, v in fields.items() if v}}, "at_least"))


def whole_number(fields: Mapping[str, str], name: str) -> int:
    try:
        return int(required(fields, name))
    except ValueError:
        raise wrong_input(f"{name} is {fields[name]!r:.80}. Nothing was done.", "Use a whole number.") from None
