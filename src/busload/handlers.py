"""Which function runs a command, under which retry policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from busload.domain.cause import RESOLVE
from busload.domain.command import InputLimits, check_name, refuse
from busload.domain.retry import RetryPolicy
from busload.errors import HandlerAlreadyRegisteredError, Problem
from busload.resolve import RETRY, resolve

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function; one written with `def` runs in a thread. `timeout` is in seconds."""

    function: Callable[..., Any]
    retry: RetryPolicy
    timeout: float | None
    is_async: bool


BUILT_IN = {RESOLVE: Handler(resolve, RETRY, timeout=None, is_async=True)}
"""What every worker runs, in every domain."""


class Handlers:
    """An explicit registry: a type name that comes with a command is looked up here and nowhere else."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], Handler] = {}

    def register(
        self,
        domain: str,
        command_type: str,
        *,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
    ) -> Callable[[Function], Function]:
        """A decorator that returns the function unchanged."""
        limits = InputLimits()
        refuse(check_name(domain, "domain", limits) + check_name(command_type, "command_type", limits))
        if command_type in BUILT_IN:
            message = f"found {command_type!r}, which every worker runs by itself; choose another name"
            refuse([Problem("INVALID_NAME", "/command_type", message)])
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise ValueError(f"retry must be a RetryPolicy, found {retry!r:.80}.")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < 10**9):
            raise ValueError(f"A handler's timeout must be more than 0 seconds, found {timeout!r}.")

        def add(function: Function) -> Function:
            if not callable(function):
                raise ValueError(f"A handler must be a function, found {function!r:.80}.")
            existing = self._handlers.get((domain, command_type))
            if existing is not None:
                raise HandlerAlreadyRegisteredError(domain, command_type, _name(existing.function))
            is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
                getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
            )
            self._handlers[domain, command_type] = Handler(function, retry or RetryPolicy(), seconds, is_async)
            return function

        return add

    def find(self, domain: str, command_type: str) -> Handler | None:
        return self._handlers.get((domain, command_type)) or BUILT_IN.get(command_type)

    @property
    def domains(self) -> list[str]:
        """Every domain that has a handler."""
        return sorted({domain for domain, _ in self._handlers})


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
