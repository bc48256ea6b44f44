"""Which commands were sent: assertions that say, when they fail, what was sent instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, overload

from busload.bus import CommandBus
from busload.commands.command import CommandMetadata
from busload.commands.listing import list_commands
from busload.commands.wording import counted
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.plan import Plan
from busload.sync.bus import SyncCommandBus
from busload.testing.faces import AnyBus, performed, refuse_no_bus
from busload.testing.run import ran_alone

MOST_SHOWN = 5
"""Commands that a failure shows, the nearest first."""

FIELDS = {field.name for field in fields(CommandMetadata)} - {"domain", "command_type", "data"}


class _Anything:
    """Fits all data, which None does not: a command without data has None."""

    def __repr__(self) -> str:
        return "ANYTHING"


ANYTHING: Final[Any] = _Anything()


@overload
def assert_sent(
    bus: CommandBus,
    domain: str,
    command_type: str,
    data: Any = ANYTHING,
    *,
    times: int | None = None,
    conn: AnyConnection | None = None,
    **wanted: Any,
) -> Coroutine[Any, Any, list[CommandMetadata]]: ...
@overload
def assert_sent(
    bus: SyncCommandBus,
    domain: str,
    command_type: str,
    data: Any = ANYTHING,
    *,
    times: int | None = None,
    conn: AnyConnection | None = None,
    **wanted: Any,
) -> list[CommandMetadata]: ...
def assert_sent(
    bus: AnyBus,
    domain: str,
    command_type: str,
    data: Any = ANYTHING,
    *,
    times: int | None = None,
    conn: AnyConnection | None = None,
    **wanted: Any,
) -> Any:
    """Assert that a command was sent, and return those that fit, oldest first.

    `data` may be a part: of an object only the keys that are given are compared, at every depth, and lists item by
    item. Other fields of `CommandMetadata` are named as they are: `task_key=`, `priority=`, `batch_id=`, `status=`,
    and `headers=`, which may be a part too. With `times` exactly so many must fit; without it at least one. It does
    not matter whether the commands have run. Those of `run_handler` do not count: the test has made them itself.
    With `conn` it looks on that connection, also at what its transaction has not committed.
    """
    _refuse(bus, wanted, times)
    return performed(bus, _looked(bus, domain, command_type, {"data": data, **wanted}, times), conn)


@overload
def assert_not_sent(
    bus: CommandBus,
    domain: str,
    command_type: str,
    data: Any = ANYTHING,
    *,
    conn: AnyConnection | None = None,
    **wanted: Any,
) -> Coroutine[Any, Any, None]: ...
@overload
def assert_not_sent(
    bus: SyncCommandBus,
    domain: str,
    command_type: str,
    data: Any = ANYTHING,
    *,
    conn: AnyConnection | None = None,
    **wanted: Any,
) -> None: ...
def assert_not_sent(
    bus: AnyBus,
    domain: str,
    command_type: str,
    data: Any = ANYTHING,
    *,
    conn: AnyConnection | None = None,
    **wanted: Any,
) -> Any:
    """Assert that no such command was sent; the arguments are those of `assert_sent`."""
    _refuse(bus, wanted, 0)
    return performed(bus, _none(bus, domain, command_type, {"data": data, **wanted}), conn)


def _none(bus: AnyBus, domain: str, command_type: str, wanted: Mapping[str, Any]) -> Plan[None]:
    yield from _looked(bus, domain, command_type, wanted, 0)


def _looked(
    bus: AnyBus, domain: str, command_type: str, wanted: Mapping[str, Any], times: int | None
) -> Plan[list[CommandMetadata]]:
    sent = [one for one in (yield from _sent(bus, domain)) if one.command_id not in ran_alone.get(bus, ())]
    alike = [one for one in sent if one.command_type == command_type]
    differences = [(one, list(_differences(wanted, one))) for one in alike]
    fitting = [one for one, found in differences if not found]
    if (len(fitting) == times) if times is not None else fitting:
        return fitting
    raise AssertionError("\n".join(_report(domain, command_type, wanted, times, fitting, differences, sent)))


def _sent(bus: AnyBus, domain: str) -> Plan[list[CommandMetadata]]:
    found: list[CommandMetadata] = []
    after: str | None = None
    while True:
        page = yield from list_commands(bus.settings.limits, domain, {}, limit=1000, after=after)
        found += page
        if page.next is None:
            return found[::-1]
        after = page.next


def _differences(wanted: Mapping[str, Any], found: CommandMetadata) -> Iterator[str]:
    for name, value in wanted.items():
        if value is not ANYTHING:
            yield from different(value, getattr(found, name), name)


def different(wanted: Any, found: Any, path: str) -> Iterator[str]:
    """In words, where data is not as it was wanted; nothing if the wanted part is there."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key, value in wanted.items():
            if key in found:
                yield from different(value, found[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: wanted {value!r}, but there is no {key!r}"
    elif isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        if len(wanted) != len(found):
            yield f"{path}: wanted {counted(len(wanted), 'item')}, found {len(found)}: {found!r:.200}"
            return
        for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from different(one, other, f"{path}[{index}]")
    elif not (wanted == found):  # noqa: SIM201 an object that fits everything, such as mock.ANY, may define only ==
        yield f"{path}: wanted {wanted!r}, found {found!r:.200}"


def _report(
    domain: str,
    command_type: str,
    wanted: Mapping[str, Any],
    times: int | None,
    fitting: Sequence[CommandMetadata],
    differences: Sequence[tuple[CommandMetadata, list[str]]],
    sent: Sequence[CommandMetadata],
) -> Iterator[str]:
    kind = f"{domain}/{command_type}"
    looked_for = ", ".join(f"{name}={value!r}" for name, value in wanted.items() if value is not ANYTHING)
    such = f"command {kind}" + (f" with {looked_for}" if looked_for else "")
    if times == 0:
        yield f"Wanted no {such}, but {counted(len(fitting), 'was', 'were')} sent:"
        yield from (f"  {one.command_id} {one.status}: data={one.data!r:.300}" for one in fitting[:MOST_SHOWN])
        return
    yield f"Wanted {'at least 1' if times is None else times} {such}, found {len(fitting)}."
    others = sorted((each for each in differences if each[1]), key=lambda each: len(each[1]))
    if others:
        yield f"{counted(len(others), f'command {kind} differs', f'commands {kind} differ')}:"
    for one, found in others[:MOST_SHOWN]:
        yield f"  {one.command_id}"
        yield from (f"    {line}" for line in found)
    if len(others) > MOST_SHOWN:
        yield f"  and {len(others) - MOST_SHOWN} more"
    types = Counter(one.command_type for one in sent if one.command_type != command_type)
    if types:
        yield f"Other commands of {domain}: {', '.join(f'{name} ({count})' for name, count in types.items())}."
    elif not differences:
        yield f"Nothing was sent to {domain}."


def _refuse(bus: object, wanted: Mapping[str, Any], times: int | None) -> None:
    refuse_no_bus(bus)
    if unknown := [name for name in wanted if name not in FIELDS]:
        raise TypeError(f"A command has no {unknown[0]!r} to compare. It has {', '.join(sorted(FIELDS))}.")
    if times is not None and (type(times) is not int or times < 0):
        raise ValueError(f"times must be a whole number from 0 on, found {times!r}.")
