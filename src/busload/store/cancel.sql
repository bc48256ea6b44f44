-- name: mark_canceled
-- From here on nothing of the batch is tried again, it takes no more commands, and with `in_pages` nobody claims any of it for
-- as long as it is canceled page by page.
WITH marked AS (
    UPDATE busload.batch
       SET canceled_at = now(), sealed_at = coalesce(sealed_at, now()),
           canceling_until = CASE WHEN %(in_pages)s::boolean THEN now() + %(hold)s::interval END
     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND completed_at IS NULL
    RETURNING batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    SELECT 'BATCH_CANCELED', batch_id, %(operator)s::text, json_build_object('reason', %(reason)s::text) FROM marked
)
SELECT batch_id, pg_notify('busload_cancel', batch_id::text) FROM marked;

-- name: hold_batch
-- Before each page: the batch's row comes before its loads. Who cancels page by page says how long it will be at it.
UPDATE busload.batch
   SET canceling_until = CASE WHEN canceling_until IS NULL OR %(hold)s::interval IS NULL THEN canceling_until
                              ELSE now() + %(hold)s::interval END
 WHERE batch_id = %(batch_id)s::uuid;

-- name: let_batch_go
UPDATE busload.batch SET canceling_until = NULL WHERE batch_id = %(batch_id)s::uuid AND canceling_until IS NOT NULL;

-- name: cancel_page
-- Cancel the next of what has not started, in the order of loads: those after the command `after`, until there are `limit`
-- commands. A load that a claim is splitting is waited for, and what is left of it is canceled. Returns how many that were, and after
-- which command the next page begins; null if there is none.
WITH numbered AS MATERIALIZED (
    SELECT id FROM busload.command
     WHERE batch_id = %(batch_id)s::uuid AND id & 1023 = 0 AND id >= %(after)s::bigint >> 10 << 10 ORDER BY id LIMIT %(limit)s::integer
), placed AS MATERIALIZED (
    SELECT p.hi, sum((p.hi - p.lo + 1)::integer) OVER (ORDER BY p.hi) - (p.hi - p.lo + 1)::integer AS before
      FROM numbered AS n CROSS JOIN LATERAL (
            SELECT lo, hi FROM busload.queue WHERE hi BETWEEN n.id AND (n.id | 1023)
            UNION ALL SELECT lo, hi FROM busload.scheduled WHERE hi BETWEEN n.id AND (n.id | 1023)
            UNION ALL SELECT lo, hi FROM busload.outbox WHERE hi BETWEEN n.id AND (n.id | 1023)) AS p
     WHERE p.hi > %(after)s::bigint
), page AS MATERIALIZED (
    SELECT array_agg(hi) FILTER (WHERE before < %(limit)s::integer) AS his, max(hi) FILTER (WHERE before < %(limit)s::integer) AS last,
           bool_or(before >= %(limit)s::integer) AS more FROM placed
), waiting AS (
    DELETE FROM busload.queue
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue WHERE hi = ANY ((SELECT his FROM page)::bigint[]) ORDER BY hi FOR UPDATE))
    RETURNING lo, hi, batch_id, attempt, replies
), later AS (
    DELETE FROM busload.scheduled
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.scheduled WHERE hi = ANY ((SELECT his FROM page)::bigint[]) ORDER BY hi FOR UPDATE))
    RETURNING lo, hi, batch_id, attempt, replies
), unannounced AS (
    DELETE FROM busload.outbox
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox WHERE hi = ANY ((SELECT his FROM page)::bigint[]) ORDER BY hi FOR UPDATE))
    RETURNING lo, hi, batch_id, attempt, replies
), load AS (
    SELECT * FROM waiting UNION ALL SELECT * FROM later UNION ALL SELECT * FROM unannounced
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'CANCELED', lo, hi, batch_id, attempt, %(operator)s::text, json_build_object('reason', %(reason)s::text) FROM load
), replied AS (
    SELECT busload.reply(id, 'CANCELED', json_build_object('message', %(reason)s::text)) AS domain
      FROM load CROSS JOIN LATERAL generate_series(lo, hi) AS id WHERE replies
), told AS (
    SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM replied) AS domains WHERE domain IS NOT NULL
)
SELECT coalesce(sum((hi - lo + 1)::integer), 0)::integer,
       (SELECT CASE WHEN p.more THEN p.last WHEN n.found = %(limit)s::integer THEN n.last | 1023 END
          FROM page AS p CROSS JOIN (SELECT count(*) AS found, max(id) AS last FROM numbered) AS n),
       (SELECT * FROM told)
  FROM load;
