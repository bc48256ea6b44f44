-- fragments of: busload.commands.search

-- name: unpublished
-- What waits for each broker: commands, those after a failed round, and the seconds of the oldest.
SELECT transport, sum(hi - lo + 1)::bigint,
       coalesce(sum(hi - lo + 1) FILTER (WHERE rounds > 0), 0)::bigint,
       greatest(extract(epoch FROM now() - min(since)), 0)::float8
  FROM busload.outbox
 GROUP BY transport
 ORDER BY transport;

-- name: schedules
-- Of each schedule: the due time that was fired last, the one that is next, how many seconds the oldest one
-- waits that was not fired, and whether it is paused. Those that are due first, if there are too many.
SELECT name, domain, extract(epoch FROM last_due_at)::float8, extract(epoch FROM next_due_at)::float8,
       CASE WHEN paused_at IS NULL THEN coalesce(greatest(extract(epoch FROM now() - next_due_at), 0), 0)
            ELSE 0 END::float8,
       paused_at IS NOT NULL
  FROM busload.schedule
 ORDER BY paused_at IS NOT NULL, next_due_at, name
 LIMIT %(most)s::integer;

-- name: troubled_since
-- For how many seconds the oldest command of each domain has waited for a person.
WITH RECURSIVE {troubled}
SELECT d.domain, greatest(extract(epoch FROM now() - t.since), 0)::float8
  FROM troubled AS d
 CROSS JOIN LATERAL (
    SELECT since FROM busload.troubleshooting WHERE domain = d.domain ORDER BY since LIMIT 1
 ) AS t
 ORDER BY d.domain;
