-- What people read: where a command is, and its story.

-- Where a command is. The number of its load finds its row in a place. A command in no place has ended, or
-- was removed by other hands, or was not put into a place yet.
CREATE VIEW busload.command_status AS
SELECT c.id,
       c.domain,
       c.command_id,
       c.command_type,
       c.data,
       c.batch_id,
       c.task_key,
       coalesce(c.correlation_id, c.command_id) AS correlation_id,
       c.reply_to,
       coalesce(q.priority, s.priority, o.priority, l.priority, c.priority) AS priority,
       c.max_attempts,
       c.created_at,
       coalesce(CASE WHEN s.reason <> 'LIMITED' THEN nullif(s.run_at, 'infinity') END, c.run_at) AS run_at,
       CASE WHEN t.command IS NOT NULL THEN 'IN_TROUBLESHOOTING_QUEUE'
            WHEN q.hi IS NOT NULL THEN 'PENDING'
            WHEN s.hi IS NOT NULL THEN 'SCHEDULED'
            WHEN o.hi IS NOT NULL THEN CASE WHEN o.rounds > 0 THEN 'PENDING_RETRY' ELSE 'PENDING_QUEUE' END
            WHEN l.lease_id IS NOT NULL THEN 'IN_PROGRESS'
            WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.outcome
            WHEN f.type = 'OPERATOR_COMPLETED' THEN 'COMPLETED'
            WHEN f.type IN ('CANCELED', 'OPERATOR_CANCELED') THEN 'CANCELED'
            ELSE 'PENDING_QUEUE' END AS status,
       CASE WHEN t.command IS NOT NULL THEN t.attempt - t.forgiven
            WHEN q.hi IS NOT NULL THEN q.attempt - q.forgiven - 1
            WHEN s.hi IS NOT NULL THEN s.attempt - s.forgiven - 1
            WHEN o.hi IS NOT NULL THEN o.attempt - o.forgiven - 1
            WHEN l.lease_id IS NOT NULL THEN l.attempt - l.forgiven
            ELSE coalesce(e.attempt, 0) - coalesce(   -- attempts before an operator's retry do not count
                (SELECT max(r.attempt) FROM busload.event AS r
                  WHERE r.lo >> 10 = c.id >> 10
                    AND r.lo = c.id
                    AND r.type = 'OPERATOR_RETRIED'), 0) END AS attempts,
       coalesce(l.since, e.started_at) AS started_at,
       CASE WHEN t.command IS NULL AND q.hi IS NULL AND s.hi IS NULL AND o.hi IS NULL AND l.lease_id IS NULL
            THEN coalesce(CASE WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.finished_at END,
                          f.at) END AS finished_at,
       (SELECT w.name FROM busload.worker AS w WHERE w.worker = coalesce(l.worker, e.worker)) AS worker,
       coalesce(busload.execution_id(l.lease_id, c.id),
                busload.execution_id(e.lease_id, c.id)) AS execution_id,
       coalesce(t.error, failure.details) AS error,
       CASE WHEN e.outcome = 'COMPLETED' THEN e.details
            WHEN f.type = 'OPERATOR_COMPLETED' THEN f.details -> 'result' END AS result,
       t.reason AS troubleshooting_reason,
       t.since AS troubleshooting_since,
       s.reason AS scheduled_reason,
       coalesce(o.rounds, 0) + greatest(
           (SELECT coalesce(sum((p.details ->> 'attempts')::integer), 0)::integer FROM busload.event AS p
             WHERE p.lo >> 10 = c.id >> 10 AND c.id BETWEEN p.lo AND p.hi
               AND p.type IN ('PUBLISHED', 'PUBLISHED_AGAIN', 'REROUTED')),
           CASE WHEN q.published_at IS NULL THEN 0 ELSE 1 END) AS publish_attempts,
       coalesce(o.error,
                (SELECT p.details ->> 'last_error' FROM busload.event AS p
                  WHERE p.lo >> 10 = c.id >> 10 AND c.id BETWEEN p.lo AND p.hi
                    AND p.type IN ('PUBLISHED', 'REROUTED') AND p.details ->> 'last_error' IS NOT NULL
                  ORDER BY p.event DESC LIMIT 1)) AS last_publish_error,
       coalesce((SELECT max(p.at) FROM busload.event AS p
                  WHERE p.lo >> 10 = c.id >> 10 AND c.id BETWEEN p.lo AND p.hi
                    AND p.type IN ('PUBLISHED', 'PUBLISHED_AGAIN')),
                q.published_at) AS published_at,
       (SELECT coalesce(b.job_id, b.batch_id::text) || '-cp-' || min(k.checkpoint)
          FROM busload.batch AS b JOIN busload.checkpoint AS k USING (batch_id)
         WHERE b.batch_id = c.batch_id AND k.last_load >= c.id >> 10
         GROUP BY b.batch_id) AS checkpoint
  FROM busload.command AS c
  LEFT JOIN busload.troubleshooting AS t ON t.command = c.id
  LEFT JOIN LATERAL (SELECT * FROM busload.queue AS q
                      WHERE q.hi BETWEEN c.id AND (c.id | 1023) AND q.lo <= c.id
                      ORDER BY q.hi LIMIT 1) AS q ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.scheduled AS s
                      WHERE s.hi BETWEEN c.id AND (c.id | 1023) AND s.lo <= c.id
                      ORDER BY s.hi LIMIT 1) AS s ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.outbox AS o
                      WHERE o.hi BETWEEN c.id AND (c.id | 1023) AND o.lo <= c.id
                      ORDER BY o.hi LIMIT 1) AS o ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.execution AS e
                      WHERE e.command = c.id
                      ORDER BY e.attempt DESC LIMIT 1) AS e ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.lease AS l
                      WHERE l.hi BETWEEN c.id AND (c.id | 1023) AND l.lo <= c.id AND c.id <> ALL (l.returned)
                        AND l.attempt > coalesce(e.attempt, 0)
                      ORDER BY l.hi LIMIT 1) AS l ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.execution AS x
                      WHERE x.command = c.id AND x.outcome <> 'COMPLETED'
                      ORDER BY x.attempt DESC LIMIT 1) AS failure ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.event AS f
                      WHERE f.lo >> 10 = c.id >> 10 AND c.id BETWEEN f.lo AND f.hi
                        AND f.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
                      ORDER BY f.event DESC LIMIT 1) AS f ON true;

-- The audit trail of a command: what was sent, every attempt, and everything that is not an attempt. Steps
-- that have the same time are in the order of `step`.
CREATE VIEW busload.audit AS
SELECT c.id AS command, c.domain, c.command_id, c.batch_id, a.*
  FROM busload.command AS c
 CROSS JOIN LATERAL (
    SELECT c.created_at AS at, 0 AS step, 'SENT' AS type,
           NULL::integer AS attempt, NULL::uuid AS execution_id, NULL::bigint AS worker,
           NULL::text AS operator, NULL::json AS details
    UNION ALL
    SELECT l.since, 1, 'RECEIVED',
           l.attempt, busload.execution_id(l.lease_id, c.id), l.worker, NULL, NULL
      FROM busload.lease AS l
     WHERE l.hi BETWEEN c.id AND (c.id | 1023) AND l.lo <= c.id AND c.id <> ALL (l.returned)
       AND NOT EXISTS (SELECT FROM busload.execution AS e WHERE e.command = c.id AND e.attempt = l.attempt)
    UNION ALL
    SELECT e.started_at, 1, 'RECEIVED',
           e.attempt, busload.execution_id(e.lease_id, c.id), e.worker, NULL, NULL
      FROM busload.execution AS e WHERE e.command = c.id
    UNION ALL
    SELECT e.finished_at, 2,
           CASE e.outcome WHEN 'TROUBLESHOOTING' THEN 'MOVED_TO_TROUBLESHOOTING' ELSE e.outcome END,
           e.attempt, busload.execution_id(e.lease_id, c.id), e.worker, NULL, e.details
      FROM busload.execution AS e WHERE e.command = c.id
    UNION ALL   -- a lease that ended without a result: the event remembers when it began
    SELECT (v.details ->> 'since')::timestamptz, 1, 'RECEIVED',
           v.attempt, busload.execution_id(v.lease_id, c.id), v.worker, NULL, NULL
      FROM busload.event AS v
     WHERE v.lo >> 10 = c.id >> 10 AND c.id BETWEEN v.lo AND v.hi AND v.type IN ('LEASE_LOST', 'RELEASED')
    UNION ALL
    SELECT o.failed_at, 3, 'PUBLISH_FAILED', NULL, NULL, NULL, NULL,   -- the last round, until one succeeds
           json_build_object('transport', o.transport, 'attempts', o.rounds,
                             'reason', o.reason, 'last_error', o.error)
      FROM busload.outbox AS o
     WHERE o.hi BETWEEN c.id AND (c.id | 1023) AND o.lo <= c.id AND o.rounds > 0
    UNION ALL
    SELECT v.at, 3, CASE v.type WHEN 'PARKED' THEN 'MOVED_TO_TROUBLESHOOTING' ELSE v.type END,
           v.attempt, busload.execution_id(v.lease_id, c.id), v.worker, v.operator, v.details
      FROM busload.event AS v WHERE v.lo >> 10 = c.id >> 10 AND c.id BETWEEN v.lo AND v.hi
 ) AS a;

-- Batches and commands under the names and columns of the first design of batches, for queries that were
-- written for it. With `busload` in the search_path the names need no schema.
CREATE VIEW busload.command_bus_batch AS
SELECT batch_id, domain, name, custom_data, status,
       total_count, completed_count, failed_count, canceled_count, in_troubleshooting_count,
       created_at, started_at, completed_at
  FROM busload.batch
 WHERE pruned_at IS NULL;

-- The commands of a batch are found by the first command of each load, which alone has the batch in an index.
CREATE VIEW busload.command_bus_command AS
SELECT s.command_id, s.domain, s.command_type, s.data, s.status, s.attempts, s.max_attempts,
       s.correlation_id, s.reply_to, first.batch_id, s.created_at, s.started_at, s.finished_at
  FROM busload.command AS first
  JOIN busload.command AS c ON c.id BETWEEN first.id AND (first.id | 1023) AND first.id = c.id & ~1023::bigint
 CROSS JOIN LATERAL (SELECT * FROM busload.command_status AS s WHERE s.id = c.id OFFSET 0) AS s
 WHERE first.id & 1023 = 0 AND first.batch_id IS NOT NULL
UNION ALL
SELECT s.command_id, s.domain, s.command_type, s.data, s.status, s.attempts, s.max_attempts,
       s.correlation_id, s.reply_to, NULL::uuid, s.created_at, s.started_at, s.finished_at
  FROM busload.command_status AS s
 WHERE s.batch_id IS NULL;

-- What was created per day (UTC), by every way in: what is there, and what was removed. Commands of a batch
-- count on the day and in the domain of their batch. Those without a batch came by `send` or `send_many`, or
-- as a reply or a callback; those that busload sent to itself are apart.
CREATE VIEW busload.created_daily AS
SELECT day,
       domain,
       way,
       nullif(strategy, '') AS strategy,
       sum(commands)::bigint AS commands,
       sum(batches)::bigint AS batches,
       sum(published)::bigint AS published,
       sum(dispatched)::bigint AS dispatched,
       sum(attempts)::bigint AS attempts
  FROM (SELECT day, domain, way, strategy, commands, batches, published, dispatched, attempts
          FROM busload.daily
        UNION ALL
        SELECT day, domain, way, strategy, sum(commands), count(*), count(*) FILTER (WHERE published),
               count(attempts), coalesce(sum(attempts), 0)
          FROM busload.counted_batch GROUP BY day, domain, way, strategy
        UNION ALL
        SELECT (created_at AT TIME ZONE 'UTC')::date, domain, busload.way_of(command_type), '',
               count(*), 0, 0, 0, 0
          FROM busload.command WHERE batch_id IS NULL GROUP BY 1, 2, 3) AS daily
 GROUP BY day, domain, way, strategy;

-- Per day (UTC): batches, those that were published as a whole, and how many rounds that took on average
-- where there is a broker. The view counts what happened, so the figures of a day do not fall when its
-- commands end or are removed.
CREATE VIEW busload.dispatch_daily AS
SELECT day,
       sum(batches)::bigint AS batches,
       sum(published)::bigint AS published,
       sum(attempts)::float8 / nullif(sum(dispatched), 0)::float8 AS rounds,
       sum(commands) FILTER (WHERE way <> 'busload')::bigint AS commands
  FROM busload.created_daily
 GROUP BY day;

-- What was created in the last hour, per job: where its commands are now. Commands without a job are counted
-- together, those without a batch among them.
CREATE VIEW busload.dispatch_recent AS
SELECT domain,
       job_id,
       sum(pending)::bigint AS pending,
       sum(queued)::bigint AS queued,
       sum(processing)::bigint AS processing,
       sum(completed)::bigint AS completed,
       sum(failed)::bigint AS failed
  FROM (SELECT b.domain, b.job_id, o.commands AS pending,
               b.total_count - b.completed_count - b.failed_count - b.canceled_count
               - b.in_troubleshooting_count - o.commands - l.commands AS queued,
               l.commands AS processing,
               b.completed_count AS completed,
               b.failed_count + b.canceled_count + b.in_troubleshooting_count AS failed
          FROM busload.batch AS b
         CROSS JOIN LATERAL (SELECT coalesce(sum(hi - lo + 1), 0) AS commands
                               FROM busload.outbox WHERE batch_id = b.batch_id) AS o
         CROSS JOIN LATERAL (
                SELECT coalesce(sum(l.open), 0) AS commands
                  FROM (SELECT id >> 10 AS load FROM busload.command
                         WHERE batch_id = b.batch_id AND id & 1023 = 0 OFFSET 0) AS c
                 CROSS JOIN LATERAL (SELECT open
                                       FROM busload.lease
                                      WHERE hi BETWEEN c.load << 10 AND (c.load << 10 | 1023)
                                     OFFSET 0) AS l) AS l
         WHERE b.created_at > now() - interval '1 hour' AND b.pruned_at IS NULL
        UNION ALL
        SELECT domain, NULL,
               count(*) FILTER (WHERE status IN ('PENDING_QUEUE', 'PENDING_RETRY')),
               count(*) FILTER (WHERE status IN ('PENDING', 'SCHEDULED')),
               count(*) FILTER (WHERE status = 'IN_PROGRESS'),
               count(*) FILTER (WHERE status = 'COMPLETED'),
               count(*) FILTER (WHERE status IN ('FAILED', 'CANCELED', 'IN_TROUBLESHOOTING_QUEUE'))
          FROM (SELECT c.domain,
                       CASE WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.outcome
                            ELSE (SELECT s.status FROM busload.command_status AS s WHERE s.id = c.id)
                            END AS status
                  FROM busload.command AS c
                  LEFT JOIN LATERAL (SELECT outcome FROM busload.execution AS e
                                      WHERE e.command = c.id ORDER BY e.attempt DESC LIMIT 1) AS e ON true
                 WHERE c.created_at > now() - interval '1 hour' AND c.batch_id IS NULL) AS command
         GROUP BY domain) AS batch
 GROUP BY domain, job_id;
