"""Many small batches at once, as the stages of many jobs are: a statement for up to 1,000 commands of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from psycopg import errors as pg

from busload.commands.command import NewCommand
from busload.commands.expire import note_expiry
from busload.commands.load import NewLoad, arrays, cut_all
from busload.commands.send import NO_BROKER, SOME, SOME_BYTES, NewBatch, Via, create_batch, refuse_existing
from busload.postgres.arrays import Bigints, unless_all_null
from busload.postgres.plan import Plan, Savepoint, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

BatchToWrite: TypeAlias = tuple[NewBatch, Sequence[NewCommand]]
"""A batch of one domain with all its commands. It has new ids, no chosen callback, no guards and no own expiry."""


def create_batches(batches: Sequence[BatchToWrite], via: Via = NO_BROKER) -> Plan[None]:
    """Create sealed batches of one domain, each with all its commands; needs a transaction.

    With a broker, the commands wait for any relay.
    """
    if len(batches) == 1:
        yield from create_batch(*batches[0], via)
        return
    domain = batches[0][0].domain
    cut = yield from cut_all(domain, [commands for _, commands in batches])
    loads = [(batch, those) for (batch, _), those in zip(batches, cut, strict=True)]
    about = _columns_of_batches(batches) | _columns_of_loads(loads)
    try:
        yield Savepoint(execute(SQL.create, **about, transport=via.transport))
    except pg.UniqueViolation:
        yield from refuse_existing(domain, [command for _, commands in batches for command in commands])
    yield from note_expiry([load for _, those in loads for load in those])


def in_parts(batches: Sequence[BatchToWrite]) -> Iterator[Sequence[BatchToWrite]]:
    """Cut a list of batches so that one statement can write each part. A batch that is too large is alone."""
    part: list[BatchToWrite] = []
    commands = size = 0
    for one in batches:
        own, own_size = len(one[1]), sum(len(command.data) for command in one[1])
        if part and (commands + own > SOME or size + own_size > SOME_BYTES):
            yield part
            part, commands, size = [], 0, 0
        part.append(one)
        commands, size = commands + own, size + own_size
    if part:
        yield part


def _columns_of_batches(batches: Sequence[BatchToWrite]) -> dict[str, Any]:
    columns = [batch.columns() for batch, _ in batches]
    return {
        "batch_ids": [batch.batch_id for batch, _ in batches],
        "batch_domains": [batch.domain for batch, _ in batches],
        "names": unless_all_null(batch.name for batch, _ in batches),
        "on_completes": unless_all_null(batch.on_complete for batch, _ in batches),
        "job_ids": unless_all_null(one["job_id"] for one in columns),
        "stages": unless_all_null(one["stage"] for one in columns),
        "ways": [batch.way for batch, _ in batches],
        "totals": [len(commands) for _, commands in batches],
        "batch_headers": unless_all_null(batch.headers for batch, _ in batches),
    }


def _columns_of_loads(loads: Sequence[tuple[NewBatch, Sequence[NewLoad]]]) -> dict[str, Any]:
    all_loads = [load for _, those in loads for load in those]
    columns = arrays(all_loads)
    del columns["firsts"], columns["lasts"]
    sizes = [len(load.commands) for load in all_loads]
    return columns | {
        "load_batches": [batch.batch_id for batch, those in loads for _ in those],
        "sizes": Bigints.of(sizes),
        "loads": Bigints.of([nth for nth, size in enumerate(sizes, 1) for _ in range(size)]),
        "positions": Bigints.of([position for size in sizes for position in range(size)]),
    }
