-- name: ready
-- What could start now in each domain that is not paused, since when, and who serves it. A load that is due
-- but not promoted yet is as good as ready. A command that was tried before is ready for less long than it
-- exists, so it has no time here. However many loads are ready, this looks at so many of each domain as
-- `most` says. Where there are more, it looks for the oldest one: the first load of each owner, beginning
-- with the lowest priority, for as many owners; and the oldest loads of all. The third column says whether a
-- domain may have more.
WITH RECURSIVE known AS (
    SELECT '' AS domain
    UNION ALL
    SELECT (SELECT q.domain
              FROM busload.queue AS q
             WHERE q.crashes = 0 AND q.domain > k.domain
             ORDER BY q.domain
             LIMIT 1)
      FROM known AS k
     WHERE k.domain IS NOT NULL
), awake AS MATERIALIZED (
    SELECT k.domain
      FROM known AS k
     WHERE k.domain <> ''
       AND NOT EXISTS (SELECT FROM busload.pause AS p WHERE p.domain = k.domain AND p.resumed_at IS NULL)
), first AS MATERIALIZED (
    SELECT a.domain, q.lo, q.hi - q.lo + 1 AS commands, q.attempt
      FROM awake AS a
     CROSS JOIN LATERAL (
        SELECT lo, hi, attempt
          FROM busload.ready
         WHERE domain = a.domain AND crashes = 0
         ORDER BY priority DESC, fair, hi
         LIMIT %(most)s::integer
     ) AS q
), owner AS (   -- leaps from owner to owner, backwards
    SELECT domain, -32769 AS priority, NULL::bigint AS fair, 0 AS nth
      FROM first GROUP BY domain HAVING count(*) >= %(most)s::integer
    UNION ALL
    SELECT o.domain, n.priority, n.fair, o.nth + 1
      FROM owner AS o
     CROSS JOIN LATERAL (
        (SELECT q.priority::integer, q.fair
           FROM busload.queue AS q
          WHERE q.domain = o.domain AND q.crashes = 0 AND q.priority = o.priority AND q.fair < o.fair
          ORDER BY q.fair DESC
          LIMIT 1)
        UNION ALL
        (SELECT q.priority, q.fair
           FROM busload.queue AS q
          WHERE q.domain = o.domain AND q.crashes = 0 AND q.priority > o.priority
          ORDER BY q.priority, q.fair DESC
          LIMIT 1)
        LIMIT 1
     ) AS n
     WHERE o.nth < %(most)s::integer
), load AS (
    SELECT domain, lo, commands, attempt, NULL::timestamptz AS due FROM first
    UNION ALL
    SELECT o.domain, q.lo, 0, q.attempt, NULL
      FROM owner AS o
     CROSS JOIN LATERAL (
        SELECT r.lo, r.attempt
          FROM busload.ready AS r
         WHERE r.domain = o.domain AND r.crashes = 0 AND r.priority = o.priority
           AND r.fair BETWEEN o.fair AND o.fair   -- not `=`: else the planner may go by hi alone
         ORDER BY r.fair, r.hi
         LIMIT 1
     ) AS q
    UNION ALL
    (SELECT domain, lo, hi - lo + 1, attempt, NULL
       FROM busload.ready
      WHERE crashes > 0
      LIMIT %(most)s::integer)
    UNION ALL
    (SELECT domain, lo, 0, attempt, NULL FROM busload.ready ORDER BY hi LIMIT %(most)s::integer)
    UNION ALL
    (SELECT domain, lo, hi - lo + 1, NULL, run_at
       FROM busload.scheduled AS s
      WHERE run_at <= now()
        AND NOT EXISTS (SELECT FROM busload.pause AS p WHERE p.domain = s.domain AND p.resumed_at IS NULL)
      ORDER BY run_at
      LIMIT %(most)s::integer)
), place AS (
    SELECT domain,
           sum(commands)::bigint AS commands,
           count(*) FILTER (WHERE commands > 0) >= %(most)s::integer AS more,
           min(lo) FILTER (WHERE attempt = 1) AS oldest,
           min(due) AS due
      FROM load
     GROUP BY domain
)
SELECT place.domain, place.commands, place.more, least(greatest(c.created_at, c.run_at), place.due),
       (SELECT count(*)
          FROM busload.worker AS w
         WHERE w.stopped_at IS NULL AND w.seen_at > now() - w.lease_for AND w.concurrency > 0
           AND place.domain = ANY (w.domains))::integer
  FROM place
  LEFT JOIN LATERAL (
    SELECT created_at, run_at FROM busload.command WHERE id = place.oldest OFFSET 0
  ) AS c ON true
 WHERE NOT EXISTS (SELECT FROM busload.pause AS p WHERE p.domain = place.domain AND p.resumed_at IS NULL)
 ORDER BY place.domain;

-- name: workers
-- Workers that have not stopped, and what they hold. A tracker has no concurrency and is none.
SELECT w.name, w.seen_at > now() - w.lease_for, w.seen_at,
       coalesce((SELECT sum(l.open) FROM busload.lease AS l WHERE l.worker = w.worker), 0)::bigint,
       w.condition
  FROM busload.worker AS w
 WHERE w.stopped_at IS NULL AND w.concurrency > 0
 ORDER BY w.worker;

-- name: unpublished
-- What could not be published so far, by transport.
SELECT transport, sum(hi - lo + 1)::bigint, min(since), max(error)
  FROM busload.outbox
 WHERE rounds > 0
 GROUP BY transport
 ORDER BY transport;

-- name: late_schedules
-- How many schedules nobody has fired though their due time counts as missed, and the first of them.
SELECT count(*), (array_agg(name ORDER BY next_due_at, name))[1], min(next_due_at)
  FROM (SELECT name, next_due_at
          FROM busload.schedule
         WHERE paused_at IS NULL AND next_due_at < now() - missed_after
         ORDER BY next_due_at
         LIMIT %(most)s::integer) AS late
HAVING count(*) > 0;

-- name: now
-- The time of the database.
SELECT now();
