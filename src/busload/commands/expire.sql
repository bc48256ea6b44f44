-- fragments of: busload.commands.load

-- fragment: unstarted
-- What has not started. A retry has started before, and so has a command whose worker died over it.
attempt = 1 AND crashes = 0

-- fragment: of_batch
-- The same, of a batch `b` whose commands have the ids `i`.
p.hi BETWEEN i.first AND i.last AND p.batch_id = b.batch_id AND {unstarted} OFFSET 0

-- fragment: waiting
-- What waits of a load `d` and has not started.
(
    SELECT hi FROM busload.queue WHERE hi BETWEEN d.lo AND d.hi AND {unstarted}
    UNION ALL SELECT hi FROM busload.scheduled WHERE hi BETWEEN d.lo AND d.hi AND {unstarted}
    UNION ALL SELECT hi FROM busload.outbox WHERE hi BETWEEN d.lo AND d.hi AND {unstarted}
)

-- name: note_expiry
-- Until when the loads that were just written may start. A load is named by its first and its last command.
INSERT INTO busload.expiry (lo, hi, batch_id, expires_at, look_at)
SELECT first.id, last.id, first.batch_id, n.expires_at, n.expires_at
  FROM unnest(%(domains)b::text[], %(firsts)b::uuid[], %(lasts)b::uuid[], %(expires_ats)b::timestamptz[])
    AS n (domain, first_id, last_id, expires_at)
  JOIN busload.command AS first ON first.domain = n.domain AND first.command_id = n.first_id
  JOIN busload.command AS last ON last.domain = n.domain AND last.command_id = n.last_id;

-- name: due
-- Loads whose time is over, until they hold `limit` commands, and their batches, which are locked before the
-- loads. What belongs to a batch that somebody else holds locked is left for the next time.
SELECT lo, hi
  FROM (
    SELECT lo, hi, sum(size) OVER (ORDER BY look_at, lo) - size AS before
      FROM (
        SELECT lo, hi, look_at, (hi - lo + 1)::integer AS size
          FROM busload.expiry AS e
         WHERE look_at <= now()
           AND (
                batch_id IS NULL
                OR EXISTS (SELECT FROM busload.batch AS b
                            WHERE b.batch_id = e.batch_id FOR NO KEY UPDATE SKIP LOCKED)
           )
         ORDER BY look_at
         LIMIT %(loads)s::integer
           FOR UPDATE SKIP LOCKED
      ) AS load
  ) AS load
 WHERE before < %(limit)s::integer;

-- name: waiting
-- What waits of these loads and has not started.
SELECT p.hi FROM unnest(%(los)b::bigint[], %(his)b::bigint[]) AS d (lo, hi) CROSS JOIN LATERAL {waiting} AS p;

-- name: forget
-- Forget loads of which nothing can still start. What is in a lease may still be handed back without having
-- begun, and may have been since `waiting` looked, so that load is looked at again later.
WITH looked AS MATERIALIZED (
    SELECT d.lo,
           EXISTS (
            SELECT FROM busload.lease AS l
             WHERE l.hi BETWEEN d.lo AND (d.lo | 1023) AND l.lo <= d.hi AND l.attempt = 1
            OFFSET 0
           ) OR EXISTS (SELECT FROM {waiting} AS p OFFSET 0) AS open
      FROM unnest(%(los)b::bigint[], %(his)b::bigint[]) AS d (lo, hi)
), again AS (
    UPDATE busload.expiry
       SET look_at = now() + interval '5 s'
     WHERE lo = ANY (ARRAY(SELECT lo FROM looked WHERE open))
)
DELETE FROM busload.expiry WHERE lo = ANY (ARRAY(SELECT lo FROM looked WHERE NOT open));

-- name: expired_batch
-- A batch whose time is over while something of it waits that has not started, unless somebody else holds it
-- locked.
SELECT b.batch_id, i.first, i.last
  FROM busload.batch AS b
 CROSS JOIN LATERAL busload.ids_of(ARRAY[b.batch_id]) AS i
 WHERE b.expires_at <= now()
   AND b.completed_at IS NULL
   AND (
        EXISTS (SELECT FROM busload.queue AS p WHERE {of_batch})
        OR EXISTS (SELECT FROM busload.scheduled AS p WHERE {of_batch})
        OR EXISTS (SELECT FROM busload.outbox AS p WHERE {of_batch})
   )
 ORDER BY b.expires_at
 LIMIT 1
   FOR NO KEY UPDATE OF b SKIP LOCKED;

-- name: note_expired
-- The batch has expired: an event says so, once.
WITH expired AS (
    UPDATE busload.batch
       SET expired_at = now()
     WHERE batch_id = %(batch_id)s::uuid AND expired_at IS NULL
    RETURNING batch_id, expires_at
)
INSERT INTO busload.event (type, batch_id, details)
SELECT 'BATCH_EXPIRED', batch_id, json_build_object('expires_at', expires_at) FROM expired;

-- name: waiting_of_batch
-- What waits of this batch and has not started: the first loads, until they hold `limit` commands.
SELECT hi
  FROM (
    SELECT hi, sum(size) OVER (ORDER BY hi) - size AS before
      FROM (
        SELECT hi, (hi - lo + 1)::integer AS size
          FROM (
            SELECT lo, hi, batch_id, attempt, crashes FROM busload.queue
             WHERE hi BETWEEN %(first)s::bigint AND %(last)s::bigint
            UNION ALL SELECT lo, hi, batch_id, attempt, crashes FROM busload.scheduled
             WHERE hi BETWEEN %(first)s::bigint AND %(last)s::bigint
            UNION ALL SELECT lo, hi, batch_id, attempt, crashes FROM busload.outbox
             WHERE hi BETWEEN %(first)s::bigint AND %(last)s::bigint
          ) AS place
         WHERE batch_id = %(batch_id)s::uuid AND {unstarted}
         ORDER BY hi
         LIMIT %(limit)s::integer
      ) AS load
  ) AS load
 WHERE before < %(limit)s::integer;

-- name: expire
-- Cancel these loads as far as they still wait and have not started. If a claim is splitting one, this waits
-- for it, and cancels what is left. Returns how many commands were canceled.
WITH ready AS (
    DELETE FROM busload.queue
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue
                            WHERE hi = ANY (%(his)b::bigint[]) AND {unstarted} ORDER BY hi FOR UPDATE))
    RETURNING {canceled}
), later AS (
    DELETE FROM busload.scheduled
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.scheduled
                            WHERE hi = ANY (%(his)b::bigint[]) AND {unstarted} ORDER BY hi FOR UPDATE))
    RETURNING {canceled}
), unpublished AS (
    DELETE FROM busload.outbox
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox
                            WHERE hi = ANY (%(his)b::bigint[]) AND {unstarted} ORDER BY hi FOR UPDATE))
    RETURNING {canceled_unpublished}
), load AS (
    SELECT * FROM ready UNION ALL SELECT * FROM later UNION ALL SELECT * FROM unpublished
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, details)
    SELECT 'CANCELED', lo, hi, batch_id, attempt, {cancel_details} FROM load
), replied AS (
    SELECT busload.reply(id, 'CANCELED', json_build_object('message', %(reason)s::text)) AS domain
      FROM load CROSS JOIN LATERAL generate_series(lo, hi) AS id WHERE replies
), told AS (
    SELECT count(pg_notify('busload_ready', domain))
      FROM (SELECT DISTINCT domain FROM replied) AS domains
     WHERE domain IS NOT NULL
)
SELECT coalesce(sum((hi - lo + 1)::integer), 0)::integer, (SELECT * FROM told) FROM load;
