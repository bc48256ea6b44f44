-- fragment: schedule
-- A schedule with all that is needed to fire it.
SELECT name, domain, rule::text, command::text, expires_in, catch_up, catch_up_limit, missed_after,
       declaration, next_due_at, now()
  FROM busload.schedule

-- name: due
-- Schedules that are due, the most overdue first, for this transaction alone. Schedules whose declaration
-- this worker cannot read are left to others.
{schedule}
 WHERE next_due_at <= now() AND paused_at IS NULL AND declaration <> ALL (%(unreadable)s::text[])
 ORDER BY next_due_at
 LIMIT %(limit)s::integer
   FOR UPDATE SKIP LOCKED;

-- name: next_due
-- Seconds until the next schedule is due; null if none will be.
SELECT extract(epoch FROM min(next_due_at) - now())::float8
  FROM busload.schedule
 WHERE paused_at IS NULL AND declaration <> ALL (%(unreadable)s::text[]);

-- name: advance
-- Note what is fired and skipped, and when these schedules are due next. Returns the commands that are to be
-- sent: those of due times that were not fired before.
WITH advanced AS (
    UPDATE busload.schedule AS s
       SET next_due_at = n.next_due_at, last_due_at = coalesce(n.last_due_at, s.last_due_at)
      FROM unnest(%(names)s::text[], %(next_due_ats)s::timestamptz[], %(last_due_ats)s::timestamptz[])
        AS n (name, next_due_at, last_due_at)
     WHERE s.name = n.name
)
INSERT INTO busload.fire (schedule, type, due_at, domain, command_id, batch_id, skipped)
SELECT schedule, CASE WHEN skipped > 0 THEN 'SKIPPED' ELSE 'DUE' END, due_at, domain, command_id, batch_id,
       skipped
  FROM unnest(%(schedules)s::text[], %(due_ats)s::timestamptz[], %(domains)s::text[], %(command_ids)s::uuid[],
              %(batch_ids)s::uuid[], %(skipped)s::integer[])
       WITH ORDINALITY AS f (schedule, due_at, domain, command_id, batch_id, skipped, nth)
 ORDER BY nth
    ON CONFLICT (schedule, due_at) WHERE type = 'DUE' DO NOTHING
RETURNING command_id;

-- name: to_trigger
-- One schedule, as it is to be sent now.
{schedule}
 WHERE name = %(name)s::text
   FOR SHARE;

-- name: note_trigger
-- An operator, or a program, has triggered a schedule.
WITH noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'SCHEDULE_TRIGGERED', %(operator)s::text,
           json_build_object('schedule', %(schedule)s::text, 'domain', %(domain)s::text)
     WHERE %(operator)s::text IS NOT NULL
)
INSERT INTO busload.fire (schedule, type, due_at, domain, command_id, batch_id, operator)
VALUES (%(schedule)s::text, 'TRIGGERED', now(), %(domain)s::text, %(command_id)s::uuid, %(batch_id)s::uuid,
        %(operator)s::text);
