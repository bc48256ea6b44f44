-- fragments of: busload.commands.load

-- fragment: pieces
-- What became of messages: neighbouring commands, and why the broker has refused their message, if it has.
SELECT *
  FROM unnest(%(los)b::bigint[], %(his)b::bigint[], %(reasons)b::text[], %(errors)b::text[],
              %(pauses)b::float8[], %(published)b::text[])
    AS p (lo, hi, reason, error, pause, published)

-- fragment: noted
-- The audit trail tells of each message that was confirmed: also if a worker was faster than this report, and
-- once only, although the report may come twice.
noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, details)
    SELECT 'PUBLISHED', p.lo, p.hi, c.batch_id, p.published::json
      FROM piece AS p JOIN busload.command AS c ON c.id = p.lo
     WHERE p.published IS NOT NULL AND p.reason IS NULL
       AND NOT EXISTS (SELECT FROM busload.publication AS v
                        WHERE v.lo >> 10 = p.lo >> 10 AND v.lo = p.lo AND v.hi = p.hi
                          AND v.publication = p.published::json ->> 'publication' OFFSET 0)
)

-- fragment: noted_again
noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, details)
    SELECT 'PUBLISHED_AGAIN', lo, hi, batch_id, json_build_object('transport', transport, 'attempts', 1)
      FROM again
)
SELECT lo, hi, domain, batch_id, publications, NULL FROM again

-- fragment: of_domain_and_batch
(%(domain)s::text IS NULL OR domain = %(domain)s::text)
AND (%(batch_id)s::uuid IS NULL OR batch_id = %(batch_id)s::uuid)

-- name: take
-- Hold loads that are to be published and that nobody publishes right now: new ones, those that are due
-- again, and those of a relay that died. Loads of some domains are left for later.
UPDATE busload.outbox AS o SET relay = %(relay)s::uuid, due_at = now() + %(hold)s::interval
 WHERE hi = ANY (ARRAY(SELECT hi FROM busload.unmarked
                        WHERE transport = %(transport)s::text AND due_at <= now()
                          AND domain <> ALL (%(later)b::text[])
                        ORDER BY due_at, hi LIMIT %(limit)s::integer FOR UPDATE SKIP LOCKED))
RETURNING lo, hi, domain, batch_id, rounds, error;

-- name: next_due
-- Seconds until something is due again for this transport; none if nothing waits.
SELECT extract(epoch FROM min(due_at) - now())::float8 FROM busload.unmarked
 WHERE transport = %(transport)s::text AND domain <> ALL (%(later)b::text[]);

-- name: mark
-- Whoever published loads reports how that went, piece by piece: confirmed commands are ready, the others
-- wait for another round. Only loads that the relay still holds are moved, and only if it reports on the
-- whole load. If a worker was faster than the mark, it has taken its part already: nothing is ever moved
-- backwards. Returns how many commands are ready, how many wait again, and of which batches those are.
WITH piece AS (
    {pieces}
), held AS MATERIALIZED (
    SELECT * FROM busload.outbox
     WHERE hi IN (SELECT o.hi
                    FROM (SELECT DISTINCT lo >> 10 AS load FROM piece) AS l
                   CROSS JOIN LATERAL (SELECT hi
                                         FROM busload.outbox
                                        WHERE hi BETWEEN l.load << 10 AND (l.load << 10 | 1023)
                                       OFFSET 0) AS o)
       AND relay = %(relay)s::uuid
     ORDER BY hi FOR UPDATE
), part AS MATERIALIZED (
    SELECT greatest(h.lo, p.lo) AS lo, least(h.hi, p.hi) AS hi, h.hi AS held, h.lo AS held_lo,
           h.domain, h.batch_id, h.priority, h.attempt, h.forgiven, h.crashes, h.replies, h.fair,
           h.transport, h.since, h.rounds, p.reason, p.error, p.pause
      FROM held AS h JOIN piece AS p ON p.lo >> 10 = h.hi >> 10 AND p.lo <= h.hi AND p.hi >= h.lo
), whole AS MATERIALIZED (
    SELECT held FROM part GROUP BY held, held_lo HAVING sum((hi - lo + 1)::integer) = held - held_lo + 1
), gone AS (
    DELETE FROM busload.outbox WHERE hi = ANY (ARRAY(SELECT held FROM whole)) RETURNING hi
), told AS MATERIALIZED (   -- through `gone`, so that a load is out before a part of it comes in again
    SELECT part.* FROM part JOIN gone ON gone.hi = part.held
), ready AS (
    INSERT INTO busload.queue ({load}, transport, published_at, publications)
    SELECT {load}, transport, now(), 1 FROM told WHERE reason IS NULL
), again AS (
    INSERT INTO busload.outbox ({load}, transport, since, due_at,
                                rounds, reason, error, failed_at)
    SELECT {load}, transport, since,
           now() + pause * interval '1 second', rounds + 1, reason, error, now()
      FROM told WHERE reason IS NOT NULL
), {noted}
SELECT coalesce(sum(hi - lo + 1) FILTER (WHERE reason IS NULL), 0)::integer,
       coalesce(sum(hi - lo + 1) FILTER (WHERE reason IS NOT NULL), 0)::integer,
       coalesce(array_agg(DISTINCT batch_id) FILTER (WHERE reason IS NOT NULL AND batch_id IS NOT NULL), '{}')
  FROM told;

-- name: take_back
-- Loads that were ready before the broker refused their message go into the outbox, as far as nobody has
-- claimed them yet. Returns how many commands that are, and of which batches.
WITH piece AS (
    {pieces}
), ready AS MATERIALIZED (
    SELECT q.*, p.lo AS piece_lo, p.hi AS piece_hi, p.reason, p.error, p.pause
      FROM piece AS p CROSS JOIN LATERAL (
            SELECT * FROM busload.queue
             WHERE hi BETWEEN p.lo AND (p.lo | 1023) AND lo <= p.hi AND transport = %(transport)s::text
               AND published_at IS NOT NULL
             ORDER BY hi FOR UPDATE SKIP LOCKED) AS q
), gone AS (
    DELETE FROM busload.queue WHERE hi = ANY (ARRAY(SELECT hi FROM ready)) RETURNING hi
), told AS MATERIALIZED (
    SELECT DISTINCT ON (ready.hi, piece_lo) ready.* FROM ready JOIN gone USING (hi)
), rest AS (   -- parts of these loads that no refused message was about stay ready
    SELECT part.lo, part.hi, t.domain, t.batch_id, t.priority, t.attempt, t.forgiven, t.crashes, t.replies,
           t.fair, t.transport, t.published_at
      FROM (SELECT hi AS load, lo AS first,
                   range_agg(int8range(greatest(lo, piece_lo), least(hi, piece_hi), '[]')) AS refused
              FROM told GROUP BY hi, lo) AS r
     CROSS JOIN LATERAL (
        SELECT lower(free) AS lo, upper(free) - 1 AS hi
          FROM unnest(
                   int8multirange(int8range(r.first, r.load, '[]')) OPERATOR(pg_catalog.-) r.refused
               ) AS free) AS part
      JOIN (SELECT DISTINCT ON (hi) * FROM told ORDER BY hi) AS t ON t.hi = r.load
), kept AS (
    INSERT INTO busload.queue ({load}, transport, published_at, publications)
    SELECT {load}, transport, published_at, 1 FROM rest
), again AS (
    INSERT INTO busload.outbox ({load}, transport, due_at, rounds, reason, error, failed_at)
    SELECT greatest(lo, piece_lo), least(hi, piece_hi), domain, batch_id, priority, attempt, forgiven,
           crashes, replies, fair, transport, now() + pause * interval '1 second', 1, reason,
           error, now()
      FROM told
    RETURNING lo, hi, batch_id
)
SELECT coalesce(sum(hi - lo + 1), 0)::integer,
       coalesce(array_agg(DISTINCT batch_id) FILTER (WHERE batch_id IS NOT NULL), '{}')
  FROM again;

-- name: note_published
-- The broker has confirmed messages about loads that were ready before.
WITH piece AS (
    {pieces}
), {noted}
SELECT count(*) FROM piece;

-- name: hurry
-- The broker can be reached again: loads that waited only for that are due now.
UPDATE busload.outbox SET due_at = now()
 WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox
                        WHERE transport = %(transport)s::text AND rounds > 0 AND reason = 'UNREACHABLE'
                          AND relay IS NULL AND due_at > now()
                        ORDER BY hi FOR UPDATE SKIP LOCKED));

-- name: unclaimed
-- Ready loads whose message was confirmed long ago, and that nobody has claimed: publish them again. The
-- pause doubles each time.
WITH again AS (
    UPDATE busload.queue SET published_at = now(), publications = least(coalesce(publications, 1), 30) + 1
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue
                            WHERE transport = %(transport)s::text
                              AND published_at < now() - %(bound)s::interval
                              AND published_at < now() - %(bound)s::interval
                                  * 2::float8 ^ (least(coalesce(publications, 1), 16) - 1)::float8
                            ORDER BY published_at, hi LIMIT %(limit)s::integer FOR UPDATE SKIP LOCKED))
    RETURNING *
), {noted_again};

-- name: identity
-- Eight hex digits that tell this database from others.
SELECT left(database::text, 8) FROM busload.identity;

-- name: sizes
-- How large messages about single commands get, so that no more of them are read than fit.
SELECT c.id, coalesce(octet_length(c.data::text), 0)
  FROM unnest(%(los)b::bigint[], %(his)b::bigint[]) AS r (lo, hi)
 CROSS JOIN LATERAL (SELECT id, data
                       FROM busload.command WHERE id BETWEEN r.lo AND r.hi ORDER BY id OFFSET 0) AS c
 ORDER BY c.id;

-- name: commands
-- What a message about a single command says.
SELECT c.id, c.domain, c.command_id, c.command_type, c.data::text, c.batch_id, c.task_key, b.job_id,
       b.stage::text
  FROM unnest(%(los)b::bigint[], %(his)b::bigint[]) AS r (lo, hi)
 CROSS JOIN LATERAL (SELECT * FROM busload.command WHERE id BETWEEN r.lo AND r.hi ORDER BY id OFFSET 0) AS c
  LEFT JOIN busload.batch AS b USING (batch_id)
 ORDER BY c.id;

-- name: reroute
-- Let PostgreSQL deliver what waits in the outbox: the row is the message. What has `failed` was refused by
-- the broker or, with `stuck_for`, was published by nobody for so long.
WITH gone AS (
    DELETE FROM busload.outbox
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox
                            WHERE {of_domain_and_batch}
                              AND (NOT %(failed)s::boolean OR rounds > 0
                                   OR since < now() - %(stuck_for)s::interval)
                            ORDER BY hi LIMIT %(limit)s::integer FOR UPDATE SKIP LOCKED))
    RETURNING *
), ready AS (
    INSERT INTO busload.queue ({load})
    SELECT {load} FROM gone RETURNING domain
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'REROUTED', lo, hi, batch_id, attempt, %(operator)s::text,
           json_build_object('transport', transport, 'attempts', rounds, 'last_error', error)
      FROM gone
)
SELECT coalesce(sum(hi - lo + 1), 0)::integer,
       (SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM ready) AS told)
  FROM gone;

-- name: retry
-- Try again now what waits for another round.
WITH due AS (
    UPDATE busload.outbox SET due_at = now()
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox
                            WHERE rounds > 0 AND relay IS NULL
                              AND {of_domain_and_batch}
                            ORDER BY hi FOR UPDATE SKIP LOCKED))
    RETURNING lo, hi, transport
), noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'OUTBOX_RETRIED', %(operator)s::text, json_build_object('domain', %(domain)s::text)
     WHERE %(operator)s::text IS NOT NULL AND EXISTS (SELECT FROM due)
)
SELECT coalesce(sum(hi - lo + 1), 0)::integer,
       (SELECT count(pg_notify('busload_outbox', transport))
          FROM (SELECT DISTINCT transport FROM due) AS told)
  FROM due;

-- name: note_repair
-- An operator has the messages of the broker repaired.
INSERT INTO busload.event (type, operator, details)
VALUES ('OUTBOX_REPAIRED', %(operator)s::text, json_build_object('domain', %(domain)s::text));

-- name: retryable
-- How many commands `retry` would take.
SELECT coalesce(sum(hi - lo + 1), 0)::integer FROM busload.outbox
 WHERE rounds > 0 AND relay IS NULL AND {of_domain_and_batch};

-- name: waiting
-- What is in the outbox, by transport, domain and why.
SELECT transport, domain, reason, sum(hi - lo + 1)::bigint, count(*)::bigint,
       min(since), max(rounds), max(error), min(due_at),
       coalesce(sum(hi - lo + 1) FILTER (WHERE due_at > now() AND relay IS NOT NULL), 0)::bigint
  FROM busload.outbox
 WHERE {of_domain_and_batch}
 GROUP BY transport, domain, reason ORDER BY transport, domain, reason NULLS FIRST;

-- name: published
-- Which loads of a domain the broker should know of: for comparing both sides.
SELECT lo, hi FROM busload.queue
 WHERE transport = %(transport)s::text AND published_at IS NOT NULL AND domain = %(domain)s::text
   AND published_at < now() - %(older_than)s::interval
 ORDER BY published_at, hi LIMIT %(limit)s::integer;

-- name: look_up
-- What is behind messages: whether a command of a load exists, and whether one waits or runs.
SELECT EXISTS (SELECT FROM busload.command WHERE id BETWEEN first AND first | 1023 OFFSET 0),
       EXISTS (SELECT FROM busload.queue WHERE hi BETWEEN first AND first | 1023 OFFSET 0)
       OR EXISTS (SELECT FROM busload.outbox WHERE hi BETWEEN first AND first | 1023 OFFSET 0)
       OR EXISTS (SELECT FROM busload.lease WHERE hi BETWEEN first AND first | 1023 OFFSET 0)
  FROM (SELECT load << 10 AS first, n FROM unnest(%(loads)b::bigint[]) WITH ORDINALITY AS l (load, n)) AS l
 ORDER BY n;

-- name: publish_again
-- Ready loads that are published again, because the broker has too few messages about them.
WITH again AS (
    UPDATE busload.queue SET published_at = now(), publications = least(coalesce(publications, 1), 30) + 1
     WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue
                            WHERE hi = ANY (%(his)b::bigint[]) AND transport = %(transport)s::text
                              AND published_at IS NOT NULL
                            ORDER BY hi FOR UPDATE SKIP LOCKED))
    RETURNING *
), {noted_again};

-- name: lag
-- Per transport: commands that wait, those after a failed round, seconds the oldest has waited, most rounds.
SELECT transport, sum(hi - lo + 1)::bigint, coalesce(sum(hi - lo + 1) FILTER (WHERE rounds > 0), 0)::bigint,
       extract(epoch FROM now() - min(since))::float8, max(rounds)
  FROM busload.outbox GROUP BY transport ORDER BY transport;
