"""Values for unit tests that need no database."""

from __future__ import annotations

import pytest

from busload.testing import (
    make_audit_event,
    make_batch_metadata,
    make_chunk,
    make_command,
    make_command_metadata,
    make_group,
    make_troubleshooting_item,
)


def test_values_have_what_is_given_and_sensible_rest() -> None:
    command = make_command("Debit", {"account": 7}, task_key="a")
    assert (command.command_type, command.data, command.task_key, command.headers) == (
        "Debit",
        {"account": 7},
        "a",
        None,
    )
    assert command.correlation_id == command.command_id != make_command().command_id
    told = make_command_metadata("Debit", status="COMPLETED", result=3)
    assert (told.status, told.result, told.run_at, told.publish_attempts) == ("COMPLETED", 3, None, 0)
    assert make_troubleshooting_item(reason="EXHAUSTED").reason == "EXHAUSTED"
    assert make_audit_event("COMPLETED", attempt=1).attempt == 1


def test_a_batch_is_as_its_counters_say() -> None:
    done = make_batch_metadata(5)
    assert (done.status, done.completed_count, done.remaining_count) == ("COMPLETED", 5, 0)
    failed = make_batch_metadata(5, failed_count=2)
    assert (failed.status, failed.completed_count) == ("COMPLETED_WITH_FAILURES", 3)
    open_one = make_batch_metadata(5, completed_count=1)
    assert (open_one.status, open_one.completed_at) == ("IN_PROGRESS", None)


def test_chunks_and_groups_are_judged_as_real_ones() -> None:
    chunk = make_chunk([1, 2])
    chunk.succeed(chunk[0])
    chunk.fail(chunk[1], "bad")
    assert [item.data for item in chunk.judgement().done] == [1]
    assert [item.data for item in make_group([3, 4], buffer="events")] == [3, 4]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match=r"BatchMetadata has no field 'total'. Its fields are batch_id"):
        make_batch_metadata(total=3)
