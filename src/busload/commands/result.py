"""What a handler returns, as JSON: common types are converted, and what has no JSON form is named.

What is sent must come back as it was, so `payload` refuses to guess. A result is different: the work is done when it is
seen, and those who read it want to know what came out. So it is written as JSON usually has it.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import AsyncGeneratorType, GeneratorType, UnionType
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec

from busload.commands.payload import PayloadRefusedError, encode, safe_str, storable
from busload.errors import PermanentCommandError
from busload.settings import PayloadLimits

INSTEAD = "Return None, or a dict, a dataclass or a model of what is to be kept."

_CONVERTED = (
    *(str, int, float, type(None), bytes, bytearray, memoryview, date, time, timedelta, UUID, Decimal, Enum, PurePath),
    *(Mapping, list, tuple, set, frozenset, deque, msgspec.Struct),
)
"""Bool is an int, and a datetime is a date. Beyond these: dataclasses, classes of attrs, and models of pydantic."""

_UNTYPED = ("UNSERIALISABLE", "INVALID_KEY")
"""Refusals that are about a type, so that a conversion may help."""


class ResultNotKeptError(ValueError):
    """A result that has no JSON form."""


def encode_result(result: object, limits: PayloadLimits) -> str:
    """The JSON text of what a handler has returned.

    Raises `ResultNotKeptError` if a part of it has no JSON form, `PayloadRefusedError` if it has one that cannot be
    stored, and `PermanentCommandError` if the handler has not even run.
    """
    try:
        return encode(result, limits, path="/result")
    except PayloadRefusedError as refused:
        if refused.problem.code not in _UNTYPED:
            raise
    _refuse_not_run(result)
    try:
        plain = msgspec.to_builtins(result, str_keys=True, enc_hook=_convert)
    except ResultNotKeptError:
        raise
    except RecursionError:
        raise ResultNotKeptError(f"The result contains itself, or is nested too deep. {INSTEAD}") from None
    except BaseException as error:  # of a model's own conversion, or about a key; also a SystemExit
        said = f"{type(error).__name__}: {safe_str(error, 300)}"
        raise ResultNotKeptError(f"A part of the result could not be converted to JSON ({said}). {INSTEAD}") from None
    return encode(plain, limits, path="/result")


def refuse_result_type(function: Callable[..., Any]) -> None:
    """Raise `ValueError` if a handler says by its annotation that it returns what cannot be kept, or is a generator."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(
            f"The handler {_name(function)} has a `yield`, so calling it would not run it. Return what it should yield."
        )
    try:
        returned = get_type_hints(function if inspect.isroutine(function) else type(function).__call__).get("return")
    except Exception:  # a name that exists for type checkers only: its first return will show
        return
    for kind in _parts(returned):
        if not _is_kept(kind):
            raise ValueError(
                f"The handler {_name(function)} is annotated to return {kind.__name__}, which has no JSON form, so no "
                f"result could be kept. {INSTEAD}"
            )


def _refuse_not_run(result: object) -> None:
    if not issubclass(type(result), Awaitable | GeneratorType | AsyncGeneratorType):  # a proxy's __class__ may raise
        return
    if inspect.iscoroutine(result):
        result.close()  # nobody will await it
    raise PermanentCommandError(
        f"The handler returned a {type(result).__name__} that nobody runs, so its work was not done. Register the "
        "`async def` function itself, or return what it returns.",
        code="NOT_RUN",
    )


def _convert(value: Any) -> Any:
    """What msgspec does not know: models of pydantic, paths, and subclasses of builtins."""
    kind = type(value)
    if callable(getattr(kind, "model_dump", None)):
        return value.model_dump(mode="json")
    if issubclass(kind, PurePath):
        return str(value)
    if issubclass(kind, deque):
        return list(value)
    if issubclass(kind, Mapping):
        return dict(value)
    for base, builtin in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if issubclass(kind, base):
            return builtin(value)
    found = storable(f"{kind.__module__}.{kind.__qualname__}", 255).removeprefix("builtins.")
    raise ResultNotKeptError(f"The handler returned a value of type {found}, which has no JSON form. {INSTEAD}")


def _parts(hint: Any) -> list[type]:
    """The classes that an annotation names, as far as that can be told."""
    if hint is Any:  # which is a class itself
        return []
    if isinstance(hint, NewType):
        return _parts(hint.__supertype__)
    origin = get_origin(hint)
    if origin is None:
        return [hint] if isinstance(hint, type) else []
    arguments = get_args(hint)
    if origin is Annotated:
        return _parts(arguments[0])
    if origin in (Union, UnionType) or (isinstance(origin, type) and issubclass(origin, _CONVERTED)):
        return [part for argument in arguments for part in _parts(argument)]
    return [origin] if isinstance(origin, type) else []


def _is_kept(kind: type) -> bool:
    """Whether values of a class may be kept; also where only a value can tell, as it may be of a subclass."""
    return (
        kind is object
        or issubclass(kind, _CONVERTED)
        or is_dataclass(kind)
        or hasattr(kind, "__attrs_attrs__")
        or hasattr(kind, "model_dump")
        or inspect.isabstract(kind)
        or getattr(kind, "_is_protocol", False)
        or any(map(_is_kept, type.__subclasses__(kind)))
    )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
