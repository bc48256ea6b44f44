-- fragments of: busload.commands.load

-- fragment: of_command
-- The load that a command lies in.
WHERE hi BETWEEN %(command)s::bigint AND (%(command)s::bigint | 1023) AND lo <= %(command)s::bigint
ORDER BY hi
LIMIT 1
FOR UPDATE

-- fragment: others
-- What is left of a load `p` without the command: the part before it is a load of its own. The part after it
-- keeps the key of the load, so the command becomes a load of its own. The rest is as `p` has it; in the
-- queue, both have entered now.
CROSS JOIN LATERAL (
    SELECT jsonb_build_object('hi', %(command)s::bigint - 1) AS range WHERE p.lo < %(command)s::bigint
    UNION ALL
    SELECT jsonb_build_object('lo', %(command)s::bigint, 'hi', %(command)s::bigint)
     WHERE p.hi > %(command)s::bigint
) AS part
CROSS JOIN LATERAL jsonb_populate_record(
    p.load, part.range || jsonb_build_object('entered', pg_current_xact_id()::text)) AS new

-- fragment: first_left
-- Where the load begins that keeps the key: at the command if the command is its last one, or behind it.
lo = CASE WHEN hi > %(command)s::bigint THEN %(command)s::bigint + 1 ELSE %(command)s::bigint END

-- name: find
-- Where a command is.
SELECT s.id, s.command_type, s.batch_id, s.status
  FROM busload.command_status AS s
 WHERE s.domain = %(domain)s::text AND s.command_id = %(command_id)s::uuid;

-- name: hold_batch
-- The row of a batch is locked before its loads, as the cancel of a batch does it.
SELECT batch_id FROM busload.batch WHERE batch_id = %(batch_id)s::uuid FOR NO KEY UPDATE;

-- name: part
-- Part a command that waits from its load: afterwards it is a load of one, in the same place. If a claim is
-- splitting the load, this statement waits for it. No row: the command does not wait any more.
WITH queued AS MATERIALIZED (
    SELECT q AS load, q.lo, q.hi, q.batch_id, q.attempt FROM busload.queue AS q {of_command}
), scheduled AS MATERIALIZED (
    SELECT s AS load, s.lo, s.hi, s.batch_id, s.attempt, s.reason FROM busload.scheduled AS s {of_command}
), boxed AS MATERIALIZED (
    SELECT o AS load, o.lo, o.hi, o.batch_id, o.attempt FROM busload.outbox AS o {of_command}
), parted_queue AS (
    INSERT INTO busload.queue SELECT new.* FROM queued AS p {others}
), left_in_queue AS (
    UPDATE busload.queue SET {first_left} WHERE hi = (SELECT hi FROM queued WHERE lo < hi)
), parted_scheduled AS (
    INSERT INTO busload.scheduled SELECT new.* FROM scheduled AS p {others}
), left_scheduled AS (
    UPDATE busload.scheduled SET {first_left} WHERE hi = (SELECT hi FROM scheduled WHERE lo < hi)
), parted_outbox AS (
    INSERT INTO busload.outbox SELECT new.* FROM boxed AS p {others}
), left_in_outbox AS (
    UPDATE busload.outbox SET {first_left} WHERE hi = (SELECT hi FROM boxed WHERE lo < hi)
)
SELECT batch_id, attempt, NULL AS reason FROM queued
UNION ALL SELECT batch_id, attempt, reason FROM scheduled
UNION ALL SELECT batch_id, attempt, NULL FROM boxed;

-- name: cancel
-- Cancel a command that waits, and was parted from its load.
WITH queued AS (
    DELETE FROM busload.queue WHERE hi = %(command)s::bigint RETURNING {canceled}
), scheduled AS (
    DELETE FROM busload.scheduled WHERE hi = %(command)s::bigint RETURNING {canceled}
), boxed AS (
    DELETE FROM busload.outbox WHERE hi = %(command)s::bigint RETURNING {canceled_unpublished}
), load AS (
    SELECT * FROM queued UNION ALL SELECT * FROM scheduled UNION ALL SELECT * FROM boxed
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'CANCELED', lo, hi, batch_id, attempt, %(operator)s::text, {cancel_details} FROM load
), replied AS (
    SELECT busload.reply(%(command)s::bigint, 'CANCELED', json_build_object('message', %(reason)s::text))
           AS domain
      FROM load
     WHERE replies
)
SELECT count(pg_notify('busload_ready', domain)) FROM replied WHERE domain IS NOT NULL;

-- name: hold_leases
-- Wait for whoever settles the command right now: only the next statement sees what that recorded.
SELECT lease_id
  FROM busload.lease
 WHERE hi BETWEEN %(command)s::bigint AND (%(command)s::bigint | 1023) AND lo <= %(command)s::bigint
 ORDER BY lease_id
   FOR UPDATE;

-- name: ask_to_stop
-- Ask the worker that has the command to stop it. This attempt is the last one: whatever would have the
-- command tried again ends it. No row: nobody has the command any more.
WITH running AS (
    SELECT l.attempt, l.batch_id, l.lease_id, l.worker
      FROM busload.lease AS l
     WHERE hi BETWEEN %(command)s::bigint AND (%(command)s::bigint | 1023) AND lo <= %(command)s::bigint
       AND %(command)s::bigint <> ALL (returned)
       AND NOT EXISTS (
            SELECT
              FROM busload.execution AS e
             WHERE e.command = %(command)s::bigint AND e.attempt = l.attempt
            OFFSET 0
       )
), asked AS (
    INSERT INTO busload.stopping (command, attempt, operator, reason)
    SELECT %(command)s::bigint, attempt, %(operator)s::text, %(reason)s::text FROM running
        ON CONFLICT (command) DO UPDATE
       SET attempt = excluded.attempt, operator = excluded.operator, reason = excluded.reason,
           since = excluded.since
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, operator, details)
    SELECT 'ASKED_TO_STOP', %(command)s::bigint, %(command)s::bigint, batch_id, attempt, lease_id, worker,
           %(operator)s::text, json_build_object('reason', %(reason)s::text)
      FROM running
)
SELECT pg_notify('busload_cancel', %(command)s::bigint::text) FROM running;

-- name: stopping
-- The commands that were asked to stop and do not run any more. Those that wait again are to be canceled,
-- also as a later attempt, since a settlement may not have seen that they were asked. Only an operator's
-- retry forgives the attempt that was to be the last one. Then nothing need be remembered, nor of those that
-- have ended. In the order in which everybody locks batches.
SELECT s.command, s.operator, s.reason, c.batch_id, coalesce(place.forgiven < s.attempt, false),
       c.id IS NULL OR place.forgiven >= s.attempt
       OR c.status IN ('COMPLETED', 'FAILED', 'CANCELED', 'IN_TROUBLESHOOTING_QUEUE')
  FROM busload.stopping AS s
  LEFT JOIN LATERAL (SELECT id, batch_id, status FROM busload.command_status AS c
                      WHERE c.id = s.command OFFSET 0) AS c ON true
  LEFT JOIN LATERAL (
    SELECT forgiven FROM busload.queue WHERE hi BETWEEN s.command AND (s.command | 1023) AND lo <= s.command
    UNION ALL
    SELECT forgiven
      FROM busload.scheduled WHERE hi BETWEEN s.command AND (s.command | 1023) AND lo <= s.command
    UNION ALL
    SELECT forgiven FROM busload.outbox WHERE hi BETWEEN s.command AND (s.command | 1023) AND lo <= s.command
    LIMIT 1
  ) AS place ON true
 WHERE c.id IS NULL OR c.status <> 'IN_PROGRESS'
 ORDER BY c.batch_id, s.command
 LIMIT 1000
   FOR UPDATE OF s SKIP LOCKED;

-- name: forget
-- These were asked to stop, and that is over.
DELETE FROM busload.stopping WHERE command = ANY (%(commands)b::bigint[]);
