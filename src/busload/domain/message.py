"""What a message says: which commands to look for. Whoever reads it believes only that a look may be worth it."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from uuid import UUID

from busload.domain.ids import POSITIONS
from busload.domain.payload import PayloadLimits, decode, encode

VERSION = 1
MOST_RANGES = 1000
MOST_BYTES = 16 * 1024 * 1024

WIDEST = PayloadLimits(data_bytes=MOST_BYTES, depth=500)
"""A message is larger and deeper than the payload that it carries, which was checked when it was sent."""

SIGNATURE = b',"signature":"'
"""What a signature begins with, at the end of a message. It signs all bytes before, and the brace that closes them."""


class UnreadableMessage(ValueError):
    """The bytes are not a message of ours, or not signed by us."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Neighbouring commands of one domain, as ranges of ids; for foreign readers also what the one command says."""

    domain: str
    ranges: tuple[tuple[int, int], ...]
    command: Mapping[str, Any] | None = None

    @property
    def commands(self) -> int:
        return sum(hi - lo + 1 for lo, hi in self.ranges)


@dataclass(frozen=True, slots=True)
class Key:
    """A secret to sign with, and the name by which a signature tells which one it was; it may have none."""

    name: bytes
    secret: bytes = field(repr=False)

    def sign(self, body: bytes) -> bytes:
        digest = hmac.new(self.secret, body, hashlib.sha256).hexdigest().encode()
        return self.name + b":" + digest if self.name else digest


@lru_cache(maxsize=8)
def keys(text: bytes) -> tuple[Key, ...]:
    """The keys in `secret`, `id:secret`, or several of these by commas: the first one signs, all are accepted."""
    return tuple(_key(each.strip()) for each in text.split(b","))


def _key(text: bytes) -> Key:
    name, colon, secret = text.partition(b":") if b":" in text else (b"", b"", text)
    if not secret or (colon and not re.fullmatch(rb"[A-Za-z0-9_.-]{1,64}", name)):
        raise ValueError(
            "Found an unusable message key: an empty secret, or an id with more than letters, digits and _.- in it. "
            "Wanted `secret`, `id:secret`, or several of them by commas."
        )
    return Key(name, secret)


def write(envelope: Envelope, key: bytes | None = None) -> bytes:
    """The bytes of a message; `PayloadRefused` if a command is too large to be carried."""
    content: dict[str, Any] = {"v": VERSION, "domain": envelope.domain, "loads": [list(r) for r in envelope.ranges]}
    if envelope.command is not None:
        content |= envelope.command
    body = encode(content, WIDEST).encode()
    if key is None:
        return body
    return body[:-1] + SIGNATURE + keys(key)[0].sign(body) + b'"}'


def read(body: bytes, key: bytes | None = None) -> Envelope:
    """The envelope in these bytes; with a key, only if whoever wrote them had it too."""
    if len(body) > MOST_BYTES:
        raise UnreadableMessage(f"found {len(body)} bytes")
    if key is not None and not _is_signed(body, keys(key)):
        raise UnreadableMessage("its signature is missing or wrong")
    try:
        content = decode(body.decode())
    except Exception as error:  # whatever strangers have written, only this message is refused for it
        raise UnreadableMessage(f"found no JSON: {type(error).__name__}") from None
    if not isinstance(content, dict) or content.get("v") != VERSION:
        raise UnreadableMessage(f"wanted an object of version {VERSION}")
    domain, ranges = content.get("domain"), content.get("loads")
    if not isinstance(domain, str) or not isinstance(ranges, list) or not 0 < len(ranges) <= MOST_RANGES:
        raise UnreadableMessage("wanted a domain, and loads from 1 to 1,000")
    return Envelope(domain, tuple(map(_range, ranges)))


def _range(found: object) -> tuple[int, int]:
    if isinstance(found, list) and len(found) == 2 and all(type(id) is int for id in found):
        lo, hi = found
        if 0 <= lo <= hi < 2**63 and lo // POSITIONS == hi // POSITIONS:
            return lo, hi
    raise UnreadableMessage("wanted loads as pairs of a first and a last id")


def _is_signed(body: bytes, keys: Sequence[Key]) -> bool:
    """By one of these, over exactly these bytes: nobody needs to spell numbers or strings as we do to check it."""
    before, found, rest = body.rpartition(SIGNATURE)
    signature = rest.removesuffix(b'"}')
    signed = before + b"}"
    name = signature.rpartition(b":")[0]
    return bool(found) and any(
        hmac.compare_digest(signature, key.sign(signed)) for key in keys if hmac.compare_digest(key.name, name)
    )


def envelopes(loads: Sequence[tuple[int, int, str]], size: int) -> Iterator[Envelope]:
    """Loads (first and last id, domain) as envelopes of up to `size` commands; those of a domain go together."""
    by_domain: dict[str, list[tuple[int, int]]] = {}
    for lo, hi, domain in loads:
        by_domain.setdefault(domain, []).append((lo, hi))
    for domain, ranges in by_domain.items():
        gathered: list[tuple[int, int]] = []
        room = size
        for lo, hi in sorted(ranges):
            while lo <= hi:
                upto = min(hi, lo + room - 1)
                gathered.append((lo, upto))
                room -= upto - lo + 1
                lo = upto + 1
                if not room or len(gathered) == MOST_RANGES:
                    yield Envelope(domain, tuple(gathered))
                    gathered, room = [], size
        if gathered:
            yield Envelope(domain, tuple(gathered))


def of_one(
    domain: str,
    id: int,
    command_id: UUID,
    command_type: str,
    data: Any,
    *,
    batch_id: UUID | None,
    task_key: str | None,
    job_id: UUID | None,
    stage: str | None,
) -> Envelope:
    """One command with all a foreign reader needs, under the names that brokers' tasks usually have."""
    command = {
        "task_id": str(command_id),
        "parent_job_id": None if job_id is None else str(job_id),
        "task_type": command_type,
        "parameters": data,
        "stage": stage,
        "batch_id": None if batch_id is None else str(batch_id),
        "task_key": task_key,
    }
    return Envelope(domain, ((id, id),), command)
