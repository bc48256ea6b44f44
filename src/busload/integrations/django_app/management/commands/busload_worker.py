"""`manage.py busload_worker`: the worker of a Django project. Its options are those of `busload worker`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import click
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from busload.cli import main
from busload.cli.worker import PROGRAM, worker
from busload.integrations.django_app.conf import configuration, load_bus

NOT_HERE = {"dsn", "transport"}
"""Settings of a Django project say these."""


class Command(BaseCommand):
    help = (
        "Run the commands of the bus that BUSLOAD['BUS'] names. On SIGTERM or Ctrl-C it stops claiming, lets running "
        "commands finish within the grace time, settles every result and hands the rest back."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for option in _options():
            about: dict[str, Any] = {"dest": f"worker_{option.name}", "default": None}
            hidden = getattr(option, "hidden", False)
            about["help"] = argparse.SUPPRESS if hidden else (getattr(option, "help", None) or "").replace("%", "%%")
            if option.is_flag:
                about |= {"action": "store_true"}
            else:
                about |= {"metavar": option.metavar or (option.name or "").upper()}
            parser.add_argument(*option.opts, **about)

    def handle(self, *args: Any, **given: Any) -> None:
        _refuse_running_loop()
        try:
            load_bus()
            application = configuration().bus_path
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=2) from None
        words = []
        for option in _options():
            value = given.get(f"worker_{option.name}")
            if value is not None and value is not False:
                words += [option.opts[0]] if option.is_flag else [option.opts[0], str(value)]
        try:
            with main.make_context("manage.py", ["worker", application, *words]) as ctx:
                ctx.meta[PROGRAM] = [*_this_program(), *_of_django(given)]
                main.invoke(ctx)
        except click.ClickException as error:
            raise CommandError(error.format_message(), returncode=error.exit_code) from None
        except click.exceptions.Exit as ended:
            sys.exit(ended.exit_code)


def _options() -> list[click.Option]:
    options = [one for one in worker.params if isinstance(one, click.Option)]
    return [one for one in options if one.name not in NOT_HERE and one.name not in ("debug", "help")]


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise CommandError(
        "An event loop runs in this thread already, and busload_worker needs one of its own. Inside of your loop, use "
        "`async with Worker(bus):`; or call this command in a thread.",
        returncode=2,
    )


def _this_program() -> list[str]:
    """How another process of this project is started, for --processes."""
    script = Path(sys.argv[0])
    return [sys.executable, *(("-m", "django") if script.name == "__main__.py" else (str(script),)), "busload_worker"]


def _of_django(given: dict[str, Any]) -> list[str]:
    found = []
    for name in ("settings", "pythonpath"):
        if given.get(name):
            found += [f"--{name}", str(given[name])]
    return found
