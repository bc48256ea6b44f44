-- fragments of: busload.commands.load

-- fragment: of_page
WHERE hi = ANY ((SELECT his FROM page)::bigint[])
ORDER BY hi
FOR UPDATE

-- name: mark_canceled
-- From here on no command of the batch is tried again, and it takes no more commands. With `in_pages`, nobody
-- claims any of its commands for as long as it is canceled page by page. A hold ends with the cancel.
WITH marked AS (
    UPDATE busload.batch
       SET canceled_at = now(), sealed_at = coalesce(sealed_at, now()),
           held_at = NULL, held_reason = NULL, held_by = NULL, held_note = NULL,
           canceling_until = CASE WHEN %(in_pages)s::boolean THEN now() + %(hold)s::interval END
     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND completed_at IS NULL
    RETURNING batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    SELECT 'BATCH_CANCELED', batch_id, %(operator)s::text, json_build_object('reason', %(reason)s::text)
      FROM marked
)
SELECT batch_id, pg_notify('busload_cancel', batch_id::text) FROM marked;

-- name: lock_batches
-- Lock the batches before each page, in order: the row of a batch comes before its loads. Whoever cancels
-- page by page says how long that may still take.
UPDATE busload.batch
   SET canceling_until = CASE WHEN canceling_until IS NULL OR %(hold)s::interval IS NULL THEN canceling_until
                              ELSE now() + %(hold)s::interval END
 WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM busload.batch
                              WHERE batch_id = ANY (%(batch_ids)b::uuid[])
                              ORDER BY batch_id FOR NO KEY UPDATE));

-- name: let_batches_go
-- The cancel is over: workers may claim what comes back to its places.
UPDATE busload.batch
   SET canceling_until = NULL
 WHERE batch_id = ANY (%(batch_ids)b::uuid[]) AND canceling_until IS NOT NULL;

-- name: cancel_page
-- Cancel the next commands of these batches that have not started, in the order of loads: those after the
-- command `after`, until there are `limit` commands. If a claim is splitting a load, this statement waits for
-- it, and cancels what is left. Returns how many commands were canceled, and after which command the next
-- page begins; null if there is no next page.
WITH numbered AS MATERIALIZED (
    SELECT c.id
      FROM unnest(%(batch_ids)b::uuid[]) AS b (batch_id)
     CROSS JOIN LATERAL (
            SELECT id FROM busload.command
             WHERE batch_id = b.batch_id AND id & 1023 = 0 AND id >= %(after)s::bigint >> 10 << 10
             ORDER BY id LIMIT %(limit)s::integer) AS c
     ORDER BY c.id LIMIT %(limit)s::integer
), placed AS MATERIALIZED (
    SELECT p.hi, sum((p.hi - p.lo + 1)::integer) OVER (ORDER BY p.hi) - (p.hi - p.lo + 1)::integer AS before
      FROM numbered AS n CROSS JOIN LATERAL (
            SELECT lo, hi FROM busload.queue WHERE hi BETWEEN n.id AND (n.id | 1023)
            UNION ALL SELECT lo, hi FROM busload.scheduled WHERE hi BETWEEN n.id AND (n.id | 1023)
            UNION ALL SELECT lo, hi FROM busload.outbox WHERE hi BETWEEN n.id AND (n.id | 1023)) AS p
     WHERE p.hi > %(after)s::bigint
), page AS MATERIALIZED (
    SELECT array_agg(hi) FILTER (WHERE before < %(limit)s::integer) AS his,
           max(hi) FILTER (WHERE before < %(limit)s::integer) AS last,
           bool_or(before >= %(limit)s::integer) AS more FROM placed
), waiting AS (
    DELETE FROM busload.queue
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue {of_page}))
    RETURNING {canceled}
), later AS (
    DELETE FROM busload.scheduled
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.scheduled {of_page}))
    RETURNING {canceled}
), unpublished AS (
    DELETE FROM busload.outbox
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox {of_page}))
    RETURNING {canceled_unpublished}
), load AS (
    SELECT * FROM waiting UNION ALL SELECT * FROM later UNION ALL SELECT * FROM unpublished
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'CANCELED', lo, hi, batch_id, attempt, %(operator)s::text, {cancel_details} FROM load
), replied AS (
    SELECT busload.reply(id, 'CANCELED', json_build_object('message', %(reason)s::text)) AS domain
      FROM load CROSS JOIN LATERAL generate_series(lo, hi) AS id WHERE replies
), told AS (
    SELECT count(pg_notify('busload_ready', domain))
      FROM (SELECT DISTINCT domain FROM replied) AS domains
     WHERE domain IS NOT NULL
)
SELECT coalesce(sum((hi - lo + 1)::integer), 0)::integer,
       (SELECT CASE WHEN p.more THEN p.last WHEN n.found = %(limit)s::integer THEN n.last | 1023 END
          FROM page AS p CROSS JOIN (SELECT count(*) AS found, max(id) AS last FROM numbered) AS n),
       (SELECT * FROM told)
  FROM load;

-- name: canceling_batches
-- Canceled batches that still have commands waiting, unless somebody is canceling them right now. Locked in
-- order, as every statement locks batches. With the command after which the waiting ones begin, and the
-- reason given for the cancel.
SELECT b.batch_id,
       w.after,
       (SELECT v.details ->> 'reason'
          FROM busload.event AS v
         WHERE v.batch_id = b.batch_id AND v.lo IS NULL AND v.type = 'BATCH_CANCELED'
         ORDER BY v.event DESC
         LIMIT 1)
  FROM busload.batch AS b
  JOIN (
    SELECT batch_id, min(hi) - 1 AS after
      FROM (
        SELECT batch_id, hi FROM busload.queue
        UNION ALL SELECT batch_id, hi FROM busload.scheduled
        UNION ALL SELECT batch_id, hi FROM busload.outbox
      ) AS place
     WHERE batch_id = ANY (ARRAY(
            SELECT batch_id FROM busload.batch WHERE canceled_at IS NOT NULL AND completed_at IS NULL
           ))
     GROUP BY batch_id
  ) AS w USING (batch_id)
 WHERE b.canceled_at IS NOT NULL
   AND b.completed_at IS NULL
   AND (b.canceling_until IS NULL OR b.canceling_until < now())
 ORDER BY b.batch_id
 LIMIT 100
   FOR NO KEY UPDATE OF b SKIP LOCKED;
