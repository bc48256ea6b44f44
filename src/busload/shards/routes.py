"""Which domain lives in which database: the mapping that a bus over several databases was given, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from busload.commands.checks import NAME, shown, wrong_name
from busload.errors import DatabaseUnusableError, InvalidCommandError, Problem, kind_of
from busload.postgres import dsn as dsns
from busload.settings import InputLimits

REST = "*"
"""Stands for every domain that the mapping does not name."""

WANTED = 'Wanted a DSN for each domain, for example {"payments": dsn1, "*": dsn2}.'


@dataclass(frozen=True, slots=True)
class Routes:
    """The databases in the order of the mapping, each once, and the number of the one in which each domain lives."""

    dsns: tuple[str, ...]
    numbers: Mapping[str, int]

    @classmethod
    def read(cls, given: object) -> Routes:
        """Check a mapping; a `ValueError` says what was found, what is wanted, and what to do."""
        if not isinstance(given, Mapping):
            raise ValueError(f"The databases must be a mapping, found {kind_of(given)}. {WANTED}")
        if not given:
            raise ValueError(f"The mapping of domains to databases is empty. {WANTED}")
        found: dict[str, int] = {}
        numbers: dict[str, int] = {}
        places: dict[tuple[str, ...], str] = {}
        for domain, dsn in given.items():
            _refuse_domain(domain)
            if not isinstance(dsn, str):
                raise ValueError(f"The DSN of {domain!r} must be text, found {kind_of(dsn)}. {WANTED}")
            if dsn not in found:
                at = _place(domain, dsn)
                if at in places:
                    raise ValueError(
                        f"The DSNs of {places[at]!r} and {domain!r} differ, and both name {dsns.place(dsn)}. Give both "
                        "the same text: one database has one DSN."
                    )
                places[at] = domain
            numbers[domain] = found.setdefault(dsn, len(found))
        return cls(tuple(found), numbers)

    def find(self, domain: object) -> int:
        """The number of the database of a domain; a domain that the mapping leaves out is refused.

        What cannot be a domain goes to the first database, which refuses it as any bus does.
        """
        number = self._number(domain)
        if number is not None:
            return number
        named = ", ".join(repr(name) for name in self.numbers)
        message = f'found {shown(domain)}, but the databases are of {named}; name it there, or "*" for all others'
        raise InvalidCommandError([Problem("NO_DATABASE", "/domain", message)], writes=False)

    @property
    def mapping(self) -> dict[str, str]:
        """The DSN of each domain, as the mapping names it."""
        return {domain: self.dsns[number] for domain, number in self.numbers.items()}

    def place(self, number: int) -> str:
        """Which database that is, for people."""
        return dsns.place(self.dsns[number])

    def elsewhere(self, number: int) -> Any:
        """A function that names the place of a domain which does not live in the database of this number."""
        return partial(self._elsewhere, number)

    def domains(self, number: int) -> list[str]:
        """What the mapping names for a database."""
        return [domain for domain, own in self.numbers.items() if own == number]

    def _number(self, domain: object) -> int | None:
        if not isinstance(domain, str) or not NAME.match(domain):
            return 0
        return self.numbers.get(domain, self.numbers.get(REST))

    def _elsewhere(self, here: int, domain: str) -> str | None:
        number = self._number(domain)
        if number is None:
            return "none, since the mapping of this bus does not name it"
        return None if number == here else self.place(number)


def _refuse_domain(domain: object) -> None:
    if domain == REST:
        return
    if isinstance(domain, str) and any(sign in domain for sign in "*?["):
        raise ValueError(
            f'The mapping names {domain!r}. Only "*" alone stands for several domains: all that are not named. Name '
            "the others one by one."
        )
    if wrong_name(domain, "domain", InputLimits()):
        raise ValueError(
            f'The mapping names {shown(domain)}, wanted a domain: a letter, then letters, digits, "_", "." or "-"; or '
            '"*" for all that are not named.'
        )


def _place(domain: str, dsn: str) -> tuple[str, ...]:
    """What tells databases apart, as far as their DSNs do: two users of one database are in the same one."""
    try:
        found = dsns.read(dsn)
    except DatabaseUnusableError as error:
        raise ValueError(f"The DSN of {domain!r} cannot be used. {error}") from None
    names = ("host", "hostaddr", "port", "dbname", "service")
    given = {name: str(found.get(name) or "") for name in names}
    return tuple(given[name] or ("5432" if name == "port" else "") for name in names)
