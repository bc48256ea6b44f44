"""A command whose first argument may be a verb instead: `busload worker app:bus`, but `busload worker ls`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import click


class WithVerbs(click.Command):
    """A command with verbs that are commands of their own; a class below this names them."""

    verbs: ClassVar[Mapping[str, click.Command]] = {}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.verbs:
            return self.verbs[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
