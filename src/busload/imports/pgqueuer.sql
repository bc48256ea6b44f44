-- name: has_jobs
-- Whether PgQueuer is installed where its search_path finds it.
SELECT to_regclass('pgqueuer') IS NOT NULL;

-- fragment: waiting
-- The next jobs that wait, oldest first. A time that Python cannot read, such as infinity, comes as text.
SELECT id, extract(epoch FROM created)::text, entrypoint, priority, dedupe_key, payload, headers,
       CASE WHEN execute_after > now() AND execute_after < '9999-12-30' THEN execute_after END,
       CASE WHEN execute_after >= '9999-12-30' THEN execute_after::text END
  FROM pgqueuer
 WHERE status = 'queued' AND id > %(after)s::bigint
   AND (cardinality(%(names)s::text[]) = 0 OR entrypoint = ANY (%(names)s::text[]))
 ORDER BY id
 LIMIT %(limit)s::integer

-- name: waiting
-- Jobs that wait.
{waiting};

-- name: lock_waiting
-- The same, and no worker of PgQueuer takes them before this transaction has ended.
{waiting} FOR UPDATE SKIP LOCKED;

-- name: cancel
-- Jobs that are commands now: PgQueuer removes canceled jobs, and keeps a line about each in its log.
WITH removed AS (
    DELETE FROM pgqueuer
     WHERE id = ANY (%(ids)s::bigint[]) AND status = 'queued'
    RETURNING id, priority, entrypoint
)
INSERT INTO pgqueuer_log (job_id, status, priority, entrypoint)
SELECT id, 'canceled', priority, entrypoint
  FROM removed
RETURNING job_id;
