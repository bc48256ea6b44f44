-- name: batches
-- Batches by the beginning of their id, which is a range of ids.
SELECT domain, batch_id, concat_ws(', ', name, status) FROM busload.batch
 WHERE batch_id BETWEEN %(first)s::uuid AND %(last)s::uuid AND pruned_at IS NULL
   AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
 ORDER BY batch_id LIMIT %(limit)s::integer;

-- name: commands
-- Commands by the beginning of their id. Their index begins with the domain: the search goes from each domain
-- to the next, and in each domain to the range.
WITH RECURSIVE place (domain) AS (
    SELECT coalesce(%(domain)s::text, (SELECT min(domain) FROM busload.command))
    UNION ALL
    SELECT (SELECT min(c.domain) FROM busload.command AS c WHERE c.domain > p.domain)
      FROM place AS p WHERE p.domain IS NOT NULL AND %(domain)s::text IS NULL
)
SELECT p.domain, c.command_id, c.command_type
  FROM place AS p
 CROSS JOIN LATERAL (SELECT command_id, command_type FROM busload.command
                      WHERE domain = p.domain AND command_id BETWEEN %(first)s::uuid AND %(last)s::uuid
                      ORDER BY command_id LIMIT %(limit)s::integer) AS c
 ORDER BY c.command_id, p.domain LIMIT %(limit)s::integer;

-- name: jobs
-- Jobs by the beginning of their id.
SELECT domain, job_id, concat_ws(', ', name, status) FROM busload.job
 WHERE job_id BETWEEN %(first)s::uuid AND %(last)s::uuid
   AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
 ORDER BY job_id LIMIT %(limit)s::integer;

-- name: jobs_of_batches
-- Ids by which batches are found: those of jobs, and those that applications have chosen.
SELECT domain, job_id, '' FROM busload.batch
 WHERE job_id BETWEEN %(first)s::uuid AND %(last)s::uuid
   AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
 GROUP BY domain, job_id ORDER BY job_id LIMIT %(limit)s::integer;

-- name: domains
-- Every domain in which anything ever happened. An index finds the next domain without reading what is in
-- between.
WITH RECURSIVE of_command (domain) AS (
    SELECT min(domain) FROM busload.command
    UNION ALL
    SELECT (SELECT min(c.domain) FROM busload.command AS c WHERE c.domain > d.domain)
      FROM of_command AS d
     WHERE d.domain IS NOT NULL
), of_batch (domain) AS (
    SELECT min(domain)::text FROM busload.batch
    UNION ALL
    SELECT (SELECT min(b.domain)::text FROM busload.batch AS b WHERE b.domain > d.domain)
      FROM of_batch AS d
     WHERE d.domain IS NOT NULL
), of_event (domain) AS (
    (SELECT buffer FROM busload.buffered WHERE group_id IS NULL ORDER BY buffer LIMIT 1)
    UNION ALL
    SELECT (SELECT e.buffer
              FROM busload.buffered AS e
             WHERE e.group_id IS NULL AND e.buffer > d.domain ORDER BY e.buffer LIMIT 1)
      FROM of_event AS d WHERE d.domain IS NOT NULL
)
SELECT domain FROM (
    SELECT domain FROM of_command
    UNION SELECT domain FROM of_batch
    UNION SELECT domain FROM of_event
    UNION SELECT buffer FROM busload.buffer
    UNION SELECT unnest(domains) FROM busload.worker
    UNION SELECT domain FROM busload.pause) AS known
 WHERE domain IS NOT NULL ORDER BY domain;
