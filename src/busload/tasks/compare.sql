-- fragments of: busload.tasks.track

-- name: task_page
-- The next tasks, in the order of their keys.
SELECT DISTINCT task_key FROM busload.command
 WHERE task_key > %(after)s::text AND command_type = 'TrackedTask'
   AND (%(domains)b::text[] IS NULL OR domain = ANY (%(domains)b::text[]))
 ORDER BY task_key LIMIT %(limit)s::integer;

-- name: newest
-- The newest command of each task: its state in the words of the tracker, the id by which it can be claimed,
-- and the id of its newest execution.
SELECT task.task_key,
       CASE s.status WHEN 'IN_PROGRESS' THEN 'processing' WHEN 'IN_TROUBLESHOOTING_QUEUE' THEN 'dlq'
                     WHEN 'PENDING' THEN CASE WHEN s.attempts > 0 THEN 'failed' ELSE 'queued' END
                     WHEN 'SCHEDULED' THEN CASE WHEN s.attempts > 0 THEN 'failed' ELSE 'queued' END
                     ELSE lower(s.status) END,
       {announced_id},
       s.execution_id
  FROM unnest(%(task_keys)b::text[]) AS task (task_key)
 CROSS JOIN LATERAL (SELECT c.id, c.command_id FROM busload.command AS c
                      WHERE c.task_key = task.task_key AND c.command_type = 'TrackedTask'
                        AND (%(domains)b::text[] IS NULL OR c.domain = ANY (%(domains)b::text[]))
                      ORDER BY c.id DESC LIMIT 1) AS c
 CROSS JOIN LATERAL (SELECT * FROM busload.command_status AS s WHERE s.id = c.id OFFSET 0) AS s;
