-- name: waiting
-- What waits of these batches: all of it, what is HELD or waits for a canary, and what has another priority
-- than the given one; and how many commands run. Nothing is locked.
WITH i AS MATERIALIZED (
    SELECT * FROM busload.ids_of(%(batch_ids)b::uuid[])
), load AS (
    SELECT p.*
      FROM i
     CROSS JOIN LATERAL (
        SELECT hi - lo + 1 AS commands, false AS held, priority
          FROM busload.queue WHERE hi BETWEEN i.first AND i.last AND batch_id = i.batch_id
        UNION ALL
        SELECT hi - lo + 1, reason IN ('HELD', 'CANARY'), priority
          FROM busload.scheduled WHERE hi BETWEEN i.first AND i.last AND batch_id = i.batch_id
        UNION ALL
        SELECT hi - lo + 1, false, priority
          FROM busload.outbox WHERE hi BETWEEN i.first AND i.last AND batch_id = i.batch_id
     ) AS p
)
SELECT coalesce(sum(commands), 0)::integer,
       coalesce(sum(commands) FILTER (WHERE held), 0)::integer,
       coalesce(sum(commands) FILTER (WHERE priority <> %(priority)s::smallint), 0)::integer,
       (SELECT coalesce(sum(l.open), 0)
          FROM i JOIN busload.lease AS l
            ON l.hi BETWEEN i.first AND i.last AND l.batch_id = i.batch_id)::integer
  FROM load;
