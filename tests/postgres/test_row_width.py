"""What is written most often takes few bytes."""

from __future__ import annotations

from busload import BatchCommand
from tests.given import DOMAIN, Database, Given

HEADER = 24
"""The bytes of a row that PostgreSQL needs itself, if it has at most eight columns."""


async def test_the_row_of_a_finished_attempt_has_nothing_but_its_facts(given: Given, database: Database) -> None:
    """Two numbers and two times of 8 bytes, an id of 16, and two values of 4: no byte is padding."""
    given.handler("Debit")
    await given.batch(commands=20)
    await given.drained()
    widths = database.rows("SELECT DISTINCT pg_column_size(e.*) FROM busload.execution AS e")
    assert widths == [(HEADER + 4 * 8 + 16 + 2 * 4,)]


async def test_no_byte_is_lost_between_the_columns_of_a_command(given: Given, database: Database) -> None:
    """A text that is longer by one byte makes the row longer by one, and never by more."""
    sent = [BatchCommand("x" * length, data={"i": 1}) for length in range(1, 20)]
    await given.bus.create_batch(DOMAIN, sent)
    widths = [width for (width,) in database.rows("SELECT pg_column_size(c.*) FROM busload.command AS c ORDER BY id")]
    assert widths == list(range(widths[0], widths[0] + len(sent)))
