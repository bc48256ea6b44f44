-- fragments of: busload.commands.search

-- name: unpublished
-- What waits for each broker: commands, those after a failed round, and the seconds of the oldest.
SELECT transport, sum(hi - lo + 1)::bigint,
       coalesce(sum(hi - lo + 1) FILTER (WHERE rounds > 0), 0)::bigint,
       greatest(extract(epoch FROM now() - min(since)), 0)::float8
  FROM busload.outbox
 GROUP BY transport
 ORDER BY transport;

-- name: troubled_since
-- For how many seconds the oldest command of each domain has waited for a person.
WITH RECURSIVE {troubled}
SELECT d.domain, greatest(extract(epoch FROM now() - t.since), 0)::float8
  FROM troubled AS d
 CROSS JOIN LATERAL (
    SELECT since FROM busload.troubleshooting WHERE domain = d.domain ORDER BY since LIMIT 1
 ) AS t
 ORDER BY d.domain;
