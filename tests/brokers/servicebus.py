"""A look-alike of Azure Service Bus for the tests: AMQP 1.0 as far as the SDK speaks it with queues.

It knows tokens ($cbs), transfers that hold many messages, locks that expire and are renewed, dead letters, duplicate
detection and looking into a queue; and it fails on command. It has no sessions, topics, schedules or TLS, and keeps its
messages in memory: a restart only cuts its connections. It proves an adapter against the SDK, not against the cloud.

A process of its own. Its first line on standard output is the port; then it answers each line of JSON on standard
input, `["create", {"queue": "busload.payments"}]`, with a line of JSON, and ends when standard input ends.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
import sys
import threading
import time
import urllib.parse
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from proton import UNDESCRIBED, Array, Condition, Connection, Data, Endpoint, Link, Message, int32, symbol, timestamp
from proton import Delivery as Transfer
from proton.handlers import Handshaker
from proton.reactor import ApplicationEvent, Container, EventInjector, Handler

KEY_NAME, KEY = "RootManageSharedAccessKey", "bG9vay1hbGlrZS1rZXk="
MAX_MESSAGE_SIZE = 262_144
PEEKED_AT_ONCE = 100
LOOK_EVERY = 0.05
"""Seconds between two looks for locks that have expired, while there are locks."""

DATA = 0x75
"""The section of an AMQP message that holds its body."""

BUSY = "The request was terminated because the entity is being throttled. Please wait 4 seconds and try again."
NO_BATCHES = (
    "Message to a partitioned entity with duplicate detection enabled must have either PartitionKey or MessageId."
)


@dataclass(eq=False, slots=True)
class Stored:
    """A message in a queue, as it was sent."""

    raw: bytes
    number: int
    enqueued_at: float
    failed_deliveries: int = 0


@dataclass(slots=True)
class Lock:
    stored: Stored
    transfer: Transfer
    until: float


@dataclass(eq=False)
class Queue:
    name: str
    lock_for: float = 30.0
    max_deliveries: int = 1_000_000
    drops_duplicates: bool = False
    refuses_batches: bool = False
    faults: deque[str] = field(default_factory=deque)
    ready: deque[Stored] = field(default_factory=deque)
    dead: list[Stored] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    locks: dict[bytes, Lock] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)
    consumers: list[Link] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    last_number: int = 0

    def store(self, raw: bytes) -> None:
        if self.drops_duplicates:
            message_id = decoded(raw).id
            if message_id in self.seen:
                return
            self.seen.add(message_id)
        self.last_number += 1
        self.counts["messages"] += 1
        self.ready.append(Stored(raw, self.last_number, time.time()))

    def unlock(self, tag: bytes, *, failed: bool) -> None:
        """Take a message back; one that has failed too often is put aside."""
        stored = self.locks.pop(tag).stored
        stored.failed_deliveries += failed
        if stored.failed_deliveries >= self.max_deliveries:
            self.bury(stored, "MaxDeliveryCountExceeded")
        else:
            self.ready.appendleft(stored)

    def bury(self, stored: Stored, reason: str) -> None:
        self.dead.append(stored)
        self.reasons.append(reason)

    def unlock_expired(self) -> None:
        now = time.time()
        for tag in [tag for tag, lock in self.locks.items() if lock.until < now]:
            self.counts["expired"] += 1
            self.unlock(tag, failed=True)


class Broker(Handler):  # type: ignore[misc]
    """Answers what the SDK asks, and what the tests command."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers = [Handshaker()]
        self.queues: dict[str, Queue] = {}
        self.hidden: set[str] = set()
        self.connections: set[Connection] = set()
        self.commands = EventInjector()
        self.looks_again = False

    # -- its life -------------------------------------------------------------------------------------------------

    def on_reactor_init(self, event: Any) -> None:
        self.container = event.container
        acceptor = self.container.listen("127.0.0.1:0")
        self.container.selectable(self.commands)
        say(acceptor._selectable._delegate.getsockname()[1])
        threading.Thread(target=self._read_commands, daemon=True).start()

    def on_timer_task(self, event: Any) -> None:
        self.looks_again = False
        for queue in self.queues.values():
            queue.unlock_expired()
            self._deliver(queue)
        if any(queue.locks for queue in self.queues.values()):
            self._look_again()

    def _look_again(self) -> None:
        """Not while nothing is locked: for most of a run it would wake up in vain, twenty times a second."""
        if not self.looks_again:
            self.looks_again = True
            self.container.schedule(LOOK_EVERY, self)

    def on_connection_remote_open(self, event: Any) -> None:
        self.connections.add(event.connection)

    def on_transport_closed(self, event: Any) -> None:
        self.connections.discard(event.connection)

    # -- commands of the tests ------------------------------------------------------------------------------------

    def _read_commands(self) -> None:
        """In a thread of its own; what it reads is done by the broker's thread."""
        for line in sys.stdin:
            self.commands.trigger(ApplicationEvent("command", subject=json.loads(line)))
        self.commands.trigger(ApplicationEvent("command", subject=["stop", {}]))

    def on_command(self, event: Any) -> None:
        verb, arguments = event.subject
        say(getattr(self, f"_command_{verb}")(**arguments))

    def _command_create(self, queue: str, **settings: Any) -> None:
        self.queues.setdefault(queue.lower(), Queue(queue.lower(), **settings))

    def _command_hide(self, queue: str) -> None:
        """A token for it is answered with 404, as for one that is not there."""
        self.hidden.add(queue.lower())

    def _command_fail(self, queue: str, faults: list[str]) -> None:
        """One for each transfer to come: none, busy, drop-before, drop-after, silent, full."""
        self.queues[queue.lower()].faults.extend(faults)

    def _command_look(self, queue: str) -> dict[str, Any]:
        found = self.queues[queue.lower()]
        return {
            **found.counts,
            "ready": len(found.ready),
            "locked": len(found.locks),
            "deliveries": [lock.stored.failed_deliveries + 1 for lock in found.locks.values()],
            "dead": [base64.b64encode(body_of(each)).decode() for each in found.dead],
            "reasons": found.reasons,
        }

    def _command_cut(self) -> None:
        for connection in list(self.connections):
            cut(connection)

    def _command_unlock(self) -> None:
        """Those of every queue have expired; links that lead to it are given its messages again."""
        for queue in self.queues.values():
            for lock in queue.locks.values():
                lock.until = 0.0
            queue.unlock_expired()
            self._deliver(queue)

    def _command_stop(self) -> None:
        self.container.stop()

    # -- links ----------------------------------------------------------------------------------------------------

    def on_link_remote_open(self, event: Any) -> None:
        link = event.link
        queue = self.queues.get(node_of(link).removesuffix("/$management"))
        if queue is None and not node_of(link).endswith("$cbs"):
            link.open()
            link.condition = Condition("amqp:not-found", f"The messaging entity '{node_of(link)}' could not be found.")
            link.close()
            return
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        link.snd_settle_mode, link.rcv_settle_mode = link.remote_snd_settle_mode, link.remote_rcv_settle_mode
        if link.is_receiver:
            link.max_message_size = MAX_MESSAGE_SIZE
        link.open()
        if link.is_receiver:
            link.flow(500)
        elif queue is not None and not is_service(link):
            queue.consumers.append(link)

    def on_link_flow(self, event: Any) -> None:
        queue = self.queues.get(node_of(event.link))
        if queue and event.link.is_sender:
            self._deliver(queue)

    def on_link_remote_detach(self, event: Any) -> None:
        event.link.detach()

    # -- messages that come in ------------------------------------------------------------------------------------

    def on_delivery(self, event: Any) -> None:
        link, transfer = event.link, event.delivery
        if not is_open(link):
            return
        if link.is_receiver:
            if transfer.readable and not transfer.partial:
                self._take(link, transfer)
        elif transfer.updated:
            self._settle(link, transfer)

    def _take(self, link: Link, transfer: Transfer) -> None:
        raw = link.recv(transfer.pending)
        link.advance()
        link.flow(1)
        queue = self.queues.get(node_of(link))
        if is_service(link):
            accept(transfer)
            self._answer(link, raw)
        elif queue is not None:
            self._store(queue, link, transfer, raw)
            self._deliver(queue)

    def _store(self, queue: Queue, link: Link, transfer: Transfer, raw: bytes) -> None:
        messages = batched(raw)
        fault = queue.faults.popleft() if queue.faults else "none"
        queue.counts[fault] += 1
        queue.counts["transfers"] += 1
        if fault == "busy":
            refuse(transfer, "com.microsoft:server-busy", BUSY)
        elif fault == "full":
            refuse(transfer, "amqp:resource-limit-exceeded", "The maximum entity size has been reached.")
        elif fault == "drop-before":
            cut(link.connection)
        elif queue.refuses_batches and messages:
            refuse(transfer, "amqp:not-allowed", NO_BATCHES)
        else:
            for message in messages or [raw]:
                queue.store(message)
            if fault == "drop-after":
                cut(link.connection)
            elif fault != "silent":
                accept(transfer)

    # -- messages that go out -------------------------------------------------------------------------------------

    def _deliver(self, queue: Queue) -> None:
        queue.consumers = [link for link in queue.consumers if is_open(link)]
        for link in queue.consumers:
            while link.credit > 0 and queue.ready:
                self._lend(queue, link, queue.ready.popleft())
            if link.drain_mode:
                link.drained()

    def _lend(self, queue: Queue, link: Link, stored: Stored) -> None:
        tag, until = uuid.uuid4().bytes, time.time() + queue.lock_for
        transfer = link.delivery(tag)
        link.send(outgoing(stored, locked_until=until).encode())
        link.advance()
        queue.locks[tag] = Lock(stored, transfer, until)
        self._look_again()

    def _settle(self, link: Link, transfer: Transfer) -> None:
        queue = self.queues.get(node_of(link))
        if queue is None:
            transfer.settle()
            return
        tag = next((tag for tag, lock in queue.locks.items() if lock.transfer == transfer), None)
        if tag is None:
            queue.counts["lock lost"] += 1
            refuse(transfer, "com.microsoft:message-lock-lost", "The lock supplied is invalid.")
            return
        outcome = transfer.remote_state
        if outcome == Transfer.ACCEPTED:
            del queue.locks[tag]
            queue.counts["completed"] += 1
        elif outcome == Transfer.REJECTED:
            queue.bury(queue.locks.pop(tag).stored, reason_of(transfer))
        else:
            queue.unlock(tag, failed=outcome == Transfer.MODIFIED)
        transfer.update(outcome)
        transfer.settle()
        self._deliver(queue)

    # -- requests to $cbs and $management -------------------------------------------------------------------------

    def _answer(self, link: Link, raw: bytes) -> None:
        request, node = decoded(raw), node_of(link)
        if node.endswith("$cbs"):
            answer = self._checked(request)
        else:
            queue = self.queues[node.removesuffix("/$management")]
            operation = (request.properties or {})["operation"]
            if operation == "com.microsoft:renew-lock":
                answer = renewed(queue, request)
            elif operation == "com.microsoft:peek-message":
                answer = peeked(queue, request)
            else:
                answer = response(request, 501, f"not implemented: {operation}")
        for each in links_of(link.connection):
            if each.is_sender and node_of(each) == node and is_open(each):
                each.delivery(uuid.uuid4().bytes)
                each.send(answer.encode())
                each.advance()
                return

    def _checked(self, request: Message) -> Message:
        if not is_signed(str(request.body)):
            return response(request, 401, "InvalidSignature")
        if str((request.properties or {})["name"]).rpartition("/")[2].lower() in self.hidden:
            return response(request, 404, "The messaging entity could not be found.")
        return response(request, 202, "Accepted")


def renewed(queue: Queue, request: Message) -> Message:
    queue.unlock_expired()
    tags = [token.bytes_le for token in request.body["lock-tokens"].elements]
    if not all(tag in queue.locks for tag in tags):
        queue.counts["lock lost"] += 1
        return response(request, 410, "The lock supplied is invalid.", error="com.microsoft:message-lock-lost")
    until = time.time() + queue.lock_for
    for tag in tags:
        queue.locks[tag].until = until
    queue.counts["renewed"] += len(tags)
    expirations = Array(UNDESCRIBED, Data.TIMESTAMP, *[timestamp(int(until * 1000))] * len(tags))
    return response(request, 200, "OK", body={"expirations": expirations})


def peeked(queue: Queue, request: Message) -> Message:
    held = sorted([*queue.ready, *(lock.stored for lock in queue.locks.values())], key=lambda each: each.number)
    wanted = [each for each in held if each.number >= request.body["from-sequence-number"]]
    most = min(request.body["message-count"], PEEKED_AT_ONCE)
    found = [{"message": outgoing(each).encode()} for each in wanted[:most]]
    return response(request, 200 if found else 204, "OK", body={"messages": found} if found else None)


def response(request: Message, code: int, text: str, *, body: Any = None, error: str | None = None) -> Message:
    answer = Message(body=body)
    answer.correlation_id = request.id
    # $cbs and $management spell them differently.
    answer.properties = {
        "status-code": int32(code),
        "statusCode": int32(code),
        "status-description": text,
        "statusDescription": text,
        **({"errorCondition": symbol(error)} if error else {}),
    }
    return answer


def is_signed(token: str) -> bool:
    """Whether a shared access signature was made with our key."""
    fields = dict(urllib.parse.parse_qsl(token.removeprefix("SharedAccessSignature ")))
    signed = "\n".join([urllib.parse.quote_plus(fields["sr"]), fields["se"]]).encode()
    right = base64.b64encode(hmac.digest(KEY.encode(), signed, hashlib.sha256)).decode()
    return fields["skn"] == KEY_NAME and hmac.compare_digest(fields["sig"], right)


def outgoing(stored: Stored, *, locked_until: float | None = None) -> Message:
    message = decoded(stored.raw)
    message.delivery_count = stored.failed_deliveries
    message.annotations = {
        **(message.annotations or {}),
        symbol("x-opt-sequence-number"): stored.number,
        symbol("x-opt-enqueued-time"): timestamp(int(stored.enqueued_at * 1000)),
        **({symbol("x-opt-locked-until"): timestamp(int(locked_until * 1000))} if locked_until else {}),
    }
    return message


def batched(raw: bytes) -> list[bytes]:
    """The messages inside of a message: it repeats the head of the first, and has each in a data section."""
    found = [content for kind, content in sections(raw) if kind == DATA]
    return found if all(content[:2] == b"\x00\x53" and 0x70 <= content[2] <= 0x78 for content in found) else []


def sections(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of an encoded message: a descriptor, how the length is written, the length, the content."""
    at = 0
    while at < len(raw):
        kind, constructor = raw[at + 2], raw[at + 3]
        if constructor == 0x45:  # an empty list
            length, begin = 0, at + 4
        elif constructor in (0xA0, 0xC0, 0xC1):
            length, begin = raw[at + 4], at + 5
        else:
            length, begin = struct.unpack_from(">I", raw, at + 4)[0], at + 8
        at = begin + length
        yield kind, bytes(raw[begin:at])


def body_of(stored: Stored) -> bytes:
    message = decoded(stored.raw)  # must outlive the view of its body
    return bytes(message.body)


def decoded(raw: bytes) -> Message:
    message = Message()
    message.decode(raw)
    return message


def accept(transfer: Transfer) -> None:
    transfer.update(Transfer.ACCEPTED)
    transfer.settle()


def refuse(transfer: Transfer, condition: str, description: str) -> None:
    # The SDK falls over a refusal without a third part.
    transfer.local.condition = Condition(condition, description, {symbol("look-alike"): True})
    transfer.update(Transfer.REJECTED)
    transfer.settle()


def reason_of(transfer: Transfer) -> str:
    condition = transfer.remote.condition
    return str((condition.info or {}).get("DeadLetterReason", "")) if condition else ""


def cut(connection: Connection) -> None:
    connection.transport.close_tail()
    connection.transport.close_head()


def links_of(connection: Connection) -> Iterator[Link]:
    link = connection.link_head(0)
    while link is not None:
        yield link
        link = link.next(0)


def node_of(link: Link) -> str:
    """What a link leads to: `amqps://host/busload.payments` and `busload.payments` are the same."""
    address = (link.remote_target if link.is_receiver else link.remote_source).address or ""
    return str(address.partition("://")[2].partition("/")[2] if "://" in address else address).lower()


def is_service(link: Link) -> bool:
    return node_of(link).endswith(("$cbs", "$management"))


def is_open(link: Link) -> bool:
    return bool(link.state & Endpoint.LOCAL_ACTIVE and link.state & Endpoint.REMOTE_ACTIVE)


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    Container(Broker()).run()
