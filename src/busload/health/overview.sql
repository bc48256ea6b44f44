-- fragments of: busload.commands.search

-- name: totals
-- Since when the oldest loads wait in the queue, the outbox and troubleshooting; the workers and their slots;
-- and how many commands were ever inserted and attempts recorded, as PostgreSQL counts rows. A worker that
-- was not seen for the time of its leases is silent. The difference of two such counts makes a rate.
WITH RECURSIVE {troubled}
SELECT now(),
       (SELECT greatest(c.created_at, c.run_at)
          FROM (SELECT lo FROM busload.ready ORDER BY hi LIMIT 1) AS first
          JOIN busload.command AS c ON c.id = first.lo),
       (SELECT min(since) FROM busload.outbox),
       (SELECT min((SELECT t.since FROM busload.troubleshooting AS t
                     WHERE t.domain = d.domain ORDER BY t.since LIMIT 1)) FROM troubled AS d),
       w.alive, w.silent, w.slots,
       coalesce(pg_stat_get_tuples_inserted('busload.command'::regclass), 0),
       coalesce(pg_stat_get_tuples_inserted('busload.execution'::regclass), 0)
  FROM (SELECT count(*) FILTER (WHERE living)::integer AS alive,
               count(*) FILTER (WHERE NOT living)::integer AS silent,
               coalesce(sum(concurrency) FILTER (WHERE living), 0)::integer AS slots
          FROM (SELECT concurrency, seen_at > now() - lease_for AS living
                  FROM busload.worker WHERE stopped_at IS NULL AND concurrency > 0) AS worker) AS w;
