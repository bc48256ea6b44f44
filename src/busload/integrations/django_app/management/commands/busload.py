"""`manage.py busload`: the command line of busload on the database of a Django project."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import click
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from busload.cli import TYPES, main
from busload.commands.data_type import DataTypes
from busload.commands.lines import as_called, called_as
from busload.integrations.django_app.bus import dsn_of
from busload.integrations.django_app.conf import configuration, load_bus


class Command(BaseCommand):
    help = (
        "Run a command of busload on the database of this project: manage.py busload troubleshooting ls. "
        "manage.py busload help lists them, and each has --help."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("words", nargs=argparse.REMAINDER, metavar="NOUN VERB ...", help="as busload takes them")

    def handle(self, *args: Any, words: list[str], **given: Any) -> None:
        if words[:1] == ["worker"] and not {"ls", "stop"} & set(words[1:2]):
            raise CommandError("Run the worker of a Django project by `manage.py busload_worker`.", returncode=2)
        try:
            found = configuration()
            dsn = dsn_of(found.database)
            types: DataTypes = {} if found.bus is None else load_bus().data_types
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=2) from None
        if words in ([], ["help"]):
            words = ["--help"]
        with called_as("python manage.py busload"):
            self._run(dsn, types, words)

    def _run(self, dsn: str, types: DataTypes, words: list[str]) -> None:
        try:
            with main.make_context("manage.py busload", ["--dsn", dsn, *words]) as ctx:
                ctx.meta[TYPES] = types
                main.invoke(ctx)
        except click.ClickException as error:
            raise CommandError(as_called(error.format_message()), returncode=error.exit_code) from None
        except click.exceptions.Exit as ended:
            sys.exit(ended.exit_code)
