-- fragments of: busload.commands.claim

-- name: survey
-- Who owns ready loads in these domains, and the first load of each owner: higher priorities first, up to one
-- owner more than `most`. The first column is the snapshot of this look. The second one is how many entries
-- of the index it has read: nearly one for each owner, unless dead entries lie between them.
WITH RECURSIVE before AS MATERIALIZED (
    SELECT pg_stat_get_xact_tuples_returned('busload.queue_ready'::regclass) AS entries
), walk AS (
    SELECT d.domain, 32768 AS priority, 0::bigint AS fair, NULL::bigint AS hi, 0 AS nth
      FROM before CROSS JOIN unnest(%(domains)s::text[]) AS d (domain)
    UNION ALL
    SELECT w.domain, n.priority, n.fair, n.hi, w.nth + 1
      FROM walk AS w
     CROSS JOIN LATERAL (
        (SELECT r.priority::integer, r.fair, r.hi
           FROM busload.ready AS r
          WHERE r.domain = w.domain AND r.crashes = 0 AND r.priority = w.priority AND r.fair > w.fair
          ORDER BY r.fair, r.hi
          LIMIT 1)
        UNION ALL
        (SELECT r.priority, r.fair, r.hi
           FROM busload.ready AS r
          WHERE r.domain = w.domain AND r.crashes = 0 AND r.priority < w.priority
          ORDER BY r.priority DESC, r.fair, r.hi
          LIMIT 1)
        LIMIT 1
     ) AS n
     WHERE w.nth <= %(most)s::integer
), owner AS MATERIALIZED (
    SELECT * FROM walk WHERE hi IS NOT NULL
)
SELECT pg_current_snapshot()::text,
       pg_stat_get_xact_tuples_returned('busload.queue_ready'::regclass) - (SELECT entries FROM before),
       o.owners
  FROM (SELECT json_agg(json_build_array(domain, priority, fair, hi, false))::text AS owners FROM owner) AS o;

-- name: claim_known
-- Take ready commands of owners that the worker knows, and of those that came since its last look:
-- `busload.known_turns` says whose turn it is, and which loads that are. The third column has all these
-- owners: the first load of each, or null if there is none, and whether the owner got more than its share.
WITH {alive}, wanted AS MATERIALIZED (
    SELECT t.*
      FROM alive
     CROSS JOIN busload.known_turns(
        %(served)s::text[], %(domains)s::text[], %(since)s::text::pg_snapshot, %(places)s::text::integer[],
        %(priorities)s::text::smallint[], %(fairs)s::text::bigint[], %(his)s::text::bigint[],
        %(limit)s::integer) AS t
), ready AS (
    SELECT q.*, w.split
      FROM wanted AS w
     CROSS JOIN LATERAL (
        SELECT * FROM busload.ready WHERE hi = w.hi AND crashes = 0 FOR UPDATE SKIP LOCKED
     ) AS q
     WHERE w.ahead < %(limit)s::integer
), {lease_ready}
SELECT {seen},
       pg_current_snapshot()::text,
       (SELECT json_agg(json_build_array(domain, priority, fair, first, more))
          FROM (
            SELECT domain, priority, fair, min(first) AS first,
                   coalesce(bool_or(split AND ahead < %(limit)s::integer), false) AS more
              FROM wanted
             GROUP BY 1, 2, 3
          ) AS owner)::text,
       l.*, c.*
  {leases_and_commands};
