-- name: publish
-- Add messages. A message that is here already is dropped. They are written in one order, so that two
-- transactions that publish the same messages do not wait for each other.
WITH added AS (
    INSERT INTO busload.message (queue, id, body)
    SELECT *
      FROM unnest(%(queues)s::text[], %(ids)s::text[], %(bodies)s::bytea[]) AS m (queue, id, body)
     ORDER BY queue, id
        ON CONFLICT (queue, id) DO NOTHING
    RETURNING queue
)
SELECT pg_notify('busload_message', queue) FROM (SELECT DISTINCT queue FROM added) AS added;

-- name: take
-- Lend the messages that have waited longest, unless another receiver is taking them.
WITH taken AS (
    SELECT queue, id FROM busload.message WHERE queue = %(queue)s::text AND visible_at <= now()
     ORDER BY visible_at LIMIT %(limit)s::bigint FOR UPDATE SKIP LOCKED
)
UPDATE busload.message AS m
   SET visible_at = now() + %(seconds)s::float8 * interval '1 second', deliveries = m.deliveries + 1
  FROM taken AS t WHERE m.queue = t.queue AND m.id = t.id
RETURNING m.id, m.deliveries, m.body;

-- name: renew
-- Extend the loan of the messages that this receiver still has. Messages that others are about to settle or
-- take are left to them.
WITH held AS (
    SELECT m.queue, m.id
      FROM unnest(%(ids)s::text[], %(deliveries)s::integer[]) AS h (id, deliveries)
      JOIN busload.message AS m ON m.queue = %(queue)s::text AND m.id = h.id AND m.deliveries = h.deliveries
       FOR UPDATE OF m SKIP LOCKED
)
UPDATE busload.message AS m SET visible_at = now() + %(seconds)s::float8 * interval '1 second'
  FROM held AS h WHERE m.queue = h.queue AND m.id = h.id;

-- name: release
-- Give back the messages that this receiver still has on loan.
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
-- A message was acknowledged. If its loan has lapsed and another receiver has it, it stays.
DELETE FROM busload.message
 WHERE queue = %(queue)s::text AND id = %(id)s::text AND deliveries = %(deliveries)s::integer;

-- name: depth
-- How many messages a queue holds.
SELECT count(*) FROM busload.message WHERE queue = %(queue)s::text;

-- name: peek
-- The bodies of messages, without taking them.
SELECT body FROM busload.message WHERE queue = %(queue)s::text ORDER BY visible_at LIMIT %(limit)s::bigint;

-- name: privileges
-- What the role may not do with the table; no row if there is no such table.
SELECT array(SELECT p
               FROM unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) AS p
              WHERE NOT has_table_privilege(t, p))
  FROM to_regclass('busload.message') AS t WHERE t IS NOT NULL;
