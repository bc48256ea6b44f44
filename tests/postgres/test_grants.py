"""The roles sender, worker, operator and reader: each may do what it must, and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from busload import BatchCommand, Command, CommandBus, Dedup, HandlerContext, Worker, schema
from busload.batches import Canary, FailureBudget
from busload.errors import NothingWrittenError, PermanentCommandError
from busload.postgres.grants import CALLS, INCLUDES, RIGHTS, Role, needs, performers, rights, roles_of
from busload.testing import TestServer
from tests.given import eventually
from tests.postgres.test_statements import OWNED, as_prepared

OURS = f"grants_{os.getpid()}_"
"""Roles belong to the server, which all processes of a run share."""
PAYLOAD = {
    "archive": ("data", "executions", "events", "headers"),
    "archived_batch": ("on_complete", "events"),
    "archived_job": ("custom_data",),
    "audit": ("details",),
    "batch": ("on_complete", "on_exceeded"),
    "buffer_archive": ("data",),
    "buffered": ("data",),
    "command": ("data", "headers"),
    "command_bus_command": ("data",),
    "command_status": ("data", "headers"),
    "event": ("details",),
    "execution": ("details",),
    "job": ("on_complete",),
    "job_part": None,
    "message": ("body",),
    "schedule": None,
    "troubleshooting": ("error",),
}
"""Where the data of commands are, and what became of them; None: everywhere in the table."""


@pytest.fixture(scope="module", params=["18", "15"])
def granted(request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    """The owner of a database with all the roles."""
    server: TestServer = request.getfixturevalue("server" if request.param == "18" else "oldest_server")
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(schema.grants(OURS).encode())
        yield conn
        for role in Role:
            conn.execute(f"DROP OWNED BY {OURS}{role}; DROP ROLE {OURS}{role}".encode())


def test_every_role_may_perform_its_statements_and_each_is_decided_about(
    granted: psycopg.Connection[Any],
) -> None:
    """PostgreSQL checks the rights of a statement when it explains it: nothing has to be there, or is written."""
    wrong = []
    for name, text in OWNED.items():
        decided = performers(name)
        if decided is None:
            wrong.append(f"nobody has decided who performs {name}")
        if re.match(r"\s*COPY", text) or not decided:
            continue
        query, names = as_prepared(text)
        granted.execute(f"PREPARE asked AS {query}".encode())
        call = f"EXPLAIN EXECUTE asked ({', '.join(['NULL'] * len(names))})" if names else "EXPLAIN EXECUTE asked"
        for role in Role:
            granted.execute(f"SET ROLE {OURS}{role}".encode())
            try:
                granted.execute(call.encode())
                may = True
            except psycopg.errors.InsufficientPrivilege as error:
                may, why = False, str(error)
            granted.execute("RESET ROLE")
            if role in decided and not may:
                wrong.append(f"{role} may not {name}: {why}")
        granted.execute("DEALLOCATE asked")
    assert wrong == []


def test_each_role_has_the_rights_of_the_table_and_no_others(granted: psycopg.Connection[Any]) -> None:
    """Also if somebody has given it more meanwhile. A new table or function that nobody has decided about is found."""
    granted.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA busload TO {OURS}reader".encode())
    granted.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA busload TO {OURS}reader".encode())
    granted.execute(f"GRANT CREATE ON SCHEMA busload TO {OURS}sender".encode())
    granted.execute(f"GRANT UPDATE (data) ON busload.command TO {OURS}sender".encode())
    granted.execute(schema.grants(OURS).encode())
    relations = granted.execute(
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'busload'::regnamespace AND relkind IN ('r', 'v', 'S')"
        " AND NOT EXISTS (SELECT FROM pg_depend WHERE objid = pg_class.oid AND deptype = 'i' AND relkind = 'S')"
    ).fetchall()
    assert {name for (name,) in relations} == set(RIGHTS), "every table, view and sequence is decided about"
    definers = granted.execute(
        "SELECT proname::text FROM pg_proc WHERE pronamespace = 'busload'::regnamespace AND prosecdef"
    ).fetchall()
    assert {name for (name,) in definers} == set(CALLS), "every function with the rights of its owner is decided about"
    for role in Role:
        for relation in RIGHTS:
            wanted = {(right.privilege, right.column or "") for right in needs(role) if right.relation == relation}
            found = granted.execute(
                "SELECT (aclexplode(relacl)).privilege_type, '', (aclexplode(relacl)).grantee FROM pg_class"
                " WHERE oid = %(name)s::regclass UNION ALL SELECT (aclexplode(attacl)).privilege_type, attname::text,"
                " (aclexplode(attacl)).grantee FROM pg_attribute WHERE attrelid = %(name)s::regclass",
                {"name": f"busload.{relation}"},
            ).fetchall()
            me = granted.execute("SELECT %s::regrole::oid", [f"{OURS}{role}"]).fetchone()
            assert me is not None
            assert {(right, column) for right, column, who in found if who == me[0]} == wanted, (role, relation)
        for function in CALLS:
            may = granted.execute(
                "SELECT has_function_privilege(%s, oid, 'EXECUTE') FROM pg_proc"
                " WHERE pronamespace = 'busload'::regnamespace AND proname = %s",
                [f"{OURS}{role}", function],
            ).fetchone()
            assert may == (role in roles_of(CALLS[function]),), (role, function)
        create = granted.execute("SELECT has_schema_privilege(%s, 'busload', 'CREATE')", [f"{OURS}{role}"]).fetchone()
        assert create == (False,)


def test_a_reader_may_only_read() -> None:
    assert {given for relation in RIGHTS for given in rights(relation, Role.READER)} == {"SELECT"}


def test_functions_with_the_rights_of_their_owner_pin_their_search_path_and_are_not_for_everybody(
    granted: psycopg.Connection[Any],
) -> None:
    loose = granted.execute(
        "SELECT proname::text FROM pg_proc WHERE pronamespace = 'busload'::regnamespace AND prosecdef"
        " AND (NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), false)"
        "      OR EXISTS (SELECT FROM aclexplode(coalesce(proacl, acldefault('f', proowner))) WHERE grantee = 0))"
    ).fetchall()
    assert loose == []


def test_a_sender_reads_no_payload_by_any_table_view_or_function(granted: psycopg.Connection[Any]) -> None:
    granted.execute(f"SET ROLE {OURS}sender".encode())
    try:
        for relation, columns in PAYLOAD.items():
            for column in columns or ("*",):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    granted.execute(f"SELECT {column} FROM busload.{relation}".encode())
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                granted.execute(f"SELECT r::text FROM busload.{relation} AS r".encode())
        for call in ("end_groups('{1}', 'DONE')", "reply(1, 'SUCCESS', '{}')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                granted.execute(f"SELECT busload.{call}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):  # not a batch of this transaction
            granted.execute("SELECT busload.begin_canary(gen_random_uuid(), 1, '1 minute', NULL)")
    finally:
        granted.execute("RESET ROLE")


Operation = Callable[[CommandBus, dict[str, Any]], Awaitable[Any]]


async def fill_nothing(bus: CommandBus) -> None:
    """The callback is sent at once, and holds data."""
    async with bus.open_batch("payments", on_complete=BatchCommand("Report", data={"secret": 1})):
        pass


SENDS: dict[str, Operation] = {
    "send": lambda bus, it: bus.send("payments", "Debit", {"secret": 1}),
    "send later": lambda bus, it: bus.send("payments", "Debit", {}, delay=timedelta(hours=1)),
    "send with a key": lambda bus, it: bus.send("payments", "Debit", {}, task_key=uuid4().hex, dedup=Dedup()),
    "send many": lambda bus, it: bus.send_many("payments", [BatchCommand("Debit") for _ in range(3)]),
    "create a batch": lambda bus, it: bus.create_batch("payments", [BatchCommand("Debit")]),
    "create a large batch": lambda bus, it: bus.create_batch("payments", [BatchCommand("Debit")] * 2500),
    "seal a batch that is complete": lambda bus, it: fill_nothing(bus),
    "create a guarded batch": lambda bus, it: bus.create_batch(
        "payments", [BatchCommand("Debit")] * 5, canary=Canary(size=2), budget=FailureBudget(share=0.5)
    ),
    "create a batch of new keys": lambda bus, it: bus.create_batch(
        "payments", [BatchCommand("Debit", task_key=uuid4().hex)], dedup=Dedup()
    ),
    "follow a batch": lambda bus, it: bus.get_batch("payments", it["batch_id"]),
    "add an event": lambda bus, it: bus.buffer("calls", merge="keep_last").add({"a": 1}, key="k"),
    "add events": lambda bus, it: bus.buffer("calls", merge="keep_last").add_many([{"a": 1}], key=lambda e: "k"),
    "add events that are not merged": lambda bus, it: bus.buffer("notes").add_many([{"a": 1}]),
}
READS: dict[str, Operation] = {
    "show a command": lambda bus, it: bus.get_command("payments", it["command_id"]),
    "list commands": lambda bus, it: bus.list_commands("payments"),
    "list batches": lambda bus, it: bus.list_batches("payments"),
    "show the trail": lambda bus, it: bus.get_audit_trail("payments", it["command_id"]),
    "trace": lambda bus, it: bus.trace("k"),
    "explain a batch": lambda bus, it: bus.explain_batch("payments", it["batch_id"]),
    "explain a command": lambda bus, it: bus.explain_command("payments", it["command_id"]),
    "list troubleshooting": lambda bus, it: bus.troubleshooting.list("payments"),
    "list causes": lambda bus, it: bus.troubleshooting.groups("payments"),
    "list jobs": lambda bus, it: bus.jobs.list("payments"),
    "list limits": lambda bus, it: bus.limits.list(),
    "list schedules": lambda bus, it: bus.schedules.list(),
    "list domains": lambda bus, it: bus.domains.list(),
    "list the outbox": lambda bus, it: bus.outbox.list(),
    "metrics": lambda bus, it: bus.metrics(),
    "health": lambda bus, it: bus.health(),
    "overview": lambda bus, it: bus.overview(),
}
SHARED = {"follow a batch", "health", "list batches", "list jobs", "list the outbox"}
"""What a sender needs too, or what shows no payload. The health of a database that may not be read is an answer."""
DECISIONS: dict[str, Operation] = {
    "cancel a command": lambda bus, it: bus.cancel_command("payments", it["waiting"], reason="wrong"),
    "reschedule": lambda bus, it: bus.reschedule_command(
        "payments", it["command_id"], run_at=datetime.now(UTC) + timedelta(hours=1)
    ),
    "hold a batch": lambda bus, it: bus.hold_batch("payments", it["batch_id"], reason="wait"),
    "resume a batch": lambda bus, it: bus.resume_batch("payments", it["batch_id"], operator="ada"),
    "reprioritize": lambda bus, it: bus.reprioritize_batch("payments", it["batch_id"], 5, operator="ada"),
    "pause a domain": lambda bus, it: bus.domains.pause("payments", operator="ada"),
    "resume a domain": lambda bus, it: bus.domains.resume("payments", operator="ada"),
    "retry": lambda bus, it: bus.troubleshooting.retry("payments", it["parked"], operator="ada"),
    "cancel a batch": lambda bus, it: bus.cancel_batch("payments", it["batch_id"], reason="wrong"),
}


@pytest.mark.parametrize("version", ["18", "15"])
async def test_each_role_can_do_its_operations_and_is_told_the_role_for_others(
    request: pytest.FixtureRequest, version: str
) -> None:
    server: TestServer = request.getfixturevalue("server" if version == "18" else "oldest_server")
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as owner:
        prefix = f"ops_{uuid4().hex[:8]}_"
        owner.execute(schema.grants(prefix).encode())
        for role in Role:
            owner.execute(f"ALTER ROLE {prefix}{role} LOGIN".encode())
        try:
            await operate(dsn, owner, prefix)
        finally:
            for role in Role:
                owner.execute(f"DROP OWNED BY {prefix}{role}; DROP ROLE {prefix}{role}".encode())


async def operate(dsn: str, owner: psycopg.Connection[Any], prefix: str) -> None:
    buses = {role: CommandBus(make_conninfo(dsn, user=f"{prefix}{role}")) for role in Role}
    it: dict[str, Any] = {}

    @buses[Role.WORKER].handler("payments", "Fail")
    async def fail(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("no")

    @buses[Role.WORKER].handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> dict[str, int]:
        await ctx.send("payments", "Later", {})
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")
        return {"done": 1}

    for bus in buses.values():
        await bus.open()
    try:
        sender = buses[Role.SENDER]
        done = await sender.create_batch("payments", [BatchCommand("Debit"), BatchCommand("Debit")])
        it["parked"] = (await sender.send("payments", "Fail", {})).command_id
        async with Worker(buses[Role.WORKER]):
            assert (await sender.wait_batch("payments", done, timeout=60)).completed_count == 2
            await eventually(lambda: owner.execute("SELECT count(*) FROM busload.troubleshooting").fetchone() == (1,))
        it["command_id"] = (await sender.send("payments", "Debit", {"secret": 1}, delay=timedelta(hours=1))).command_id
        it["waiting"] = (await sender.send("payments", "Debit", {}, delay=timedelta(hours=1))).command_id
        it["batch_id"] = await sender.create_batch("payments", [BatchCommand("Debit")] * 3)
        wrong = []
        for role in (Role.SENDER, Role.READER, Role.WORKER, Role.OPERATOR):  # who decides comes last
            bus = buses[role]
            for operations, wanted in ((SENDS, Role.SENDER), (READS, Role.READER), (DECISIONS, Role.OPERATOR)):
                if role is Role.WORKER and operations is not SENDS:
                    continue  # it reads and moves what the others do, by statements of its own
                for name, operation in operations.items():
                    before, refused = facts(owner), None
                    try:
                        await operation(bus, it)
                    except psycopg.errors.InsufficientPrivilege as error:
                        refused = error
                    except Exception as error:
                        wrong.append(f"{role}: {name}: {error!r}")
                    if wanted in INCLUDES[role] or name in SHARED:
                        if refused is not None:
                            wrong.append(f"{role}: {name}: {refused}")
                    elif refused is None:
                        wrong.append(f"{role}: {name} is not refused")
                    else:
                        if f'GRANT "busload_{wanted}" TO "{prefix}{role}";' not in str(
                            refused
                        ) or "schema grants" not in str(refused):
                            wrong.append(f"{role}: {name} does not name the role {wanted}: {refused}")
                        if operations is not READS and not isinstance(refused, NothingWrittenError):
                            wrong.append(f"{role}: {name} does not say that nothing was written: {refused}")
                        if facts(owner) != before:
                            wrong.append(f"{role}: {name} has written")
        assert not wrong, "\n".join(wrong)
    finally:
        for bus in buses.values():
            await bus.close()


def facts(owner: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return owner.execute(
        "SELECT (SELECT count(*) FROM busload.command), (SELECT count(*) FROM busload.event),"
        " (SELECT count(*) FROM busload.batch), (SELECT count(*) FROM busload.scheduled),"
        " (SELECT count(*) FROM busload.queue), (SELECT count(*) FROM busload.buffered)"
    ).fetchall()
