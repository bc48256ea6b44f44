"""What may be said about a function that workers call: how often, how long, and how fast."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypedDict, TypeVar

from busload.commands.retry import RetryPolicy
from busload.limits.concurrency import ConcurrencyLimit
from busload.limits.rate import RateLimit

Function = TypeVar("Function", bound=Callable[..., Any])


class PolicyOptions(TypedDict, total=False):
    """What may be said about every function that workers call."""

    retry: RetryPolicy | None
    """How often a command is tried, and how long it waits in between; `RetryPolicy()` if it is left out."""
    timeout: timedelta | float | None
    """How long one call may take, in seconds if it is a number."""


class HandlerOptions(PolicyOptions, total=False):
    """What may be said about a handler of commands."""

    rate_limit: RateLimit | None
    """How often the function may be called, by all workers together."""
    concurrency_limit: ConcurrencyLimit | None
    """How many calls of the function may run at a time, by all workers together."""
    on_failure: Callable[[Any], Any] | None
    """A function that is called with a `CommandFailure` when a command of this handler will not be tried again."""


class GroupHandlerOptions(HandlerOptions, total=False):
    """What may be said about a handler that gets several commands or events at once."""

    isolate_poison: bool
    """Split what fails as a whole more than once, until the bad commands or events stand alone."""
