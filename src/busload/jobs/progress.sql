-- name: existing
-- The jobs of these that exist.
SELECT job_id FROM busload.job WHERE job_id = ANY (%(job_ids)b::uuid[]);

-- name: create
-- Jobs without their stages.
INSERT INTO busload.job (job_id, domain, batch_id, name, custom_data, on_complete, continue_after_failures)
SELECT job_id, %(domain)s::text, %(batch_id)s::uuid, name, custom_data::jsonb, on_complete::json,
       continue_after_failures
  FROM unnest(%(job_ids)b::uuid[], %(name)b::text[], %(custom_data)b::text[], %(on_complete)b::text[],
              %(continue_after_failures)b::boolean[])
       AS job (job_id, name, custom_data, on_complete, continue_after_failures);

-- name: create_stages
-- The stages of new jobs.
INSERT INTO busload.job_stage (job_id, position, name, planned, batch_id, step_id, plan_id, status,
                               undo, undo_batch_id, undo_step_id)
SELECT *
  FROM unnest(%(job_id)b::uuid[], %(position)b::integer[], %(name)b::text[], %(planned)b::boolean[],
              %(batch_id)b::uuid[], %(step_id)b::uuid[], %(plan_id)b::uuid[], %(status)b::text[],
              %(undo)b::text[], %(undo_batch_id)b::uuid[], %(undo_step_id)b::uuid[]);

-- name: keep_parts
-- Keep commands of stages until their turn has come.
INSERT INTO busload.job_part (job_id, position, part, commands)
SELECT job_id, position, part, commands::json
  FROM unnest(%(job_ids)b::uuid[], %(positions)b::integer[], %(parts)b::integer[], %(commands)b::text[])
       AS kept (job_id, position, part, commands);

-- name: take_parts
-- The commands of a stage whose turn has come. From here on they are in its batch.
WITH taken AS (
    DELETE FROM busload.job_part WHERE job_id = %(job_id)s::uuid AND position = %(position)s::integer
    RETURNING part, commands::text AS commands
)
SELECT commands FROM taken ORDER BY part;

-- name: drop_parts
-- Drop the commands that are kept for stages of a job, and not those that undo one.
DELETE FROM busload.job_part WHERE job_id = %(job_id)s::uuid AND position >= 0;

-- name: hold
-- Whoever moves a job on, or stops it, locks its row first: one at a time.
SELECT job_id, domain, name, status, position, continue_after_failures, on_complete::text, outcome, batch_id
  FROM busload.job WHERE job_id = %(job_id)s::uuid AND domain = %(domain)s::text
   FOR NO KEY UPDATE;

-- name: headers_of
-- The headers of a batch.
SELECT headers::text FROM busload.batch WHERE batch_id = %(batch_id)s::uuid;

-- name: lock_batch
-- Lock the batch of jobs that a job counts in, and say whether it is complete or canceled. The job is locked
-- before.
SELECT completed_at IS NOT NULL, canceled_at IS NOT NULL
  FROM busload.batch WHERE batch_id = %(batch_id)s::uuid FOR NO KEY UPDATE;

-- name: mark_stage
-- How far a stage has come.
UPDATE busload.job_stage SET status = %(status)s::text
 WHERE job_id = %(job_id)s::uuid AND position = %(position)s::integer;

-- name: replan
-- The command that should have planned a stage was ended by an operator: another command will plan it.
UPDATE busload.job_stage SET plan_id = %(plan_id)s::uuid
 WHERE job_id = %(job_id)s::uuid AND position = %(position)s::integer;

-- name: arrive
-- The job has reached this stage. If it had stopped, it goes on.
WITH here AS (
    UPDATE busload.job SET position = %(position)s::integer, status = 'IN_PROGRESS', completed_at = NULL
     WHERE job_id = %(job_id)s::uuid
)
UPDATE busload.job_stage SET status = %(status)s::text
 WHERE job_id = %(job_id)s::uuid AND position = %(position)s::integer;

-- name: compensate
-- From here on the job goes back: what its stages have done is undone, and then it has ended so.
UPDATE busload.job SET status = 'COMPENSATING', outcome = %(outcome)s::text
 WHERE job_id = %(job_id)s::uuid;

-- name: mark_undo
-- How far the compensation of a stage has come.
UPDATE busload.job_stage SET undo = %(undo)s::text
 WHERE job_id = %(job_id)s::uuid AND position = %(position)s::integer;

-- name: end
-- A job ends. Whoever waits for it is notified. What would undo its stages is not needed any more, unless the
-- job has failed and may be resumed.
WITH ended AS (
    UPDATE busload.job
       SET status = %(status)s::text,
           completed_at = statement_timestamp(),
           compensated_at = coalesce(compensated_at, (
                SELECT statement_timestamp() FROM busload.job_stage AS s
                 WHERE s.job_id = job.job_id AND s.undo = 'DONE' LIMIT 1))
     WHERE job_id = %(job_id)s::uuid
    RETURNING job_id, status, compensated_at
), dropped AS (
    DELETE FROM busload.job_part AS p
     USING ended AS e
     WHERE p.job_id = e.job_id AND p.position < 0 AND (e.status <> 'FAILED' OR e.compensated_at IS NOT NULL)
)
SELECT pg_notify('busload_batch', job_id::text) FROM ended;

-- name: sign
-- Who has decided about the job, and why.
WITH noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'JOB_RESUMED', %(operator)s::text, json_build_object('job_id', job_id, 'domain', domain)
      FROM busload.job
     WHERE job_id = %(job_id)s::uuid AND %(operator)s::text IS NOT NULL
)
UPDATE busload.job
   SET operator = %(operator)s::text, reason = %(reason)s::text
 WHERE job_id = %(job_id)s::uuid;
