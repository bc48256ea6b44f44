-- name: take
-- Ask for the permits of some calls; see busload.take_permits. No call may begin before they are `on_disk`.
SELECT permits, first_row, last_row
  FROM busload.take_permits(
           %(worker)s::bigint, %(names)b::text[], %(subjects)b::text[],
           %(most)b::integer[], %(sizes)b::integer[], %(leases)b::uuid[], %(commands)b::bigint[],
           %(requests)b::integer[], %(lease_ordinals)b::integer[], %(different)b::boolean
       );

-- name: on_disk
-- Wait until all that was committed before is on the disk. A permit that a crash of the server undid would be
-- given twice. The commit of the permits themselves does not wait, because they are locked until its end. The
-- empty message is there to be written: who decodes the log can pass over what begins with "busload".
SELECT pg_logical_emit_message(true, 'busload', '')::text;

-- name: free
-- Give permits back.
SELECT busload.free_permits(%(names)b::text[], %(subjects)b::text[], %(permits)b::bigint[]);

-- name: free_rows
-- Give permits back that were granted together; see busload.free_rows.
SELECT freed, woken
  FROM busload.free_rows(%(names)s::text[], %(first_rows)s::text[], %(last_rows)s::text[],
                         %(first_permits)b::bigint[], %(last_permits)b::bigint[]);

-- name: free_of_dead
-- Give the permits of workers back that stopped or were declared dead.
SELECT busload.free_permits(coalesce(array_agg(limit_name), '{}'), coalesce(array_agg(limit_subject), '{}'),
                            coalesce(array_agg(permit), '{}'), array_agg(worker))
  FROM (
    SELECT limit_name, limit_subject, permit, worker
      FROM busload.permit AS p
     WHERE NOT EXISTS (SELECT FROM busload.worker AS w WHERE w.worker = p.worker AND w.stopped_at IS NULL)
     ORDER BY permit LIMIT 1000
  ) AS dead;

-- name: forgotten
-- Limits that commands wait for though a permit is free: a command that was to ask was canceled, held or lost
-- its worker before it did.
WITH RECURSIVE waited_for AS (
    (SELECT limit_name, limit_subject
       FROM busload.scheduled
      WHERE reason = 'LIMITED' AND per_call IS NOT NULL
      ORDER BY limit_name, limit_subject LIMIT 1)
    UNION ALL
    SELECT s.limit_name, s.limit_subject
      FROM waited_for AS w
     CROSS JOIN LATERAL (
        SELECT limit_name, limit_subject
          FROM busload.scheduled
         WHERE reason = 'LIMITED' AND per_call IS NOT NULL
           AND (limit_name, limit_subject) > (w.limit_name, w.limit_subject)
         ORDER BY limit_name, limit_subject LIMIT 1
     ) AS s
)
SELECT coalesce(array_agg(w.limit_name), '{}'), coalesce(array_agg(w.limit_subject), '{}'),
       coalesce(array_agg(w.free), '{}')
  FROM (
    SELECT w.*, l.most - (SELECT count(*) FROM busload.permit AS p
                           WHERE p.limit_name = w.limit_name
                             AND p.limit_subject = w.limit_subject) AS free
      FROM (SELECT * FROM waited_for LIMIT 10000) AS w
      JOIN busload.concurrency_limit AS l ON l.name = w.limit_name
  ) AS w
 WHERE free > 0;

-- name: wake
-- Let commands ask again that wait for these limits.
SELECT busload.wake_limited(%(names)b::text[], %(subjects)b::text[], %(calls)b::bigint[]);

-- name: forget
-- Remove limits that nobody has asked for in the last day, that no call holds a permit of and nothing waits
-- for. Whoever asks again writes or dates the row first, and then waits for this to end, or this for it.
DELETE FROM busload.concurrency_limit AS l
 WHERE used_at < now() - interval '1 day'
   AND NOT EXISTS (SELECT FROM busload.permit AS p WHERE p.limit_name = l.name OFFSET 0)
   AND NOT EXISTS (SELECT FROM busload.scheduled AS s
                    WHERE s.reason = 'LIMITED' AND s.per_call IS NOT NULL AND s.limit_name = l.name OFFSET 0);

-- name: permits_of
-- The permits that a worker holds and that are older than the answer to a request takes.
SELECT limit_name, limit_subject, permit
  FROM busload.permit
 WHERE worker = %(worker)s::bigint AND since < now() - %(settled)s::interval;

-- name: adopt
-- A worker that was declared dead still runs these calls: they count again, so that no further ones begin.
INSERT INTO busload.permit (permit, limit_name, limit_subject, worker, command)
OVERRIDING SYSTEM VALUE
SELECT permit, name, subject, %(worker)s::bigint, command
  FROM unnest(%(permits)b::bigint[], %(names)b::text[], %(subjects)b::text[], %(commands)b::bigint[])
    AS a (permit, name, subject, command)
    ON CONFLICT (limit_subject, limit_name, permit) DO UPDATE SET worker = excluded.worker;

-- name: concurrency
-- Every limit that runs calls or is waited for; who runs them, and how many commands wait. Of an ordered
-- limit: the first command of each key, which runs if somebody has its lease.
SELECT coalesce(h.limit_name, w.limit_name) AS name, coalesce(h.limit_subject, w.limit_subject) AS subject,
       coalesce(l.most, h.most, 0), coalesce(h.running, 0)::integer, coalesce(w.waiting, 0)::bigint,
       coalesce(h.workers, '{}'), coalesce(h.commands, '{}'), h.since
  FROM (
    SELECT p.limit_name, p.limit_subject, count(*) FILTER (WHERE p.runs) AS running, min(p.since) AS since,
           min(p.most) AS most,
           coalesce(array_agg(coalesce(k.name, p.worker::text) ORDER BY p.since, p.permit)
                    FILTER (WHERE p.runs), '{}') AS workers,
           array_agg(c.command_id ORDER BY p.since, p.permit) AS commands
      FROM (
        SELECT limit_name, limit_subject, permit, worker, command, since, true AS runs, NULL::integer AS most
          FROM busload.permit
         WHERE %(name)s::text IS NULL OR limit_name = %(name)s::text
        UNION ALL
        SELECT f.limit_name, f.limit_subject, 0, l.worker, f.command, f.since, l.worker IS NOT NULL, 1
          FROM busload.first_in_order AS f
          LEFT JOIN LATERAL (
            SELECT worker
              FROM busload.lease AS l
             WHERE l.hi BETWEEN f.command AND (f.command | 1023) AND l.lo <= f.command
               AND f.command <> ALL (l.returned)
               AND NOT EXISTS (SELECT FROM busload.execution AS e
                                WHERE e.command = f.command AND e.attempt = l.attempt OFFSET 0)
             LIMIT 1
          ) AS l ON true
         WHERE %(name)s::text IS NULL OR f.limit_name = %(name)s::text
      ) AS p
      LEFT JOIN busload.worker AS k ON k.worker = p.worker
      LEFT JOIN busload.command AS c ON c.id = p.command
     GROUP BY p.limit_name, p.limit_subject
  ) AS h
  FULL JOIN (
    SELECT limit_name, limit_subject, sum((hi - lo + 1)::integer) AS waiting
      FROM busload.scheduled
     WHERE reason = 'LIMITED' AND (%(name)s::text IS NULL OR limit_name = %(name)s::text)
     GROUP BY limit_name, limit_subject
  ) AS w USING (limit_name, limit_subject)
  LEFT JOIN busload.concurrency_limit AS l ON l.name = coalesce(h.limit_name, w.limit_name)
 ORDER BY name, subject LIMIT %(limit)s::integer;
