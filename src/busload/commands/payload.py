"""What JSON we accept, how it becomes text, and how it comes back.

The promise: what `encode` accepts, PostgreSQL's `json` stores, and `decode` returns it equal and of the same
types. Two differences are wanted. A tuple comes back as a list. An instance of a subclass of `str`, `int`,
`float`, `dict` or `list` comes back as that builtin, and is accepted only if it compares equal to it, as an
`OrderedDict` or a `numpy.float64` does. Enum members, named tuples and all other types would lose their
meaning on the way and are refused; keys are exactly `str`. The column is `json`, not `jsonb`: its text stays
as it is, so -0.0 and long integers survive.

Three walks share the work. `_flat` knows payloads as nearly all commands have them, `_ordinary` most others; a million
may pass, so they only say yes or no. `_plain_copy` sees the few they turned down, and says what is wrong and where, or
that all is well after all.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from math import isfinite
from types import UnionType
from typing import Any
from uuid import UUID

import msgspec

from busload.errors import Problem
from busload.settings import PayloadLimits

DEFAULT_LIMITS = PayloadLimits()
WIDEST = PayloadLimits(data_bytes=16 * 1024 * 1024, depth=500)
"""For JSON that was checked already, and is read back or wrapped once more."""


class PayloadRefusedError(ValueError):
    """A value or text that is not stored; `problem` says what is wrong with it, and where."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class UndecodableError(ValueError):
    """Stored text that cannot become a value; it was not written by `encode`."""


def encode(value: object, limits: PayloadLimits = DEFAULT_LIMITS, *, path: str = "/data") -> str:
    """The JSON text of a value that will come back exactly as it went in; raises `PayloadRefusedError`."""
    if _flat(value, limits) or _ordinary(value, limits):
        try:
            raw = _to_json(value)
        except UnicodeEncodeError:
            pass  # a lone surrogate: the careful way says where
        else:
            text = raw.decode()
            if len(raw) <= limits.data_bytes and ("\\" not in text or "\\u0000" not in text):
                return text
    raw = _to_json(_plain_copy(value, limits, path))
    if len(raw) > limits.data_bytes:
        raise _refused(_too_large(f"{len(raw):,}", limits), path)
    return raw.decode()


def decode(text: str) -> Any:
    """The value of stored text; `UndecodableError` is all it raises, whatever the text holds.

    Where a key is repeated, which only text from elsewhere can do, its last value counts.
    """
    try:
        return _from_json(text)
    except msgspec.ValidationError:  # it counts the sign as a digit, so it stops one short of what `encode` writes
        try:
            return decode_strict(text, WIDEST)
        except PayloadRefusedError as refused:
            reason = refused.problem.message
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error)
    raise UndecodableError(f"The stored text cannot be read as JSON: {reason}")


def readable(text: str | None) -> Any:
    """A stored value, for people. Text that other hands wrote and that cannot be decoded is shown as it is."""
    if text is None:
        return None
    try:
        return decode(text)
    except UndecodableError:
        return text[:1000]


def decode_strict(raw: bytes | str, limits: PayloadLimits = DEFAULT_LIMITS, *, path: str = "") -> Any:
    """The value of JSON text from a person or program; raises `PayloadRefusedError`.

    Nothing is guessed: a repeated key, a number that no double holds or a byte that is not UTF-8 is refused.
    An exponent below -308 is taken if a double holds the number all the same: 5e-324 is one, 1e-400 is not.
    """
    return _plain_copy(_parse(raw, limits), limits, path)


def storable(text: str, max_bytes: int) -> str:
    """Text about a failure, made fit for a column: never refused, at most `max_bytes` of UTF-8.

    NUL and lone surrogates become U+FFFD. What is cut ends in "… [cut]", as long as that fits itself.
    """
    kept = _UNSTORABLE.sub("\ufffd", text[:max_bytes])  # a character takes a byte or more
    if len(text) <= max_bytes and len(kept.encode()) <= max_bytes:
        return kept
    mark = "… [cut]"
    room = max_bytes - len(mark.encode())
    if room < 0:
        mark, room = "", max_bytes
    return kept.encode()[:room].decode(errors="ignore") + mark


def safe_str(error: BaseException, max_bytes: int) -> str:
    """`str(error)`, storable, also when the exception's own `__str__` raises."""
    try:
        text = str.__str__(str(error))
    except BaseException as another:  # it belongs to the handler: not even SystemExit may pass for ours
        text = f"<{type(error).__name__}; its str() raised {type(another).__name__}>"
    return storable(text, max_bytes)


_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode

_CONTAINERS = (dict, list, tuple)
_LARGEST = sys.float_info.max
_FEW, _SHORT = 100, 1000  # so that what is far too large is not encoded to find out
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class _Flaw:
    """A problem that does not know its path yet. It stands where the value stood, until the walk comes by."""

    code: str
    message: str
    limit: int | None = None


def _flat(value: object, limits: PayloadLimits) -> bool:
    """Whether a value is a short dict of short scalars: `_ordinary` would say so too, in three times the time."""
    if type(value) is not dict or len(value) > _FEW or limits.integer_digits < 19:
        return False
    for key, item in value.items():
        if type(key) is not str or len(key) > _SHORT:
            return False
        kind = type(item)
        if kind is int:
            if not -0x8000_0000_0000_0000 <= item <= 0x7FFF_FFFF_FFFF_FFFF:
                return False
        elif kind is str:
            if len(item) > _SHORT:
                return False
        elif kind is float:
            if not -_LARGEST <= item <= _LARGEST:  # NaN is on neither side
                return False
        elif kind is not bool and item is not None:
            return False
    return True


def _ordinary(value: object, limits: PayloadLimits) -> bool:
    """Whether a value is made of builtins only, shallow and small, as nearly all payloads are.

    Level by level, so that depth needs no recursion. The size is a lower bound: enough to turn a huge value
    down before it is encoded.
    """
    if limits.integer_digits < 19:  # what fits into 64 bits may be too long all the same
        return False
    room = limits.data_bytes + 1  # for the comma that the last item does not have
    levels = limits.depth
    level: Sequence[Any] = (value,) if type(value) in _CONTAINERS else ((value,),)
    while level:
        deeper: list[Any] = []
        for container in level:
            room -= 2 * len(container)  # an item and its comma
            if room < 0:
                return False
            items: Iterable[Any] = container
            if type(container) is dict:
                items = container.values()
                for key in container:
                    if type(key) is not str:
                        return False
                    room -= len(key)
            for item in items:
                kind = type(item)
                if kind is str:
                    room -= len(item)
                elif kind is int:
                    if not -0x8000_0000_0000_0000 <= item <= 0x7FFF_FFFF_FFFF_FFFF:
                        return False
                elif kind is dict or kind is list or kind is tuple:
                    deeper.append(item)
                elif kind is float:
                    if not -_LARGEST <= item <= _LARGEST:  # NaN is on neither side
                        return False
                elif kind is not bool and item is not None:
                    return False
        levels -= 1
        if room < 0 or (deeper and not levels):
            return False
        level = deeper
    return True


def _plain_copy(value: object, limits: PayloadLimits, path: str) -> Any:
    """The same value made of builtins only; raises `PayloadRefusedError` for the first flaw in reading order."""
    room = limits.data_bytes + 1
    around: set[int] = set()  # the containers around the item, to notice that a value contains itself

    def copy(item: Any, keys: tuple[Any, ...]) -> Any:
        nonlocal room
        flaw: _Flaw | None
        plain = _builtin(item, limits)
        room -= _least_bytes(plain) + 1
        if type(plain) is _Flaw:
            flaw = plain
        elif room < 0:
            flaw = _too_large(f"at least {limits.data_bytes - room:,}", limits)
        elif id(item) in around:
            flaw = _Flaw("CIRCULAR", "The value contains itself; pass a value that ends.")
        elif type(plain) in _CONTAINERS and len(keys) >= limits.depth:
            flaw = _too_deep(limits)
        else:
            flaw = _scalar_flaw(plain, limits)
        if flaw:
            raise _refused(flaw, path, keys)
        if type(plain) not in _CONTAINERS:
            return plain
        around.add(id(item))
        kept: Any
        if type(plain) is dict:
            kept = {}
            for key, part in plain.items():
                if flaw := _key_flaw(key, limits):
                    raise _refused(flaw, path, keys)
                room -= len(key) + 3
                kept[key] = copy(part, (*keys, key))
        else:
            kept = []
            for index, part in enumerate(plain):  # in 3.11 a comprehension would double the depth of the stack
                kept.append(copy(part, (*keys, index)))
        around.discard(id(item))
        return kept

    try:
        return copy(value, ())
    except RecursionError:  # the caller itself is nested that deep
        raise _refused(_too_deep(limits), path) from None


_AS_THEY_ARE = frozenset((str, int, float, bool, type(None), dict, list, tuple, _Flaw))
_BUILTIN_OF: dict[type, Callable[[Any], object]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    dict: dict.copy,
    list: list.copy,
}


def _builtin(item: Any, limits: PayloadLimits) -> Any:
    """The builtin that equals an item, or the flaw that there is none."""
    kind = type(item)
    if kind in _AS_THEY_ARE:
        return item
    for base, builtin in _BUILTIN_OF.items():
        if not issubclass(kind, base) or issubclass(kind, Enum):
            continue
        length = base.__len__(item) if base in (str, dict, list) else 0
        if length > limits.data_bytes:
            return _too_large(f"at least {length:,}", limits)
        try:
            plain = builtin(item)
            if plain == item or plain != plain:  # NaN has a flaw of its own
                return plain
        except Exception:  # its class may do anything here
            break
    name = kind.__name__[:40]
    return _Flaw("UNSERIALISABLE", f"A value of type {name} would not come back as one; {_instead_of(kind)}.")


def _instead_of(kind: type) -> str:
    for kinds, advice in _ADVICE_BY_CLASS:
        if issubclass(kind, kinds):
            return advice
    for attribute, advice in _ADVICE_BY_ATTRIBUTE.items():
        if hasattr(kind, attribute):
            return advice
    for base in _BUILTIN_OF:
        if issubclass(kind, base):
            return f"pass {base.__name__}(value)"
    return "pass str(value), or a dict of what the handler needs"


_ADVICE_BY_CLASS: tuple[tuple[type | UnionType, str], ...] = (
    (Enum, "pass its .value"),
    (date | time, "pass value.isoformat()"),
    (bytes | bytearray | memoryview, "pass base64.b64encode(value).decode()"),
    (set | frozenset, "pass sorted(value)"),
    (UUID | Decimal, "pass str(value)"),
    (tuple, "pass list(value) or value._asdict()"),
)
_ADVICE_BY_ATTRIBUTE = {
    "model_dump": 'pass value.model_dump(mode="json")',  # pydantic
    "__struct_fields__": "pass msgspec.to_builtins(value)",
    "__attrs_attrs__": "pass attrs.asdict(value)",
    "__dataclass_fields__": "pass dataclasses.asdict(value)",
}


def _least_bytes(plain: Any) -> int:
    """What a value's own text takes at least; the parts of a container are counted when it is their turn."""
    if type(plain) is str:
        return len(plain) + 2
    if type(plain) is int:
        return max(1, plain.bit_length() * 3 // 10)  # log10(2) is a little more than 3/10
    return 1


def _key_flaw(key: Any, limits: PayloadLimits) -> _Flaw | None:
    if type(key) is not str:
        instead = "its .value" if issubclass(type(key), Enum) else "str(key)"
        found = type(key).__name__[:40]
        return _Flaw("INVALID_KEY", f"A key of type {found}, but keys are str; pass {instead}.")
    if len(key) > limits.data_bytes:
        return _too_large(f"at least {len(key):,}", limits)
    return _text_flaw(key)


def _scalar_flaw(plain: Any, limits: PayloadLimits) -> _Flaw | None:
    if type(plain) is str:
        return _text_flaw(plain)
    if type(plain) is float and not isfinite(plain):
        return _Flaw("NON_FINITE_NUMBER", f"JSON has no {plain}; pass None or a string.")
    if type(plain) is int:
        most = min(limits.integer_digits, sys.get_int_max_str_digits() or limits.integer_digits)
        may_be_long = plain.bit_length() > 3 * most  # spares nearly all integers the power: 2**3 < 10
        if may_be_long and abs(plain) >= 10**most:
            return _too_long(f"about {plain.bit_length() * 3 // 10 + 1:,}", most)
    return None


def _text_flaw(text: str) -> _Flaw | None:
    if "\0" in text:
        where = f"character {text.index(chr(0))}"
        return _Flaw("NUL_IN_JSON", f"U+0000 as {where}, which PostgreSQL cannot store; remove it.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"A lone surrogate U+{ord(text[error.start]):04X} as character {error.start}"
            return _Flaw("LONE_SURROGATE", f"{found}, which is no text; decode it from its real encoding.")
    return None


def _too_large(size: str, limits: PayloadLimits) -> _Flaw:
    found = f"The JSON takes {size} bytes, at most {limits.data_bytes:,}"
    return _Flaw("TOO_LARGE", f"{found}; keep the data elsewhere and pass a reference to it.", limits.data_bytes)


def _too_long(digits: str, most: int) -> _Flaw:
    return _Flaw("NUMBER_TOO_LONG", f"A number of {digits} digits, at most {most:,}; pass it as a string.", most)


def _too_deep(limits: PayloadLimits) -> _Flaw:
    return _Flaw("TOO_DEEP", f"Nested deeper than {limits.depth}; pass a flatter value.", limits.depth)


def _refused(flaw: _Flaw, path: str, keys: Sequence[Any] = ()) -> PayloadRefusedError:
    if flaw.code == "TOO_LARGE":  # no single part is to blame
        keys = ()
    pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
    if len(pointer) > 60:
        pointer = f"{pointer[:20]}…{pointer[-39:]}"
    return PayloadRefusedError(Problem(flaw.code, path + pointer, flaw.message, limit=flaw.limit))


def _parse(raw: bytes | str, limits: PayloadLimits) -> Any:
    """What JSON text says, with a flaw wherever it says what we do not take."""
    if len(raw) > limits.data_bytes:
        return _too_large(f"at least {len(raw):,}", limits)
    if isinstance(raw, str):
        raw = raw.encode(errors="surrogatepass")  # an argument that was not UTF-8 has surrogates; found below
        if len(raw) > limits.data_bytes:
            return _too_large(f"{len(raw):,}", limits)
    try:
        text = raw.decode()
        if text.startswith("\ufeff"):
            return _Flaw("INVALID_JSON", "A byte order mark at offset 0; save the text as UTF-8 without one.")
        return _STRICT.decode(text)
    except UnicodeDecodeError as error:
        return _Flaw("INVALID_UTF8", f"The byte at offset {error.start} is not UTF-8; convert the text.")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno} (offset {error.pos})"
        return _Flaw("INVALID_JSON", f"{error.msg} at {where}; pass one JSON value.")
    except RecursionError:
        return _too_deep(limits)


def _parse_object(pairs: list[tuple[str, Any]]) -> Any:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    seen: set[str] = set()
    repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return _Flaw("DUPLICATE_KEY", f"The key {repeated[:20]!a} appears more than once; keep one.")


def _parse_integer(digits: str) -> Any:
    if len(digits) > _LONGEST:
        return _too_long(f"{len(digits):,}", _LONGEST - 1)
    try:
        return int(digits)
    except ValueError:  # sys.set_int_max_str_digits() was set lower
        return _too_long(f"{len(digits):,}", sys.get_int_max_str_digits())


def _parse_float(digits: str) -> Any:
    if len(digits) > _LONGEST:
        return _too_long(f"{len(digits):,}", _LONGEST - 1)
    number = float(digits)
    mantissa, _, exponent = digits.lower().partition("e")
    size = float(exponent or 0)  # of any length, where int() would stop at 4300 digits
    lost = number == 0 and (size < -308 or mantissa.strip("-0."))
    if size > 308 or lost or not isfinite(number):
        return _Flaw("NUMBER_OUT_OF_RANGE", "A double cannot hold this number; pass it as a string.", 308)
    return number


_LONGEST = 4301  # 4300 digits, as CPython reads them, and a sign
_STRICT = json.JSONDecoder(object_pairs_hook=_parse_object, parse_int=_parse_integer, parse_float=_parse_float)
