"""What the schema makes, as its files say it and as a database has it."""

from __future__ import annotations

from busload.doctor.objects import expected
from busload.postgres.schema.migrate import Migration
from tests.given import Database

FOUND = """
    SELECT 'table', relname, '' FROM pg_class
     WHERE relnamespace = 'busload'::regnamespace AND relkind = 'r'
    UNION SELECT 'function', proname, '' FROM pg_proc WHERE pronamespace = 'busload'::regnamespace
    UNION SELECT 'trigger', tgname, tgrelid::regclass::text FROM pg_trigger
           WHERE NOT tgisinternal AND tgrelid::regclass::text LIKE 'busload.%'
    UNION SELECT 'index', i.relname, t.relname FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
           JOIN pg_class AS t ON t.oid = x.indrelid
           WHERE t.relnamespace = 'busload'::regnamespace AND t.relkind = 'r' AND t.relname <> 'migration'"""


def test_the_files_name_what_a_migrated_database_has(database: Database) -> None:
    found = {(kind, name, table.removeprefix("busload.")) for kind, name, table in database.rows(FOUND)}
    assert found - {("table", "migration", "")} == set(expected())


def test_a_key_is_made_again_as_it_was(database: Database) -> None:
    keys = {
        f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition};".replace('"', "")
        for table, name, definition in database.rows(
            "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE connamespace = 'busload'::regnamespace AND contype IN ('p', 'u')"
            " AND conrelid <> 'busload.migration'::regclass"
        )
    }
    assert keys == {one.sql for one in expected().values() if one.sql.startswith("ALTER")}


def test_what_a_later_file_drops_is_not_missed() -> None:
    made = """
CREATE TABLE busload.one (id bigint);
CREATE UNIQUE INDEX one_once ON busload.one (id);
CREATE TRIGGER count_one AFTER INSERT ON busload.one FOR EACH ROW EXECUTE FUNCTION busload.count();
CREATE TABLE busload.two (id bigint);
CREATE FUNCTION busload.count() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RETURN NULL;
END $$;
"""
    first = Migration(1, "first", made)
    assert {(one.kind, one.name, one.is_unique) for one in expected([first]).values()} == {
        ("table", "one", False),
        ("index", "one_once", True),
        ("trigger", "count_one", False),
        ("table", "two", False),
        ("function", "count", False),
    }
    assert expected([first])["function", "count", ""].sql.endswith("END $$;")
    later = Migration(2, "later", "DROP TABLE busload.one;\nDROP FUNCTION busload.count();\n")
    assert {one.name for one in expected([first, later]).values()} == {"two"}
    trigger = Migration(2, "later", "DROP TRIGGER count_one ON busload.one;\nDROP INDEX busload.one_once;\n")
    assert {one.name for one in expected([first, trigger]).values()} == {"one", "two", "count"}
