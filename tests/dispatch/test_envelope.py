"""What a message says, and what is not believed."""

from __future__ import annotations

import hashlib
import hmac
import json
from uuid import UUID

import pytest

from busload.commands.load import Load
from busload.dispatch import envelope as message
from busload.dispatch.envelope import Envelope, UnreadableMessageError

KEY = b"a secret"
ENVELOPE = Envelope("payments", (Load(1024, 1123), Load(4096, 4096)))


@pytest.mark.parametrize("key", [None, KEY])
def test_what_was_written_is_read(key: bytes | None) -> None:
    assert message.read(message.write(ENVELOPE, key), key) == ENVELOPE
    assert ENVELOPE.commands == 101


def test_a_signed_message_can_be_read_by_one_without_the_key() -> None:
    """So that a key can be rolled out: first to those who write, then to those who read."""
    assert message.read(message.write(ENVELOPE, KEY)) == ENVELOPE


def test_a_message_carries_ids_and_no_data() -> None:
    """Its size depends on the number of loads only."""
    assert json.loads(message.write(ENVELOPE)) == {
        "v": 1,
        "domain": "payments",
        "loads": [[1024, 1123], [4096, 4096]],
    }


@pytest.mark.parametrize(
    "forged",
    [
        message.write(ENVELOPE),
        message.write(ENVELOPE, b"another secret"),
        message.write(ENVELOPE, KEY).replace(b"1123", b"1124"),
        message.write(ENVELOPE, KEY).replace(b"payments", b"salaries"),
        message.write(ENVELOPE, KEY).replace(b'"signature":"', b'"signature":1,"other":"'),
        message.write(ENVELOPE, KEY).replace(b'"v":1', b'"v":1,"w":2'),
    ],
)
def test_a_forged_message_is_not_believed(forged: bytes) -> None:
    with pytest.raises(UnreadableMessageError, match="signature"):
        message.read(forged, KEY)


def test_a_key_can_be_replaced_while_messages_are_under_way() -> None:
    """All that are named are accepted, the first one signs."""
    old, both, turned, new = b"2025:first", b"2025:first,2026:second", b"2026:second, 2025:first", b"2026:second"
    assert json.loads(message.write(ENVELOPE, turned))["signature"].startswith("2026:")
    for writes, reads, believed in [
        (old, both, True),
        (both, old, True),
        (turned, both, True),
        (old, turned, True),
        (new, turned, True),
        (old, new, False),
        (turned, old, False),
        (b"2026:first", both, False),  # the secret of another id
        (b"first", old, False),
        (b"first", b"2026:second,first", True),
        (b"second", b"first,second", True),
    ]:
        body = message.write(ENVELOPE, writes)
        if believed:
            assert message.read(body, reads) == ENVELOPE
        else:
            with pytest.raises(UnreadableMessageError, match="signature"):
                message.read(body, reads)


@pytest.mark.parametrize(("key", "name"), [(b"a secret", ""), (b"k-1:a secret", "k-1:"), (b"k-1:a:b", "k-1:")])
def test_a_signature_can_be_checked_without_spelling_json_as_we_do(key: bytes, name: str) -> None:
    """As the documentation says it, with nothing of ours, also if the data looks like a signature."""
    data = {"x": 1e16, "ü": '\u2028,"signature":"abc"}', "signature": "mine"}
    one = message.of_one(
        1024, "payments", UUID(int=1), "Debit", json.dumps(data), batch_id=None, task_key=None, job_id=None, stage=None
    )
    body = message.write(one, key)
    assert json.loads(body)["parameters"] == data
    signed, _, rest = body.rpartition(b',"signature":"')
    secret = key.removeprefix(name.encode())
    assert rest.decode() == name + hmac.new(secret, signed + b"}", hashlib.sha256).hexdigest() + '"}'
    assert message.read(body, key).domain == "payments"


def test_secrets_are_in_no_representation() -> None:
    assert "hush" not in repr(message.keys(b"2025:hush"))


@pytest.mark.parametrize("key", [b"", b" ", b",", b"a:", b":a", b"a,", b"two words:a", b"\xc3\xbc:a"])
def test_a_key_without_a_secret_is_refused(key: bytes) -> None:
    """Otherwise everybody could sign."""
    for use in (lambda: message.write(ENVELOPE, key), lambda: message.read(message.write(ENVELOPE), key)):
        with pytest.raises(ValueError, match="unusable message key"):
            use()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"1" * 5000,
        b'{"v":1',
        b"[" * 100_000,
        b'{"v":2,"domain":"payments","loads":[[1,1]]}',
        b'{"v":1,"loads":[[1,1]]}',
        b'{"v":1,"domain":7,"loads":[[1,1]]}',
        b'{"v":1,"domain":"payments"}',
        b'{"v":1,"domain":"payments","loads":[]}',
        b'{"v":1,"domain":"payments","loads":{"1":1}}',
        b'{"v":1,"domain":"payments","loads":[1]}',
        b'{"v":1,"domain":"payments","loads":[[1]]}',
        b'{"v":1,"domain":"payments","loads":[[1,2,3]]}',
        b'{"v":1,"domain":"payments","loads":[["1","2"]]}',
        b'{"v":1,"domain":"payments","loads":[[1.0,2.0]]}',
        b'{"v":1,"domain":"payments","loads":[[true,true]]}',
        b'{"v":1,"domain":"payments","loads":[[2,1]]}',
        b'{"v":1,"domain":"payments","loads":[[-1,1]]}',
        b'{"v":1,"domain":"payments","loads":[[1,1025]]}',
        b'{"v":1,"domain":"payments","loads":[[9223372036854775808,9223372036854775808]]}',
        json.dumps({"v": 1, "domain": "payments", "loads": [[1, 1]] * 1001}).encode(),
        b" " * (message.MOST_BYTES + 1),
    ],
    ids=lambda body: body[:60].decode(errors="replace"),
)
@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
def test_what_is_not_a_message_is_refused_and_harms_nobody(body: bytes, key: bytes | None) -> None:
    """Malformed and oversize ones."""
    with pytest.raises(UnreadableMessageError):
        message.read(body, key)


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 5000])
def test_envelopes_hold_every_command_once_and_no_more_than_their_size(size: int) -> None:
    loads = [(Load.of(n, length), "abc"[n % 3]) for n, length in enumerate([1, 1000, 13, 100, 999, 2, 7])]

    envelopes = list(message.envelopes(loads, size))

    told = [(e.domain, id) for e in envelopes for load in e.loads for id in load.ids]
    assert sorted(told) == sorted((domain, id) for load, domain in loads for id in load.ids)
    assert all(0 < envelope.commands <= size for envelope in envelopes)
    assert all(lo >> 10 == hi >> 10 for envelope in envelopes for lo, hi in envelope.loads)
    domains = {domain: sum(load.size for load, d in loads if d == domain) for domain in "abc"}
    assert len(envelopes) == sum(-(-commands // size) for commands in domains.values())


def test_an_envelope_of_many_single_commands_can_be_read() -> None:
    singles = [(Load.of(n, 1), "payments") for n in range(2500)]
    envelopes = list(message.envelopes(singles, 100_000))
    assert [envelope.commands for envelope in envelopes] == [1000, 1000, 500]
    assert all(message.read(message.write(envelope)) == envelope for envelope in envelopes)


def test_a_message_about_one_command_tells_foreign_readers_all_they_need() -> None:
    """A worker of ours reads from it what it needs."""
    task, batch, job = UUID(int=1), UUID(int=2), UUID(int=3)
    one = message.of_one(
        1024, "payments", task, "Debit", '{"n": 1}', batch_id=batch, task_key="t", job_id=str(job), stage='"first"'
    )
    body = message.write(one, KEY)
    said = json.loads(body)
    assert {name: said[name] for name in ("task_id", "parent_job_id", "task_type", "parameters", "stage")} == {
        "task_id": str(task),
        "parent_job_id": str(job),
        "task_type": "Debit",
        "parameters": {"n": 1},
        "stage": "first",
    }
    assert (said["batch_id"], said["task_key"]) == (str(batch), "t")
    assert message.read(body, KEY) == Envelope("payments", (Load(1024, 1024),))


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(
    "forged",
    [
        b'{"v":1,"x":"\\u0000","signature":"00"}',
        b'{"v":1,"domain":"payments","loads":' + b"[" * 100_000,
        b'{"v":1,"domain":"payments","x":' + b"[" * 70 + b"]" * 70 + b',"signature":"00"}',
        b'{"v":1,"domain":"payments","loads":[[' + b"9" * 5000 + b',1]],"signature":"00"}',
        b'{"v":1,"x":"' + b"x" * 2**21 + b'","signature":"00"}',
    ],
    ids=["nul", "unclosed", "deep", "digits", "large"],
)
def test_whatever_strangers_write_is_refused_and_nothing_worse(forged: bytes, key: bytes | None) -> None:
    """Whatever else is raised would end receiving for the domain."""
    with pytest.raises(UnreadableMessageError):
        message.read(forged, key)


def test_a_payload_at_its_limits_fits_into_a_message() -> None:
    deep: list[object] = []
    for _ in range(63):
        deep = [deep]
    envelope = Envelope("payments", (Load(1024, 1024),), {"parameters": [deep, "x" * (1024 * 1024)]})
    assert message.read(message.write(envelope, KEY), KEY).loads == (Load(1024, 1024),)
