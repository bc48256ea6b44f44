-- fragments of: busload.commands.load

-- fragment: later
%(run_at)s::timestamptz > now()

-- name: reschedule
-- Let a command that waits, and was parted from its load, run at another time. One that is to run now goes
-- into the queue; one that is not published yet waits for that, as before.
WITH unqueued AS (
    DELETE FROM busload.queue WHERE hi = %(command)s::bigint AND {later} RETURNING {load}
), unboxed AS (
    DELETE FROM busload.outbox WHERE hi = %(command)s::bigint AND {later} RETURNING *
), put_off AS (
    INSERT INTO busload.scheduled ({load}, run_at, reason)
    SELECT {load}, %(run_at)s::timestamptz, 'RUN_AT'
      FROM (SELECT * FROM unqueued UNION ALL SELECT {load} FROM unboxed) AS load
    RETURNING domain, run_at
), moved AS (
    UPDATE busload.scheduled
       SET run_at = %(run_at)s::timestamptz,
           reason = CASE WHEN reason IN ('LIMITED', 'HELD') THEN 'RUN_AT' ELSE reason END
     WHERE hi = %(command)s::bigint AND {later}
    RETURNING domain, run_at
), due AS (
    DELETE FROM busload.scheduled WHERE hi = %(command)s::bigint AND NOT {later} RETURNING {load}
), queued AS (
    INSERT INTO busload.queue ({load})
    SELECT {load} FROM due
    RETURNING domain
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    VALUES ('RESCHEDULED', %(command)s::bigint, %(command)s::bigint, %(batch_id)s::uuid,
            %(attempt)s::integer, %(operator)s::text,
            json_build_object('run_at', greatest(%(run_at)s::timestamptz, now())))
), rerouted AS (   -- else nobody would know that the broker has refused it
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'REROUTED', lo, hi, batch_id, attempt, %(operator)s::text,
           json_build_object('transport', transport, 'attempts', rounds, 'last_error', error)
      FROM unboxed WHERE rounds > 0
)
SELECT count(pg_notify({channel}, told))
  FROM (SELECT domain, domain AS told FROM queued
         UNION ALL
        SELECT domain, ''
          FROM (SELECT * FROM put_off UNION ALL SELECT * FROM moved) AS later
         WHERE {is_soon}) AS ready;
