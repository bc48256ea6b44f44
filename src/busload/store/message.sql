-- name: publish
-- One that is here already is dropped. In one order, so that two who publish the same do not wait for each other in a ring.
WITH added AS (
    INSERT INTO busload.message (queue, id, body)
    SELECT * FROM unnest(%(queues)s::text[], %(ids)s::text[], %(bodies)s::bytea[]) AS m (queue, id, body) ORDER BY queue, id
        ON CONFLICT (queue, id) DO NOTHING
    RETURNING queue
)
SELECT pg_notify('busload_message', queue) FROM (SELECT DISTINCT queue FROM added) AS added;

-- name: take
-- Those that have waited longest, unless another one is taking them.
WITH taken AS (
    SELECT queue, id FROM busload.message WHERE queue = %(queue)s::text AND visible_at <= now()
     ORDER BY visible_at LIMIT %(limit)s::bigint FOR UPDATE SKIP LOCKED
)
UPDATE busload.message AS m SET visible_at = now() + %(loan)s::interval, deliveries = m.deliveries + 1
  FROM taken AS t WHERE m.queue = t.queue AND m.id = t.id
RETURNING m.id, m.deliveries, m.body;

-- name: renew
-- What this receiver still has on loan stays so. What others are about to settle or take is left to them.
WITH held AS (
    SELECT m.queue, m.id
      FROM unnest(%(ids)s::text[], %(deliveries)s::integer[]) AS h (id, deliveries)
      JOIN busload.message AS m ON m.queue = %(queue)s::text AND m.id = h.id AND m.deliveries = h.deliveries
       FOR UPDATE OF m SKIP LOCKED
)
UPDATE busload.message AS m SET visible_at = now() + %(loan)s::interval
  FROM held AS h WHERE m.queue = h.queue AND m.id = h.id;

-- name: release
-- Give back what is still on loan to this receiver.
WITH held AS (
    SELECT m.queue, m.id
      FROM unnest(%(ids)s::text[], %(deliveries)s::integer[]) AS h (id, deliveries)
      JOIN busload.message AS m ON m.queue = %(queue)s::text AND m.id = h.id AND m.deliveries = h.deliveries
     ORDER BY m.id FOR UPDATE OF m
), released AS (
    UPDATE busload.message AS m SET visible_at = now() FROM held AS h WHERE m.queue = h.queue AND m.id = h.id
    RETURNING m.queue
)
SELECT pg_notify('busload_message', queue) FROM (SELECT DISTINCT queue FROM released) AS released;

-- name: forget
DELETE FROM busload.message
 WHERE queue = %(queue)s::text AND id = %(id)s::text AND deliveries = %(deliveries)s::integer;

-- name: depth
SELECT count(*) FROM busload.message WHERE queue = %(queue)s::text;

-- name: peek
SELECT body FROM busload.message WHERE queue = %(queue)s::text ORDER BY visible_at LIMIT %(limit)s::bigint;

-- name: privileges
-- What of the table we may not do; no row if there is no such table.
SELECT array(SELECT p FROM unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) AS p WHERE NOT has_table_privilege(t, p))
  FROM to_regclass('busload.message') AS t WHERE t IS NOT NULL;
