"""How often a command is tried, and how long it waits in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from busload.commands.checks import require, whole

Verdict = Literal["permanent", "failed"]
"""What a rule can say of an exception: a person must look, or it is a final no."""

VERDICTS = ("permanent", "failed")
MOST_STEPS = 1000
"""Pauses that an exponential backoff is written out to; the last one repeats."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `max_attempts` attempts; the n-th failure waits the n-th `backoff` seconds, the last one repeats.

    With `jitter`, each wait is longer or shorter by up to this share of it: 0.1 is a tenth. `rules` say what else is
    done after exceptions of some classes: "permanent" sends the command to troubleshooting, "failed" ends it as FAILED,
    and another policy counts in the place of this one. The rule for the class that is nearest to the exception wins.
    """

    max_attempts: int = 3
    backoff: tuple[float, ...] = (10, 60, 300)
    jitter: float = 0.0
    rules: Mapping[type[BaseException], RetryPolicy | Verdict] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        require(whole(1), max_attempts=self.max_attempts)
        if not isinstance(self.backoff, tuple | list):
            raise ValueError(f"backoff must hold seconds, e.g. (10, 60), found {self.backoff!r:.80}.")
        if any(isinstance(s, bool) or not isinstance(s, int | float) or not 0 <= s < 10**9 for s in self.backoff):
            raise ValueError(f"backoff must hold seconds from 0 on, found {self.backoff!r}.")
        if type(self.jitter) not in (int, float) or not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be a share from 0 to 1, such as 0.1, found {self.jitter!r:.80}.")
        object.__setattr__(self, "backoff", tuple(self.backoff))
        object.__setattr__(self, "rules", _checked(self.rules))

    @classmethod
    def exponential(
        cls,
        max_attempts: int = 10,
        *,
        base: float = 1.0,
        factor: float = 2.0,
        longest: float = 3600.0,
        jitter: float = 0.1,
        rules: Mapping[type[BaseException], RetryPolicy | Verdict] | None = None,
    ) -> Self:
        """A policy whose waits grow: `base` seconds after the first failure, and each time `factor` times as many.

        No wait is longer than `longest` seconds, before the jitter.
        """
        numbers = {"base": base, "factor": factor, "longest": longest}
        for name, least in (("base", 0.0), ("factor", 1.0), ("longest", 0.0)):
            value = numbers[name]
            if type(value) not in (int, float) or not least <= value < 10**9:
                raise ValueError(f"{name} must be a number from {least:g} on, found {value!r:.80}.")
        steps, pause = [min(float(base), float(longest))], float(base) * factor
        while steps[-1] < pause <= longest and len(steps) < MOST_STEPS:
            steps.append(pause)
            pause *= factor
        if steps[-1] < longest < pause:
            steps.append(float(longest))
        return cls(max_attempts, tuple(steps), jitter, {} if rules is None else rules)

    def rule_for(
        self, error: BaseException, *, up_to: type[BaseException] = BaseException
    ) -> RetryPolicy | Verdict | None:
        """What the rules say of an exception; None if nothing. Rules for bases of `up_to` say nothing of it."""
        if not self.rules:
            return None
        for kind in type(error).__mro__:
            if kind in self.rules or kind is up_to:
                return self.rules.get(kind)
        return None

    def exhausted(self, attempt: int, limit: int | None = None) -> bool:
        """Whether this was the last attempt; a command's own `max_attempts` is the `limit` that wins."""
        return attempt >= (limit or self.max_attempts)

    def delay(self, attempt: int, draw: Callable[[float, float], float] = random.uniform) -> float:
        """Seconds to wait after this failed attempt."""
        if not self.backoff:
            return 0.0
        pause = float(self.backoff[min(attempt, len(self.backoff)) - 1])
        return pause * draw(1 - self.jitter, 1 + self.jitter) if self.jitter else pause


def _checked(rules: object) -> dict[type[BaseException], RetryPolicy | Verdict]:
    if not isinstance(rules, Mapping):
        raise ValueError(
            f'rules must be a dict of exception classes, e.g. {{KeyError: "permanent"}}, found {rules!r:.80}.'
        )
    for kind, rule in rules.items():
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise ValueError(f"rules must be a dict of exception classes, found the key {kind!r:.80}.")
        if not isinstance(rule, RetryPolicy) and rule not in VERDICTS:
            raise ValueError(
                f'The rule for {kind.__name__} must be "permanent", "failed" or a RetryPolicy, found {rule!r:.80}.'
            )
        if isinstance(rule, RetryPolicy) and rule.rules:
            raise ValueError(f"The policy for {kind.__name__} has rules of its own, which nobody would read.")
    return dict(rules)
