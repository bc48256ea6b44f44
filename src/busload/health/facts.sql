-- name: ready
-- What could start now in each domain that is not paused, since when, and who serves it. A load that is due
-- but not promoted yet is as good as ready. A command that was tried before is ready for less long than it
-- exists, so it has no time here. Reads the places, which hold loads, from end to end.
SELECT place.domain, place.commands, least(greatest(c.created_at, c.run_at), place.due),
       (SELECT count(*)
          FROM busload.worker AS w
         WHERE w.stopped_at IS NULL AND w.seen_at > now() - w.lease_for AND w.concurrency > 0
           AND place.domain = ANY (w.domains))::integer
  FROM (SELECT domain, sum(hi - lo + 1)::bigint AS commands, min(oldest) AS oldest, min(due) AS due
          FROM (SELECT domain, lo, hi, CASE WHEN attempt = 1 THEN lo END AS oldest, NULL::timestamptz AS due
                  FROM busload.ready
                UNION ALL
                SELECT domain, lo, hi, NULL, run_at FROM busload.scheduled WHERE run_at <= now()) AS load
         GROUP BY domain) AS place
  LEFT JOIN busload.command AS c ON c.id = place.oldest
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

-- name: now
-- The time of the database.
SELECT now();
