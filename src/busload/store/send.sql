-- name: send
-- One command, a load of one, without a batch. A time that has passed means now. Its id is the given one, next to those
-- its sender has sent before, or begins a load. If another transaction that is not over uses its command_id or task key too,
-- it waits for that, or fails if it takes longer than `patience`, in milliseconds. With a `window` it is sent only if its
-- task key is free, and holds it from then on. With a `transport` it waits in the outbox until a relay has announced it.
WITH hasty AS MATERIALIZED (
    SELECT set_config('lock_timeout', %(patience)s::integer::text, true) AS set
), held AS (
    INSERT INTO busload.task AS t (domain, task_key, command_id, held_until)
    SELECT %(domain)s::text, %(task_key)s::text, %(command_id)s::uuid, statement_timestamp() + %(window)s::interval
     WHERE %(window)s::interval IS NOT NULL AND (%(patience)s::integer IS NULL OR (SELECT set FROM hasty) IS NOT NULL)
        ON CONFLICT (domain, task_key) DO UPDATE SET command_id = excluded.command_id, held_until = excluded.held_until
     WHERE t.held_until <= statement_timestamp() AND NOT busload.is_open(t.domain, t.command_id)
    RETURNING command_id
), sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, task_key, correlation_id, reply_to,
                                 priority, max_attempts, run_at)
    SELECT coalesce(%(id)s::bigint, nextval('busload.load_number') * 1024), %(domain)s::text, %(command_id)s::uuid,
           %(command_type)s::text, %(data)s::text::json, %(task_key)s::text, %(correlation_id)s::uuid, %(reply_to)s::text,
           %(priority)s::smallint, %(max_attempts)s::smallint, %(run_at)s::timestamptz
     WHERE (%(patience)s::integer IS NULL OR (SELECT set FROM hasty) IS NOT NULL)
       AND (%(window)s::interval IS NULL OR EXISTS (SELECT FROM held))
    RETURNING id, domain, priority, run_at, reply_to
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, priority, replies)
    SELECT id, id, domain, priority, reply_to IS NOT NULL FROM sent
     WHERE %(transport)s::text IS NULL AND (run_at IS NULL OR run_at <= now())
    RETURNING domain
), announced AS (
    INSERT INTO busload.outbox (lo, hi, domain, priority, replies, transport)
    SELECT id, id, domain, priority, reply_to IS NOT NULL, %(transport)s::text FROM sent
     WHERE %(transport)s::text IS NOT NULL AND (run_at IS NULL OR run_at <= now())
    RETURNING transport
), scheduled AS (
    INSERT INTO busload.scheduled (lo, hi, domain, priority, replies, run_at, reason)
    SELECT id, id, domain, priority, reply_to IS NOT NULL, run_at, 'RUN_AT' FROM sent WHERE run_at > now()
)
SELECT id, (SELECT pg_notify('busload_ready', domain) FROM queued WHERE %(notify)s::boolean),
       (SELECT pg_notify('busload_outbox', transport) FROM announced WHERE %(notify)s::boolean)
  FROM sent;

-- name: send_ready
-- The same for what is ready at once, as most commands are: no broker, no later time, no window. Each table that a statement
-- may write to costs the server some 20 µs, even if nothing goes there.
WITH sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, task_key, correlation_id, reply_to,
                                 priority, max_attempts)
    SELECT coalesce(%(id)s::bigint, nextval('busload.load_number') * 1024), %(domain)s::text, %(command_id)s::uuid,
           %(command_type)s::text, %(data)s::text::json, %(task_key)s::text, %(correlation_id)s::uuid, %(reply_to)s::text,
           %(priority)s::smallint, %(max_attempts)s::smallint
     WHERE %(patience)s::integer IS NULL OR set_config('lock_timeout', %(patience)s::integer::text, true) IS NOT NULL
    RETURNING id, domain, priority, reply_to
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, priority, replies)
    SELECT id, id, domain, priority, reply_to IS NOT NULL FROM sent
    RETURNING domain
)
SELECT id, (SELECT pg_notify('busload_ready', domain) FROM queued WHERE %(notify)s::boolean) FROM sent;

-- name: hold_tasks
-- Hold those of these keys that are free, in order, so that two such statements cannot wait for each other. The rows of
-- the others are locked until the end of the transaction: their holders stay the same meanwhile.
INSERT INTO busload.task AS t (domain, task_key, command_id, held_until)
SELECT %(domain)s::text, task_key, command_id, statement_timestamp() + %(window)s::interval
  FROM unnest(%(task_keys)b::text[], %(command_ids)b::uuid[]) AS wanted (task_key, command_id)
 ORDER BY task_key COLLATE "C"
    ON CONFLICT (domain, task_key) DO UPDATE SET command_id = excluded.command_id, held_until = excluded.held_until
 WHERE t.held_until <= statement_timestamp() AND NOT busload.is_open(t.domain, t.command_id)
RETURNING task_key;

-- name: hurry
-- No lock is waited for any longer than that, until the end of the transaction.
SELECT set_config('lock_timeout', %(patience)s::integer::text, true);

-- name: lock_holders
-- Sessions that have written what others may wait for, in transactions that are open since before then; the oldest first.
SELECT a.pid, a.application_name, a.state, a.xact_start
  FROM pg_catalog.pg_stat_activity AS a
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
   AND (a.xact_start IS NULL OR a.xact_start < clock_timestamp() - %(waited)s::interval)
   AND EXISTS (SELECT FROM pg_catalog.pg_locks AS l
                WHERE l.pid = a.pid AND l.granted AND l.mode <> 'AccessShareLock' AND l.locktype = 'relation'
                  AND l.relation >= 16384::oid)   -- none of PostgreSQL's own: the table of a buffer may be anybody's
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.pid = a.pid AND NOT l.granted)
 ORDER BY a.xact_start LIMIT 3;

-- name: holders
SELECT task_key, command_id FROM busload.task
 WHERE domain = %(domain)s::text AND task_key = ANY (%(task_keys)b::text[]);

-- name: notify
SELECT CASE WHEN %(transport)s::text IS NULL THEN pg_notify('busload_ready', domain) ELSE pg_notify('busload_outbox', %(transport)s::text) END
  FROM unnest(%(domains)b::text[]) AS domain;

-- name: send_some
-- Some loads with their commands, of any domains. With a batch, which then is of their one domain, its total rises by as
-- many; if there is none, or it is sealed, nothing is written. `patience` and
-- `transport` are those of `send`; with a `relay`, the caller announces them. Returns its loads in the outbox.
WITH hasty AS MATERIALIZED (
    SELECT set_config('lock_timeout', %(patience)s::integer::text, true) AS set
), raised AS (
    UPDATE busload.batch SET total_count = total_count + cardinality(%(command_ids)b::uuid[])
     WHERE batch_id = %(batch_id)s::uuid AND domain = (%(domains)b::text[])[1] AND sealed_at IS NULL
       AND (%(patience)s::integer IS NULL OR (SELECT set FROM hasty) IS NOT NULL)
    RETURNING batch_id
), load AS MATERIALIZED (
    SELECT nextval('busload.load_number') * 1024 - first AS shift, first, last, domain, priority, replies, run_at
      FROM unnest(%(firsts)b::bigint[], %(lasts)b::bigint[], %(domains)b::text[], %(priorities)b::smallint[],
                  %(replies)b::boolean[], %(run_ats)b::timestamptz[])
                  AS load (first, last, domain, priority, replies, run_at)
     WHERE (%(batch_id)s::uuid IS NULL OR EXISTS (SELECT FROM raised))
       AND (%(patience)s::integer IS NULL OR (SELECT set FROM hasty) IS NOT NULL)
), sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, batch_id, task_key, correlation_id, reply_to,
                                 priority, max_attempts, run_at)
    SELECT shift + c.nth, domain, c.command_id, c.command_type, c.data::json, %(batch_id)s::uuid, c.task_key,
           c.correlation_id, c.reply_to, priority, c.max_attempts, run_at
      FROM unnest(%(command_ids)b::uuid[], %(command_types)b::text[], %(data)b::text[], %(task_keys)b::text[],
                  %(correlation_ids)b::uuid[], %(reply_tos)b::text[], %(max_attempts)b::smallint[]) WITH ORDINALITY
                  AS c (command_id, command_type, data, task_key, correlation_id, reply_to, max_attempts, nth)
      JOIN load ON c.nth BETWEEN first AND last
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, replies)
    SELECT shift + first, shift + last, domain, %(batch_id)s::uuid, priority, replies FROM load
     WHERE %(transport)s::text IS NULL AND (run_at IS NULL OR run_at <= now())
    RETURNING domain
), announced AS (
    INSERT INTO busload.outbox (lo, hi, domain, batch_id, priority, replies, transport, relay, due_at)
    SELECT shift + first, shift + last, domain, %(batch_id)s::uuid, priority, replies, %(transport)s::text,
           %(relay)s::uuid, now() + CASE WHEN %(relay)s::uuid IS NULL THEN interval '0' ELSE %(hold)s::interval END
      FROM load WHERE %(transport)s::text IS NOT NULL AND (run_at IS NULL OR run_at <= now())
    RETURNING lo, hi
), scheduled AS (
    INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, replies, run_at, reason)
    SELECT shift + first, shift + last, domain, %(batch_id)s::uuid, priority, replies, run_at, 'RUN_AT' FROM load
     WHERE run_at > now()
)
SELECT EXISTS (SELECT FROM load),
       (SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM queued) AS ready),
       (SELECT pg_notify('busload_outbox', %(transport)s::text) WHERE %(relay)s::uuid IS NULL AND EXISTS (SELECT FROM announced)),
       ARRAY(SELECT lo FROM announced ORDER BY lo), ARRAY(SELECT hi FROM announced ORDER BY lo);

-- name: create_some
-- A batch with some commands, sealed: nothing can have ended yet, so there is nothing to decide. With a `transport` they wait
-- in the outbox: for the `relay` that the caller is, or for any; `optimistic`ly they are ready at once. Returns its loads.
WITH opened AS (
    INSERT INTO busload.batch (batch_id, domain, name, custom_data, on_complete, job_id, stage, total_count, sealed_at)
    VALUES (%(batch_id)s::uuid, %(domain)s::text, %(name)s::text, %(custom_data)s::text::jsonb, %(on_complete)s::text::json,
            %(job_id)s::uuid, %(stage)s::text, cardinality(%(command_ids)b::uuid[]), now())
), noted AS (
    INSERT INTO busload.event (type, batch_id) VALUES ('BATCH_SEALED', %(batch_id)s::uuid)
), load AS MATERIALIZED (
    SELECT nextval('busload.load_number') * 1024 - first AS shift, first, last, priority, replies, run_at
      FROM unnest(%(firsts)b::bigint[], %(lasts)b::bigint[], %(priorities)b::smallint[], %(replies)b::boolean[],
                  %(run_ats)b::timestamptz[]) AS load (first, last, priority, replies, run_at)
), sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, batch_id, task_key, correlation_id, reply_to,
                                 priority, max_attempts, run_at)
    SELECT shift + c.nth, %(domain)s::text, c.command_id, c.command_type, c.data::json, %(batch_id)s::uuid, c.task_key,
           c.correlation_id, c.reply_to, priority, c.max_attempts, run_at
      FROM unnest(%(command_ids)b::uuid[], %(command_types)b::text[], %(data)b::text[], %(task_keys)b::text[],
                  %(correlation_ids)b::uuid[], %(reply_tos)b::text[], %(max_attempts)b::smallint[]) WITH ORDINALITY
                  AS c (command_id, command_type, data, task_key, correlation_id, reply_to, max_attempts, nth)
      JOIN load ON c.nth BETWEEN first AND last
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, replies, transport, announced_at)
    SELECT shift + first, shift + last, %(domain)s::text, %(batch_id)s::uuid, priority, replies, %(transport)s::text,
           CASE WHEN %(optimistic)s::boolean THEN now() END
      FROM load WHERE (%(transport)s::text IS NULL OR %(optimistic)s::boolean) AND (run_at IS NULL OR run_at <= now())
    RETURNING hi
), announced AS (
    INSERT INTO busload.outbox (lo, hi, domain, batch_id, priority, replies, transport, relay, due_at)
    SELECT shift + first, shift + last, %(domain)s::text, %(batch_id)s::uuid, priority, replies, %(transport)s::text,
           %(relay)s::uuid, now() + CASE WHEN %(relay)s::uuid IS NULL THEN interval '0' ELSE %(hold)s::interval END
      FROM load WHERE %(transport)s::text IS NOT NULL AND NOT %(optimistic)s::boolean AND (run_at IS NULL OR run_at <= now())
    RETURNING hi
), scheduled AS (
    INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, replies, run_at, reason)
    SELECT shift + first, shift + last, %(domain)s::text, %(batch_id)s::uuid, priority, replies, run_at, 'RUN_AT' FROM load
     WHERE run_at > now()
)
SELECT ARRAY(SELECT shift + first FROM load WHERE run_at IS NULL OR run_at <= now() ORDER BY first),
       ARRAY(SELECT shift + last FROM load WHERE run_at IS NULL OR run_at <= now() ORDER BY first),
       (SELECT pg_notify('busload_ready', %(domain)s::text) WHERE EXISTS (SELECT FROM queued WHERE NOT %(optimistic)s::boolean)),
       (SELECT pg_notify('busload_outbox', %(transport)s::text) WHERE %(relay)s::uuid IS NULL AND EXISTS (SELECT FROM announced));

-- name: number_loads
-- Load numbers are known before the commands are written, so these can be copied in.
SELECT nextval('busload.load_number') FROM generate_series(1, %(loads)s::integer);

-- name: copy_commands
COPY busload.command (id, command_id, data, domain, batch_id, priority, run_at,
                      command_type, task_key, correlation_id, reply_to, max_attempts) FROM STDIN (FORMAT binary);

-- name: place_loads
-- Put loads whose commands were just copied in where they belong: ready, not announced yet (as in `create_some`), or not due.
WITH load AS (
    SELECT lo, hi, priority, replies, run_at
      FROM unnest(%(los)b::bigint[], %(his)b::bigint[], %(priorities)b::smallint[], %(replies)b::boolean[],
                  %(run_ats)b::timestamptz[]) AS load (lo, hi, priority, replies, run_at)
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, replies, transport, announced_at)
    SELECT lo, hi, %(domain)s::text, %(batch_id)s::uuid, priority, replies, %(transport)s::text,
           CASE WHEN %(optimistic)s::boolean THEN now() END
      FROM load WHERE (%(transport)s::text IS NULL OR %(optimistic)s::boolean) AND (run_at IS NULL OR run_at <= now())
    RETURNING hi
), announced AS (
    INSERT INTO busload.outbox (lo, hi, domain, batch_id, priority, replies, transport, relay, due_at)
    SELECT lo, hi, %(domain)s::text, %(batch_id)s::uuid, priority, replies, %(transport)s::text,
           %(relay)s::uuid, now() + CASE WHEN %(relay)s::uuid IS NULL THEN interval '0' ELSE %(hold)s::interval END
      FROM load WHERE %(transport)s::text IS NOT NULL AND NOT %(optimistic)s::boolean AND (run_at IS NULL OR run_at <= now())
    RETURNING hi
), scheduled AS (
    INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, replies, run_at, reason)
    SELECT lo, hi, %(domain)s::text, %(batch_id)s::uuid, priority, replies, run_at, 'RUN_AT' FROM load WHERE run_at > now()
)
SELECT ARRAY(SELECT lo FROM load WHERE run_at IS NULL OR run_at <= now() ORDER BY lo),
       ARRAY(SELECT hi FROM load WHERE run_at IS NULL OR run_at <= now() ORDER BY lo),
       (SELECT pg_notify('busload_ready', %(domain)s::text) WHERE EXISTS (SELECT FROM queued WHERE NOT %(optimistic)s::boolean)),
       (SELECT pg_notify('busload_outbox', %(transport)s::text) WHERE %(relay)s::uuid IS NULL AND EXISTS (SELECT FROM announced));

-- name: existing_commands
-- Which of these ids are taken: asked only after a duplicate was found.
SELECT command_id FROM busload.command WHERE domain = %(domain)s::text AND command_id = ANY (%(command_ids)b::uuid[]);

-- name: open_batch
WITH opened AS (
    INSERT INTO busload.batch (batch_id, domain, name, custom_data, on_complete, job_id, stage, total_count, sealed_at)
    VALUES (%(batch_id)s::uuid, %(domain)s::text, %(name)s::text, %(custom_data)s::text::jsonb, %(on_complete)s::text::json,
            %(job_id)s::uuid, %(stage)s::text, %(total)s::integer, CASE WHEN %(sealed)s::boolean THEN now() END)
    RETURNING batch_id, sealed_at
)
INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_SEALED', batch_id FROM opened WHERE sealed_at IS NOT NULL;

-- name: raise_total
-- Whoever sets a command's batch raises that batch's total first: no row means no such batch, or a sealed one.
UPDATE busload.batch SET total_count = total_count + %(count)s::integer
 WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND sealed_at IS NULL
RETURNING batch_id;

-- name: find_batch
SELECT sealed_at IS NOT NULL, completed_at IS NOT NULL FROM busload.batch
 WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text;

-- name: seal
-- From here on the batch can complete; if all its commands have ended already, or there are none, it does so now.
WITH sealed AS (
    UPDATE busload.batch SET sealed_at = now()
     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND sealed_at IS NULL
    RETURNING batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_SEALED', batch_id FROM sealed
)
SELECT batch_id FROM sealed;

-- name: decide
SELECT busload.decide(ARRAY[%(batch_id)s::uuid]);
