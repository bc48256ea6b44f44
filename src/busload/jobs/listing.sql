-- fragments of: busload.commands.load

-- fragment: job
-- In the order of `JobMetadata`. A job is pending until the batch of its first stage has started.
SELECT j.job_id, j.domain, j.name, j.custom_data::text, s.status,
       j.continue_after_failures, j.operator, j.reason, j.created_at, s.started_at, j.completed_at,
       j.compensated_at, j.batch_id, j.position
  FROM busload.job AS j
 CROSS JOIN LATERAL (
        SELECT CASE WHEN j.status = 'IN_PROGRESS' AND j.position = 0 AND b.status = 'PENDING' THEN 'PENDING'
                    ELSE j.status END AS status,
               b.started_at
          FROM busload.job_stage AS s LEFT JOIN busload.batch AS b ON b.batch_id = s.batch_id
         WHERE s.job_id = j.job_id AND s.position = 0 OFFSET 0) AS s

-- name: job_of_batch
-- The job that a batch is a stage of, or undoes a stage of. The id of a job of another system may be any
-- text.
SELECT j.job_id, j.name
  FROM busload.batch AS b
  JOIN busload.job AS j
    ON j.job_id = CASE WHEN b.job_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN b.job_id::uuid END
 WHERE b.batch_id = %(batch_id)s::uuid;

-- name: stages
-- The stages of these jobs, in order.
SELECT job_id, position, name, planned, batch_id, step_id, plan_id, status, undo, undo_batch_id, undo_step_id
  FROM busload.job_stage WHERE job_id = ANY (%(job_ids)b::uuid[]) ORDER BY job_id, position;

-- name: job
-- One job.
{job}
 WHERE j.job_id = %(job_id)s::uuid AND (%(domain)s::text IS NULL OR j.domain = %(domain)s::text);

-- fragment: newest_jobs
-- The newest job comes first; `after` is the last job of the page before.
(%(status)s::text IS NULL OR s.status = %(status)s::text)
AND (%(batch_id)s::uuid IS NULL OR j.batch_id = %(batch_id)s::uuid)
AND (%(name)s::text IS NULL OR strpos(lower(j.name), lower(%(name)s::text)) > 0)
AND (%(after)s::uuid IS NULL OR (j.created_at, j.job_id) <
     (SELECT created_at, job_id FROM busload.job WHERE job_id = %(after)s::uuid))
ORDER BY j.created_at DESC, j.job_id DESC
{page}

-- name: jobs
-- The jobs of a domain.
{job}
 WHERE j.domain = %(domain)s::text
   AND {newest_jobs};

-- name: jobs_everywhere
-- The jobs of all domains.
{job}
 WHERE {newest_jobs};
