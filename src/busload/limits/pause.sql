-- name: pause
-- Pause a domain. If two operators do it at once, the first one is remembered.
WITH paused AS (
    INSERT INTO busload.pause (domain, operator, reason)
    VALUES (%(domain)s::text, %(operator)s::text, %(reason)s::text)
        ON CONFLICT (domain) WHERE resumed_at IS NULL DO NOTHING
    RETURNING domain
)
SELECT pg_notify('busload_pause', domain) FROM paused;

-- name: resume
-- Workers may take commands of the domain again.
WITH resumed AS (
    UPDATE busload.pause SET resumed_at = now(), resumed_by = %(operator)s::text
     WHERE domain = %(domain)s::text AND resumed_at IS NULL
    RETURNING domain
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

-- name: domains
-- Every domain that has something waiting or running, is served or is paused, with how much of each. Reads
-- the places from end to end: they hold loads, not commands.
WITH place AS (
    SELECT domain, hi - lo + 1 AS ready, 0 AS scheduled, 0 AS running, 0 AS troubleshooting, 0 AS workers,
           0 AS unpublished
      FROM busload.queue
    UNION ALL SELECT domain, 0, hi - lo + 1, 0, 0, 0, 0 FROM busload.scheduled
    UNION ALL SELECT domain, 0, 0, open, 0, 0, 0 FROM busload.lease
    UNION ALL SELECT domain, 0, 0, 0, count(*), 0, 0 FROM busload.troubleshooting GROUP BY domain
    UNION ALL SELECT domain, 0, 0, 0, 0, 0, hi - lo + 1 FROM busload.outbox
    UNION ALL
    SELECT unnest(domains), 0, 0, 0, 0, 1, 0
      FROM busload.worker
     WHERE stopped_at IS NULL AND seen_at > now() - lease_for
    UNION ALL SELECT domain, 0, 0, 0, 0, 0, 0 FROM busload.pause WHERE resumed_at IS NULL
)
SELECT domain, sum(ready)::bigint, sum(scheduled)::bigint, sum(running)::bigint, sum(troubleshooting)::bigint,
       sum(workers)::integer, sum(unpublished)::bigint, p.since, p.operator, p.reason
  FROM place LEFT JOIN (SELECT * FROM busload.pause WHERE resumed_at IS NULL) AS p USING (domain)
 GROUP BY domain, p.since, p.operator, p.reason
 ORDER BY domain;
