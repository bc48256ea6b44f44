"""`busload buffer` at a shell."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from busload import CommandBus, Group, HandlerContext, PermanentCommandError, RetryPolicy
from busload.buffers import Buffer
from tests.cli.conftest import Busload
from tests.given import Database, Given

NAME = "contact_activity_events"
TABLE = "contact_activity_event"
NO_COLUMNS = f"CREATE TABLE {TABLE} (contact_activity_id bigint NOT NULL)"
WHOLE = f"""CREATE TABLE {TABLE} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, contact_activity_id bigint NOT NULL,
    group_id uuid, created_at timestamptz NOT NULL DEFAULT now())"""


@pytest.fixture
def events(bus: CommandBus) -> Buffer:
    """A buffer of four, whose handler refuses what is negative and takes the rest."""
    events = bus.buffer(NAME, size=4, max_age=timedelta(hours=1))

    @events.handler(retry=RetryPolicy(max_attempts=1))
    async def sync(group: Group, ctx: HandlerContext) -> None:
        for item in group:
            if item.data < 0:
                group.fail(item, PermanentCommandError("below zero", code="NEGATIVE"))
            else:
                group.succeed(item)

    return events


def listed(busload: Busload) -> dict[str, Any]:
    [found] = json.loads(busload("buffer", "ls", "--json").stdout)
    assert isinstance(found, dict)
    return found


async def test_ls_shows_depth_age_and_what_was_saved(busload: Busload, given: Given, events: Buffer) -> None:
    nothing = busload("buffer", "ls")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "There are no buffers.\n")

    for n in range(10):
        await events.add(n)
    await given.drained(domains=[NAME])
    given.database.rows("UPDATE busload.buffered SET created_at = now() - interval '5 min'")

    found = listed(busload)
    assert (found["name"], found["waiting"], found["waiting_capped"], found["table"]) == (NAME, 2, False, None)
    assert 300 <= found["oldest_age"] < 600
    assert (found["calls"], found["done"], found["items_per_call"], found["calls_saved"]) == (2, 8, 4.0, 6)
    assert (found["size"], found["max_age"]) == (4, 3600.0)
    columns, row = busload("buffer", "ls").stdout.splitlines()
    assert columns.split("  ")[0] == "BUFFER"
    assert row.split() == [NAME, "2", "5", "min", "0", "0", "0", "0", "4.0", "6", "-"]


async def test_show_says_which_events_wait_for_a_person_and_why(busload: Busload, given: Given, events: Buffer) -> None:
    ids = [await events.add(n) for n in (1, -2, 3, -4)]
    await given.drained(domains=[NAME])

    found = json.loads(busload("buffer", "show", NAME, "--json").stdout)
    assert (found["done"], found["grouped"], found["groups_in_troubleshooting"]) == (2, 2, 1)
    [parked] = found["troubleshooting"]
    assert [(item["id"], item["code"], item["message"]) for item in parked["items"]] == [
        (ids[1], "NEGATIVE", "below zero"),
        (ids[3], "NEGATIVE", "below zero"),
    ]

    said = busload("buffer", "show", NAME).stdout
    assert "leaves                     4 at a time, or after 60 min" in said
    assert f"  event {ids[1]}: NEGATIVE: below zero\n  event {ids[3]}: NEGATIVE: below zero\n" in said
    assert f"→ Decide: `busload troubleshooting retry {parked['group_id']}`" in said

    done = busload("troubleshooting", "cancel", parked["group_id"], "--reason", "never mind")
    assert done.exit_code == 0, done.output
    assert json.loads(busload("buffer", "show", NAME, "--json").stdout)["troubleshooting"] == []
    given.database.check_invariants()


async def test_show_of_many_groups_is_short(busload: Busload, given: Given, bus: CommandBus) -> None:
    events = bus.buffer(NAME, size=12)

    @events.handler(retry=RetryPolicy(max_attempts=1))
    async def refuse(group: Group, ctx: HandlerContext) -> None:
        raise PermanentCommandError("it rings\a", code="BELL")

    await events.add_many(range(22 * 12))
    await given.drained(domains=[NAME])
    said = busload("buffer", "show", NAME).stdout
    assert said.count("→ Decide") == 20
    assert said.count("  event ") == 200 and said.count("  and 2 more") == 20
    assert f"And 2 more: `busload troubleshooting groups --domain {NAME}`" in said
    assert "it rings\\x07" in said and "\a" not in said


async def test_show_counts_errors_that_were_not_kept(busload: Busload, given: Given, bus: CommandBus) -> None:
    """Of a group of 1,200 the errors of 1,000 are kept."""
    events = bus.buffer(NAME, size=1200)

    @events.handler(retry=RetryPolicy(max_attempts=1))
    async def refuse(group: Group, ctx: HandlerContext) -> None:
        raise ConnectionError("nobody answers")

    await events.add_many(range(1200))
    await given.drained(domains=[NAME])
    said = busload("buffer", "show", NAME).stdout
    assert "EXHAUSTED, since " in said and ", after 1 attempt: ConnectionError: nobody answers" in said
    assert said.count("  event ") == 10 and "  and 1,190 more\n" in said


async def test_flush_says_how_many_leave(busload: Busload, given: Given, events: Buffer) -> None:
    await events.add_many(range(3))
    assert await given.drained(domains=[NAME]) == 0
    dry = busload("buffer", "flush", NAME, "--dry-run")
    assert dry.stdout == f"Would let 3 events leave {NAME}; nothing was done.\n"
    assert await given.drained(domains=[NAME]) == 0

    assert busload("buffer", "flush", NAME).stdout == f"3 events will leave {NAME}, as soon as its workers have room.\n"
    await given.drained(domains=[NAME])
    assert listed(busload)["done"] == 3
    assert busload("buffer", "flush", NAME).stdout == f"Nothing waits in {NAME}.\n"
    again = json.loads(busload("buffer", "flush", NAME, "--json").stdout)
    assert again == {"name": NAME, "leaving": 0, "dry_run": False}


async def test_show_and_flush_say_that_a_buffer_is_paused(busload: Busload, bus: CommandBus, events: Buffer) -> None:
    await events.add(1)
    assert "paused" not in busload("buffer", "show", NAME).stdout
    await bus.domains.pause(NAME)
    assert f"yes: `busload domain resume {NAME}`" in busload("buffer", "show", NAME).stdout
    assert json.loads(busload("buffer", "show", NAME, "--json").stdout)["paused"] is True
    assert busload("buffer", "flush", NAME).stdout.startswith(f"1 event will leave {NAME} once it is resumed: `busload")


async def test_show_names_a_function_for_used_up_attempts_that_failed_itself(
    busload: Busload, given: Given, bus: CommandBus
) -> None:
    events = bus.buffer(NAME, size=1)

    @events.handler(retry=RetryPolicy(max_attempts=1))
    async def sync(group: Group, ctx: HandlerContext) -> None:
        raise ConnectionError("nobody answers")

    @events.exhausted(retry=RetryPolicy(max_attempts=1))
    async def compensate(group: Group, ctx: HandlerContext) -> None:
        raise PermanentCommandError("no place to note it", code="FULL")

    await events.add(1)
    await given.drained(domains=[NAME])
    [hook] = json.loads(busload("buffer", "show", NAME, "--json").stdout)["hooks"]
    assert (hook["reason"], hook["message"]) == ("PERMANENT", "FULL: no place to note it")
    said = busload("buffer", "show", NAME).stdout
    assert "The function registered with exhausted() failed" in said and "FULL: no place to note it" in said
    assert f"busload troubleshooting retry {hook['command_id']}" in said


async def test_ages_of_nothing_are_numbers(busload: Busload, bus: CommandBus, database: Database) -> None:
    """Not durations in another form"""
    await bus.buffer(NAME, size=4, max_age=timedelta(0)).distribute()
    database.rows(
        "INSERT INTO busload.buffered (buffer, data, bytes, created_at) VALUES (%s, '1', 1, now() + interval '1 h')",
        NAME,
    )
    found = listed(busload)
    assert (found["max_age"], found["oldest_age"]) == (0.0, 0.0)


async def test_flush_reaches_a_table_of_the_application(busload: Busload, given: Given, bus: CommandBus) -> None:
    """The shell knows the name only; which table it is was kept by the worker that served it."""
    given.database.rows(WHOLE)
    events = bus.buffer(NAME, table=TABLE, size=100)
    seen: list[int] = []

    @events.handler()
    async def sync(group: Group, ctx: HandlerContext) -> None:
        seen.extend(item.data["contact_activity_id"] for item in group)

    await given.drained(domains=[NAME])  # it is known from its first worker on
    given.database.rows(f"INSERT INTO {TABLE} (contact_activity_id) SELECT generate_series(1, 5)")
    assert listed(busload)["waiting"] == 5
    assert busload("buffer", "flush", NAME).stdout.startswith("5 events will leave")
    await given.drained(domains=[NAME])
    assert sorted(seen) == [1, 2, 3, 4, 5]
    assert TABLE in listed(busload)["table"]


async def test_ls_names_a_table_that_is_gone_and_goes_on(busload: Busload, given: Given, bus: CommandBus) -> None:
    """A dropped table is a line on stderr, not the end of the list."""
    given.database.rows(WHOLE)
    assert await bus.buffer(NAME, table=TABLE).distribute() == 0
    await bus.buffer("others").add(1)
    given.database.rows(f"DROP TABLE {TABLE}")
    result = busload("buffer", "ls")
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [[NAME, "?"], ["others", "1"]]
    assert result.stderr.startswith(f"{NAME}: ") and TABLE in result.stderr
    assert "problem " in busload("buffer", "show", NAME).stdout


@pytest.mark.parametrize("verb", ["show", "flush"])
async def test_an_unknown_buffer_is_refused_with_those_there_are(busload: Busload, events: Buffer, verb: str) -> None:
    none = busload("buffer", verb, "contacts")
    assert none.exit_code == 1 and "There is no buffer 'contacts'. There are none" in none.stderr
    await events.add(1)
    one = busload("buffer", verb, "contacts")
    assert one.exit_code == 1 and f"Known: {NAME}." in one.stderr


def test_ddl_prints_what_a_table_lacks(busload: Busload, database: Database) -> None:
    """Applied, it makes the table fit; then there is nothing left to print."""
    database.rows(NO_COLUMNS)
    printed = busload("buffer", "ddl", TABLE)
    assert printed.exit_code == 0, printed.output
    assert printed.stdout.count("ADD COLUMN") == 3 and printed.stdout.count("CREATE INDEX") == 2
    database.rows(printed.stdout)
    again = busload("buffer", "ddl", TABLE)
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr == f"Nothing to do: {TABLE} has all that a buffer needs.\n"
    assert json.loads(busload("buffer", "ddl", TABLE, "--json").stdout) == []


def test_ddl_with_names_of_ones_own(busload: Busload, database: Database) -> None:
    database.rows(
        'CREATE SCHEMA crm; CREATE TABLE crm."Out box" (tenant text, subject text, event_id uuid PRIMARY KEY)'
    )
    names = ("--id", "event_id", "--group-id", "Group", "--created-at", "added_at", "--key", "subject")
    options = (*names, "--partition-by", "tenant")
    printed = busload("buffer", "ddl", 'crm."Out box"', *options)
    assert printed.exit_code == 0, printed.output
    assert '(tenant, added_at, event_id) WHERE "Group" IS NULL' in printed.stdout
    database.rows(printed.stdout)
    assert busload("buffer", "ddl", 'crm."Out box"', *options).stdout == ""


def test_ddl_all_needs_no_database(offline: Busload, database: Database) -> None:
    printed = offline("buffer", "ddl", TABLE, "--all", "--key", "contact_activity_id")
    assert printed.exit_code == 0, printed.output
    database.rows(NO_COLUMNS)
    database.rows(printed.stdout)
    assert json.loads(offline("buffer", "ddl", TABLE, "--all", "--json").stdout)[0].startswith(f"ALTER TABLE {TABLE} ")


def test_ddl_of_a_table_that_is_not_there_says_what_to_do(busload: Busload) -> None:
    refused = busload("buffer", "ddl", "nowhere")
    assert refused.exit_code == 1
    assert "There is no table 'nowhere'" in refused.stderr


def test_ddl_never_runs_what_it_is_given(busload: Busload, database: Database) -> None:
    database.rows(NO_COLUMNS)
    evil = f"x); DROP TABLE {TABLE}; --"
    for arguments in ((evil,), (TABLE, "--id", evil), (TABLE, "--key", evil, "--partition-by", evil)):
        busload("buffer", "ddl", *arguments)
    printed = busload("buffer", "ddl", TABLE, "--group-id", evil).stdout
    database.rows(printed)
    assert database.value("SELECT to_regclass(%s) IS NOT NULL", TABLE)
    added = "SELECT format_type(atttypid, NULL) FROM pg_attribute WHERE attrelid = %s::regclass AND attname = %s"
    assert database.value(added, TABLE, evil) == "uuid"
