"""Our schema in revisions of Alembic."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from alembic import command
from alembic.config import Config

from busload.postgres.schema.migrate import MIGRATIONS, script
from busload.testing import TestServer
from tests.given import Database
from tests.integrations.servers import ROOT
from tests.postgres.catalogue import schema_text


@pytest.fixture
def empty(server: TestServer) -> Iterator[str]:
    with server.database(migrated=False) as dsn:
        yield dsn


@pytest.fixture
def shop(empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The example, in a folder of its own, to write revisions in."""
    folder = tmp_path / "shop"
    shutil.copytree(ROOT / "examples/alembic_shop", folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", empty)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return Config(folder / "alembic.ini", output_buffer=io.StringIO(), stdout=io.StringIO())


def schema_of(dsn: str) -> str:
    with psycopg.connect(dsn) as conn:
        return schema_text(conn)


def tables(dsn: str) -> list[str]:
    with Database(dsn) as database:
        return [name for (name,) in database.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]


def generated(config: Config, name: str) -> str:
    """What autogenerate writes as the bodies of upgrade and downgrade, without its comments."""
    command.revision(config, name, autogenerate=True)
    [path] = Path(config.config_file_name or "").parent.glob(f"migrations/versions/*_{name}.py")
    text = re.sub(r"^ *# .*\n", "", path.read_text(), flags=re.MULTILINE)
    return text[text.index("from alembic") :]


def test_a_revision_installs_the_schema_with_the_tables_of_the_application(
    shop: Config, empty: str, server: TestServer
) -> None:
    command.upgrade(shop, "head")
    assert sorted(tables(empty)) == ["alembic_version", "shop_order"]
    with server.database() as ours:
        assert schema_of(empty) == schema_of(ours)
    command.downgrade(shop, "base")
    assert tables(empty) == ["alembic_version"]
    with Database(empty) as database:
        assert database.value("SELECT count(*) FROM busload.command") == 0, "it only goes forward"
    command.upgrade(shop, "head")


def test_the_same_revision_offline_is_sql_to_apply(shop: Config, empty: str, server: TestServer) -> None:
    command.upgrade(shop, "head", sql=True)
    assert shop.output_buffer is not None
    shop.output_buffer.seek(0)
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute(shop.output_buffer.read().encode())
    with server.database() as ours:
        assert schema_of(empty) == schema_of(ours)
    assert sorted(tables(empty)) == ["alembic_version", "shop_order"]


def test_autogenerate_leaves_our_schema_alone(shop: Config, empty: str) -> None:
    command.upgrade(shop, "head")
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute("CREATE SCHEMA other; CREATE TABLE other.forgotten (id integer)")
    text = generated(shop, "nothing_of_ours")
    assert "op.drop_table('forgotten', schema='other')" in text
    assert "busload" not in text


def test_autogenerate_upgrades_a_schema_that_lacks_something(shop: Config, empty: str) -> None:
    """A new release of busload needs no thought: the next revision that is generated has it."""
    command.upgrade(shop, "head")
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute("DROP SCHEMA busload CASCADE")
        conn.execute(script(0, MIGRATIONS[:-1]).encode())
    text = generated(shop, "next_release")
    assert "import busload.integrations.alembic" in text
    assert text.count("    op.busload_upgrade()") == 1
    assert "def downgrade() -> None:\n    pass" in text
    command.upgrade(shop, "head")
    assert "busload" not in generated(shop, "no_more")
