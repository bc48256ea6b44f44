"""Results of handlers as JSON: what is converted, and what is refused when a handler is registered."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import OrderedDict, deque, namedtuple
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, NewType, Protocol, TypedDict
from uuid import UUID

import msgspec
import psycopg
import pytest

from busload.commands.payload import PayloadRefusedError
from busload.commands.result import ResultNotKeptError, encode_result, refuse_result_type
from busload.errors import PermanentCommandError
from busload.settings import PayloadLimits

LIMITS = PayloadLimits()
ID = UUID(int=7)
AT = datetime(2026, 11, 17, 8, 30, tzinfo=UTC)


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


@dataclass
class Invoice:
    number: int
    due: date


class Receipt(msgspec.Struct):
    id: UUID


class Model:
    """What pydantic's models look like from outside."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        return {"mode": mode, "at": AT}


class Attrs:
    """What classes of attrs look like from outside."""


class Text(str):
    __slots__ = ()


class Session:
    pass


Point = namedtuple("Point", "x y")

CONVERTED: list[tuple[Any, Any]] = [
    (AT, "2026-11-17T08:30:00Z"),
    (date(2026, 11, 17), "2026-11-17"),
    (time(8, 30), "08:30:00"),
    (timedelta(minutes=90), "PT5400S"),
    (ID, str(ID)),
    (Decimal("1.50"), "1.50"),
    (Color.RED, "red"),
    (Level.HIGH, 3),
    (Invoice(7, date(2026, 11, 17)), {"number": 7, "due": "2026-11-17"}),
    (Receipt(ID), {"id": str(ID)}),
    (Model(), {"mode": "json", "at": "2026-11-17T08:30:00Z"}),
    ({"deep": [Model()]}, {"deep": [{"mode": "json", "at": "2026-11-17T08:30:00Z"}]}),
    (Point(1, AT), [1, "2026-11-17T08:30:00Z"]),
    ({1}, [1]),
    (frozenset(["a"]), ["a"]),
    (deque([1, 2]), [1, 2]),
    (b"\x00\xff", "AP8="),
    (PurePosixPath("/tmp/x"), "/tmp/x"),
    ({1: "one", ID: 2, Color.RED: 3, 1.5: 4}, {"1": "one", str(ID): 2, "red": 3, "1.5": 4}),
    (OrderedDict(at=AT, text=Text("a")), {"at": "2026-11-17T08:30:00Z", "text": "a"}),
]


@pytest.mark.parametrize(("result", "expected"), CONVERTED, ids=lambda value: type(value).__name__)
def test_common_types_are_converted(result: Any, expected: Any) -> None:
    assert json.loads(encode_result(result, LIMITS)) == expected


def test_what_is_json_already_stays_as_it_is() -> None:
    for result in (0, -0.0, 2**64, "é", [None, {"a": [True]}], (1, 2)):
        assert encode_result(result, LIMITS) == json.dumps(result, ensure_ascii=False, separators=(",", ":"))


class Moody:
    def model_dump(self, *, mode: str) -> Any:
        raise ValueError("not today")


@dataclass
class Node:
    next: Any


LOOP = Node(None)
LOOP.next = LOOP


@pytest.mark.parametrize(
    ("result", "because"),
    [
        (Session(), f"type {__name__}.Session, which has no JSON form. Return None, or a dict"),
        ({"deep": [object()]}, "type object, which has no JSON form"),
        (Moody(), "could not be converted to JSON (ValueError: not today)"),
        ({(1, 2): 3}, "could not be converted to JSON (TypeError: Only dicts with str-like"),
        (LOOP, "contains itself"),
        (lambda: 1, "type function"),
    ],
)
def test_what_has_no_json_form_is_named_with_what_to_do(result: Any, because: str) -> None:
    with pytest.raises(ResultNotKeptError) as caught:
        encode_result(result, LIMITS)
    assert because in str(caught.value)


def test_json_that_cannot_be_stored_is_refused_also_after_a_conversion() -> None:
    for result in ({"at": AT, "text": "a\0"}, {"at": AT, "number": float("nan")}, [AT, "x" * 2_000_000]):
        with pytest.raises(PayloadRefusedError):
            encode_result(result, LIMITS)


def test_what_shows_that_the_handler_has_not_run_is_no_result() -> None:
    async def later() -> None: ...

    async def some() -> AsyncIterator[int]:
        yield 1

    for result in (later(), some(), (n for n in range(3))):
        with pytest.raises(PermanentCommandError, match="its work was not done") as caught:
            encode_result(result, LIMITS)
        assert caught.value.code == "NOT_RUN"


class Typed(TypedDict):
    a: int


class Closable(Protocol):
    def close(self) -> None: ...


class Shape(ABC):
    @abstractmethod
    def area(self) -> float: ...


class Base:
    pass


class Kept(Base, msgspec.Struct):
    pass


Number = NewType("Number", int)


def returning(annotation: Any) -> Callable[..., Any]:
    async def handler(command: Any, ctx: Any) -> Any: ...

    handler.__annotations__["return"] = annotation
    return handler


@pytest.mark.parametrize(
    "annotation",
    [
        *(None, Any, object, int, "dict[str, int]", dict[str, Invoice], list[Receipt | None], tuple[int, ...]),
        *(Model, Typed, Closable, Shape, Base, Number, Annotated[int, "n"], Mapping[str, Color], "a name nobody knows"),
    ],
    ids=str,
)
def test_a_handler_that_may_return_what_is_kept_is_registered(annotation: Any) -> None:
    refuse_result_type(returning(annotation))


@pytest.mark.parametrize(
    "annotation",
    [Session, Session | None, list[Session], dict[str, Session | int], Annotated[Session, "s"], "Session"],
    ids=str,
)
def test_a_handler_that_says_it_returns_what_has_no_json_form_is_refused(annotation: Any) -> None:
    with pytest.raises(ValueError, match="is annotated to return Session, which has no JSON form"):
        refuse_result_type(returning(annotation))


@pytest.mark.parametrize("session", [psycopg.Connection, psycopg.AsyncConnection, psycopg.Cursor])
def test_a_database_session_as_a_result_is_refused_though_there_are_subclasses_of_it(session: type) -> None:
    assert type.__subclasses__(session)
    with pytest.raises(ValueError, match=f"is annotated to return {session.__name__}, which has no JSON form"):
        refuse_result_type(returning(session))


def test_a_base_class_is_accepted_if_a_subclass_of_a_subclass_has_a_json_form() -> None:
    class Base: ...

    class Between(Base): ...

    @dataclass
    class Kept(Between):
        id: int

    refuse_result_type(returning(Base))


def test_a_generator_is_no_handler() -> None:
    def lazy(command: Any, ctx: Any) -> Iterator[int]:
        yield 1

    async def lazy_too(command: Any, ctx: Any) -> AsyncIterator[int]:
        yield 1

    for function in (lazy, lazy_too):
        with pytest.raises(ValueError, match="has a `yield`, so calling it would not run it"):
            refuse_result_type(function)


def test_objects_that_can_be_called_are_looked_at_too() -> None:
    class Handler:
        def __call__(self, command: Any, ctx: Any) -> Session:
            return Session()

    with pytest.raises(ValueError, match="annotated to return Session"):
        refuse_result_type(Handler())
