-- name: send
-- One command, a load of one, without a batch. A time that has passed means now.
WITH sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, task_key, correlation_id, reply_to,
                                 priority, max_attempts, run_at)
    VALUES (nextval('busload.load_number') * 1024, %(domain)s::text, %(command_id)s::uuid, %(command_type)s::text,
            %(data)s::text::json, %(task_key)s::text, %(correlation_id)s::uuid, %(reply_to)s::text, %(priority)s::smallint,
            %(max_attempts)s::smallint, %(run_at)s::timestamptz)
    RETURNING id, domain, priority, run_at, reply_to
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, priority, replies)
    SELECT id, id, domain, priority, reply_to IS NOT NULL FROM sent WHERE run_at IS NULL OR run_at <= now()
    RETURNING domain
), scheduled AS (
    INSERT INTO busload.scheduled (lo, hi, domain, priority, replies, run_at, reason)
    SELECT id, id, domain, priority, reply_to IS NOT NULL, run_at, 'RUN_AT' FROM sent WHERE run_at > now()
)
SELECT pg_notify('busload_ready', domain) FROM queued;

-- name: number_loads
-- Load numbers are known before the commands are written, so these can be copied in.
SELECT nextval('busload.load_number') FROM generate_series(1, %(loads)s::integer);

-- name: copy_commands
COPY busload.command (id, domain, command_id, command_type, data, batch_id, task_key, correlation_id, reply_to,
                      priority, max_attempts, run_at) FROM STDIN;

-- name: place_loads
-- Put loads whose commands were just copied in where they belong: ready, or not due yet.
WITH load AS (
    SELECT lo, hi, priority, replies, run_at
      FROM unnest(%(los)b::bigint[], %(his)b::bigint[], %(priorities)b::smallint[], %(replies)b::boolean[],
                  %(run_ats)b::timestamptz[]) AS load (lo, hi, priority, replies, run_at)
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, replies)
    SELECT lo, hi, %(domain)s::text, %(batch_id)s::uuid, priority, replies FROM load WHERE run_at IS NULL OR run_at <= now()
    RETURNING hi
), scheduled AS (
    INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, replies, run_at, reason)
    SELECT lo, hi, %(domain)s::text, %(batch_id)s::uuid, priority, replies, run_at, 'RUN_AT' FROM load WHERE run_at > now()
)
SELECT pg_notify('busload_ready', %(domain)s::text) WHERE EXISTS (SELECT FROM queued);

-- name: existing_commands
-- Which of these ids are taken: asked only after a duplicate was found.
SELECT command_id FROM busload.command WHERE domain = %(domain)s::text AND command_id = ANY (%(command_ids)b::uuid[]);

-- name: open_batch
INSERT INTO busload.batch (batch_id, domain, name, custom_data, on_complete)
VALUES (%(batch_id)s::uuid, %(domain)s::text, %(name)s::text, %(custom_data)s::text::jsonb, %(on_complete)s::text::json);

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
