"""The setting BUSLOAD of a Django project."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from busload.errors import kind_of
from busload.integrations.django_app.bus import DjangoCommandBus


@dataclass(frozen=True, slots=True)
class Configuration:
    """What BUSLOAD may say; the names are in upper case there."""

    bus: str | None = None
    """`module:attribute` of the bus, such as "shop.handlers:bus". The module imports all handlers."""
    database: str = "default"
    """The alias in DATABASES of the database that has our schema."""
    worker: bool = False
    """Whether a worker runs inside the web process, from its first request on: for development."""

    @property
    def bus_path(self) -> str:
        if self.bus is None:
            raise ImproperlyConfigured(
                'BUSLOAD names no bus. Set BUSLOAD = {"BUS": "shop.handlers:bus"} in your settings: the module that '
                "imports all handlers, and its bus."
            )
        return self.bus


_KINDS: dict[str, type] = {"bus": str, "database": str, "worker": bool}


def configuration() -> Configuration:
    """The setting as it is now. What cannot be is refused."""
    given: Any = getattr(settings, "BUSLOAD", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f"BUSLOAD must be a dict, found {kind_of(given)}.")
    known = [field.name.upper() for field in fields(Configuration)]
    for name, value in given.items():
        if name not in known:
            likely = get_close_matches(str(name).upper(), known, n=1)
            hint = f"Did you mean {likely[0]!r}?" if likely else f"There are {', '.join(known)}."
            raise ImproperlyConfigured(f"BUSLOAD has {name!r}, which is no setting of busload. {hint}")
        if not isinstance(value, _KINDS[name.lower()]):
            wanted = {"BUS": "a text such as 'shop.handlers:bus'", "DATABASE": "an alias of DATABASES"}
            raise ImproperlyConfigured(
                f"BUSLOAD[{name!r}] must be {wanted.get(name, 'True or False')}, found {value!r:.80}."
            )
    return Configuration(**{name.lower(): value for name, value in given.items()})


def load_bus() -> DjangoCommandBus:
    """The bus that BUSLOAD names."""
    path = configuration().bus_path
    module, colon, attribute = path.partition(":")
    if not module or not colon or not attribute:
        raise ImproperlyConfigured(
            f"BUSLOAD['BUS'] is {path!r:.80}, wanted module:attribute, e.g. 'shop.handlers:bus'."
        )
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise ImproperlyConfigured(
            f"BUSLOAD['BUS'] is {path!r:.80}, and there is no module {error.name!r}. Name the module in which your bus "
            "is made; it must be importable as your apps are."
        ) from None
    try:
        found = getattr(imported, attribute)
    except AttributeError:
        raise ImproperlyConfigured(
            f"BUSLOAD['BUS'] is {path!r:.80}, and {module!r} has no {attribute!r}. Name the variable of the bus."
        ) from None
    if not isinstance(found, DjangoCommandBus):
        raise ImproperlyConfigured(
            f"BUSLOAD['BUS'] is {path!r:.80}, which is {kind_of(found)}, wanted a DjangoCommandBus: bus = "
            "DjangoCommandBus()."
        )
    return found
