-- name: going
-- The jobs of a batch that go on, and the batch of the stage that each is in.
SELECT j.job_id, s.batch_id
  FROM busload.job AS j
  JOIN busload.job_stage AS s ON s.job_id = j.job_id AND s.position = j.position
 WHERE j.batch_id = %(batch_id)s::uuid AND j.domain = %(domain)s::text AND j.status = 'IN_PROGRESS'
 ORDER BY j.job_id;

-- name: canceled_or_complete
-- Whether the batch of jobs that a job counts in is complete or was canceled.
SELECT coalesce(completed_at, canceled_at) IS NOT NULL FROM busload.batch WHERE batch_id = %(batch_id)s::uuid;
