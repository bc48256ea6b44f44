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
       c.headers,
       c.created_at,
       coalesce(CASE WHEN s.reason <> 'LIMITED' THEN nullif(s.run_at, 'infinity') END, c.run_at) AS run_at,
       CASE WHEN t.command IS NOT NULL THEN 'IN_TROUBLESHOOTING_QUEUE'
            WHEN q.hi IS NOT NULL THEN 'PENDING'
            WHEN s.hi IS NOT NULL THEN 'SCHEDULED'
            WHEN o.hi IS NOT NULL THEN CASE WHEN o.rounds > 0 THEN 'PENDING_RETRY' ELSE 'PENDING_QUEUE' END
            WHEN l.lease_id IS NOT NULL THEN 'IN_PROGRESS'
            WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.outcome::text
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
               AND p.type IN ('PUBLISHED', 'PUBLISHED_AGAIN', 'REROUTED', 'CANCELED')),
           CASE WHEN q.published_at IS NULL THEN 0 ELSE 1 END) AS publish_attempts,
       coalesce(o.error,
                (SELECT p.details ->> 'last_error' FROM busload.event AS p
                  WHERE p.lo >> 10 = c.id >> 10 AND c.id BETWEEN p.lo AND p.hi
                    AND p.type IN ('PUBLISHED', 'REROUTED', 'CANCELED')
                    AND p.details ->> 'last_error' IS NOT NULL
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
           CASE e.outcome WHEN 'TROUBLESHOOTING' THEN 'MOVED_TO_TROUBLESHOOTING' ELSE e.outcome::text END,
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

-- How many jobs of a batch of jobs wait for a person: all that is left of their stage is in troubleshooting,
-- or the command that is to take them on is there, or somebody has ended that command. This is found out when
-- somebody asks, among those that are in doubt, and not kept: a job is not touched when its commands are
-- parked or decided. It is a number, so whoever follows a batch may ask: the function has the rights of its
-- owner.
CREATE FUNCTION busload.jobs_waiting(of_jobs uuid) RETURNS integer
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT count(*)::integer
      FROM busload.job_in_doubt AS d
      JOIN busload.job AS j ON j.job_id = d.job_id
     CROSS JOIN LATERAL (
            SELECT s.batch_id, s.undo = 'IN_PROGRESS' AS undoing,
                   CASE WHEN s.undo = 'IN_PROGRESS' THEN s.undo_step_id
                        WHEN s.status = 'PLANNING' THEN s.plan_id ELSE s.step_id END AS awaited
              FROM busload.job_stage AS s
             WHERE s.job_id = j.job_id AND (s.undo = 'IN_PROGRESS' OR s.position = j.position)
             ORDER BY s.undo IS NOT DISTINCT FROM 'IN_PROGRESS' DESC
             LIMIT 1) AS s
     WHERE d.batch_id = of_jobs
       AND j.completed_at IS NULL
       AND (s.undoing IS NOT TRUE
            AND EXISTS (SELECT FROM busload.batch AS b
                         WHERE b.batch_id = s.batch_id AND b.stalled_at IS NOT NULL OFFSET 0)
            OR EXISTS (SELECT FROM busload.command_status AS c
                        WHERE c.domain = j.domain AND c.command_id = s.awaited
                          AND c.status IN ('IN_TROUBLESHOOTING_QUEUE', 'COMPLETED', 'FAILED', 'CANCELED')
                       OFFSET 0))
$$;
REVOKE ALL ON FUNCTION busload.jobs_waiting FROM PUBLIC;

-- Batches and commands under the names and columns of the first design of batches, for queries that were
-- written for it. With `busload` in the search_path the names need no schema.
CREATE VIEW busload.command_bus_batch AS
SELECT batch_id, domain, name, custom_data, status,
       total_count, completed_count, failed_count, canceled_count,
       CASE batch_type WHEN 'JOBS' THEN busload.jobs_waiting(batch_id)
            ELSE in_troubleshooting_count END AS in_troubleshooting_count,
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

-- The batches of commands that were created in the last hour: where their commands are now.
CREATE VIEW busload.batch_recent AS
SELECT b.domain, b.job_id, o.commands AS pending,
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
   AND b.batch_type = 'COMMANDS';

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
  FROM (SELECT domain, job_id, pending, queued, processing, completed, failed FROM busload.batch_recent
        UNION ALL
        SELECT domain, NULL,
               count(*) FILTER (WHERE status IN ('PENDING_QUEUE', 'PENDING_RETRY')),
               count(*) FILTER (WHERE status IN ('PENDING', 'SCHEDULED')),
               count(*) FILTER (WHERE status = 'IN_PROGRESS'),
               count(*) FILTER (WHERE status = 'COMPLETED'),
               count(*) FILTER (WHERE status IN ('FAILED', 'CANCELED', 'IN_TROUBLESHOOTING_QUEUE'))
          FROM (SELECT c.domain,
                       CASE WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.outcome::text
                            ELSE (SELECT s.status FROM busload.command_status AS s WHERE s.id = c.id)
                            END AS status
                  FROM busload.command AS c
                  LEFT JOIN LATERAL (SELECT outcome FROM busload.execution AS e
                                      WHERE e.command = c.id ORDER BY e.attempt DESC LIMIT 1) AS e ON true
                 WHERE c.created_at > now() - interval '1 hour' AND c.batch_id IS NULL) AS command
         GROUP BY domain) AS batch
 GROUP BY domain, job_id;

-- What a forecast of a batch needs to know, with all times in seconds from now; null for a batch that has
-- ended, or is one of jobs. It has to be cheap, so it looks at no more than the last thousand leases, the
-- first and the last hundred ready loads, and the last two hundred loads that wait, among the ids of the
-- batch: they tell enough about the others. If commands of the batch are in several domains, the first one is
-- that which holds it up most, and the others are `elsewhere`. These are figures, so whoever follows a batch
-- may ask: the function has the rights of its owner.
CREATE FUNCTION busload.outlook(b busload.batch) RETURNS json
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    oldest  bigint;
    newest  bigint;
    running record;
    ready   text[];     -- domains in which its commands are ready
    waiting record;
    around  jsonb;      -- for each of its domains: who serves it, and what limits its commands
BEGIN
    IF b.completed_at IS NOT NULL OR b.batch_type = 'JOBS' THEN
        RETURN NULL;
    END IF;
    SELECT id INTO oldest FROM busload.command
     WHERE batch_id = b.batch_id AND id & 1023 = 0 ORDER BY id LIMIT 1;
    SELECT id | 1023 INTO newest FROM busload.command
     WHERE batch_id = b.batch_id AND id & 1023 = 0 ORDER BY id DESC LIMIT 1;

    SELECT coalesce(sum(l.open), 0) AS count, date_part('epoch', now() - min(l.since)) AS longest,
           array_agg(DISTINCT l.domain) AS domains
      INTO running
      FROM (SELECT batch_id, open, since, domain FROM busload.lease
             WHERE hi BETWEEN oldest AND newest ORDER BY hi DESC LIMIT 1000) AS l
     WHERE l.batch_id = b.batch_id;

    SELECT array_agg(DISTINCT q.domain) INTO ready
      FROM ((SELECT domain, batch_id FROM busload.queue
              WHERE hi BETWEEN oldest AND newest ORDER BY hi LIMIT 100)
            UNION ALL
            (SELECT domain, batch_id FROM busload.queue
              WHERE hi BETWEEN oldest AND newest ORDER BY hi DESC LIMIT 100)) AS q
     WHERE q.batch_id = b.batch_id;

    SELECT sum(size) FILTER (WHERE reason = 'RETRY') AS retries,
           date_part('epoch', max(run_at) FILTER (WHERE reason = 'RETRY') - now()) AS last_retry,
           sum(size) FILTER (WHERE reason IN ('RUN_AT', 'SNOOZED')) AS planned,
           date_part('epoch', max(run_at) FILTER (WHERE reason IN ('RUN_AT', 'SNOOZED')) - now())
               AS last_planned,
           sum(size) FILTER (WHERE reason = 'NO_HANDLER') AS no_handler,
           coalesce(bool_or(reason IN ('RATE_LIMITED', 'LIMITED')), false) AS limited,
           array_agg(DISTINCT domain) AS domains
      INTO waiting
      FROM (SELECT batch_id, hi - lo + 1 AS size, reason, run_at, domain
              FROM busload.scheduled
             WHERE hi BETWEEN oldest AND newest ORDER BY hi DESC LIMIT 200) AS s
     WHERE s.batch_id = b.batch_id AND s.run_at > now();

    SELECT jsonb_agg(
               jsonb_build_object(
                   'domain', d.domain, 'waits', d.waits, 'paused', d.paused,
                   'workers', w.workers, 'slots', w.slots, 'busy', w.busy,
                   'rate_limited', l.rate_limited, 'limited', l.limited,
                   'limit', coalesce(v.name, l.name),
                   'allowed', CASE WHEN v.name IS NOT NULL
                                   THEN (SELECT sum(rate) FROM busload.rate_limit AS r WHERE r.name = v.name)
                                   ELSE (SELECT most FROM busload.concurrency_limit AS c
                                          WHERE c.name = l.name) END,
                   'by_key', l.by_key)
               ORDER BY d.paused AND d.waits DESC, w.workers = 0 DESC,
                        w.busy::float8 / greatest(w.slots, 1) DESC, d.domain)
      INTO around
      FROM (SELECT domain,
                   domain = ANY (coalesce(ready, '{}') || coalesce(waiting.domains, '{}')) AS waits,
                   EXISTS (SELECT FROM busload.pause AS p
                            WHERE p.domain = its.domain AND p.resumed_at IS NULL) AS paused
              FROM (SELECT DISTINCT unnest(coalesce(
                        nullif(coalesce(running.domains, '{}') || coalesce(ready, '{}')
                               || coalesce(waiting.domains, '{}'), '{}'),
                        ARRAY[b.domain])) AS domain) AS its) AS d
     CROSS JOIN LATERAL (   -- a tracker has no concurrency, and takes only what it is told to
        SELECT count(*) AS workers, coalesce(sum(w.concurrency), 0) AS slots,
               (SELECT coalesce(sum(l.open), 0)
                  FROM (SELECT open FROM busload.lease
                         WHERE worker = ANY (array_agg(w.worker)) LIMIT 1000) AS l) AS busy
          FROM busload.worker AS w
         WHERE w.concurrency > 0 AND w.stopped_at IS NULL AND w.seen_at > now() - w.lease_for
           AND d.domain = ANY (w.domains)) AS w
      LEFT JOIN LATERAL (
        SELECT sum(size) FILTER (WHERE reason = 'RATE_LIMITED') AS rate_limited,
               max(lo) FILTER (WHERE reason = 'RATE_LIMITED') AS sample,
               sum(size) FILTER (WHERE reason = 'LIMITED') AS limited,
               max(limit_name) FILTER (WHERE reason = 'LIMITED') AS name,
               max(limit_subject) FILTER (WHERE reason = 'LIMITED') <> '' AS by_key
          FROM (SELECT batch_id, domain, lo, hi - lo + 1 AS size, reason, run_at, limit_name, limit_subject
                  FROM busload.scheduled
                 WHERE hi BETWEEN oldest AND newest ORDER BY hi DESC LIMIT 200) AS s
         WHERE s.batch_id = b.batch_id AND s.domain = d.domain AND s.run_at > now()) AS l ON waiting.limited
      LEFT JOIN LATERAL (   -- the rate limit has left an event the first time
        SELECT details ->> 'limit' AS name FROM busload.event
         WHERE lo >> 10 = l.sample >> 10 AND lo <= l.sample AND hi >= l.sample
           AND type = 'RATE_LIMITED' LIMIT 1) AS v ON l.sample IS NOT NULL;

    RETURN jsonb_strip_nulls(around -> 0 || jsonb_build_object(
        'elsewhere', around - 0,
        'all_slots', CASE WHEN jsonb_array_length(around) > 1 THEN (
            SELECT sum(w.concurrency) FROM busload.worker AS w
             WHERE w.concurrency > 0 AND w.stopped_at IS NULL AND w.seen_at > now() - w.lease_for
               AND w.domains && ARRAY(SELECT one ->> 'domain' FROM jsonb_array_elements(around) AS one)) END,
        'now', now(),
        'total', b.total_count,
        'ended', b.completed_count + b.failed_count + b.canceled_count,
        'parked', b.in_troubleshooting_count,
        'sealed', b.sealed_at IS NOT NULL,
        'held', b.held_reason,
        'canary', b.canary_until IS NOT NULL AND b.canary_ended_at IS NULL,
        'age', date_part('epoch', now() - b.started_at),
        'expires', date_part('epoch', b.expires_at - now()),
        'idle', greatest(date_part('epoch', now() - b.paced_at), 0),
        'paces', jsonb_build_array(b.pace_1, b.pace_10, b.pace_100, b.pace_1000),
        'running', running.count,
        'longest', running.longest,
        'retries', waiting.retries,
        'last_retry', waiting.last_retry,
        'planned', waiting.planned,
        'last_planned', waiting.last_planned,
        'no_handler', waiting.no_handler));
END $$;
REVOKE ALL ON FUNCTION busload.outlook FROM PUBLIC;

-- A batch as whoever follows it sees it: in the order of `BatchMetadata`, without the data of its callbacks.
-- The planner puts the view in the place of its name, and computes the columns that are asked for.
CREATE VIEW busload.batch_metadata AS
SELECT batch_id, domain, name, custom_data, status, total_count, completed_count, failed_count,
       canceled_count,
       CASE batch_type WHEN 'JOBS' THEN busload.jobs_waiting(batch_id)
            ELSE in_troubleshooting_count END AS in_troubleshooting_count,
       created_at, started_at, completed_at, job_id, stage,
       expires_at, held_at, held_reason, held_by, held_note, canary_count, canary_until, canary_ended_at,
       busload.failures_allowed(budget_share, budget_at_least, total_count) AS failure_budget,
       CASE WHEN budget_per_cause
            THEN (SELECT coalesce(max(c.failed), 0) FROM busload.batch_cause AS c
                   WHERE c.batch_id = batch.batch_id)
            ELSE failed_count + in_troubleshooting_count - budget_from
       END AS failure_budget_used,
       fair_by, headers, batch_type,
       (on_complete ->> 'command_id')::uuid AS callback_id,
       on_complete ->> 'command_type' AS callback_type,
       pruned_at,
       busload.outlook(batch) AS outlook
  FROM busload.batch;

-- Messages that a broker has confirmed, without what else events tell.
CREATE VIEW busload.publication AS
SELECT lo, hi, details ->> 'publication' AS publication FROM busload.event WHERE type = 'PUBLISHED';
