-- fragments of: busload.commands.load

-- name: register
-- A worker begins. If it goes on under a new number, it was asked to stop if one of its dead numbers was.
INSERT INTO busload.worker (name, domains, concurrency, lease_for, version, host, process_id, release,
                            stop_requested_at, stop_requested_by)
SELECT %(name)s::text, %(domains)s::text[], %(concurrency)s::integer, %(lease_for)s::interval,
       %(version)s::text, %(host)s::text, %(process_id)s::integer, %(release)s::text,
       asked.stop_requested_at, asked.stop_requested_by
  FROM (SELECT) AS new
  LEFT JOIN LATERAL (
    SELECT w.stop_requested_at, w.stop_requested_by
      FROM busload.worker AS w
     WHERE w.worker = ANY (%(dead)b::bigint[]) AND w.stop_requested_at IS NOT NULL
     ORDER BY w.worker DESC
     LIMIT 1
  ) AS asked ON true
RETURNING worker;

-- name: renew
-- One heartbeat keeps all leases of a worker, and tells how the worker is. No row: the worker was declared
-- dead, and its leases are not its own any more. Also tells the worker which leases it holds, which of them
-- belong to canceled batches, which of them are older than a claim takes to answer, and which commands are
-- to be asked to stop. So the worker can notice a claim whose answer was lost, and a lease that it has lost.
-- At the end stands whether the worker itself was asked to stop.
WITH alive AS (
    UPDATE busload.worker
       SET seen_at = now(), condition = %(condition)s::json
     WHERE worker = %(worker)s::bigint AND stopped_at IS NULL
    RETURNING worker, stop_requested_at IS NOT NULL AS asked_to_stop
)
SELECT coalesce(array_agg(l.lease_id) FILTER (WHERE l.lease_id IS NOT NULL), '{}'),
       coalesce(array_agg(l.lease_id) FILTER (WHERE b.canceled_at IS NOT NULL), '{}'),
       coalesce(array_agg(l.lease_id) FILTER (WHERE l.since < now() - %(settled)s::interval), '{}'),
       ARRAY(
        SELECT s.command
          FROM busload.stopping AS s
         WHERE EXISTS (
            SELECT
              FROM busload.lease AS mine
             WHERE mine.hi BETWEEN s.command AND (s.command | 1023)
               AND mine.lo <= s.command
               AND mine.forgiven < s.attempt
               AND mine.worker = %(worker)s::bigint
            OFFSET 0
         )
       ),
       alive.asked_to_stop
  FROM alive
  LEFT JOIN busload.lease AS l USING (worker)
  LEFT JOIN busload.batch AS b USING (batch_id)
 GROUP BY alive.worker, alive.asked_to_stop;

-- name: retire
-- A worker has stopped by itself.
UPDATE busload.worker SET stopped_at = now() WHERE worker = %(worker)s::bigint AND stopped_at IS NULL;

-- name: declare_dead
-- With `judge`, declare workers dead that were not seen for as long as their leases last. A heartbeat that
-- arrives now waits for this transaction, and then finds that it is refused. The worker that asks is alive,
-- so it is left out. If a command is about to wait for a person, because it has taken down so many workers,
-- its worker is left to those that serve the domain of the command, if one of them is alive: their
-- application is told of the failure. They have as long as its leases last, but no more than 10 s: they may
-- be busy, or leave it to each other. Holds and returns leases of workers that are not alive: declared dead
-- now or before, stopped, or without a row. With `free_only`, leases of batches that somebody else holds
-- right now are left for later.
WITH dead AS (
    UPDATE busload.worker
       SET stopped_at = now(), lost = true
     WHERE worker IN (
        SELECT worker
          FROM busload.worker AS w
         WHERE %(judge)s::boolean
           AND stopped_at IS NULL
           AND seen_at < now() - lease_for
           AND worker IS DISTINCT FROM %(worker)s::bigint
           AND NOT EXISTS (
                SELECT
                  FROM busload.lease AS l
                  JOIN busload.worker AS serving
                    ON l.domain = ANY (serving.domains)
                   AND serving.stopped_at IS NULL
                   AND serving.seen_at >= now() - serving.lease_for
                   AND serving.worker IS DISTINCT FROM %(worker)s::bigint
                 WHERE l.worker = w.worker
                   AND w.seen_at >= now() - w.lease_for - least(w.lease_for, interval '10 seconds')
                   AND l.crashes >= %(max_crashes)s::integer
                   AND l.domain <> ALL (%(domains)s::text[])
           )
         ORDER BY worker
           FOR UPDATE SKIP LOCKED
     )
    RETURNING worker
)
SELECT lease_id
  FROM busload.lease AS l
 WHERE (
        worker IN (SELECT worker FROM dead)
        OR NOT EXISTS (SELECT FROM busload.worker AS w WHERE w.worker = l.worker AND w.stopped_at IS NULL)
   )
   AND (
        NOT %(free_only)s::boolean
        OR batch_id IS NULL
        OR EXISTS (SELECT FROM busload.batch AS b WHERE b.batch_id = l.batch_id FOR NO KEY UPDATE SKIP LOCKED)
   )
 ORDER BY lease_id
 LIMIT 1000
   FOR UPDATE SKIP LOCKED;

-- name: hold
-- Wait for whoever settles commands of these leases right now: only the next statement sees what that
-- recorded.
SELECT lease_id {leases_in_order};

-- name: return_leases
-- Close leases and put the commands that they have not settled back into the queue. No attempt is burnt. With
-- `suspect`, a worker died while it held these leases. Then everything that it ran is a suspect from now on
-- (crashes = 1) and is halved, so that a command that kills its worker is soon alone. A worker runs one
-- suspect at a time. If it dies over a suspect of one command, or over a command that was all it ran, that
-- command is to blame: its crashes rise by one each time, and after `max_crashes` of its own it waits for a
-- person. No command is to blame if the worker stopped by itself, or was declared dead before: what is found
-- of that worker now was claimed too late, or is the end of a long list. Commands of a canceled batch are
-- canceled, and so are those that were asked to stop: each of these is a load of its own.
WITH lease AS MATERIALIZED (
    SELECT l.*,
           b.canceled_at IS NOT NULL AS canceled,
           %(suspect)s::boolean AND (w.worker IS NULL OR w.lost AND w.stopped_at = now()) AS blamed
      FROM busload.lease AS l
      LEFT JOIN busload.batch AS b USING (batch_id)
      LEFT JOIN busload.worker AS w USING (worker)
     WHERE lease_id = ANY (%(leases)b::uuid[])
     ORDER BY lease_id
       FOR UPDATE OF l
), rest AS (   -- OFFSET keeps the planner from reading all executions for an anti join
    SELECT l.lease_id, c.id, s.command AS stopping,
           c.id - row_number() OVER (PARTITION BY l.lease_id, s.command ORDER BY c.id) AS island
      FROM lease AS l
      JOIN busload.command AS c ON c.id BETWEEN l.lo AND l.hi
      LEFT JOIN LATERAL (
        SELECT command FROM busload.stopping WHERE command = c.id AND attempt > l.forgiven OFFSET 0
      ) AS s ON true
      LEFT JOIN LATERAL (
        SELECT true AS recorded
          FROM busload.execution AS e
         WHERE e.command = c.id AND e.attempt = l.attempt
        OFFSET 0
      ) AS e ON true
     WHERE c.id <> ALL (l.returned) AND e.recorded IS NULL
), island AS (
    SELECT lease_id, min(id) AS lo, max(id) AS hi, stopping FROM rest GROUP BY lease_id, island, stopping
), scene AS (
    SELECT worker, sum((hi - lo + 1)::integer) = 1 AS alone
      FROM (SELECT l.worker, i.lo, i.hi FROM lease AS l JOIN island AS i USING (lease_id)) AS ran
     GROUP BY worker
), load AS (
    SELECT i.lo, i.hi, l.lease_id, l.domain, l.batch_id, l.priority, l.attempt, l.forgiven, l.replies,
           l.fair, l.worker,
           l.canceled OR i.stopping IS NOT NULL AS canceled, i.stopping, l.since, blamed,
           l.crashes AS before,
           CASE WHEN NOT blamed THEN l.crashes
                WHEN i.lo = i.hi AND (l.crashes > 0 OR scene.alone) THEN greatest(l.crashes, 1) + 1
                ELSE greatest(l.crashes, 1)
           END AS crashes
      FROM island AS i
      JOIN lease AS l USING (lease_id)
      JOIN scene USING (worker)
), routed AS (
    SELECT *,
           CASE WHEN canceled THEN 'CANCELED'
                WHEN blamed AND crashes > %(max_crashes)s::integer THEN 'PARKED'
                ELSE 'QUEUED'
           END AS route
      FROM load
), queued AS (
    INSERT INTO busload.queue ({load})
    SELECT part.lo, part.hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair
      FROM routed
     CROSS JOIN LATERAL (
        SELECT routed.lo, routed.hi WHERE NOT blamed OR routed.lo = routed.hi
        UNION ALL SELECT routed.lo, (routed.lo + routed.hi) / 2 WHERE blamed AND routed.lo < routed.hi
        UNION ALL SELECT (routed.lo + routed.hi) / 2 + 1, routed.hi WHERE blamed AND routed.lo < routed.hi
     ) AS part
     WHERE route = 'QUEUED'
    RETURNING domain
), parked AS (
    INSERT INTO busload.troubleshooting (command, domain, command_type, batch_id, priority, attempt, forgiven,
                                         fair, reason, error)
    SELECT lo, domain, (SELECT command_type FROM busload.command AS c WHERE c.id = lo),
           batch_id, priority, attempt, forgiven, fair, 'CRASHED',
           json_build_object(
               'type', 'WorkerCrashed', 'kind', 'CRASHED',
               'message', format('The worker died %%s times while it ran this command.', crashes - 1)
           )
      FROM routed
     WHERE route = 'PARKED'
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, details)
    SELECT CASE WHEN %(suspect)s::boolean THEN 'LEASE_LOST' ELSE 'RELEASED' END,
           lo, hi, batch_id, attempt, lease_id, worker,
           json_build_object('since', since, 'crashes', crashes, 'crashes_before', before)
      FROM load
    UNION ALL
    SELECT route, lo, hi, batch_id, attempt, lease_id, worker,
           CASE WHEN route = 'PARKED' THEN json_build_object('reason', 'CRASHED', 'crashes', crashes - 1)
                WHEN stopping IS NOT NULL
                THEN (SELECT json_build_object('reason', s.reason)
                        FROM busload.stopping AS s WHERE s.command = stopping)
           END
      FROM routed
     WHERE route <> 'QUEUED'
), closed AS (
    DELETE FROM busload.lease WHERE lease_id IN (SELECT lease_id FROM lease)
), replied AS (
    SELECT busload.reply(id, 'CANCELED', NULL) AS domain
      FROM routed
     CROSS JOIN LATERAL generate_series(lo, hi) AS id
     WHERE route = 'CANCELED' AND replies
), told AS (
    SELECT count(pg_notify('busload_ready', domain))
      FROM (SELECT domain FROM queued UNION SELECT domain FROM replied WHERE domain IS NOT NULL) AS domains
)
SELECT (SELECT coalesce(sum(hi - lo + 1), 0) FROM routed)::integer,
       ARRAY(SELECT lo FROM routed WHERE route = 'PARKED' ORDER BY lo)
  FROM told;

-- name: parked
-- What is to be told about commands that wait for a person because they have taken down their workers.
SELECT c.domain, c.command_type, c.command_id, c.data::text, c.batch_id, c.task_key, b.headers::text,
       c.headers::text, t.attempt - t.forgiven, t.reason, t.error::text
  FROM busload.troubleshooting AS t
  JOIN busload.command AS c ON c.id = t.command
  LEFT JOIN busload.batch AS b ON b.batch_id = c.batch_id
 WHERE t.command = ANY (%(commands)b::bigint[]) AND t.reason = 'CRASHED'
 ORDER BY t.command;

-- name: resume
-- A worker that was declared dead is back and still runs these leases, so it did not crash. A lease of which
-- all commands still wait becomes its own again: nobody else has begun one of them. For commands that others
-- have by now, and for leases that are not `whole` because a result was refused, only the suspicion is taken
-- back. If the worker came back before and never heard of it, several of its numbers have lost the same
-- lease: the last number counts. A lease that nobody has taken back yet, because its batch was held, only
-- changes hands. Returns the leases that the worker holds again.
WITH left_alone AS MATERIALIZED (
    SELECT lease_id
      FROM busload.lease
     WHERE lease_id = ANY (%(whole)b::uuid[]) AND worker = ANY (%(dead)b::bigint[])
     ORDER BY lease_id
       FOR UPDATE SKIP LOCKED
), kept AS (
    UPDATE busload.lease
       SET worker = %(worker)s::bigint
     WHERE lease_id = ANY (ARRAY(SELECT lease_id FROM left_alone))
    RETURNING lease_id
), lost AS MATERIALIZED (
    SELECT *
      FROM (
        SELECT lease_id, lo, hi, attempt, batch_id,
               (details ->> 'since')::timestamptz AS since,
               coalesce((details ->> 'crashes_before')::smallint, 0::smallint) AS before,
               worker = max(worker) OVER (PARTITION BY lease_id) AS last
          FROM busload.event
         WHERE lo >> 10 = ANY (%(loads)b::bigint[])
           AND type = 'LEASE_LOST'
           AND lease_id = ANY (%(leases)b::uuid[])
           AND worker = ANY (%(dead)b::bigint[])
      ) AS any_time
     WHERE last
), waiting AS MATERIALIZED (
    SELECT q.*, l.lease_id, l.before, l.since
      FROM lost AS l
     CROSS JOIN LATERAL (
        SELECT lo, hi, domain, batch_id, priority, attempt, forgiven, replies, fair
          FROM busload.queue
         WHERE hi BETWEEN l.lo AND l.hi AND lo >= l.lo AND attempt = l.attempt
           FOR UPDATE SKIP LOCKED
     ) AS q
), again AS MATERIALIZED (
    SELECT lease_id, w.lo, w.hi, w.open
      FROM (SELECT lease_id, sum((hi - lo + 1)::integer) AS commands FROM lost GROUP BY lease_id) AS l
      JOIN (
        SELECT lease_id, min(lo) AS lo, max(hi) AS hi, sum((hi - lo + 1)::integer) AS open
          FROM waiting
         GROUP BY lease_id
      ) AS w USING (lease_id)
     WHERE w.open = l.commands AND lease_id = ANY (%(whole)b::uuid[])
), taken AS (
    DELETE FROM busload.queue
     WHERE hi = ANY (ARRAY(SELECT hi FROM waiting WHERE lease_id IN (SELECT lease_id FROM again)))
-- commands between those that it held were given back before, one by one: they count as returned
), leased AS (
    INSERT INTO busload.lease (lease_id, {load}, worker, since, open, returned)
    SELECT DISTINCT ON (lease_id)
           lease_id, a.lo, a.hi, w.domain, w.batch_id, w.priority, w.attempt, w.forgiven, w.before, w.replies,
           w.fair, %(worker)s::bigint,
           w.since,
           a.open::integer,
           ARRAY(
            SELECT c.id
              FROM busload.command AS c
             WHERE c.id BETWEEN a.lo AND a.hi
               AND NOT EXISTS (
                    SELECT FROM lost AS l WHERE l.lease_id = a.lease_id AND c.id BETWEEN l.lo AND l.hi
               )
               AND NOT EXISTS (
                    SELECT
                      FROM busload.execution AS e
                     WHERE e.command = c.id AND e.attempt = w.attempt
                    OFFSET 0
               )
           )
      FROM again AS a
      JOIN waiting AS w USING (lease_id)
     ORDER BY lease_id
    RETURNING lease_id
), cleared AS (
    UPDATE busload.queue AS q
       SET crashes = w.before, entered = pg_current_xact_id()
      FROM waiting AS w
     WHERE q.hi = w.hi AND q.crashes > w.before AND w.lease_id NOT IN (SELECT lease_id FROM again)
), cleared_later AS (
    UPDATE busload.scheduled AS s
       SET crashes = l.before
      FROM lost AS l
     WHERE s.hi BETWEEN l.lo AND l.hi AND s.lo >= l.lo AND s.attempt = l.attempt AND s.crashes > l.before
), elsewhere AS MATERIALIZED (
    SELECT e.lease_id, l.before
      FROM lost AS l
      JOIN busload.lease AS e
        ON e.hi BETWEEN l.lo AND l.hi AND e.lo >= l.lo AND e.attempt = l.attempt AND e.crashes > l.before
     ORDER BY e.lease_id
       FOR UPDATE OF e SKIP LOCKED
), cleared_elsewhere AS (
    UPDATE busload.lease AS e SET crashes = o.before FROM elsewhere AS o WHERE e.lease_id = o.lease_id
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, details)
    SELECT 'NOT_CRASHED', lo, hi, batch_id, attempt, lease_id, %(worker)s::bigint,
           json_build_object('resumed', lease_id IN (SELECT lease_id FROM again))
      FROM lost
)
SELECT lease_id FROM leased UNION ALL SELECT lease_id FROM kept;

-- name: start_batches
-- Start the batches that have begun while somebody else held their row.
SELECT count(*)::integer, busload.start_batches(array_agg(batch_id), %(worker)s::bigint)
  FROM (
    SELECT batch_id
      FROM busload.batch
     WHERE status = 'PENDING'
       AND batch_id = ANY (ARRAY(SELECT batch_id FROM busload.lease WHERE worker = %(worker)s::bigint))
       FOR NO KEY UPDATE SKIP LOCKED
  ) AS begun;
