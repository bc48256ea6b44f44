-- fragments of: busload.commands.search

-- fragment: page_of
-- The next page of the commands in `candidate`, newest first. Each row also says how many candidates there
-- were, which was the last, and when the newest of them was sent; if none is found, there is only this. The
-- place of a command, and so its status, is known only by looking, which is the dearest: it is done last, and
-- not at all if an index says that the answer is no.
found AS MATERIALIZED (
    SELECT c.id
      FROM (SELECT id FROM candidate ORDER BY id DESC) AS candidate
     CROSS JOIN LATERAL (SELECT * FROM busload.command WHERE id = candidate.id OFFSET 0) AS c
     WHERE (%(domain)s::text IS NULL OR c.domain = %(domain)s::text)
       AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s::text)
       AND (%(batch_id)s::uuid IS NULL OR c.batch_id = %(batch_id)s::uuid)
       AND (%(task_key)s::text IS NULL OR c.task_key = %(task_key)s::text)
       AND (%(created_after)s::timestamptz IS NULL OR c.created_at >= %(created_after)s::timestamptz)
       AND (%(created_before)s::timestamptz IS NULL OR c.created_at < %(created_before)s::timestamptz)
       AND CASE
           WHEN %(status)s::text IS NULL AND %(error)s::text IS NULL THEN true
           WHEN %(error)s::text IS NOT NULL   -- the same error as that of busload.command_status
                AND NOT EXISTS (
                    SELECT
                      FROM (SELECT coalesce((SELECT t.error FROM busload.troubleshooting AS t
                                              WHERE t.command = c.id),
                                            (SELECT x.details FROM busload.execution AS x
                                              WHERE x.command = c.id AND x.outcome <> 'COMPLETED'
                                              ORDER BY x.attempt DESC LIMIT 1)) AS error OFFSET 0) AS last
                     WHERE CASE WHEN %(plain)s::boolean   -- a text that JSON never escapes: this is cheaper
                                THEN strpos(lower(error::text), lower(%(error)s::text)) > 0
                                ELSE true END
                       AND strpos(lower(concat_ws(' ', error ->> 'type', error ->> 'code',
                                                  error ->> 'message')), lower(%(error)s::text)) > 0)
           THEN false
           WHEN %(status)s::text IS NULL THEN true
           WHEN %(status)s::text IN ('COMPLETED', 'FAILED', 'CANCELED')
                AND NOT EXISTS (SELECT FROM busload.execution AS x
                                 WHERE x.command = c.id AND x.outcome::text = %(status)s::text OFFSET 0)
                AND NOT EXISTS (SELECT FROM busload.event AS v
                                 WHERE v.lo >> 10 = c.id >> 10 AND c.id BETWEEN v.lo AND v.hi
                                   AND v.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
                                OFFSET 0)
           THEN false
           ELSE EXISTS (SELECT FROM busload.command_status AS s
                         WHERE s.id = c.id AND s.status = %(status)s::text OFFSET 0)
           END
     ORDER BY candidate.id DESC
     LIMIT %(limit)s::integer
)
{command}, s.id, scan.examined, scan.last, scan.newest
  FROM (SELECT count(*)::integer AS examined, min(id) AS last, max(created_at) AS newest
          FROM candidate) AS scan
  LEFT JOIN found ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.command_status AS s WHERE s.id = found.id OFFSET 0) AS s ON true
 ORDER BY s.id DESC NULLS LAST

-- fragment: of_places
-- The commands in the loads of one place, newest first.
SELECT id, NULL::timestamptz AS created_at
  FROM load CROSS JOIN LATERAL generate_series(least(hi, %(after)s::bigint - 1), lo, -1) AS id
 ORDER BY hi DESC, id DESC
 LIMIT %(most)s::integer

-- fragment: load_before
WHERE hi <= (%(after)s::bigint - 1 | 1023) AND lo < %(after)s::bigint
  AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
ORDER BY hi DESC
LIMIT %(most)s::integer

-- name: any
-- Commands of any kind: read from the newest on.
WITH candidate AS MATERIALIZED (
    SELECT id, created_at FROM busload.command WHERE id < %(after)s::bigint
     ORDER BY id DESC LIMIT %(most)s::integer
), {page_of};

-- name: of_task
-- Commands of a task.
WITH candidate AS MATERIALIZED (
    SELECT id, NULL::timestamptz AS created_at
      FROM busload.command WHERE task_key = %(task_key)s::text AND id < %(after)s::bigint
     ORDER BY id DESC LIMIT %(most)s::integer
), {page_of};

-- name: of_batch
-- Commands of a batch. The `first` command of each load finds the others.
WITH candidate AS MATERIALIZED (
    SELECT c.id, NULL::timestamptz AS created_at
      FROM busload.command AS first
     CROSS JOIN LATERAL (SELECT id FROM busload.command
                          WHERE id BETWEEN first.id AND (first.id | 1023) AND id < %(after)s::bigint
                          ORDER BY id DESC) AS c
     WHERE first.batch_id = %(batch_id)s::uuid AND first.id & 1023 = 0 AND first.id < %(after)s::bigint
     ORDER BY first.id DESC, c.id DESC
     LIMIT %(most)s::integer
), {page_of};

-- name: queued
-- Commands that are ready.
WITH load AS (
    SELECT lo, hi FROM busload.queue {load_before}
), candidate AS MATERIALIZED (
    {of_places}
), {page_of};

-- name: scheduled
-- Commands that wait for their time.
WITH load AS (
    SELECT lo, hi FROM busload.scheduled {load_before}
), candidate AS MATERIALIZED (
    {of_places}
), {page_of};

-- name: unpublished
-- Commands that wait to be published.
WITH load AS (
    SELECT lo, hi FROM busload.outbox {load_before}
), candidate AS MATERIALIZED (
    {of_places}
), {page_of};

-- name: running
-- Commands that workers have. Leases may overlap, so a load stands for all commands of its number.
WITH load AS (
    SELECT DISTINCT hi & ~1023::bigint AS lo, hi | 1023 AS hi
      FROM busload.lease
     WHERE hi <= (%(after)s::bigint - 1 | 1023)
       AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
     ORDER BY 2 DESC
     LIMIT %(most)s::integer
), candidate AS MATERIALIZED (
    {of_places}
), {page_of};

-- name: parked
-- Commands in troubleshooting.
WITH candidate AS MATERIALIZED (
    SELECT command AS id, NULL::timestamptz AS created_at
      FROM busload.troubleshooting
     WHERE command < %(after)s::bigint AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
     ORDER BY command DESC
     LIMIT %(most)s::integer
), {page_of};
