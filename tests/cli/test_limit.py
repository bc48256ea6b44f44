"""`busload limit`: what people see of limits."""

from __future__ import annotations

import json

from busload import RateLimit
from busload.limits import concurrency, rate
from busload.limits.concurrency import Request
from busload.limits.rate import Ask
from tests.cli.conftest import Busload
from tests.given import Database, Given


def test_limits_are_listed_with_their_rate_and_what_was_refused(busload: Busload, database: Database) -> None:
    limit = RateLimit(10, burst=3)
    database.perform(rate.ask({("crm", ""): Ask(limit, 3), ("crm", "tenant 1"): Ask(limit, 1)}))
    database.perform(rate.refuse(("mail/Send", ""), RateLimit(0.5), 60.0, None))
    listed = busload("limit", "ls")
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == ["NAME", "crm", "crm", "mail/Send"]
    found = json.loads(busload("limit", "ls", "--json").output)
    assert [(one["name"], one["subject"], one["rate"], one["calls"], one["refused"]) for one in found] == [
        ("crm", "", 10.0, 3, 0),
        ("crm", "tenant 1", 10.0, 1, 0),
        ("mail/Send", "", 0.5, 0, 1),
    ]
    assert [one["blocked_until"] is not None for one in found] == [False, False, True]


def test_one_limit_is_shown_with_all_that_by_has_said(busload: Busload, database: Database) -> None:
    database.perform(rate.ask({("crm", f"tenant {n}"): Ask(RateLimit(1), 1) for n in range(3)}))
    shown = busload("limit", "show", "crm", "--limit", 2, "--json")
    assert [one["subject"] for one in json.loads(shown.output)] == ["tenant 0", "tenant 1"]


def test_a_block_is_lifted_for_one_value_or_for_all(busload: Busload, database: Database) -> None:
    for tenant in ("1", "2", "3"):
        database.perform(rate.refuse(("crm", tenant), RateLimit(1), 60.0, None))
    one = busload("limit", "reset", "crm", "--by", "2", "--json")
    assert json.loads(one.output) == {"name": "crm", "by": "2", "limits": 1}
    shown = json.loads(busload("limit", "show", "crm", "--json").output)
    assert [limit["blocked_until"] is None for limit in shown] == [False, True, False]
    assert "Calls under crm may go again (3 values)." in busload("limit", "reset", "crm").output
    shown = json.loads(busload("limit", "show", "crm", "--json").output)
    assert [limit["blocked_until"] for limit in shown] == [None, None, None]
    missing = busload("limit", "reset", "crm", "--by", "4")
    assert missing.exit_code == 1
    assert "No limit 'crm' by '4' was used within a day." in missing.output


async def test_who_runs_calls_and_how_many_wait_is_listed(busload: Busload, given: Given, database: Database) -> None:
    nothing = busload("limit", "concurrency")
    assert nothing.exit_code == 0
    assert "No call runs under a concurrency limit, and no command waits for one." in nothing.output
    await given.batch(3)
    worker = given.registered_worker()
    for calls, one in zip((2, 2, 2), given.claimed(3, by=worker), strict=True):
        request = Request("crm", "tenant 1", calls, [(one.lease, one.id)])
        database.perform(concurrency.take([request], worker=worker))
    listed = busload("limit", "concurrency", "crm")
    assert listed.output.splitlines()[0].split()[:5] == ["NAME", "BY", "MOST", "RUNNING", "WAITING"]
    [found] = json.loads(busload("limit", "concurrency", "--json").output)
    facts = {name: found[name] for name in ("name", "subject", "most", "running", "waiting", "workers")}
    assert facts == {
        "name": "crm",
        "subject": "tenant 1",
        "most": 2,
        "running": 2,
        "waiting": 1,
        "workers": ["given", "given"],
    }
    assert json.loads(busload("limit", "concurrency", "other", "--json").output) == []
    other = " ".join(busload("limit", "concurrency", "crn").output.split())
    assert "No call runs under a concurrency limit 'crn', and no command waits for it. Did you mean 'crm'?" in other
    assert "so this may be a limit that rests, or none" in other


def test_a_limit_that_nobody_uses_is_not_found(busload: Busload) -> None:
    assert "No limit was used within a day." in busload("limit", "ls").output
    missing = busload("limit", "show", "crm")
    assert missing.exit_code == 1
    assert "No limit 'crm' was used within a day." in missing.output
