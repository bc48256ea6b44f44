"""Faults that one actor alone never notices: locks, fences and conditions that are gone. The explorer finds them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

EXPLORER = "tests/explorer/test_explorer.py::"
WORKERS = EXPLORER + "test_workers_and_a_sweeper_lose_and_double_nothing"
OPERATORS = EXPLORER + "test_operators_lose_and_double_nothing"
STRANGERS = EXPLORER + "test_a_transaction_that_stays_open_loses_and_doubles_nothing"
RELAYS = EXPLORER + "test_relays_lose_and_double_nothing"
SENDERS = EXPLORER + "test_senders_and_a_pruner_lose_and_double_nothing"

EXPLORED = [
    Mutant(
        "settle-without-a-fence",
        "commands/settle.sql",
        "     ORDER BY l.lease_id\n       FOR UPDATE OF l\n",
        "     ORDER BY l.lease_id\n",
        WORKERS,
        "a settlement that does not lock its leases records what a rescue has taken back meanwhile",
    ),
    Mutant(
        "settled-again-without-a-look",
        "commands/settle.sql",
        "     WHERE NOT EXISTS (\n"
        "        SELECT FROM busload.execution AS e WHERE e.command = o.id AND e.attempt = h.attempt OFFSET 0\n"
        "     )\n",
        "",
        WORKERS,
        "a settlement whose answer was lost is repeated",
    ),
    Mutant(
        "settled-twice-is-an-error",
        "commands/settle.py",
        "    except pg.UniqueViolation:\n",
        "    except pg.ForeignKeyViolation:\n",
        WORKERS,
        "a settlement whose answer was lost finds its attempts recorded",
    ),
    Mutant(
        "rescue-without-locks",
        "commands/rescue.sql",
        " ORDER BY lease_id\n LIMIT 1000\n   FOR UPDATE SKIP LOCKED;",
        " ORDER BY lease_id\n LIMIT 1000;",
        WORKERS,
        "what was settled between the two statements of a rescue would run again",
    ),
    Mutant(
        "rescue-does-not-repeat-its-condition",
        "commands/rescue.sql",
        "         ORDER BY worker\n           FOR UPDATE SKIP LOCKED\n     )\n    RETURNING worker\n",
        "         ORDER BY worker\n     )\n    RETURNING worker\n",
        WORKERS,
        "a worker whose heartbeat has just come would be declared dead",
    ),
    Mutant(
        "rescue-takes-back-what-is-recorded",
        "commands/rescue.sql",
        "     WHERE c.id <> ALL (l.returned) AND e.recorded IS NULL\n",
        "     WHERE c.id <> ALL (l.returned)\n",
        WORKERS,
        "a part of a lease may be settled when its worker dies",
    ),
    Mutant(
        "a-dead-worker-is-revived",
        "commands/rescue.sql",
        "     WHERE worker = %(worker)s::bigint AND stopped_at IS NULL\n    RETURNING worker, stop",
        "     WHERE worker = %(worker)s::bigint\n    RETURNING worker, stop",
        WORKERS,
        "its leases are not its own any more",
    ),
    Mutant(
        "resumed-without-locks",
        "commands/rescue.sql",
        "attempt = l.attempt\n           FOR UPDATE SKIP LOCKED\n",
        "attempt = l.attempt\n",
        WORKERS,
        "a claim and a worker that comes back may want the same load",
    ),
    Mutant(
        "claim-without-locks",
        "commands/claim.sql",
        "LIMIT w.loads\n           FOR UPDATE SKIP LOCKED\n",
        "LIMIT w.loads\n",
        WORKERS,
        "two claims would take the same load",
    ),
    Mutant(
        "claims-wait-for-each-other",
        "commands/claim.sql",
        "LIMIT w.loads\n           FOR UPDATE SKIP LOCKED\n",
        "LIMIT w.loads\n           FOR UPDATE\n",
        WORKERS,
        "one claim at a time",
    ),
    Mutant(
        "suspects-without-locks",
        "commands/claim.sql",
        "     LIMIT %(suspects)s::integer * (SELECT count(*) FROM alive)\n       FOR UPDATE SKIP LOCKED\n",
        "     LIMIT %(suspects)s::integer * (SELECT count(*) FROM alive)\n",
        WORKERS,
        "two workers would run the same suspect",
    ),
    Mutant(
        "given-back-twice",
        "commands/claim.sql",
        "     WHERE NOT h.returned && a.ids\n",
        "",
        WORKERS,
        "a hand back whose answer was lost is repeated",
    ),
    Mutant(
        "promote-waits-for-a-lock",
        "commands/claim.sql",
        "         LIMIT 1000\n           FOR UPDATE SKIP LOCKED\n",
        "         LIMIT 1000\n           FOR UPDATE\n",
        STRANGERS,
        "a transaction that stays open would keep everything that is due from all workers",
    ),
    Mutant(
        "started-twice",
        "postgres/schema/0004_batches.sql",
        "                                        FOR NO KEY UPDATE SKIP LOCKED))\n",
        "                                        ))\n",
        WORKERS,
        "two claims of a new batch would both start it, or wait for each other",
    ),
    Mutant(
        "decided-without-a-lock",
        "troubleshooting/decisions.sql",
        "     ORDER BY t.command FOR UPDATE OF t\n",
        "     ORDER BY t.command\n",
        OPERATORS,
        "of two operators who decide at once, the second would be told that it was done",
    ),
    Mutant(
        "load-before-batch",
        "commands/cancel.py",
        "    if batch_id is not None:\n        yield from execute(SQL.hold_batch, batch_id=batch_id)\n",
        "",
        OPERATORS,
        "whoever cancels the batch locks the batch before its loads",
    ),
    Mutant(
        "page-before-batch",
        "batches/cancel.py",
        "    yield from execute(SQL.lock_batches, **batches, hold=hold)\n",
        "",
        OPERATORS,
        "whoever cancels a command locks its batch before its load",
    ),
    Mutant(
        "sent-into-a-sealed-batch",
        "commands/send.sql",
        "       AND sealed_at IS NULL\n       AND {lock_timeout_is_set}\n",
        "       AND {lock_timeout_is_set}\n",
        SENDERS,
        "a batch that is complete would have commands that are not",
    ),
    Mutant(
        "sealed-twice",
        "commands/send.sql",
        "     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND sealed_at IS NULL\n"
        "    RETURNING batch_id\n), noted AS (\n    INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_SEALED'",
        "     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text\n"
        "    RETURNING batch_id\n), noted AS (\n    INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_SEALED'",
        SENDERS,
        "two senders may seal at once",
    ),
    Mutant(
        "a-key-with-two-holders",
        "commands/task_keys.sql",
        " AND NOT busload.is_open(t.domain, t.command_id)",
        "",
        SENDERS,
        "a key is held as long as its command has not ended",
    ),
    Mutant(
        "marked-without-locks",
        "dispatch/outbox.sql",
        "       AND relay = %(relay)s::uuid\n     ORDER BY hi FOR UPDATE\n",
        "       AND relay = %(relay)s::uuid\n     ORDER BY hi\n",
        RELAYS,
        "a worker may take a part of the load while its publisher marks it",
    ),
    Mutant(
        "noted-twice",
        "dispatch/outbox.sql",
        "       AND NOT EXISTS (SELECT FROM busload.publication AS v\n"
        "                        WHERE v.lo >> 10 = p.lo >> 10 AND v.lo = p.lo AND v.hi = p.hi\n"
        "                          AND v.publication = p.published::json ->> 'publication' OFFSET 0)\n",
        "",
        RELAYS,
        "a relay whose answer was lost reports again",
    ),
    Mutant(
        "delivered-without-locks",
        "commands/claim.sql",
        "           FOR UPDATE SKIP LOCKED\n     ) AS q\n), boxed",
        "     ) AS q\n), boxed",
        RELAYS,
        "a message may come twice, to two workers",
    ),
    Mutant(
        "unmarked-without-locks",
        "commands/claim.sql",
        "           FOR UPDATE SKIP LOCKED\n     ) AS o\n), taken",
        "     ) AS o\n), taken",
        RELAYS,
        "a message may come twice, to two workers, before its publisher has marked it",
    ),
]
