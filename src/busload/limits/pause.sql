-- name: pause
-- Pause a domain. If two operators do it at once, the first one is remembered.
WITH paused AS (
    INSERT INTO busload.pause (domain, operator, reason)
    VALUES (%(domain)s::text, %(operator)s::text, %(reason)s::text)
        ON CONFLICT (domain) WHERE resumed_at IS NULL DO NOTHING
    RETURNING domain
), noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'DOMAIN_PAUSED', %(operator)s::text,
           json_build_object('domain', domain, 'reason', %(reason)s::text)
      FROM paused
     WHERE %(operator)s::text IS NOT NULL
)
SELECT pg_notify('busload_pause', domain) FROM paused;

-- name: resume
-- Workers may take commands of the domain again.
WITH resumed AS (
    UPDATE busload.pause SET resumed_at = now(), resumed_by = %(operator)s::text
     WHERE domain = %(domain)s::text AND resumed_at IS NULL
    RETURNING domain
), noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'DOMAIN_RESUMED', %(operator)s::text, json_build_object('domain', domain)
      FROM resumed
     WHERE %(operator)s::text IS NOT NULL
)
SELECT pg_notify('busload_pause', domain) FROM resumed;

-- name: pauses
-- The domains that are paused now.
SELECT domain, since, operator, reason FROM busload.pause WHERE resumed_at IS NULL ORDER BY domain;

-- name: history
-- All pauses, the newest first.
SELECT domain, since, operator, reason, resumed_at, resumed_by FROM busload.pause
 WHERE %(domain)s::text IS NULL OR domain = %(domain)s::text
 ORDER BY pause DESC LIMIT %(limit)s::bigint;

-- name: paused
-- Which of these domains are paused: what a worker asks.
SELECT domain FROM busload.pause WHERE domain = ANY (%(domains)s::text[]) AND resumed_at IS NULL;

-- fragment: domains
-- Every domain that has something waiting or running, is served or is paused, with how much of each, and
-- since when the first command waits that was not tried yet. Reads the places from end to end: they hold
-- loads, not commands.
SELECT d.domain, d.ready, d.scheduled, d.running, d.in_troubleshooting, d.workers, d.unpublished,
       p.since, p.operator, p.reason, greatest(c.created_at, c.run_at) AS oldest_ready
  FROM (
    SELECT domain, sum(ready)::bigint AS ready, sum(scheduled)::bigint AS scheduled,
           sum(running)::bigint AS running, sum(troubleshooting)::bigint AS in_troubleshooting,
           sum(workers)::integer AS workers, sum(unpublished)::bigint AS unpublished, min(lo) AS first
      FROM (
        SELECT domain, hi - lo + 1 AS ready, 0 AS scheduled, 0 AS running, 0 AS troubleshooting, 0 AS workers,
               0 AS unpublished, CASE WHEN attempt = 1 THEN lo END AS lo
          FROM busload.queue
        UNION ALL SELECT domain, 0, hi - lo + 1, 0, 0, 0, 0, NULL FROM busload.scheduled
        UNION ALL SELECT domain, 0, 0, open, 0, 0, 0, NULL FROM busload.lease
        UNION ALL SELECT domain, 0, 0, 0, count(*), 0, 0, NULL FROM busload.troubleshooting GROUP BY domain
        UNION ALL SELECT domain, 0, 0, 0, 0, 0, hi - lo + 1, NULL FROM busload.outbox
        UNION ALL
        SELECT unnest(domains), 0, 0, 0, 0, 1, 0, NULL
          FROM busload.worker
         WHERE stopped_at IS NULL AND seen_at > now() - lease_for
        UNION ALL SELECT domain, 0, 0, 0, 0, 0, 0, NULL FROM busload.pause WHERE resumed_at IS NULL
      ) AS place
     GROUP BY domain
  ) AS d
  LEFT JOIN busload.pause AS p ON p.domain = d.domain AND p.resumed_at IS NULL
  LEFT JOIN LATERAL (SELECT created_at, run_at FROM busload.command WHERE id = d.first OFFSET 0) AS c ON true

-- name: domains
-- What is in each place of each domain.
{domains} ORDER BY d.domain;
