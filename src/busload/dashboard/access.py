"""Who may do what: permissions, roles, and the users that the environment names."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from starlette.requests import Request

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SCRYPT = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}
MOST_CACHED = 1000
"""Credentials that are remembered as right, so that scrypt does not run for each request."""


class Permission(StrEnum):
    """What a route of the dashboard needs."""

    READ = "read"
    OPERATE = "operate"


class Role(StrEnum):
    """What a person is."""

    READER = "reader"
    OPERATOR = "operator"


MAY = {Role.READER: {Permission.READ}, Role.OPERATOR: {Permission.READ, Permission.OPERATE}}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is there. The audit trail names an operator by `name`."""

    name: str
    role: Role

    def may(self, permission: Permission) -> bool:
        return permission in MAY[self.role]


Authenticate: TypeAlias = Callable[[Request], Principal | Awaitable[Principal | None] | None]
"""Says who sent a request; None if nobody knows."""


@dataclass(frozen=True, slots=True)
class User:
    """One entry of BUSLOAD_DASHBOARD_USERS: a name, a role, and the salted hash of a secret."""

    principal: Principal
    salt: bytes
    digest: bytes

    @classmethod
    def create(cls, name: str, role: Role) -> tuple[User, str]:
        """A user with a new secret, which nobody can find out again."""
        if not NAME.fullmatch(name):
            raise ValueError(
                f"found the name {name!r:.80}, wanted up to 64 letters, digits, dots, dashes or underscores."
            )
        secret, salt = secrets.token_urlsafe(24), secrets.token_bytes(16)
        return cls(Principal(name, role), salt, _scrypt(secret, salt)), secret

    @classmethod
    def read(cls, entry: str) -> User:
        """An entry `name:role:hash`; an error does not repeat the hash."""
        wanted = "wanted name:role:hash, as `busload dashboard user NAME` prints it"
        name, _, rest = entry.partition(":")
        role, _, hashed = rest.partition(":")
        kind, *parts = hashed.split("$")
        if not NAME.fullmatch(name) or role not in set(Role) or kind != "scrypt" or len(parts) != 2:
            raise ValueError(f"BUSLOAD_DASHBOARD_USERS has an entry that begins with {name!r:.80}; {wanted}.")
        try:
            salt, digest = (base64.b64decode(part, altchars=b"-_", validate=True) for part in parts)
        except ValueError:
            raise ValueError(f"BUSLOAD_DASHBOARD_USERS has a wrong hash for {name!r}; {wanted}.") from None
        return cls(Principal(name, Role(role)), salt, digest)

    def __str__(self) -> str:
        salt, digest = (base64.urlsafe_b64encode(part).decode() for part in (self.salt, self.digest))
        return f"{self.principal.name}:{self.principal.role}:scrypt${salt}${digest}"

    def knows(self, secret: str) -> bool:
        return hmac.compare_digest(_scrypt(secret, self.salt), self.digest)


class Users:
    """Knows people by HTTP Basic (browsers), or by `Authorization: Bearer NAME~SECRET` (programs)."""

    def __init__(self, users: Iterable[User]) -> None:
        self._users: dict[str, User] = {}
        for user in users:
            if self._users.setdefault(user.principal.name, user) is not user:
                raise ValueError(
                    f"BUSLOAD_DASHBOARD_USERS has several entries for {user.principal.name!r}; wanted one."
                )
        self._stranger, _ = User.create("stranger", Role.READER)
        self._verified: dict[bytes, Principal] = {}
        self._working = asyncio.Semaphore(2)

    @classmethod
    def read(cls, text: str) -> Users | None:
        """The users of a text with lines or commas between them; None if there are none."""
        entries = [entry.strip() for entry in re.split(r"[\n,]", text) if entry.strip()]
        return cls(map(User.read, entries)) if entries else None

    async def __call__(self, request: Request) -> Principal | None:
        given = request.headers.getlist("authorization")
        if len(given) != 1 or (credentials := _credentials(given[0])) is None:
            return None
        key = hashlib.sha256("\0".join(credentials).encode()).digest()
        if key in self._verified:
            return self._verified[key]
        name, secret = credentials
        user = self._users.get(name)
        async with self._working:  # a stranger costs the same time as a wrong secret
            right = await asyncio.to_thread((user or self._stranger).knows, secret)
        if user is None or not right:
            return None
        while len(self._verified) >= MOST_CACHED:
            del self._verified[next(iter(self._verified))]
        self._verified[key] = user.principal
        return user.principal


def _credentials(header: str) -> tuple[str, str] | None:
    """The name and the secret in an Authorization header."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "bearer":
        name, between, secret = given.strip().partition("~")
    elif scheme.lower() == "basic":
        try:
            name, between, secret = base64.b64decode(given.strip(), validate=True).decode().partition(":")
        except ValueError:
            return None
    else:
        return None
    return (name, secret) if between and name and secret else None


def _scrypt(secret: str, salt: bytes) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=salt, **SCRYPT)
