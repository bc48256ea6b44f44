-- fragments of: busload.commands.load

-- name: create
-- Sealed batches with all their commands. A command knows the load that it lies in by the place of that load
-- in the arrays. Each load is ready at once or, if there is a `transport`, waits for any relay; if its time
-- has not come, it is scheduled.
WITH batch AS (
    INSERT INTO busload.batch (batch_id, domain, name, on_complete, job_id, stage, way, total_count,
                               headers, sealed_at)
    SELECT batch_id, domain, name, on_complete::json, job_id, stage::jsonb, way, total, headers::json, now()
      FROM unnest(%(batch_ids)b::uuid[], %(batch_domains)b::text[], %(names)b::text[],
                  %(on_completes)b::text[], %(job_ids)b::text[], %(stages)b::text[], %(ways)b::text[],
                  %(totals)b::integer[], %(batch_headers)b::text[])
           AS batch (batch_id, domain, name, on_complete, job_id, stage, way, total, headers)
), noted AS (
    INSERT INTO busload.event (type, batch_id)
    SELECT 'BATCH_SEALED', batch_id FROM unnest(%(batch_ids)b::uuid[]) AS batch_id
), load AS MATERIALIZED (
    SELECT lo, lo + size - 1 AS hi, nth, batch_id, domain, priority, replies, run_at,
           busload.fair_of(fair_by, batch_id) AS fair
      FROM (
        SELECT nextval('busload.load_number') * 1024 AS lo, load.*
          FROM unnest(%(load_batches)b::uuid[], %(sizes)b::bigint[], %(domains)b::text[],
                      %(priorities)b::smallint[], %(replies)b::boolean[], %(run_ats)b::timestamptz[],
                      %(fair_bys)b::text[])
               WITH ORDINALITY
               AS load (batch_id, size, domain, priority, replies, run_at, fair_by, nth)
      ) AS load
), written AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, batch_id, task_key,
                                 correlation_id, reply_to, priority, max_attempts, run_at, headers)
    SELECT lo + c.position, domain, c.command_id, c.command_type, c.data::json, batch_id, c.task_key,
           c.correlation_id, c.reply_to, priority, c.max_attempts, run_at, c.headers::json
      FROM unnest(%(loads)b::bigint[], %(positions)b::bigint[], %(command_ids)b::uuid[],
                  %(command_types)b::text[], %(data)b::text[], %(task_keys)b::text[],
                  %(correlation_ids)b::uuid[], %(reply_tos)b::text[], %(max_attempts)b::smallint[],
                  %(command_headers)b::text[])
           AS c (load, position, command_id, command_type, data, task_key, correlation_id, reply_to,
                 max_attempts, headers)
      JOIN load ON load.nth = c.load
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, replies, fair)
    SELECT lo, hi, domain, batch_id, priority, replies, fair
      FROM load
     WHERE %(transport)s::text IS NULL AND (run_at IS NULL OR run_at <= now())
    RETURNING lo, hi, domain
), published AS (
    INSERT INTO busload.outbox (lo, hi, domain, batch_id, priority, replies, fair, transport, due_at)
    SELECT lo, hi, domain, batch_id, priority, replies, fair, %(transport)s::text, now()
      FROM load
     WHERE %(transport)s::text IS NOT NULL AND (run_at IS NULL OR run_at <= now())
    RETURNING transport
), scheduled AS (
    INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, replies, fair, run_at, reason)
    SELECT lo, hi, domain, batch_id, priority, replies, fair, run_at, 'RUN_AT'
      FROM load
     WHERE run_at > now()
    RETURNING domain, run_at
)
SELECT (SELECT count(pg_notify(
                   CASE WHEN commands > 100::numeric THEN 'busload_ready' ELSE {channel} END, told))
          FROM (SELECT domain, domain AS told, sum(hi - lo + 1) AS commands FROM queued GROUP BY domain
                 UNION ALL
                SELECT DISTINCT domain, '', 1 FROM scheduled WHERE {is_soon}) AS ready),
       (SELECT pg_notify('busload_outbox', %(transport)s::text) WHERE EXISTS (SELECT FROM published));
