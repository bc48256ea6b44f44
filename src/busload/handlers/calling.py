"""How a handler wants to be called: with its command, with typed data, or with the fields of the data."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from busload.commands.bulk_items import Chunk, Group
from busload.commands.command import Command
from busload.commands.data_type import DataInvalidError, DataType, FieldsType, has_fields
from busload.errors import SnoozeError


class Context:
    """What a handler of single commands is given besides its command, awaited or in a thread."""

    def snooze(self, after: timedelta | float) -> NoReturn:
        """Stop here, and run this command again `after` so long, in seconds if it is a number.

        No attempt is burnt, and what was written in `transaction()` is rolled back. The audit trail has an event
        SNOOZED each time. It raises `SnoozeError`, which the handler must let pass.
        """
        raise SnoozeError(after)


AnyContext = TypeVar("AnyContext", bound=Context)

BARE = ("Command", "Chunk", "Group", "FinishedStage", "Any", "object")
"""Names that say nothing about the data, also where they exist for type checkers only."""

Parameter = inspect.Parameter


@dataclass(frozen=True, slots=True)
class Form:
    """What the worker calls with a command and its context, and the type of the data, if it is known."""

    call: Callable[..., Any]
    data_type: DataType | None = None
    fields: inspect.Signature | None = None
    """If it wants the fields of the data as arguments: these arguments, without the context."""


def form_of(function: Callable[..., Any], first: str) -> Form:
    """See by the annotations of a function how it wants to be called. `first` is what its kind of handler gets.

    A handler of single commands gets the command if its first parameter is a `Command` or has no annotation. With
    `Command[T]`, the data of the command is converted. With any other annotation it gets the converted data alone. If
    its first parameter is the context, the other ones are the fields of the data.
    """
    parameters = _parameters(function)
    if not parameters or first not in ("command", "chunk"):
        return Form(function)
    _refuse_context_first(function, parameters, first)
    annotation = _resolved(function, parameters[0])
    if first == "chunk":
        data = _argument(annotation, Chunk)
        return Form(function) if data is None else Form(function, _data_type(function, parameters[0], data))
    if isinstance(annotation, type) and issubclass(annotation, Context):
        return _by_fields(function, parameters)
    if _is_bare(annotation):
        return Form(function)
    data = _argument(annotation, Command)
    if data is not None:
        data_type = _data_type(function, parameters[0], data)
        return Form(_with_typed_command(function, data_type), data_type)
    data_type = _data_type(function, parameters[0], annotation)
    return Form(_with_data(function, data_type), data_type)


def _refuse_context_first(function: Callable[..., Any], parameters: list[Parameter], first: str) -> None:
    """Refuse a first parameter that is named as the context, without an annotation: it would be given the command."""
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return
    context, other = positional[:2]
    if context.name not in ("ctx", "context") or context.annotation is not Parameter.empty:
        return
    try:
        annotation = _resolved(function, other)
    except ValueError:  # a name for type checkers only
        return
    kind = get_origin(annotation) or annotation
    of_a_context = isinstance(kind, type) and issubclass(kind, Context)
    found_later = annotation is Any and str(other.annotation).partition("[")[0].rpartition(".")[2] in (
        "Command",
        "Chunk",
    )
    if kind in (Command, Chunk) or found_later or (has_fields(kind) and not of_a_context):
        raise ValueError(
            f"The handler {_name(function)} has {context.name!r} before {other.name!r}. The {first} (or its data) "
            f"comes first and the context second: ({other.name}, {context.name})."
        )


def _with_data(function: Callable[..., Any], data_type: DataType) -> Callable[..., Any]:
    convert = data_type.convert

    @wraps(function)
    def call(command: Command, context: Any) -> Any:
        try:
            data = convert(command.data)
        except DataInvalidError as invalid:
            raise invalid.permanent() from None
        return function(data, context)

    return call


def _with_typed_command(function: Callable[..., Any], data_type: DataType) -> Callable[..., Any]:
    convert, with_data = data_type.convert, msgspec.structs.replace

    @wraps(function)
    def call(command: Command, context: Any) -> Any:
        try:
            typed = with_data(command, data=convert(command.data))
        except DataInvalidError as invalid:
            raise invalid.permanent() from None
        return function(typed, context)

    return call


def _by_fields(function: Callable[..., Any], parameters: list[Parameter]) -> Form:
    wanted = parameters[1:]
    for one in wanted:
        if one.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ValueError(
                f"After the context, the parameters of a handler are fields of its data. {_name(function)} has {one}, "
                "which is no single field: name each field."
            )
    fields = {one.name: (_resolved(function, one), one.default is Parameter.empty) for one in wanted}
    data_type = _of(function, parameters[0], partial(FieldsType, getattr(function, "__qualname__", "it"), fields))
    convert = data_type.convert

    @wraps(function)
    def call(command: Command, context: Any) -> Any:
        try:
            given = convert(command.data)
        except DataInvalidError as invalid:
            raise invalid.permanent() from None
        return function(context, **given)

    return Form(call, data_type, inspect.Signature(wanted))


def _data_type(function: Callable[..., Any], parameter: Parameter, annotation: Any) -> DataType:
    return _of(function, parameter, partial(DataType, annotation))


def _of(function: Callable[..., Any], parameter: Parameter, make: Callable[[], DataType]) -> DataType:
    try:
        return make()
    except ValueError as refused:
        raise ValueError(
            f"The handler {_name(function)} cannot be given its data as {parameter.name!r} is annotated: {refused}."
        ) from None


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # no function, which is refused elsewhere, or one written in C
        return []


def _resolved(function: Callable[..., Any], parameter: Parameter) -> Any:
    """The annotation of a parameter; `Any` if it has none, or if it is bare and its name is not known at run time."""
    annotation = parameter.annotation
    if annotation is Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    holder = SimpleNamespace(__annotations__={"it": annotation})
    unknown: Exception | None = None
    for names, local in _namespaces(function):
        try:
            return get_type_hints(holder, names, local, include_extras=True)["it"]
        except Exception as error:
            unknown = unknown or error
    if annotation.partition("[")[0].rpartition(".")[2] in BARE:
        return Any
    raise ValueError(
        f"The handler {_name(function)} has the annotation {annotation!r} for {parameter.name!r}, which cannot be "
        f"found when it is registered ({unknown}). Import its name outside of TYPE_CHECKING, or annotate with Command."
    )


def _namespaces(function: Callable[..., Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Where the names in annotations may be defined: around the function, or in a function that is being called."""
    while isinstance(function, partial):
        function = function.func
    found: Any = inspect.unwrap(function)
    found = getattr(found, "__func__", found)
    if not hasattr(found, "__globals__"):  # an object that can be called
        found = inspect.unwrap(type(found).__call__)
    names = getattr(found, "__globals__", {})
    code = getattr(found, "__code__", None)
    cells = zip(code.co_freevars, found.__closure__ or (), strict=False) if code is not None else ()
    enclosed: dict[str, Any] = {}
    for name, cell in cells:
        try:
            enclosed[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    yield names, enclosed
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals is names and frame.f_locals is not names:
            yield names, frame.f_locals


def _is_bare(annotation: Any) -> bool:
    """Whether an annotation says nothing about the data."""
    if annotation in (Any, object, Command, Chunk, Group, inspect.Parameter.empty) or isinstance(annotation, TypeVar):
        return True
    arguments = get_args(annotation)
    if get_origin(annotation) in (Command, Chunk):
        return _is_bare(arguments[0])
    return any(one in (Command, Chunk, Group) for one in arguments)


def _argument(annotation: Any, of: type) -> Any:
    """T of `Command[T]` or `Chunk[T]`; None if there is none, or it says nothing."""
    if get_origin(annotation) is not of or _is_bare(annotation):
        return None
    return get_args(annotation)[0]


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or f"{function!r:.120}"
