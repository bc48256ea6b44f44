-- name: create
-- A batch of jobs, which takes no more than these.
WITH created AS (
    INSERT INTO busload.batch (batch_id, domain, name, custom_data, on_complete, batch_type, way,
                               total_count, sealed_at)
    VALUES (%(batch_id)s::uuid, %(domain)s::text, %(name)s::text, %(custom_data)s::text::jsonb,
            %(on_complete)s::text::json, 'JOBS', 'job', %(total)s::integer, now())
    RETURNING batch_id
)
INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_SEALED', batch_id FROM created;

-- name: type
-- Whether a batch is one of jobs.
SELECT batch_type = 'JOBS'
  FROM busload.batch
 WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND pruned_at IS NULL;

-- name: mark_canceled
-- From here on no job of the batch goes on. Whoever cancels the jobs one by one says how long that may take.
WITH marked AS (
    UPDATE busload.batch
       SET canceled_at = now(), canceling_until = now() + %(hold)s::interval
     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND completed_at IS NULL
    RETURNING batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    SELECT 'BATCH_CANCELED', batch_id, %(operator)s::text, json_build_object('reason', %(reason)s::text)
      FROM marked
)
SELECT batch_id FROM marked;

-- name: go_on
-- Whoever cancels the jobs of a batch is still there.
UPDATE busload.batch SET canceling_until = now() + %(hold)s::interval
 WHERE batch_id = %(batch_id)s::uuid AND completed_at IS NULL;

-- name: open_jobs
-- Jobs of a batch that go on.
SELECT job_id
  FROM busload.job
 WHERE batch_id = %(batch_id)s::uuid AND status = 'IN_PROGRESS'
 ORDER BY job_id
 LIMIT %(limit)s::integer;

-- name: lock_jobs
-- Lock the jobs of a batch that go on.
SELECT job_id
  FROM busload.job
 WHERE batch_id = %(batch_id)s::uuid AND status = 'IN_PROGRESS'
 ORDER BY job_id
   FOR NO KEY UPDATE;

-- name: stragglers
-- Jobs that go on although their batch was canceled, unless somebody is canceling them right now. With who
-- has canceled the batch, and why.
SELECT j.domain, j.job_id, v.reason, v.operator
  FROM busload.batch AS b
  JOIN busload.job AS j ON j.batch_id = b.batch_id
 CROSS JOIN LATERAL (
        SELECT v.details ->> 'reason' AS reason, v.operator
          FROM busload.event AS v
         WHERE v.batch_id = b.batch_id AND v.lo IS NULL AND v.type = 'BATCH_CANCELED'
         ORDER BY v.event DESC
         LIMIT 1) AS v
 WHERE b.batch_type = 'JOBS'
   AND b.canceled_at IS NOT NULL
   AND b.completed_at IS NULL
   AND (b.canceling_until IS NULL OR b.canceling_until < now())
   AND j.status = 'IN_PROGRESS'
 ORDER BY j.job_id
 LIMIT %(limit)s::integer
   FOR NO KEY UPDATE OF j SKIP LOCKED;
