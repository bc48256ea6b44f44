-- fragments of: busload.commands.load

-- name: room
-- How many more groups may stand in the queue, and when the buffer was flushed last.
SELECT %(max_groups)s::integer - (SELECT count(*) FROM (
           SELECT FROM busload.queue WHERE domain = %(buffer)s::text AND crashes = 0
            LIMIT %(max_groups)s::integer) AS q)::integer,
       coalesce((SELECT flushed_at FROM busload.buffer WHERE buffer = %(buffer)s::text), '-infinity')::text;

-- fragment: waits
{filter} AND b.{group_id} IS NULL

-- fragment: in_order
ORDER BY b.{created_at}, b.{id}

-- fragment: from_here
-- Not before the event that the last look has found.
b.{created_at} >= %(start)s::text::{created_type}

-- fragment: weight
-- The bytes of an event, if they matter.
CASE WHEN %(max_bytes)s::bigint IS NULL THEN 0 ELSE {bytes} END

-- fragment: due_in
-- Seconds until the oldest event is due. Nobody knows the age of an event whose time cannot be right: it is
-- due.
CASE WHEN {early} THEN -1
     WHEN isfinite(since) THEN extract(epoch FROM since + %(max_age)s::interval - clock_timestamp())
     WHEN since < now() THEN -1
     ELSE 1e9 END::float8

-- fragment: oldest_of_partitions
-- The partitions in which events wait, from one on, each by its oldest event. Each partition takes one step
-- of the index, however many events wait.
part AS (
    (SELECT 1 AS nth, b.{partition_column} AS name, {since} AS since, b.{created_at} AS first
       FROM {table} AS b
      WHERE {waits} AND {beyond}
      ORDER BY b.{partition_column}, b.{created_at}, b.{id}
      LIMIT 1)
    UNION ALL
    SELECT part.nth + 1, n.name, n.since, n.first
      FROM part CROSS JOIN LATERAL (
           SELECT b.{partition_column} AS name, {since} AS since, b.{created_at} AS first
             FROM {table} AS b
            WHERE {waits} AND b.{partition_column} > part.name
            ORDER BY b.{partition_column}, b.{created_at}, b.{id}
            LIMIT 1) AS n
     WHERE part.nth < %(most)s::integer
)

-- fragment: oldest_of_partition
SELECT b.{created_at} AS first, {since} AS since FROM {table} AS b WHERE {waits} AND {within}
{in_order}
LIMIT 1

-- name: partitions
-- The partitions in which events wait.
WITH RECURSIVE {oldest_of_partitions}
SELECT name::text, first::text, {due_in}, since <= %(flushed_at)s::text::timestamptz FROM part ORDER BY nth;

-- name: oldest
-- The oldest event of one partition.
SELECT NULL, first::text, {due_in}, since <= %(flushed_at)s::text::timestamptz
  FROM ({oldest_of_partition}) AS b;

-- name: weigh
-- How many events wait in one partition, and how many bytes they have: counted no further than a group is
-- large.
SELECT count(*)::integer, coalesce(sum(bytes), 0)::bigint
  FROM (SELECT {weight} AS bytes
          FROM {table} AS b
         WHERE {waits} AND {within} AND {from_here}
         {in_order}
         LIMIT %(size)s::integer) AS b;

-- name: weigh_some
-- How many events wait in each of several partitions, one after the other, until enough rows were read.
WITH RECURSIVE w AS (
    SELECT 0 AS nth, 0 AS count, 0::bigint AS bytes, 0 AS read
    UNION ALL
    SELECT w.nth + 1, c.count, c.bytes, w.read + c.count
      FROM w CROSS JOIN LATERAL (
           SELECT count(*)::integer AS count, coalesce(sum(bytes), 0)::bigint AS bytes FROM (
               SELECT {weight} AS bytes
                 FROM {table} AS b
                WHERE {waits}
                  AND b.{partition_column} = (%(partitions)s::text[])[w.nth + 1]::{partition_type}
                  AND b.{created_at} >= (%(starts)s::text[])[w.nth + 1]::{created_type}
                {in_order}
                LIMIT %(size)s::integer) AS b) AS c
     WHERE w.nth < cardinality(%(partitions)s::text[]) AND w.read < %(budget)s::integer
)
SELECT count, bytes FROM w WHERE nth > 0 ORDER BY nth;

-- name: take_turns
-- Claims of a buffer that merges come one after the other: the next claim must see what the last one has put
-- into a group.
SELECT pg_advisory_xact_lock(hashtextextended('busload.buffer ' || %(buffer)s::text, 0));

-- fragment: slice
-- Events of one partition that wait.
SELECT b.{id} AS id, b.{created_at} AS at, {since} AS since, {partition} AS partition, {weight} AS bytes
  FROM {table} AS b
 WHERE {waits} AND {within}

-- fragment: oldest_free
-- The oldest of them that nobody else holds.
{in_order}
LIMIT %(size)s::integer
FOR UPDATE OF b SKIP LOCKED

-- fragment: key_is_free
-- No event of its key is in a group: otherwise it would be the next one.
NOT EXISTS (
    SELECT
      FROM {table} AS g
     WHERE {filter_of_g} AND g.{key_column} = b.{key_column} AND g.{group_id} IS NOT NULL
    OFFSET 0
)

-- fragment: chosen
-- The slice leaves if it is full, if its oldest event is old enough, if it was there at a flush, or `anyway`.
-- An event that is too large for `max_bytes` leaves alone.
weighed AS (
    SELECT *, sum(bytes) OVER (ORDER BY at, id ROWS UNBOUNDED PRECEDING) AS upto FROM slice
), due AS (
    SELECT count(*) >= %(size)s::integer OR sum(bytes) > %(max_bytes)s::bigint AS is_full
      FROM slice
    HAVING %(anyway)s::boolean
        OR count(*) >= %(size)s::integer
        OR sum(bytes) > %(max_bytes)s::bigint
        OR bool_or({early})
        OR min(since) <= greatest(clock_timestamp() - %(max_age)s::interval,
               (SELECT flushed_at FROM busload.buffer WHERE buffer = %(buffer)s::text))
), chosen AS MATERIALIZED (
    SELECT id
      FROM weighed
     WHERE %(max_bytes)s::bigint IS NULL OR upto <= %(max_bytes)s::bigint OR upto = bytes
)

-- fragment: to_group
UPDATE {table} AS b SET {group_id} = %(group_id)s::uuid

-- fragment: if_due
AND EXISTS (SELECT FROM due)
RETURNING b.{id} AS id, b.{created_at} AS at

-- fragment: group_is_sent
-- The command of the group. Returns how many events are in the group, where the next look begins, whether the
-- slice was full, and the ids of the events if they were wanted `anyway`.
sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data)
    SELECT nextval('busload.load_number') * 1024, %(buffer)s::text, %(group_id)s::uuid, 'busload.Group',
           json_build_object('buffer', %(buffer)s::text, 'items', count(*),
                             'partition', (SELECT nullif(partition, '') FROM slice LIMIT 1),
                             'table', %(table_name)s::text)
      FROM taken
    HAVING count(*) > 0
    RETURNING id
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain) SELECT id, id, %(buffer)s::text FROM sent RETURNING domain
)
SELECT (SELECT count(*)::integer FROM taken),
       (SELECT max(at)::text FROM taken),
       coalesce((SELECT is_full FROM due), false),
       CASE WHEN %(anyway)s::boolean THEN ARRAY(SELECT id FROM taken ORDER BY at, id) END,
       (SELECT pg_notify({channel}, domain) FROM queued AS ready)

-- name: claim
-- A slice of one partition becomes a group, and its command is sent: one never exists without the other.
WITH slice AS MATERIALIZED (
    {slice} AND {from_here} {oldest_free}
), {chosen}, taken AS (
    {to_group} WHERE b.{id} = ANY (ARRAY(SELECT id FROM chosen)) {if_due}
), {group_is_sent};

-- name: claim_free_keys
-- The same for a buffer in which at most one event of a key waits. The slice begins at the very beginning: an
-- event that was kept back at the last look may be free now, and goes first.
WITH slice AS MATERIALIZED (
    {slice} AND {key_is_free} {oldest_free}
), {chosen}, taken AS (
    {to_group} WHERE b.{id} = ANY (ARRAY(SELECT id FROM chosen)) {if_due}
), {group_is_sent};

-- name: claim_in_order
-- The same for a buffer in which several events of a key wait, and become one item. The events that wait
-- behind the slice for its keys come along (`same`): otherwise every claim would have to step over them. No
-- event overtakes an older one of its key that somebody holds, or that waits in another partition
-- (`kept_back`).
WITH slice AS MATERIALIZED (
    {slice} AND {key_is_free} {oldest_free}
), {chosen}, same AS MATERIALIZED (
    SELECT b.{id} AS id
      FROM {table} AS b
     WHERE {waits} AND {within} AND {mergeable}
       AND b.{key_column} IN (
            SELECT k.{key_column} FROM {table} AS k WHERE k.{id} = ANY (ARRAY(SELECT id FROM chosen))
           )
     {in_order}
     LIMIT 10 * %(size)s::integer
       FOR UPDATE OF b SKIP LOCKED
), first AS MATERIALIZED (
    SELECT k.key, o.at, o.id
      FROM (SELECT DISTINCT k.{key_column} AS key
              FROM {table} AS k
             WHERE k.{id} = ANY (ARRAY(SELECT id FROM chosen))) AS k
     CROSS JOIN LATERAL (
            SELECT b.{created_at} AS at, b.{id} AS id
              FROM {table} AS b
             WHERE {waits} AND {mergeable} AND b.{key_column} = k.key
               AND b.{id} NOT IN (SELECT id FROM chosen UNION ALL SELECT id FROM same)
             {in_order}
             LIMIT 1) AS o
), kept_back AS MATERIALIZED (
    SELECT p.{id} AS id
      FROM {table} AS p
      JOIN first ON p.{key_column} = first.key AND (p.{created_at}, p.{id}) > (first.at, first.id)
     WHERE p.{id} = ANY (ARRAY(SELECT id FROM chosen UNION SELECT id FROM same))
), taken AS (
    {to_group}
     WHERE b.{id} = ANY (ARRAY(SELECT id FROM chosen
                               UNION SELECT id FROM same EXCEPT SELECT id FROM kept_back))
       {if_due}
), {group_is_sent};
