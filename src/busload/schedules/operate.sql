-- fragment: schedule
-- A schedule as people see it.
SELECT name, domain, rule::text, command::text, next_due_at, last_due_at, paused_at, paused_by, pause_reason,
       catch_up, catch_up_limit, missed_after, expires_in, declared_at, now()
  FROM busload.schedule

-- name: newest_fires
-- What each of these schedules has fired last, and how far that command is.
SELECT f.schedule, f.type, f.due_at, f.fired_at, f.domain, f.command_id, NULL::uuid, s.status, s.finished_at,
       f.operator, f.skipped
  FROM unnest(%(names)s::text[]) AS wanted (name)
 CROSS JOIN LATERAL (SELECT * FROM busload.fire
                      WHERE schedule = wanted.name AND command_id IS NOT NULL
                      ORDER BY fire DESC LIMIT 1) AS f
  LEFT JOIN LATERAL (SELECT status, finished_at FROM busload.command_status AS s
                      WHERE s.domain = f.domain AND s.command_id = f.command_id OFFSET 0) AS s ON true;

-- name: schedules
-- Schedules by name, behind the last one of the page before.
{schedule}
 WHERE (%(domain)s::text IS NULL OR domain = %(domain)s::text)
   AND (%(after)s::text IS NULL OR name > %(after)s::text)
 ORDER BY name LIMIT %(limit)s::bigint;

-- name: find
-- One schedule.
{schedule} WHERE name = %(name)s::text;

-- name: pause
-- Pause a schedule. If it is paused already, that pause stays as it is. Returns whether it was not, if there
-- is such a schedule.
WITH paused AS (
    UPDATE busload.schedule
       SET paused_at = now(), paused_by = %(operator)s::text, pause_reason = %(reason)s::text
     WHERE name = %(name)s::text AND paused_at IS NULL
    RETURNING name, domain
), noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'SCHEDULE_PAUSED', %(operator)s::text,
           json_build_object('schedule', name, 'domain', domain, 'reason', %(reason)s::text)
      FROM paused
     WHERE %(operator)s::text IS NOT NULL
)
SELECT EXISTS (SELECT FROM paused) FROM busload.schedule WHERE name = %(name)s::text;

-- name: resume
-- Let a paused schedule go on. What it has missed is caught up as its policy says. Returns whether it was
-- paused, if there is such a schedule.
WITH resumed AS (
    UPDATE busload.schedule
       SET paused_at = NULL, paused_by = NULL, pause_reason = NULL
     WHERE name = %(name)s::text AND paused_at IS NOT NULL
    RETURNING name, domain
), noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'SCHEDULE_RESUMED', %(operator)s::text, json_build_object('schedule', name, 'domain', domain)
      FROM resumed
     WHERE %(operator)s::text IS NOT NULL
)
SELECT EXISTS (SELECT FROM resumed), (SELECT pg_notify('busload_schedule', '') FROM resumed)
  FROM busload.schedule
 WHERE name = %(name)s::text;

-- name: remove
-- Remove schedules; what they have fired stays. Returns the names of those that were there.
WITH removed AS (
    DELETE FROM busload.schedule WHERE name = ANY (%(names)s::text[]) RETURNING name, domain
), noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'SCHEDULE_REMOVED', %(operator)s::text, json_build_object('schedule', name, 'domain', domain)
      FROM removed
     WHERE %(operator)s::text IS NOT NULL
)
SELECT name FROM removed ORDER BY name;

-- name: history
-- What a schedule, or all of them, has fired and skipped, the newest first, with how far the commands are.
-- The id of a batch is known before its planner has created it.
SELECT f.fire, f.schedule, f.type, f.due_at, f.fired_at, f.domain, f.command_id,
       (SELECT b.batch_id FROM busload.batch AS b WHERE b.batch_id = f.batch_id) AS batch_id,
       s.status, s.finished_at, f.operator, f.skipped
  FROM (SELECT * FROM busload.fire
         WHERE (%(name)s::text IS NULL OR schedule = %(name)s::text) AND fire < %(before)s::bigint
         ORDER BY fire DESC
         LIMIT %(limit)s::bigint) AS f
  LEFT JOIN LATERAL (SELECT status, finished_at FROM busload.command_status AS s
                      WHERE s.domain = f.domain AND s.command_id = f.command_id OFFSET 0) AS s ON true
 ORDER BY f.fire DESC;
