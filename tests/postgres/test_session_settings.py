"""What a role or a database sets for its sessions does not change what our statements mean."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from busload import BatchCommand, CommandBus, WorkerSettings
from tests.given import DOMAIN
from tests.life import live

HOSTILE = {
    "nulls": {"array_nulls": "off", "transform_null_equals": "on"},
    "texts": {
        "DateStyle": "SQL, DMY",
        "IntervalStyle": "sql_standard",
        "TimeZone": "Asia/Kathmandu",
        "standard_conforming_strings": "off",
        "backslash_quote": "on",
        "bytea_output": "escape",
        "extra_float_digits": "-15",
        "quote_all_identifiers": "on",
        "client_encoding": "LATIN1",
    },
    "transactions": {
        "default_transaction_isolation": "serializable",
        "default_transaction_deferrable": "on",
        "row_security": "off",
        "lock_timeout": "1h",
        "statement_timeout": "1h",
        "idle_in_transaction_session_timeout": "1h",
    },
    "plans": {
        "enable_indexscan": "off",
        "enable_nestloop": "off",
        "jit_above_cost": "0",
        "plan_cache_mode": "force_custom_plan",
        "from_collapse_limit": "1",
    },
}


@pytest.mark.parametrize("about", HOSTILE)
async def test_a_life_of_commands_is_the_same_whatever_the_session_settings(
    about: str, dsn: str, worker_settings: WorkerSettings
) -> None:
    options = " ".join(f"-c{name}={value}".replace(", ", r",\ ") for name, value in HOSTILE[about].items())
    await live(f"{dsn}&options={quote(options)}", settings=worker_settings)


@pytest.mark.parametrize("count", [1, 3, 1500])
async def test_texts_come_back_as_they_were_sent_whatever_the_encoding_of_the_client(
    count: int, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of many commands goes in by COPY, as bytes"""
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    commands = [BatchCommand("Debit", data={"to": "Zoë, 5 €"}, task_key="Zoë", headers={"to": "Zoë"})] * count
    async with CommandBus(f"{dsn}&client_encoding=LATIN1") as bus:
        await bus.create_batch(DOMAIN, commands)
        for found in (await bus.list_commands(DOMAIN)).commands:
            assert (found.data, found.task_key, found.headers) == ({"to": "Zoë, 5 €"}, "Zoë", {"to": "Zoë"})
