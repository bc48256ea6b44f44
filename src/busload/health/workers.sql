-- fragment: worker
-- A worker as people see it, and what it holds.
SELECT w.worker, w.name, w.domains, w.concurrency, w.started_at, w.seen_at, w.stopped_at,
       CASE WHEN w.lost THEN 'LOST'
            WHEN w.stopped_at IS NOT NULL THEN 'STOPPED'
            WHEN w.seen_at <= now() - w.lease_for THEN 'SILENT'
            WHEN w.stop_requested_at IS NOT NULL THEN 'STOPPING'
            ELSE 'ALIVE' END,
       l.leases, l.commands, w.version, w.host, w.process_id, w.stop_requested_at, w.stop_requested_by,
       now(), w.condition
  FROM busload.worker AS w
 CROSS JOIN LATERAL (SELECT count(*)::integer AS leases, coalesce(sum(open), 0)::integer AS commands
                       FROM busload.lease WHERE worker = w.worker) AS l

-- name: workers
-- The workers that have not stopped, or all of them, the newest first, and what they hold.
{worker}
 WHERE (%(stopped_too)s::boolean OR w.stopped_at IS NULL)
   AND (%(domain)s::text IS NULL OR %(domain)s::text = ANY (w.domains))
   AND (%(after)s::bigint IS NULL OR w.worker < %(after)s::bigint)
 ORDER BY w.worker DESC LIMIT %(limit)s::integer;

-- name: worker
-- One worker, by its number.
{worker}
 WHERE w.worker = %(worker)s::bigint;

-- name: running
-- The commands that a worker holds and has not settled, the oldest lease first. No more leases are read than
-- can be needed.
SELECT c.domain, c.command_id, c.command_type, c.task_key, c.batch_id, l.attempt, l.since
  FROM (SELECT * FROM busload.lease
         WHERE worker = %(worker)s::bigint ORDER BY since, lease_id LIMIT %(limit)s::integer) AS l
 CROSS JOIN LATERAL (
    SELECT c.*
      FROM busload.command AS c
     WHERE c.id BETWEEN l.lo AND l.hi AND c.id <> ALL (l.returned)
       AND NOT EXISTS (SELECT FROM busload.execution AS e
                        WHERE e.command = c.id AND e.attempt = l.attempt OFFSET 0)
     ORDER BY c.id LIMIT %(limit)s::integer
 ) AS c
 ORDER BY l.since, c.id LIMIT %(limit)s::integer;

-- name: stop
-- Ask workers to stop: one by its number, or all that have a name. Their heartbeats tell them; the
-- notification makes a heartbeat come at once. A tracker is asked by whoever runs it, not by us.
WITH running AS MATERIALIZED (
    SELECT worker, name, stop_requested_at IS NULL AS asked_now
      FROM busload.worker
     WHERE (worker = %(worker)s::bigint OR name = %(name)s::text) AND stopped_at IS NULL AND concurrency > 0
     ORDER BY worker
       FOR UPDATE
), asked AS (
    UPDATE busload.worker
       SET stop_requested_at = now(), stop_requested_by = %(operator)s::text
     WHERE worker = ANY (ARRAY(SELECT worker FROM running WHERE asked_now))
    RETURNING worker, name
), noted AS (
    INSERT INTO busload.event (type, worker, operator, details)
    SELECT 'WORKER_ASKED_TO_STOP', worker, %(operator)s::text,
           json_build_object('worker', name, 'reason', %(reason)s::text)
      FROM asked
     WHERE %(operator)s::text IS NOT NULL
)
SELECT name, asked_now, CASE WHEN asked_now THEN pg_notify('busload_stop', worker::text) END
  FROM running
 ORDER BY worker;
