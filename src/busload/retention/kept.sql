-- name: tables
-- How many rows the tables of the past have, as PostgreSQL estimates it, and how much room they take.
SELECT c.relname, greatest(c.reltuples, 0)::bigint, pg_total_relation_size(c.oid)
  FROM pg_class AS c
 WHERE c.relnamespace = 'busload'::regnamespace AND c.relkind = 'r'
   AND c.relname IN ('command', 'execution', 'event', 'batch', 'job', 'archive', 'archived_batch',
                     'archived_job', 'buffer_archive')
 ORDER BY c.relname;

-- name: old
-- Batches that ended longer ago than each of these times, counted up to a limit, and the commands in them.
SELECT a.days, count(b.total_count)::integer, coalesce(sum(b.total_count), 0)::bigint
  FROM unnest(%(days)b::integer[]) AS a (days)
  LEFT JOIN LATERAL (
    SELECT total_count FROM busload.batch
     WHERE completed_at IS NOT NULL AND pruned_at IS NULL
       AND completed_at < now() - a.days::float8 * interval '1 day'
     LIMIT %(most)s::integer
  ) AS b ON true
 GROUP BY a.days ORDER BY a.days;

-- name: since
-- When the oldest command was sent, and the oldest batch was created; when a worker took its turn to prune
-- last, when a prune came to its end, what it did; and how many batches are being removed.
SELECT (SELECT created_at FROM busload.command ORDER BY id LIMIT 1),
       (SELECT min(created_at) FROM busload.batch),
       nullif(t.taken_at, '-infinity'), t.ended_at, t.details,
       (SELECT count(*)::integer FROM (SELECT FROM busload.batch WHERE pruned_at IS NOT NULL
                                       LIMIT %(most)s::integer) AS b)
  FROM busload.turn AS t WHERE t.what = 'prune';
