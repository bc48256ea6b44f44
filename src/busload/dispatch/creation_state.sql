-- name: start
-- A creation begins. Its row tells where to resume, and how it went.
INSERT INTO busload.dispatch (batch_id, transport, strategy, status, total, written)
VALUES (%(batch_id)s::uuid, %(transport)s::text, %(strategy)s::text, 'pending', %(total)s::integer,
        %(written)s::integer);

-- name: start_some
-- Several batches were written, each as a whole.
INSERT INTO busload.dispatch (batch_id, transport, strategy, status, total, written)
SELECT batch_id, %(transport)s::text, %(strategy)s::text, 'pending', size, size
  FROM unnest(%(batch_ids)b::uuid[], %(sizes)b::integer[]) AS batch (batch_id, size);

-- name: start_sealed
-- A batch that was filled bit by bit is sealed: from now on it is known what there is to be published.
INSERT INTO busload.dispatch (batch_id, transport, strategy, status, total, written, created_at)
SELECT batch_id, %(transport)s::text, 'relay', 'pending', total_count, total_count, created_at
  FROM busload.batch WHERE batch_id = %(batch_id)s::uuid AND way = 'open_batch'
    ON CONFLICT (batch_id) DO NOTHING;

-- name: finish
-- How the creation went, as far as its creator knows. If everything was published meanwhile, that stands.
UPDATE busload.dispatch
   SET status = CASE WHEN published_at IS NULL OR written IS DISTINCT FROM total THEN %(status)s::text
                     WHEN status = 'recovered' OR retry_needed OR %(retry_needed)s::boolean THEN 'recovered'
                     WHEN %(status)s::text = 'success_with_warning' THEN %(status)s::text ELSE 'success' END,
       retry_needed = retry_needed OR %(retry_needed)s::boolean,
       confirmed = least(confirmed + %(confirmed)s::integer, written),
       error = %(error)s::text,
       warning = %(warning)s::text,
       insert_ms = %(insert_ms)s::float8,
       send_ms = %(send_ms)s::float8,
       mark_ms = %(mark_ms)s::float8,
       total_ms = %(total_ms)s::float8
 WHERE batch_id = %(batch_id)s::uuid;

-- name: failed_round
-- A round of publishing has failed for these batches. Rows are locked in order, as batches are: two relays
-- may report the same ones. A creation that was closed has something left after all.
UPDATE busload.dispatch
   SET rounds = rounds + 1, retry_needed = true, published_at = NULL,
       status = CASE WHEN published_at IS NULL THEN status ELSE 'partial_success' END
 WHERE batch_id = ANY (ARRAY(SELECT batch_id
                               FROM busload.dispatch
                              WHERE batch_id = ANY (%(batch_ids)b::uuid[])
                              ORDER BY batch_id
                                FOR NO KEY UPDATE));

-- name: close
-- Close creations of which nothing waits in the outbox any more: all their commands were published, canceled
-- or rerouted. A creation whose batch was canceled or sealed before everything was written can never go on,
-- so it is closed too.
WITH closed AS (
    UPDATE busload.dispatch
       SET published_at = now(),
           first_published_at = CASE WHEN written = total THEN coalesce(first_published_at, now()) END,
           attempts = CASE WHEN written = total THEN coalesce(attempts, rounds + 1) END,
           status = CASE WHEN written IS DISTINCT FROM total THEN 'partial_success'
                                               WHEN status IN ('pending', 'success', 'success_with_warning')
                                                    AND NOT retry_needed
                                               THEN replace(status, 'pending', 'success') ELSE 'recovered' END
     WHERE batch_id = ANY (ARRAY(
            SELECT batch_id FROM busload.dispatch AS o
             WHERE published_at IS NULL
               AND (%(batch_ids)b::uuid[] IS NULL OR batch_id = ANY (%(batch_ids)b::uuid[]))
               AND (written = total OR EXISTS (SELECT FROM busload.batch
                                                WHERE batch_id = o.batch_id
                                                  AND sealed_at IS NOT NULL OFFSET 0))
               AND NOT EXISTS (SELECT FROM busload.outbox WHERE batch_id = o.batch_id OFFSET 0)
             ORDER BY batch_id LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED))
    RETURNING batch_id
), confirmed AS (
    UPDATE busload.checkpoint SET confirmed_at = now()
     WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM closed)) AND confirmed_at IS NULL
)
SELECT batch_id FROM closed;

-- name: find
-- How a creation went, and what is still in the outbox now. What the broker has confirmed was published, also
-- while it could not be marked. What waits for the canary of its batch was not. If nothing is left to be
-- published because the batch was held, canceled or put off before, the creation is closed soon, and its
-- status is that already. A batch that was sealed before all of it was written is given up: the rest is never
-- written.
SELECT d.batch_id, d.transport, d.strategy, s.status, d.total, d.written,
       greatest(d.written - o.commands - w.commands, d.confirmed),
       o.failed > 0, c.confirmed, CASE WHEN s.status <> 'pending' THEN c.unconfirmed END,
       coalesce(d.error, o.error), d.warning, d.rounds, d.insert_ms, d.send_ms, d.mark_ms, d.total_ms,
       d.created_at, d.published_at, b.job_id, b.stage::text, s.given_up
  FROM busload.batch AS b JOIN busload.dispatch AS d USING (batch_id)
 CROSS JOIN LATERAL (
        SELECT given_up,
               CASE WHEN given_up AND d.status = 'pending' THEN 'partial_success'
                    WHEN d.status = 'pending' AND b.sealed_at IS NOT NULL AND NOT EXISTS (
                         SELECT FROM busload.outbox WHERE batch_id = b.batch_id OFFSET 0)
                    THEN CASE WHEN d.retry_needed THEN 'recovered' ELSE 'success' END
                    ELSE d.status END AS status
          FROM (SELECT b.sealed_at IS NOT NULL AND d.written IS DISTINCT FROM d.total AS given_up) AS g) AS s
 CROSS JOIN LATERAL (SELECT coalesce(sum(hi - lo + 1), 0)::integer AS commands,
                            count(*) FILTER (WHERE rounds > 0) AS failed,
                            max(error) AS error
                       FROM busload.outbox WHERE batch_id = b.batch_id) AS o
 CROSS JOIN LATERAL (
        SELECT coalesce(sum(p.hi - p.lo + 1), 0)::integer AS commands
          FROM busload.ids_of(CASE WHEN b.canary_until IS NOT NULL THEN ARRAY[b.batch_id] END) AS i
          JOIN busload.scheduled AS p
            ON p.hi BETWEEN i.first AND i.last AND p.batch_id = b.batch_id AND p.reason = 'CANARY') AS w
 CROSS JOIN LATERAL (
        SELECT coalesce(
                   array_agg(checkpoint ORDER BY checkpoint) FILTER (WHERE confirmed_at IS NOT NULL), '{}'
               ) AS confirmed,
               min(checkpoint) FILTER (WHERE confirmed_at IS NULL) AS unconfirmed
          FROM busload.checkpoint
         WHERE batch_id = b.batch_id) AS c
 WHERE b.domain = %(domain)s::text AND b.batch_id = %(batch_id)s::uuid AND b.pruned_at IS NULL;

-- name: hold
-- Lock the batch until the end of the transaction, so that two callers cannot write checkpoints of one batch
-- at once.
SELECT batch_id
  FROM busload.batch
 WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text
   FOR NO KEY UPDATE;

-- name: resume
-- Where a creation in checkpoints stopped. Asked after `hold` in a statement of its own, which sees what
-- others have done.
SELECT d.strategy, d.total, coalesce(c.checkpoints, 0)::integer, coalesce(c.commands, 0)::integer,
       c.last_command, b.sealed_at IS NOT NULL, b.canceled_at IS NOT NULL
  FROM busload.dispatch AS d JOIN busload.batch AS b USING (batch_id)
 CROSS JOIN LATERAL (SELECT max(checkpoint) AS checkpoints, sum(commands) AS commands,
                            (array_agg(last_command ORDER BY checkpoint DESC))[1] AS last_command
                       FROM busload.checkpoint WHERE batch_id = d.batch_id) AS c
 WHERE d.batch_id = %(batch_id)s::uuid AND b.domain = %(domain)s::text;

-- name: checkpoint
-- The cursor moves together with the commands, in one transaction. With the last checkpoint the total is
-- known.
WITH written AS (
    INSERT INTO busload.checkpoint (batch_id, checkpoint, commands, last_command, last_load)
    VALUES (%(batch_id)s::uuid, %(checkpoint)s::integer, %(commands)s::integer, %(last_command)s::uuid,
            currval('busload.load_number'))
)
UPDATE busload.dispatch
   SET written = written + %(commands)s::integer,
       total = CASE WHEN %(last)s::boolean THEN written + %(commands)s::integer ELSE total END
 WHERE batch_id = %(batch_id)s::uuid;

-- name: confirm_checkpoint
-- The broker has confirmed all messages of a checkpoint.
UPDATE busload.checkpoint
   SET confirmed_at = now()
 WHERE batch_id = %(batch_id)s::uuid AND checkpoint = %(checkpoint)s::integer;
