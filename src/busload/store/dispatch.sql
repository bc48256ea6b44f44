-- name: start
-- A creation begins: its row tells where to resume, and how it went.
INSERT INTO busload.dispatch (batch_id, transport, strategy, status, total, written)
VALUES (%(batch_id)s::uuid, %(transport)s::text, %(strategy)s::text, 'pending', %(total)s::integer, %(written)s::integer);

-- name: finish
-- How the creation went, as far as its creator knows. If all of it was announced meanwhile, that stands.
UPDATE busload.dispatch
   SET status = CASE WHEN announced_at IS NULL OR written IS DISTINCT FROM total THEN %(status)s::text
                     WHEN status = 'recovered' OR retry_needed OR %(retry_needed)s::boolean THEN 'recovered'
                     WHEN %(status)s::text = 'success_with_warning' THEN %(status)s::text ELSE 'success' END,
       retry_needed = retry_needed OR %(retry_needed)s::boolean, error = %(error)s::text, warning = %(warning)s::text,
       insert_ms = %(insert_ms)s::float8, send_ms = %(send_ms)s::float8, mark_ms = %(mark_ms)s::float8, total_ms = %(total_ms)s::float8
 WHERE batch_id = %(batch_id)s::uuid;

-- name: failed_round
-- Locked in order, as batches are: two relays may tell of the same ones. One that was closed has something left after all.
UPDATE busload.dispatch
   SET rounds = rounds + 1, retry_needed = true, announced_at = NULL,
       status = CASE WHEN announced_at IS NULL THEN status ELSE 'partial_success' END
 WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM busload.dispatch WHERE batch_id = ANY (%(batch_ids)b::uuid[])
                              ORDER BY batch_id FOR NO KEY UPDATE));

-- name: close
-- Creations of which nothing waits in the outbox any more: all of their commands were announced, canceled or rerouted. So are
-- those that can never be gone on with, because their batch was canceled or sealed before all of it was written.
WITH closed AS (
    UPDATE busload.dispatch
       SET announced_at = now(), status = CASE WHEN written IS DISTINCT FROM total THEN 'partial_success'
                                               WHEN status IN ('pending', 'success', 'success_with_warning') AND NOT retry_needed
                                               THEN replace(status, 'pending', 'success') ELSE 'recovered' END
     WHERE batch_id = ANY (ARRAY(
            SELECT batch_id FROM busload.dispatch AS o
             WHERE announced_at IS NULL AND (%(batch_ids)b::uuid[] IS NULL OR batch_id = ANY (%(batch_ids)b::uuid[]))
               AND (written = total OR EXISTS (SELECT FROM busload.batch
                                                WHERE batch_id = o.batch_id AND sealed_at IS NOT NULL OFFSET 0))
               AND NOT EXISTS (SELECT FROM busload.outbox WHERE batch_id = o.batch_id OFFSET 0)
             ORDER BY batch_id LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED))
    RETURNING batch_id
), confirmed AS (
    UPDATE busload.checkpoint SET confirmed_at = now()
     WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM closed)) AND confirmed_at IS NULL
)
SELECT batch_id FROM closed;

-- name: find
-- With what is still in the outbox now.
SELECT d.batch_id, d.transport, d.strategy, d.status, d.total, d.written, o.commands, o.failed > 0,
       coalesce(d.error, o.error), d.warning, d.insert_ms, d.send_ms, d.mark_ms, d.total_ms, d.rounds, d.created_at, d.announced_at,
       c.confirmed, c.written, b.job_id, b.stage, b.sealed_at IS NOT NULL
  FROM busload.batch AS b JOIN busload.dispatch AS d USING (batch_id)
 CROSS JOIN LATERAL (SELECT coalesce(sum(hi - lo + 1), 0)::integer AS commands, count(*) FILTER (WHERE rounds > 0) AS failed,
                            max(error) AS error
                       FROM busload.outbox WHERE batch_id = b.batch_id) AS o
 CROSS JOIN LATERAL (SELECT coalesce(array_agg(checkpoint ORDER BY checkpoint) FILTER (WHERE confirmed_at IS NOT NULL), '{}') AS confirmed,
                            coalesce(array_agg(checkpoint ORDER BY checkpoint) FILTER (WHERE confirmed_at IS NULL), '{}') AS written
                       FROM busload.checkpoint WHERE batch_id = b.batch_id) AS c
 WHERE b.domain = %(domain)s::text AND b.batch_id = %(batch_id)s::uuid AND b.pruned_at IS NULL;

-- name: hold
-- Held until the end of the transaction, so that two cannot write checkpoints of one batch at once.
SELECT batch_id FROM busload.batch WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text FOR NO KEY UPDATE;

-- name: resume
-- Where a creation in checkpoints stopped: asked after `hold`, in a statement of its own, which sees what others have done.
SELECT d.strategy, d.total, coalesce(c.checkpoints, 0)::integer, coalesce(c.commands, 0)::integer, c.last_command,
       b.sealed_at IS NOT NULL, b.canceled_at IS NOT NULL
  FROM busload.dispatch AS d JOIN busload.batch AS b USING (batch_id)
 CROSS JOIN LATERAL (SELECT max(checkpoint) AS checkpoints, sum(commands) AS commands,
                            (array_agg(last_command ORDER BY checkpoint DESC))[1] AS last_command
                       FROM busload.checkpoint WHERE batch_id = d.batch_id) AS c
 WHERE d.batch_id = %(batch_id)s::uuid AND b.domain = %(domain)s::text;

-- name: checkpoint
-- The cursor moves with the commands, in one transaction. With the last one it is known how many there are.
WITH written AS (
    INSERT INTO busload.checkpoint (batch_id, checkpoint, commands, last_command)
    VALUES (%(batch_id)s::uuid, %(checkpoint)s::integer, %(commands)s::integer, %(last_command)s::uuid)
)
UPDATE busload.dispatch
   SET written = written + %(commands)s::integer, total = CASE WHEN %(last)s::boolean THEN written + %(commands)s::integer ELSE total END
 WHERE batch_id = %(batch_id)s::uuid;

-- name: confirm_checkpoint
UPDATE busload.checkpoint SET confirmed_at = now() WHERE batch_id = %(batch_id)s::uuid AND checkpoint = %(checkpoint)s::integer;
