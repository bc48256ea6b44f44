"""Where a command goes once its handler has returned or raised: decided by values alone."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from busload.commands.execution import Failed, Lease, Leased, Outcome, Stopped, Succeeded, Unreadable, decide, describe
from busload.commands.load import Load
from busload.commands.payload import UndecodableError
from busload.commands.retry import RetryPolicy
from busload.errors import BusinessRuleError, PermanentCommandError, TransientCommandError
from busload.settings import PayloadLimits


def leased(*, attempt: int = 1, forgiven: int = 0, max_attempts: int | None = None) -> Leased:
    lease = Lease(UUID(int=1 << 64), Load(2048, 2050), "payments", None, 0, attempt, forgiven, 0, datetime.now(UTC))
    return Leased(lease, 2049, UUID(int=9), "Debit", "null", max_attempts=max_attempts)


def decided(outcome: Outcome, **state: Any) -> tuple[str, str | None, float | None]:
    transition = decide(leased(**state), outcome, RetryPolicy(), PayloadLimits())
    return transition.outcome, transition.reason, transition.delay


@pytest.mark.parametrize(
    ("outcome", "state", "expected"),
    [
        (Succeeded(), {}, ("COMPLETED", None, None)),
        (Succeeded({"a": 1}), {}, ("COMPLETED", None, None)),
        (Succeeded("a\0"), {}, ("TROUBLESHOOTING", "RESULT_INVALID", None)),
        (Succeeded(object()), {}, ("COMPLETED", "result_not_kept", None)),
        (Failed(TransientCommandError()), {}, ("FAILED_ATTEMPT", None, 10.0)),
        (Failed(TransientCommandError(after=5)), {}, ("FAILED_ATTEMPT", None, 5.0)),
        (Failed(TransientCommandError(after=timedelta(0))), {"attempt": 2}, ("FAILED_ATTEMPT", None, 0.0)),
        (Failed(TransientCommandError(after=5)), {"attempt": 3}, ("TROUBLESHOOTING", "EXHAUSTED", None)),
        (Failed(ValueError()), {"attempt": 2}, ("FAILED_ATTEMPT", None, 60.0)),
        (Failed(ValueError()), {"attempt": 3}, ("TROUBLESHOOTING", "EXHAUSTED", None)),
        (Failed(KeyboardInterrupt()), {}, ("FAILED_ATTEMPT", None, 10.0)),
        (Failed(ValueError()), {"max_attempts": 1}, ("TROUBLESHOOTING", "EXHAUSTED", None)),
        (Failed(ValueError()), {"attempt": 3, "max_attempts": 4}, ("FAILED_ATTEMPT", None, 300.0)),
        (Failed(ValueError()), {"attempt": 4, "forgiven": 3}, ("FAILED_ATTEMPT", None, 10.0)),
        (Failed(ValueError()), {"attempt": 6, "forgiven": 3}, ("TROUBLESHOOTING", "EXHAUSTED", None)),
        (Failed(PermanentCommandError()), {}, ("TROUBLESHOOTING", "PERMANENT", None)),
        (Failed(PermanentCommandError()), {"attempt": 3}, ("TROUBLESHOOTING", "PERMANENT", None)),
        (Failed(BusinessRuleError()), {}, ("FAILED", None, None)),
        (Failed(BusinessRuleError()), {"attempt": 3}, ("FAILED", None, None)),
        (Stopped(ValueError()), {"attempt": 3}, ("CANCELED", None, None)),
        (Stopped(), {}, ("CANCELED", None, None)),
        (Unreadable(UndecodableError("no")), {}, ("TROUBLESHOOTING", "UNDECODABLE", None)),
    ],
)
def test_an_outcome_decides_the_route(outcome: Outcome, state: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert decided(outcome, **state) == expected


@pytest.mark.parametrize("after", [-1, "soon", True, timedelta(days=-1), float("nan")])
def test_a_wait_that_cannot_be_is_refused(after: Any) -> None:
    with pytest.raises(ValueError, match=r"TransientCommandError\(after=...\) wants seconds from 0 on or a timedelta"):
        TransientCommandError("busy", after=after)


def test_a_result_is_kept_as_json_and_none_as_nothing() -> None:
    assert decide(leased(), Succeeded([1]), RetryPolicy(), PayloadLimits()).details == "[1]"
    assert decide(leased(), Succeeded(False), RetryPolicy(), PayloadLimits()).details == "false"
    assert decide(leased(), Succeeded(None), RetryPolicy(), PayloadLimits()).details is None


def test_an_execution_is_its_lease_with_the_position_in_the_low_bits() -> None:
    assert leased().execution_id == UUID(int=(1 << 64) | 1)


def test_an_error_is_described_for_programs_and_people() -> None:
    kinds = {TransientCommandError: "TRANSIENT", PermanentCommandError: "PERMANENT", BusinessRuleError: "BUSINESS_RULE"}
    for error, kind in kinds.items():
        assert json.loads(describe(error("text", code="CODE", details={"a": [1]}))) == {
            "type": error.__name__,
            "code": "CODE",
            "message": "text",
            "kind": kind,
            "details": {"a": [1]},
            "traceback": f"busload.errors.{error.__name__}: text\n",
        }
    assert json.loads(describe(KeyError("x"))) == {
        "type": "KeyError",
        "code": None,
        "message": "'x'",
        "kind": "TRANSIENT",
        "traceback": "KeyError: 'x'\n",
    }


def test_text_about_a_failure_can_always_be_stored() -> None:
    class Odd(Exception):
        code = object()
        details = object()

    described = json.loads(describe(PermanentCommandError("a\0" + "é" * 100_000, code="x" * 1000, details={1: 2})))
    assert described["message"].startswith("a\ufffdé")
    assert len(described["message"].encode()) <= 16 * 1024
    assert len(described["code"]) <= 255
    assert "INVALID_KEY" in described["details"]
    assert json.loads(describe(Odd("odd")))["code"] is None
    assert "TOO_LARGE" in json.loads(describe(PermanentCommandError(details="x" * 20_000)))["details"]
