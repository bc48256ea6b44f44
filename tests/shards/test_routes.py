"""Which database a domain lives in, and which mappings are refused."""

from __future__ import annotations

from typing import Any

import pytest

from busload import CommandBus, InvalidCommandError, SyncCommandBus
from busload.shards import ShardedBus, SyncShardedBus
from busload.shards.routes import Routes
from busload.transports import find_transport

ONE, TWO = "postgresql://one/db", "postgresql://two/db"


def test_a_mapping_makes_a_bus_over_several_databases_in_both_faces() -> None:
    assert type(CommandBus({"payments": ONE, "*": TWO})) is ShardedBus
    assert type(SyncCommandBus({"payments": ONE, "*": TWO})) is SyncShardedBus
    assert type(CommandBus(ONE)) is CommandBus


def test_a_plain_bus_is_its_own_and_only_shard() -> None:
    bus = CommandBus(ONE)
    assert bus.shards == (bus,)
    assert bus.shard_of("anything") is bus


def test_each_database_has_one_bus_and_each_domain_one_database() -> None:
    bus = CommandBus({"payments": ONE, "refunds": ONE, "*": TWO})
    assert [shard.database.given_dsn for shard in bus.shards] == [ONE, TWO]
    assert bus.shard_of("payments") is bus.shard_of("refunds")
    assert bus.shard_of("anything else") is bus.shards[0]  # which refuses the name
    assert bus.shard_of("orders") is bus.shards[1]


def test_a_domain_that_the_mapping_leaves_out_is_refused_by_name() -> None:
    bus = CommandBus({"payments": ONE, "orders": TWO})
    with pytest.raises(
        InvalidCommandError, match=r"found 'crm', but the databases are of 'payments', 'orders'"
    ) as raised:
        bus.shard_of("crm")
    assert raised.value.problems[0].code == "NO_DATABASE"


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({}, r"is empty\. Wanted a DSN for each domain"),
        ({"payments": None, "*": TWO}, r"The DSN of 'payments' must be text, found"),
        ({"payments": "", "*": TWO}, r"The DSN of 'payments' cannot be used\. The DSN is empty"),
        ({"payments": "postgresql+psycopg://x/y"}, "as SQLAlchemy names a driver"),
        ({"pay*": ONE, "*": TWO}, r"names 'pay\*'\. Only \"\*\" alone stands for several domains"),
        ({"pay ments": ONE}, "names 'pay ments', wanted a domain"),
        ({7: ONE}, "names 7, wanted a domain"),
        ({"payments": ONE, "*": ONE + "?application_name=x"}, "'payments' and '\\*' differ, and both name db at one"),
        ({"payments": "postgresql://ann@one/db", "*": "postgresql://bob@one:5432/db"}, "both name db at one"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused_with_what_was_found(mapping: dict[Any, Any], said: str) -> None:
    for face in (CommandBus, SyncCommandBus):
        with pytest.raises(ValueError, match=said):
            face(mapping)


def test_a_password_is_in_no_refusal() -> None:
    with pytest.raises(ValueError, match="both name") as raised:
        Routes.read({"a": "postgresql://u:geheim@one/db", "b": "postgresql://v:geheim@one/db"})
    assert "geheim" not in str(raised.value)


def test_a_transport_that_is_an_object_is_refused() -> None:
    with pytest.raises(ValueError, match="makes a transport for each"):
        CommandBus({"*": ONE}, transport=find_transport("redis://127.0.0.1"))
