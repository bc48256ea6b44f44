-- name: overview
-- Every buffer that was declared, and those of busload's own that only have events yet: how many events wait,
-- counted up to a limit, since when, where their groups are, and what workers have counted. Reads the places
-- from end to end: they hold loads, not commands.
WITH RECURSIVE own AS (
    (SELECT buffer FROM busload.buffered WHERE group_id IS NULL ORDER BY buffer LIMIT 1)
    UNION ALL
    SELECT (SELECT b.buffer
              FROM busload.buffered AS b
             WHERE b.group_id IS NULL AND b.buffer > own.buffer ORDER BY b.buffer LIMIT 1)
      FROM own WHERE own.buffer IS NOT NULL
), known AS MATERIALIZED (
    SELECT n.buffer AS name, d.*
      FROM (SELECT buffer FROM own WHERE buffer IS NOT NULL UNION SELECT buffer FROM busload.buffer) AS n
      LEFT JOIN busload.buffer AS d USING (buffer)
     ORDER BY n.buffer LIMIT %(limit)s::integer
), place AS (
    SELECT domain, hi - lo + 1 AS ready, 0 AS running, 0 AS retrying FROM busload.queue
    UNION ALL SELECT domain, 0, open, 0 FROM busload.lease
    UNION ALL SELECT domain, 0, 0, hi - lo + 1 FROM busload.scheduled
), groups AS (
    SELECT domain, sum(ready) AS ready, sum(running) AS running, sum(retrying) AS retrying
      FROM place
     WHERE domain IN (SELECT name FROM known)
     GROUP BY domain
)
SELECT k.name, k.relation, w.waiting, w.oldest, coalesce(g.ready, 0)::integer,
       coalesce(g.running, 0)::integer, coalesce(g.retrying, 0)::integer, t.parked,
       coalesce(k.calls, 0), coalesce(k.done, 0), k.size, k.max_age,
       EXISTS (SELECT FROM busload.pause AS p WHERE p.domain = k.name AND p.resumed_at IS NULL),
       coalesce(w.problem, k.problem), now()
  FROM known AS k
 CROSS JOIN LATERAL busload.buffer_depth(k.name, k.relation, k.group_column, k.created_column,
                                         %(most)s::integer) AS w
  LEFT JOIN groups AS g ON g.domain = k.name
 CROSS JOIN LATERAL (SELECT count(*)::integer AS parked
                       FROM busload.troubleshooting AS t WHERE t.domain = k.name OFFSET 0) AS t
 ORDER BY k.name;
