-- fragment: state
SELECT held_at IS NOT NULL, canceled_at IS NOT NULL, completed_at IS NOT NULL, batch_type = 'JOBS'
  FROM busload.batch
 WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND pruned_at IS NULL

-- name: lock
-- Lock a batch, and say whether it is held, canceled, complete, and one of jobs.
{state} FOR NO KEY UPDATE;

-- name: look
-- Say the same without a lock.
{state};

-- name: hold
-- Hold the batch, and take its loads out of the queue and the outbox.
SELECT busload.hold_batches(ARRAY[%(batch_id)s::uuid], 'OPERATOR', %(operator)s::text, %(reason)s::text);

-- name: set_budget
-- Give a batch another failure budget, and note who did it. With `from_here` what has failed before does not
-- count. The command to send when the budget is exceeded stays unless there is a new one.
WITH forgotten AS (
    DELETE FROM busload.batch_cause
     WHERE batch_id = %(batch_id)s::uuid AND (%(from_here)s::boolean OR NOT %(per_cause)s::boolean)
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    VALUES ('BATCH_BUDGET_CHANGED', %(batch_id)s::uuid, %(operator)s::text,
            json_build_object('share', %(share)s::float8, 'at_least', %(at_least)s::integer,
                              'per_cause', %(per_cause)s::boolean))
)
UPDATE busload.batch
   SET budget_share = %(share)s::float8::numeric,
       budget_at_least = %(at_least)s::integer,
       budget_per_cause = %(per_cause)s::boolean,
       budget_from = CASE WHEN %(from_here)s::boolean THEN failed_count + in_troubleshooting_count
                          ELSE coalesce(budget_from, 0) END,
       on_exceeded = coalesce(%(on_exceeded)s::text::json, on_exceeded)
 WHERE batch_id = %(batch_id)s::uuid;

-- name: guard
-- Hold the batch if more has failed than its budget allows.
SELECT busload.guard(ARRAY[%(batch_id)s::uuid]);

-- name: resume
-- Let the batch go on, and put its loads into the queue.
SELECT busload.resume_batches(ARRAY[%(batch_id)s::uuid], %(operator)s::text);

-- name: end_canary
-- A person lets go what waits for the canary. No row: there is no canary, it has ended, or its batch was
-- canceled. If the canary or the budget holds the batch, a resume ends the canary by itself.
WITH ended AS (
    UPDATE busload.batch
       SET canary_ended_at = statement_timestamp()
     WHERE batch_id = %(batch_id)s::uuid
       AND canary_until IS NOT NULL
       AND canary_ended_at IS NULL
       AND canceled_at IS NULL
       AND coalesce(held_reason, 'OPERATOR') = 'OPERATOR'
    RETURNING batch_id, canary_count, completed_count
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    SELECT 'BATCH_RESUMED', batch_id, %(operator)s::text,
           json_build_object('held_reason', 'CANARY', 'canary', canary_count, 'completed', completed_count)
      FROM ended
)
SELECT batch_id FROM ended;

-- name: release_canary
-- Put what has waited for the canary into the queue, and tell those who watch the batch.
SELECT busload.release_held(ARRAY[%(batch_id)s::uuid], 'CANARY'),
       pg_notify('busload_batch', %(batch_id)s::uuid::text);

-- name: held_with_stragglers
-- Held batches of which something has come back to the queue or the outbox: a retry that was due, a command
-- of a dead worker, one that was handed back, or that was sent into an open batch. No worker claims these
-- commands, but claims have to pass them by. Batches that somebody else holds locked are left for later.
SELECT b.batch_id
  FROM busload.batch AS b
 CROSS JOIN LATERAL busload.ids_of(ARRAY[b.batch_id]) AS i
 WHERE b.held_at IS NOT NULL
   AND b.completed_at IS NULL
   AND (
        EXISTS (SELECT FROM busload.queue AS q
                 WHERE q.hi BETWEEN i.first AND i.last AND q.batch_id = b.batch_id OFFSET 0)
        OR EXISTS (SELECT FROM busload.outbox AS o
                    WHERE o.hi BETWEEN i.first AND i.last AND o.batch_id = b.batch_id OFFSET 0)
   )
 ORDER BY b.batch_id
 LIMIT 100
   FOR NO KEY UPDATE OF b SKIP LOCKED;

-- name: withhold
-- Take the loads of these batches out of the queue and the outbox again.
SELECT busload.withhold(%(batches)b::uuid[]);
