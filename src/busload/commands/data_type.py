"""The type that the data of a command has for its handler: how JSON becomes a value of it, and such a value JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, NotRequired, Protocol, get_args, is_typeddict

import msgspec

from busload.commands.command import BatchCommand
from busload.commands.payload import PayloadRefusedError, safe_str
from busload.errors import PermanentCommandError, Problem

INVALID_DATA = "INVALID_DATA"
"""The code of data that does not fit the type of its handler."""

MOST_PROBLEMS = 10
"""Misfits of one command that its error names."""


class DataInvalidError(ValueError):
    """Data that does not fit its type; `problems` say where, and why."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def permanent(self) -> PermanentCommandError:
        """The failure of a command whose stored data is this: only a person can mend it."""
        told = [{"path": problem.path, "message": problem.message} for problem in self.problems]
        message = "; ".join(f"{one['path']}: {one['message']}" for one in told)
        return PermanentCommandError(message, code=INVALID_DATA, details={"problems": told})


class DataType:
    """A pydantic model, dataclass, class of attrs, TypedDict, msgspec struct, or anything else that msgspec converts.

    What holds a pydantic model is converted by pydantic, which is imported then, and everything else by msgspec.
    """

    def __init__(self, annotation: Any) -> None:
        """Raises `ValueError` if no JSON can become a value of this type."""
        self.name = getattr(annotation, "__name__", None) or str(annotation)
        known: set[type] = set()
        unknown: set[type] = set()
        why: str | None = None
        try:
            known, unknown = _classes(msgspec.inspect.type_info(annotation))
            msgspec.json.Decoder(annotation)  # refuses unions that JSON cannot tell apart
        except TypeError as error:
            why = str(error)
        if any(map(_is_pydantic, known | unknown | set(_named(annotation)))):
            self._read = _reader_of_pydantic(annotation)
            return
        if unknown or why is not None:
            why = why or f"{', '.join(sorted(one.__qualname__ for one in unknown))} has no JSON form"
            raise ValueError(
                f"found {self.name} ({why}), wanted Command, a pydantic model, a dataclass, a class of attrs, a "
                "TypedDict, a msgspec.Struct, or builtin types"
            )
        self._read = _reader_of_msgspec(annotation)

    def convert(self, data: Any) -> Any:
        """The value that decoded JSON is; raises `DataInvalidError`."""
        return self._read(data, self.name)

    def fitting(self, data: Any) -> Any:
        """Data to be sent, as JSON values; raises `DataInvalidError`, or `PayloadRefusedError` if it is no JSON."""
        plain = plain_model(data) if is_model(data) else data
        self._read(plain, self.name)
        return plain


class FieldsType(DataType):
    """Data whose fields are the arguments of a function: each has a type, and may be required. No data is no field."""

    def __init__(self, function: str, fields: Mapping[str, tuple[Any, bool]]) -> None:
        make: Any
        try:  # pydantic wants this one before Python 3.12, and brings it along
            from typing_extensions import TypedDict as make
        except ImportError:
            from typing import TypedDict as make
        name = f"the parameters of {function}"
        if len(fields) == 1 and any(map(has_fields, (t for t, _ in fields.values()))):
            name += ", of which each is a field of the data: its context comes first. With the data first, it gets all"
        super().__init__(make(name, {one: t if needed else NotRequired[t] for one, (t, needed) in fields.items()}))

    def convert(self, data: Any) -> Any:
        return super().convert({} if data is None else data)

    def fitting(self, data: Any) -> Any:
        return super().fitting({} if data is None else data)


NO_JSON = (TypeError, UnicodeEncodeError, OverflowError, RecursionError)
"""What reading a value raises that is not even JSON, such as a lone surrogate or a dict that contains itself."""

DataTypes = Mapping[tuple[str, str], DataType]
"""The types that are known, by domain and command type."""


class KnowsTypes(Protocol):
    """A bus, of which only the types of data are wanted: handlers may be registered later."""

    @property
    def data_types(self) -> DataTypes: ...


def fit_all(
    domain: str, commands: Sequence[BatchCommand], types: DataTypes
) -> tuple[Sequence[BatchCommand], list[Problem]]:
    """Commands whose data fits the types that are known, models of them as JSON; and what does not fit.

    What does not fit comes back without its data, so that it is not refused a second time.
    """
    fitted: list[BatchCommand] = []
    problems: list[Problem] = []
    for index, command in enumerate(commands):
        known = None
        if isinstance(command, BatchCommand) and isinstance(command.command_type, str):
            own = command.domain if isinstance(command.domain, str) else domain
            known = types.get((own, command.command_type))
        if known is None:
            fitted.append(command)
            continue
        try:
            plain = known.fitting(command.data)
        except DataInvalidError as invalid:
            problems += [replace(problem, index=index) for problem in invalid.problems]
            plain = None
        except PayloadRefusedError as refused:
            problems.append(replace(refused.problem, index=index))
            plain = None
        fitted.append(command if plain is command.data else replace(command, data=plain))
    return fitted, problems


def is_model(value: object) -> bool:
    """Whether a value is an instance of a class of fields."""
    return _is_class_of_fields(type(value))


def _is_class_of_fields(kind: type) -> bool:
    return (
        issubclass(kind, msgspec.Struct) or is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or _is_pydantic(kind)
    )


def has_fields(annotation: Any) -> bool:
    """Whether an annotation is a class of fields, as a type of data often is."""
    return isinstance(annotation, type) and (is_typeddict(annotation) or _is_class_of_fields(annotation))


def plain_model(value: Any) -> Any:
    """The JSON values that a model, or a dict with values of a model, stands for; raises `PayloadRefusedError`."""
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
    except PayloadRefusedError:
        raise
    except Exception as error:  # of a model's own conversion, or about a key
        said = f"{type(error).__name__}: {safe_str(error, 300)}"
        message = f"found {type(value).__name__}, which could not be converted to JSON ({said})"
        raise PayloadRefusedError(Problem("UNSERIALISABLE", "/data", message)) from None


def _plain(value: Any) -> Any:
    """What msgspec does not know."""
    if _is_pydantic(type(value)):
        return _adapter(type(value)).dump_python(value, mode="json", by_alias=True)
    message = f"found {type(value).__qualname__}, which has no JSON form; wanted a model of values that have one"
    raise PayloadRefusedError(Problem("UNSERIALISABLE", "/data", message))


def _is_pydantic(kind: type) -> bool:
    return hasattr(kind, "__pydantic_validator__")


def _adapter(annotation: Any) -> Any:
    from pydantic import TypeAdapter  # is there if a class of it is

    return TypeAdapter(annotation)


def _reader_of_msgspec(annotation: Any) -> Callable[[Any, str], Any]:
    convert = msgspec.convert

    def read(data: Any, name: str) -> Any:
        try:
            return convert(data, annotation)
        except msgspec.ValidationError as error:
            message, _, where = str(error).partition(" - at `")
            problem = Problem(INVALID_DATA, _pointer(where), f"does not fit {name}: {message}")
        except NO_JSON as error:
            problem = Problem(INVALID_DATA, "/data", f"is no JSON: {error}")
        raise DataInvalidError([problem])

    return read


def _reader_of_pydantic(annotation: Any) -> Callable[[Any, str], Any]:
    """By JSON text, so that a strict model takes what JSON has no type for, such as a date."""
    validate, to_json = _adapter(annotation).validate_json, msgspec.json.Encoder().encode

    def read(data: Any, name: str) -> Any:
        from pydantic import ValidationError

        try:
            return validate(to_json(data))
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
        except NO_JSON as error:
            raise DataInvalidError([Problem(INVALID_DATA, "/data", f"is no JSON: {error}")]) from None
        paths = ["".join(f"/{step}" for step in ("data", *one["loc"])) for one in found]
        problems = [
            Problem(INVALID_DATA, path, f"does not fit {name}: {one['msg']}")
            for path, one in zip(paths, found, strict=True)
        ]
        raise DataInvalidError(problems[:MOST_PROBLEMS])

    return read


_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def _pointer(where: str) -> str:
    """`$.items[0].when` of msgspec, as our errors write paths: `/data/items/0/when`."""
    steps = [name or index for name, index in _STEP.findall(where.rstrip("`"))]
    return "".join(f"/{step}" for step in ("data", *steps))


def _named(annotation: Any) -> Iterator[type]:
    """The classes that an annotation itself names, as in `Debit | Credit` or `list[Debit]`."""
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _named(part)


def _classes(info: msgspec.inspect.Type) -> tuple[set[type], set[type]]:
    """The classes of fields in a type that pydantic may know better, and the classes that msgspec does not know."""
    known: set[type] = set()
    unknown: set[type] = set()
    seen: dict[int, Any] = {id(info): info}
    found = [info]
    for one in found:  # grows meanwhile: a type may contain itself
        if isinstance(one, msgspec.inspect.CustomType):
            unknown.add(one.cls)
        elif isinstance(one, msgspec.inspect.DataclassType):
            known.add(one.cls)
        parts = [getattr(one, name, None) for name in ("item_type", "key_type", "value_type")]
        parts += [*getattr(one, "types", ()), *getattr(one, "item_types", ())]
        parts += [field.type for field in getattr(one, "fields", ())]
        for part in parts:
            if isinstance(part, msgspec.inspect.Type) and id(part) not in seen:
                seen[id(part)] = part
                found.append(part)
    return known, unknown
