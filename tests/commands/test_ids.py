"""Ids that sort by time."""

from __future__ import annotations

import copy
import pickle
import time
from uuid import UUID

import pytest

from busload.commands.ids import execution_id, new_id, new_ids


def test_new_ids_are_of_version_7_distinct_and_ascending() -> None:
    ids = new_ids(5000)
    assert len(set(ids)) == 5000
    assert ids == sorted(ids)
    assert {(id.version, id.variant) for id in ids} == {(7, "specified in RFC 4122")}
    assert new_ids(0) == []


def test_a_new_id_is_a_uuid_like_any_other() -> None:
    """It is made in a shorter way"""
    made = new_id()
    twin = UUID(str(made))
    assert (made, hash(made), made.is_safe, repr(made)) == (twin, hash(twin), twin.is_safe, repr(twin))
    assert pickle.loads(pickle.dumps(made)) == twin
    assert copy.deepcopy(made) == twin


def test_counting_up_never_reaches_the_bits_that_say_version_and_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even from the highest start, with more ids than anybody makes"""
    monkeypatch.setattr("os.urandom", lambda size: b"\xff" * size)
    highest = new_id()
    assert UUID(int=highest.int + 2**40).version == highest.version == 7
    assert UUID(int=highest.int + 2**40).variant == highest.variant


def test_an_id_carries_the_moment_it_was_made() -> None:
    before = time.time_ns() // 1_000_000
    made = new_id().int >> 80
    assert before <= made <= time.time_ns() // 1_000_000


def test_ids_of_two_calls_do_not_meet() -> None:
    assert len({id for _ in range(200) for id in new_ids(50)}) == 10_000


def test_an_execution_keeps_its_lease_and_the_commands_position() -> None:
    """The lease is found again by clearing the low bits"""
    lease = UUID("d0d0d0d0-0000-4000-8000-abcdefabc000")
    assert execution_id(lease, 7 * 1024 + 5) == UUID("d0d0d0d0-0000-4000-8000-abcdefabc005")
    assert execution_id(lease, 1023) == UUID("d0d0d0d0-0000-4000-8000-abcdefabc3ff")
