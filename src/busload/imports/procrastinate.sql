-- name: has_jobs
-- Whether procrastinate is installed where its search_path finds it.
SELECT to_regclass('procrastinate_jobs') IS NOT NULL;

-- fragment: waiting
-- The next jobs that wait, oldest first. A time that Python cannot read, such as infinity, comes as text.
SELECT id, (SELECT extract(epoch FROM min(e.at))::text FROM procrastinate_events AS e WHERE e.job_id = j.id),
       queue_name::text, task_name::text, priority, lock, queueing_lock, args,
       CASE WHEN scheduled_at > now() AND scheduled_at < '9999-12-30' THEN scheduled_at END,
       CASE WHEN scheduled_at >= '9999-12-30' THEN scheduled_at::text END
  FROM procrastinate_jobs AS j
 WHERE status = 'todo' AND id > %(after)s::bigint
   AND (cardinality(%(names)s::text[]) = 0 OR queue_name::text = ANY (%(names)s::text[]))
 ORDER BY id
 LIMIT %(limit)s::integer

-- name: waiting
-- Jobs that wait.
{waiting};

-- name: lock_waiting
-- The same, and no worker of procrastinate takes them before this transaction has ended.
{waiting} FOR UPDATE OF j SKIP LOCKED;

-- name: cancel
-- Jobs that are commands now: procrastinate keeps them as canceled.
UPDATE procrastinate_jobs
   SET status = 'cancelled'
 WHERE id = ANY (%(ids)s::bigint[]) AND status = 'todo'
RETURNING id;
