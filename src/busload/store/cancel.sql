-- name: mark_canceled
-- From here on nothing of the batch is tried again, and it takes no more commands. The row is held until the end of the
-- transaction, so that it can complete only after everything that waits was canceled.
WITH marked AS (
    UPDATE busload.batch SET canceled_at = now(), sealed_at = coalesce(sealed_at, now())
     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND completed_at IS NULL
    RETURNING batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    SELECT 'BATCH_CANCELED', batch_id, %(operator)s::text, json_build_object('reason', %(reason)s::text) FROM marked
)
SELECT batch_id, pg_notify('busload_cancel', batch_id::text) FROM marked;

-- name: cancel_waiting
-- Cancel what has not started. A load that a claim is splitting is waited for, and what is left of it is canceled. Loads are
-- locked in order, as a mark does.
WITH waiting AS (
    DELETE FROM busload.queue
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue WHERE batch_id = ANY (%(batch_ids)b::uuid[]) ORDER BY hi FOR UPDATE))
    RETURNING lo, hi, batch_id, attempt, replies
), later AS (
    DELETE FROM busload.scheduled WHERE batch_id = ANY (%(batch_ids)b::uuid[]) RETURNING lo, hi, batch_id, attempt, replies
), unannounced AS (
    DELETE FROM busload.outbox
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox WHERE batch_id = ANY (%(batch_ids)b::uuid[]) ORDER BY hi FOR UPDATE))
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
SELECT coalesce(sum(hi - lo + 1), 0)::integer, (SELECT * FROM told) FROM load;
