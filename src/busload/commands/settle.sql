-- fragments of: busload.commands.load

-- fragment: by_key
-- True for all leases. The planner takes it to be true for few, so it looks them up by their key, also if it
-- plans while there are no leases yet.
lease_id BETWEEN '00000000-0000-0000-0000-000000000000' AND 'ffffffff-ffff-ffff-ffff-ffffffffffff'

-- fragment: attempts
-- The attempts that have ended, with their leases. An attempt that goes on elsewhere takes along all of its
-- lease: so nothing is joined later, when PostgreSQL would go through all of one side for each row of the
-- other. OFFSET 0 keeps a plan that was made while tables were empty from reading all of them later.
held AS MATERIALIZED (
    SELECT l.lease_id, l.batch_id, l.attempt, l.forgiven, l.replies, l.worker, l.open, l AS lease
      FROM (
        SELECT CASE WHEN %(patience)s::integer IS NOT NULL
                    THEN set_config('lock_timeout', %(patience)s::integer::text, true)
               END
      ) AS patience
     CROSS JOIN busload.lease AS l
     WHERE l.lease_id = ANY (%(leases)b::uuid[]) AND {by_key}
     ORDER BY l.lease_id
       FOR UPDATE OF l
), outcome AS MATERIALIZED (   -- the statement closes it
    SELECT o.id, h.attempt, h.lease_id, h.batch_id, h.replies, h.worker, h.open, o.delay, o.reason,
           CASE WHEN o.outcome IS NULL THEN 'COMPLETED'::busload.outcome
                WHEN o.outcome = 'FAILED_ATTEMPT' AND (
                     EXISTS (
                        SELECT
                          FROM busload.batch AS b
                         WHERE b.batch_id = h.batch_id AND b.canceled_at IS NOT NULL
                        OFFSET 0
                     )
                     OR EXISTS (
                        SELECT
                          FROM busload.stopping AS s
                         WHERE s.command = o.id AND s.attempt > h.forgiven
                        OFFSET 0
                     )
                ) THEN 'CANCELED'
                ELSE o.outcome::busload.outcome
           END AS outcome,
           CASE WHEN o.outcome IN ('FAILED_ATTEMPT', 'TROUBLESHOOTING') THEN h.lease END AS lease,
           statement_timestamp() - o.started_ago * interval '1 second' AS started_at,
           statement_timestamp() - o.finished_ago * interval '1 second' AS finished_at,
           o.details::json AS details
      FROM unnest(%(ordinals)b::integer[], %(ids)b::bigint[], %(outcomes)b::text[], %(started_ago)b::float8[],
                  %(finished_ago)b::float8[], %(details)b::text[], %(delays)b::float8[], %(reasons)b::text[])
        AS o (ordinal, id, outcome, started_ago, finished_ago, details, delay, reason)
      JOIN unnest(%(leases)b::uuid[]) WITH ORDINALITY AS n (lease_id, ordinal) ON n.ordinal = o.ordinal
      JOIN held AS h ON h.lease_id = n.lease_id

-- fragment: without_traceback
-- The traceback is kept with the execution. It is not repeated elsewhere, and strangers do not get it.
(SELECT json_object_agg(key, value) FROM json_each(o.details) WHERE key <> 'traceback')

-- fragment: record_and_move
-- Record these attempts. Move the commands that go on elsewhere, and see what becomes of the leases.
-- `progress` counts from the row as it was locked: the snapshot of this statement may be older than the lock.
recorded AS (
    INSERT INTO busload.execution (command, started_at, finished_at, worker, lease_id, attempt, outcome,
                                   details)
    SELECT id, started_at, finished_at, worker, lease_id, attempt, outcome, details FROM outcome
), waiting_again AS (
    INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, attempt, forgiven, replies, fair,
                                   run_at, reason)
    SELECT id, id, (lease).domain, batch_id, (lease).priority, attempt + 1, (lease).forgiven, replies,
           (lease).fair, statement_timestamp() + delay * interval '1 second', 'RETRY'
      FROM outcome
     WHERE outcome = 'FAILED_ATTEMPT'
), parked AS (
    INSERT INTO busload.troubleshooting (command, domain, command_type, batch_id, priority, attempt, forgiven,
                                         fair, reason, error)
    SELECT id, (lease).domain, (SELECT command_type FROM busload.command WHERE id = o.id),
           batch_id, (lease).priority, attempt, (lease).forgiven, (lease).fair, reason, {without_traceback}
      FROM outcome AS o
     WHERE outcome = 'TROUBLESHOOTING'
), progress AS (
    SELECT lease_id, open - count(*)::integer AS open FROM outcome GROUP BY lease_id, open
), closed AS (
    DELETE FROM busload.lease
     WHERE lease_id = ANY (ARRAY(SELECT lease_id FROM progress WHERE open <= 0)) AND {by_key}
), kept AS (
    UPDATE busload.lease AS l
       SET open = p.open
      FROM progress AS p
     WHERE l.lease_id = p.lease_id
       AND l.lease_id = ANY (ARRAY(SELECT lease_id FROM progress WHERE open > 0))
), replied AS (
    SELECT busload.reply(
               o.id,
               CASE o.outcome WHEN 'COMPLETED' THEN 'SUCCESS' ELSE o.outcome::text END,
               CASE o.outcome WHEN 'COMPLETED' THEN o.details ELSE {without_traceback} END
           ) AS domain
      FROM outcome AS o
     WHERE o.replies AND o.outcome IN ('COMPLETED', 'FAILED', 'CANCELED')
)
SELECT (SELECT count(*) FROM outcome)::integer,
       CASE WHEN %(delays)b::float8[] IS NOT NULL
            THEN ARRAY(SELECT id FROM outcome WHERE outcome = 'CANCELED' AND delay >= 0::float8)
       END,
       (SELECT count(pg_notify({channel}, domain))
          FROM (SELECT DISTINCT domain FROM replied) AS ready
         WHERE domain IS NOT NULL)

-- name: settle
-- Record finished attempts of the leases that this worker still holds. If a lease was rescued meanwhile, its
-- attempts are skipped: the new holder will settle them. The trigger on execution counts what was recorded.
-- An attempt that would be tried again ends as canceled if the command or its batch was canceled. A lease is
-- closed with its last command. If somebody else holds a row that this statement needs for longer than
-- `patience`, in milliseconds, it fails and has changed nothing. It also fails if an attempt is recorded
-- already.
WITH {attempts}
), {record_and_move};

-- name: settle_again
-- The same for attempts that may be recorded already: those are looked up first, and skipped. So to repeat it
-- is harmless. The lock on the lease keeps others out meanwhile.
WITH {attempts}
     WHERE NOT EXISTS (
        SELECT FROM busload.execution AS e WHERE e.command = o.id AND e.attempt = h.attempt OFFSET 0
     )
), {record_and_move};

-- name: credited
-- Which of these attempts are recorded as they ended, under the lease that ran them: asked when a settlement
-- has moved fewer attempts than it sent. A retry that a canceled batch has turned into a cancel is recorded
-- too.
SELECT e.command, e.outcome <> coalesce(mine.outcome, 'COMPLETED')::busload.outcome
  FROM unnest(%(ids)b::bigint[], %(lease_ids)b::uuid[], %(outcomes)b::text[]) AS mine (id, lease_id, outcome)
  JOIN busload.execution AS e ON e.command = mine.id AND e.lease_id = mine.lease_id
   AND (
        e.outcome = coalesce(mine.outcome, 'COMPLETED')::busload.outcome
        OR mine.outcome = 'FAILED_ATTEMPT' AND e.outcome = 'CANCELED'
   );

-- name: recorded_before
-- Whether it was the same transaction that has recorded this attempt: asked when a caller's transaction could
-- not record it. A row that this transaction sees and that is still in progress is its own, also after a
-- savepoint. `xmin` has the lower 32 bits of an id, which is next to the current one.
SELECT pg_xact_status((
           current.id - ((current.id - e.xmin::text::bigint + 2147483648) & 4294967295) + 2147483648
       )::text::xid8) = 'in progress'
  FROM busload.execution AS e
 CROSS JOIN (SELECT pg_current_xact_id()::text::bigint AS id) AS current
 WHERE e.command = %(id)s::bigint AND e.lease_id = %(lease_id)s::uuid;

-- name: held_batches
-- Which of these batches are held: asked after a settlement, which may itself have exceeded their budget.
SELECT batch_id FROM busload.batch WHERE batch_id = ANY (%(batches)b::uuid[]) AND held_at IS NOT NULL;

-- name: locked
-- Which of these leases and batches others hold right now: asked when a settlement had to wait for too long.
WITH free_lease AS MATERIALIZED (
    SELECT lease_id {leases_in_order} SKIP LOCKED
), free_batch AS MATERIALIZED (
    SELECT batch_id
      FROM busload.batch
     WHERE batch_id = ANY (%(batches)b::uuid[])
     ORDER BY batch_id
       FOR NO KEY UPDATE SKIP LOCKED
)
SELECT ARRAY(
        SELECT lease_id FROM busload.lease WHERE lease_id = ANY (%(leases)b::uuid[])
        EXCEPT SELECT lease_id FROM free_lease
       ),
       ARRAY(
        SELECT batch_id FROM busload.batch WHERE batch_id = ANY (%(batches)b::uuid[])
        EXCEPT SELECT batch_id FROM free_batch
       );

-- name: lock
-- Lock leases, and after them batches, each in order, as every settlement does: for a transaction that
-- settles commands of some batches and sends into others. The count makes it wait for the leases first.
WITH held AS MATERIALIZED (
    SELECT lease_id {leases_in_order}
)
SELECT batch_id
  FROM busload.batch
 WHERE batch_id = ANY (%(batches)b::uuid[])
   AND (SELECT count(*) FROM held) >= 0
 ORDER BY batch_id
   FOR NO KEY UPDATE;
