-- name: lock_jobs
-- Lock the jobs of a batch that go on, and those that could be resumed. From here on none of them moves.
SELECT job_id, status
  FROM busload.job
 WHERE batch_id = %(batch_id)s::uuid AND status IN ('IN_PROGRESS', 'FAILED')
 ORDER BY job_id
   FOR NO KEY UPDATE;

-- name: mark_batch
-- Mark a batch of jobs as canceled. No row: it is complete, or there is no such batch.
WITH marked AS (
    UPDATE busload.batch
       SET canceled_at = now()
     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND completed_at IS NULL
    RETURNING batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    SELECT 'BATCH_CANCELED', batch_id, %(operator)s::text, json_build_object('reason', %(reason)s::text)
      FROM marked
)
SELECT batch_id FROM marked;

-- name: note
-- An operator has canceled a job.
INSERT INTO busload.event (type, operator, details)
SELECT 'JOB_CANCELED', %(operator)s::text,
       json_build_object('job_id', job_id, 'domain', domain, 'reason', %(reason)s::text)
  FROM busload.job
 WHERE job_id = %(job_id)s::uuid;

-- name: stop
-- Stop jobs whose rows are locked: none of them begins another stage. A job that goes on, and has reached a
-- stage that can be undone, is to be compensated; any other one has ended. Whoever waits for these is
-- notified. The commands of later stages are dropped, and those that undo a stage if they are not needed.
-- Returns each job, whether it compensates, and where it is; also whether a person has ended the step that
-- would begin the compensation.
WITH here AS MATERIALIZED (
    SELECT j.job_id, j.domain, s.status AS stage, s.batch_id, s.plan_id, s.step_id,
           j.status = 'IN_PROGRESS' AND EXISTS (
               SELECT FROM busload.job_stage AS u
                WHERE u.job_id = j.job_id AND u.position <= j.position AND u.undo = 'PENDING') AS compensates
      FROM unnest(%(job_ids)b::uuid[]) AS asked (job_id)
      JOIN busload.job AS j ON j.job_id = asked.job_id
      JOIN busload.job_stage AS s ON s.job_id = j.job_id AND s.position = j.position
     WHERE j.status IN ('IN_PROGRESS', 'FAILED')
), stopped AS (
    UPDATE busload.job AS j
       SET status = CASE WHEN h.compensates THEN 'COMPENSATING' ELSE 'CANCELED' END,
           outcome = CASE WHEN h.compensates THEN 'CANCELED' ELSE j.outcome END,
           completed_at = CASE WHEN NOT h.compensates THEN statement_timestamp() END,
           operator = %(operator)s::text,
           reason = %(reason)s::text
      FROM here AS h
     WHERE j.job_id = h.job_id
), dropped AS (
    DELETE FROM busload.job_part AS p
     USING here AS h
     WHERE p.job_id = h.job_id AND (p.position >= 0 OR NOT h.compensates)
)
SELECT job_id, compensates, stage, batch_id, plan_id,
       compensates AND stage = 'IN_PROGRESS' AND EXISTS (
           SELECT FROM busload.command_status AS c
            WHERE c.domain = here.domain AND c.command_id = here.step_id
              AND c.status IN ('COMPLETED', 'FAILED', 'CANCELED')
           OFFSET 0
       ),
       CASE WHEN NOT compensates THEN pg_notify('busload_batch', job_id::text) END
  FROM here
 ORDER BY job_id;

-- name: mark_stages
-- Mark the batches of stages as canceled: from here on none of their commands is tried again and, with
-- `in_pages`, none is claimed until all are canceled. Workers are told to stop what runs. Returns the batches
-- of which commands may wait: also those whose cancel has stopped before its end.
WITH open AS MATERIALIZED (
    SELECT batch_id FROM busload.batch
     WHERE batch_id = ANY (%(batch_ids)b::uuid[]) AND completed_at IS NULL
     ORDER BY batch_id FOR NO KEY UPDATE
), marked AS (
    UPDATE busload.batch AS b
       SET canceled_at = now(), held_at = NULL, held_reason = NULL, held_by = NULL, held_note = NULL,
           canceling_until = CASE WHEN %(in_pages)s::boolean THEN now() + %(hold)s::interval END
      FROM open AS o
     WHERE b.batch_id = o.batch_id
    RETURNING b.batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    SELECT 'BATCH_CANCELED', batch_id, %(operator)s::text, json_build_object('reason', %(reason)s::text)
      FROM marked
)
SELECT batch_id, pg_notify('busload_cancel', batch_id::text) FROM marked ORDER BY batch_id;

-- name: left_stages
-- The batches of stages of a batch of jobs whose cancel has begun and not come to its end.
SELECT b.batch_id
  FROM busload.job AS j
  JOIN busload.job_stage AS s ON s.job_id = j.job_id AND s.position = j.position
  JOIN busload.batch AS b ON b.batch_id = s.batch_id
 WHERE j.batch_id = %(batch_id)s::uuid AND b.canceling_until IS NOT NULL AND b.completed_at IS NULL
 ORDER BY b.batch_id;

-- name: cancel_planners
-- Cancel the commands that would have planned stages, wherever they wait. One that runs already finds that
-- its job was canceled.
WITH planner AS MATERIALIZED (
    SELECT id FROM busload.command
     WHERE domain = %(domain)s::text AND command_id = ANY (%(plan_ids)b::uuid[])
), waiting AS (
    DELETE FROM busload.queue WHERE hi = ANY (ARRAY(SELECT id FROM planner)) RETURNING hi, attempt
), later AS (
    DELETE FROM busload.scheduled WHERE hi = ANY (ARRAY(SELECT id FROM planner)) RETURNING hi, attempt
), parked AS (
    DELETE FROM busload.troubleshooting WHERE command = ANY (ARRAY(SELECT id FROM planner))
    RETURNING command, attempt
), noted AS (
    INSERT INTO busload.event (type, lo, hi, attempt, operator, details)
    SELECT type, id, id, attempt, %(operator)s::text, json_build_object('reason', %(reason)s::text)
      FROM (SELECT 'CANCELED', * FROM waiting UNION ALL SELECT 'CANCELED', * FROM later
            UNION ALL SELECT 'OPERATOR_CANCELED', * FROM parked) AS ended (type, id, attempt)
    RETURNING hi
)
SELECT count(*)::integer FROM noted;
