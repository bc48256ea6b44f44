"""Handlers that are methods: declared in a class, registered with `bus.register(instance)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Unpack

from busload.errors import InvalidOperationError, kind_of
from busload.handlers.registry import BulkOptions, HandlerDecorators, Handlers
from busload.limits.handler_options import Function, HandlerOptions, PolicyOptions

Declaration = Callable[[HandlerDecorators], Callable[[Any], Any]]
"""Calls the decorator of a bus with the options that were declared."""

DECLARED = "__busload_declared__"
"""The attribute of a function that holds its declarations."""


def handler(domain: str, command_type: str, **options: Unpack[HandlerOptions]) -> Callable[[Function], Function]:
    """Declare that the method below runs commands of this `command_type`, once `bus.register` is given its object.

    The options are those of `bus.handler`. The method is returned unchanged, and stays callable as any other.
    """
    return _declare(lambda bus: bus.handler(domain, command_type, **options))


def bulk_handler(domain: str, command_type: str, **options: Unpack[BulkOptions]) -> Callable[[Function], Function]:
    """Declare that the method below runs commands of this `command_type` in chunks.

    The options are those of `bus.bulk_handler`.
    """
    return _declare(lambda bus: bus.bulk_handler(domain, command_type, **BulkOptions(**options)))


def planner(domain: str, stage: str, **options: Unpack[PolicyOptions]) -> Callable[[Function], Function]:
    """Declare that the method below plans every stage of the name `stage`, with the options of `bus.planner`."""
    return _declare(lambda bus: bus.planner(domain, stage, **options))


class HandlerRegistration(HandlerDecorators):
    """The decorators of a bus, and the registration of objects whose methods are handlers."""

    def register(self, *instances: object) -> None:
        """Register every method of the `instances` that was declared with `handler`, `bulk_handler` or `planner`.

        It registers all of them or none: if one cannot be registered, for example because its type has a handler
        already, the error names it and the bus stays as it was. Inherited methods count. A method that overrides a
        declared one is the handler in its place. Methods whose names begin with an underscore are left out.
        """
        trial = Trial(self.handlers.copy())
        for instance in instances:
            if isinstance(instance, type):
                raise InvalidOperationError(
                    f"register() needs an object, found the class {instance.__name__}: pass {instance.__name__}(...)."
                )
            methods = list(_declared(instance))
            if not methods:
                raise InvalidOperationError(
                    f"register() found no public method of {kind_of(instance)} that is declared as a handler. "
                    "Declare one with `@busload.handler(domain, command_type)` above it."
                )
            for name, declarations in methods:
                for declare in declarations:
                    declare(trial)(getattr(instance, name))
        self.handlers.become(trial.handlers)


class Trial(HandlerDecorators):
    """Takes declarations as a bus does: whatever is wrong with them shows before the bus knows them."""

    def __init__(self, handlers: Handlers) -> None:
        self.handlers = handlers


def _declare(declaration: Declaration) -> Callable[[Function], Function]:
    declaration(Trial(Handlers()))  # refuses wrong names and options where they were written

    def declare(function: Function) -> Function:
        try:
            setattr(function, DECLARED, (declaration, *_declarations(function)))
        except AttributeError:
            raise ValueError(f"Only what a class defines can be declared, found {function!r:.80}.") from None
        return function

    return declare


def _declarations(function: object) -> tuple[Declaration, ...]:
    """What was declared of a function, above or below `@staticmethod` or `@classmethod`."""
    found = getattr(function, "__dict__", {}).get(DECLARED, ())
    if not found and isinstance(function, staticmethod | classmethod):
        return _declarations(function.__func__)
    return tuple(found)


def _declared(instance: object) -> Iterator[tuple[str, tuple[Declaration, ...]]]:
    """The public methods of an object that are handlers, each with its declarations, base classes first."""
    kinds = type(instance).__mro__
    for name in dict.fromkeys(name for kind in reversed(kinds) for name in vars(kind)):
        if name.startswith("_") or inspect.getattr_static(instance, name) is None:
            continue  # with None a subclass says that it has no such handler
        versions = (vars(kind)[name] for kind in kinds if name in vars(kind))
        if declarations := next(filter(None, map(_declarations, versions)), None):
            yield name, declarations
