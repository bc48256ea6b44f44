-- name: stages
-- Where the oldest jobs of a batch are that have not ended: the stage, its batch if there is one that has not
-- ended, the command that takes the job on, and whether that command plans the stage. A stage that is undone
-- is at the batch that undoes it.
SELECT j.job_id, s.name, b.batch_id,
       CASE WHEN s.undo = 'IN_PROGRESS' THEN s.undo_step_id
            WHEN s.status = 'PLANNING' THEN s.plan_id ELSE s.step_id END,
       s.undo IS DISTINCT FROM 'IN_PROGRESS' AND s.status = 'PLANNING'
  FROM (SELECT * FROM busload.job
         WHERE batch_id = %(batch_id)s::uuid AND completed_at IS NULL
         ORDER BY job_id LIMIT %(limit)s::integer) AS j
 CROSS JOIN LATERAL (
        SELECT * FROM busload.job_stage AS s
         WHERE s.job_id = j.job_id AND (s.undo = 'IN_PROGRESS' OR s.position = j.position)
         ORDER BY s.undo IS NOT DISTINCT FROM 'IN_PROGRESS' DESC
         LIMIT 1) AS s
  LEFT JOIN busload.batch AS b
    ON b.batch_id = CASE WHEN s.undo = 'IN_PROGRESS' THEN s.undo_batch_id ELSE s.batch_id END
   AND b.completed_at IS NULL
 ORDER BY j.job_id;
