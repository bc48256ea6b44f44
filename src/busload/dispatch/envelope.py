"""What a message says: which commands may be ready. The database decides whether they are."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from uuid import UUID

from busload.commands.checks import FLAG, require, whole, wrong_name
from busload.commands.load import Load, count_commands, number_of
from busload.commands.payload import decode, encode
from busload.errors import TransportMisconfiguredError
from busload.settings import PayloadLimits, Settings

VERSION = 1
MOST_RANGES = 1000
MOST_BYTES = 16 * 1024 * 1024

WIDEST = PayloadLimits(data_bytes=MOST_BYTES, depth=500)
"""A message is larger and deeper than the payload that it carries. The payload was checked when it was sent."""

SIGNATURE = b',"signature":"'
"""How a signature begins, at the end of a message. It signs all bytes before it, and the brace that closes them."""


QUEUE_PREFIX = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")
EXISTING_QUEUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,239}")
MOST_IN_ENVELOPE = 10_000
"""How many commands one message may be about."""


class UnreadableMessageError(ValueError):
    """The bytes are not a message of ours, or not signed by us."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Loads of one domain; for foreign readers also what the one command says."""

    domain: str
    loads: tuple[Load, ...]
    command: Mapping[str, Any] | None = None

    @property
    def commands(self) -> int:
        return count_commands(self.loads)


@dataclass(frozen=True, slots=True)
class Key:
    """A secret to sign with. A signature names its key, unless the key has no name."""

    name: bytes
    secret: bytes = field(repr=False)

    def sign(self, body: bytes) -> bytes:
        digest = hmac.new(self.secret, body, hashlib.sha256).hexdigest().encode()
        return self.name + b":" + digest if self.name else digest


@lru_cache(maxsize=8)
def keys(text: bytes) -> tuple[Key, ...]:
    """Read `secret`, `id:secret`, or several of these with commas: the first key signs, all are accepted."""
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
    """The bytes of a message. Raises `PayloadRefusedError` if a command is too large for a message."""
    content: dict[str, Any] = {
        "v": VERSION,
        "domain": envelope.domain,
        "loads": [list(load) for load in envelope.loads],
    }
    if envelope.command is not None:
        content |= envelope.command
    body = encode(content, WIDEST).encode()
    if key is None:
        return body
    return body[:-1] + SIGNATURE + keys(key)[0].sign(body) + b'"}'


def read(body: bytes, key: bytes | None = None, domain: str | None = None) -> Envelope:
    """The envelope in these bytes. With a key, the bytes must be signed with it.

    A message from the queue of a `domain` is believed only about that domain.
    """
    if len(body) > MOST_BYTES:
        raise UnreadableMessageError(f"found {len(body)} bytes")
    if key is not None and not _is_signed(body, keys(key)):
        raise UnreadableMessageError("its signature is missing or wrong")
    try:
        content = decode(body.decode())
    except Exception as error:  # whatever strangers write, only their message is refused
        raise UnreadableMessageError(f"found no JSON: {type(error).__name__}") from None
    if not isinstance(content, dict) or content.get("v") != VERSION:
        raise UnreadableMessageError(f"wanted an object of version {VERSION}")
    found, loads = content.get("domain"), content.get("loads")
    if not isinstance(found, str) or not isinstance(loads, list) or not 0 < len(loads) <= MOST_RANGES:
        raise UnreadableMessageError("wanted a domain, and loads from 1 to 1,000")
    if domain not in (None, found):
        raise UnreadableMessageError("it is about another domain than its queue")
    return Envelope(found, tuple(map(_load, loads)))


def _load(found: object) -> Load:
    if isinstance(found, list) and len(found) == 2 and all(type(id) is int for id in found):
        lo, hi = found
        if 0 <= lo <= hi < 2**63 and number_of(lo) == number_of(hi):
            return Load(lo, hi)
    raise UnreadableMessageError("wanted loads as pairs of a first and a last id")


def _is_signed(body: bytes, keys: Sequence[Key]) -> bool:
    """Whether one of these keys has signed exactly these bytes. Others check it without writing JSON as we do."""
    before, found, rest = body.rpartition(SIGNATURE)
    signature = rest.removesuffix(b'"}')
    signed = before + b"}"
    name = signature.rpartition(b":")[0]
    return bool(found) and any(
        hmac.compare_digest(signature, key.sign(signed)) for key in keys if hmac.compare_digest(key.name, name)
    )


def envelopes(loads: Sequence[tuple[Load, str]], size: int) -> Iterator[Envelope]:
    """Loads and their domains as envelopes of up to `size` commands; those of a domain go together."""
    by_domain: dict[str, list[Load]] = {}
    for load, domain in loads:
        by_domain.setdefault(domain, []).append(load)
    for domain, its_loads in by_domain.items():
        gathered: list[Load] = []
        room = size
        for load in sorted(its_loads):
            rest: Load | None = load
            while rest is not None:
                part, rest = rest.split(room)
                gathered.append(part)
                room -= part.size
                if not room or len(gathered) == MOST_RANGES:
                    yield Envelope(domain, tuple(gathered))
                    gathered, room = [], size
        if gathered:
            yield Envelope(domain, tuple(gathered))


def of_one(
    id: int,
    domain: str,
    command_id: UUID,
    command_type: str,
    data: str | None,
    batch_id: UUID | None,
    task_key: str | None,
    job_id: str | None,
    stage: str | None,
) -> Envelope:
    """One command with all a foreign reader needs, under the names that brokers' tasks usually have.

    `data` and `stage` are JSON.
    """
    command = {
        "task_id": str(command_id),
        "parent_job_id": job_id,
        "task_type": command_type,
        "parameters": None if data is None else decode(data),
        "stage": None if stage is None else decode(stage),
        "batch_id": batch_id and str(batch_id),
        "task_key": task_key,
    }
    return Envelope(domain, (Load(id, id),), command)


def check_settings(settings: Settings) -> None:
    """Refuse settings of queues and messages that cannot work, before anything is sent."""
    prefix, size = settings.queue_prefix, settings.envelope_size
    if not isinstance(prefix, str) or not QUEUE_PREFIX.fullmatch(prefix):
        raise TransportMisconfiguredError(
            f"queue_prefix must be a letter, then up to 99 letters, digits, '_', '.' or '-', found {prefix!r:.80}."
        )
    _check_queues(settings)
    try:
        require(whole(1, MOST_IN_ENVELOPE), envelope_size=size)
        require(FLAG, message_per_command=settings.message_per_command)
    except ValueError as error:
        raise TransportMisconfiguredError(str(error)) from None
    key: object = settings.message_key
    if key is not None and not (isinstance(key, str) and key):
        # What it is instead is not shown: it may be the secret, as bytes.
        raise TransportMisconfiguredError("message_key must be a text that is not empty, or None to sign nothing.")
    if key is not None:
        try:
            keys(key.encode())
        except ValueError as error:
            raise TransportMisconfiguredError(f"message_key cannot be used. {error}") from None


def _check_queues(settings: Settings) -> None:
    """A queue serves one domain: a worker puts aside messages that are about another one."""
    queues: object = settings.queues
    if not isinstance(queues, Mapping):
        raise TransportMisconfiguredError(
            f'queues must be a dict of domains and the names of their queues, as in {{"tiles": "sb-tasks"}}, '
            f"found {queues!r:.80}."
        )
    domain_of: dict[str, str] = {}
    for domain, queue in queues.items():
        if wrong_name(domain, "queues", settings.limits):
            raise TransportMisconfiguredError(f"queues must have domains as its keys, found {domain!r:.80}.")
        if not isinstance(queue, str) or not EXISTING_QUEUE.fullmatch(queue):
            raise TransportMisconfiguredError(
                f"The queue of {domain!r} must be a letter or digit, then up to 239 letters, digits, '_', '.' or '-', "
                f"found {queue!r:.80}."
            )
        other = queue.removeprefix(f"{settings.queue_prefix}.")
        other = domain_of.setdefault(queue, domain if other == queue else other)
        if other != domain:
            raise TransportMisconfiguredError(
                f"The queue {queue!r} is given to two domains, {other!r} and {domain!r}. Give each one of its own: "
                "a worker of one domain puts aside messages that are about another."
            )
