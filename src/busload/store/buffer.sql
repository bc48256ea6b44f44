-- name: add
-- One event. With a rule that is applied on arrival (`once`), one that waits for the same key takes it in: replaced by
-- `keep_last`, left as it is otherwise; but it is locked either way, so that no group takes it before this transaction ends.
-- With `patience`, in milliseconds, the statement fails if somebody else holds that one for longer.
INSERT INTO busload.buffered AS b (buffer, partition, key, once, data, bytes)
SELECT %(buffer)s::text, %(partition)s::text, %(key)s::text, %(once)s::boolean, %(data)s::text::json, %(bytes)s::integer
 WHERE %(patience)s::integer IS NULL OR (SELECT set_config('lock_timeout', %(patience)s::integer::text, true)) IS NOT NULL
    ON CONFLICT (buffer, key) WHERE group_id IS NULL AND once
    DO UPDATE SET data = excluded.data, bytes = excluded.bytes, partition = excluded.partition WHERE %(last)s::boolean
RETURNING CASE WHEN b.xmax = 0 THEN b.id END;

-- name: add_some
-- The same for many, in the order of the arrays, which is that of their keys where two such statements could meet.
INSERT INTO busload.buffered AS b (buffer, partition, key, once, data, bytes)
SELECT %(buffer)s::text, e.partition, e.key, %(once)s::boolean, e.data::json, octet_length(e.data)
  FROM unnest(%(partitions)b::text[], %(keys)b::text[], %(data)b::text[]) WITH ORDINALITY AS e (partition, key, data, nth)
 WHERE %(patience)s::integer IS NULL OR (SELECT set_config('lock_timeout', %(patience)s::integer::text, true)) IS NOT NULL
 ORDER BY e.nth
    ON CONFLICT (buffer, key) WHERE group_id IS NULL AND once
    DO UPDATE SET data = excluded.data, bytes = excluded.bytes, partition = excluded.partition WHERE %(last)s::boolean
RETURNING CASE WHEN b.xmax = 0 THEN b.id END, b.key;

-- name: insert_row
-- An event into an application's table.
INSERT INTO {table} AS b ({names}) VALUES ({values}) RETURNING b.{id};

-- name: declare
-- Keep what was declared, for whoever lists buffers or resolves their groups. Nothing is written if nothing is new.
INSERT INTO busload.buffer AS d (buffer, relation, id_column, group_column, created_column, key_column, partition_column,
                                 archive, size, max_age)
VALUES (%(buffer)s::text, %(relation)s::text, %(id_column)s::text, %(group_column)s::text, %(created_column)s::text,
        %(key_column)s::text, %(partition_column)s::text, %(archive)s::boolean, %(size)s::integer, %(max_age)s::interval)
    ON CONFLICT (buffer) DO UPDATE
       SET relation = excluded.relation, id_column = excluded.id_column, group_column = excluded.group_column,
           created_column = excluded.created_column, key_column = excluded.key_column,
           partition_column = excluded.partition_column, archive = excluded.archive, size = excluded.size,
           max_age = excluded.max_age, served_at = now()
 WHERE (d.relation, d.id_column, d.group_column, d.created_column, d.key_column, d.partition_column, d.archive, d.size, d.max_age)
       IS DISTINCT FROM (excluded.relation, excluded.id_column, excluded.group_column, excluded.created_column,
                         excluded.key_column, excluded.partition_column, excluded.archive, excluded.size, excluded.max_age)
    OR d.served_at < now() - interval '1 minute';

-- name: note_problem
-- What a worker found wrong with a buffer, or null: it is fit.
UPDATE busload.buffer SET problem = %(problem)s::text
 WHERE buffer = %(buffer)s::text AND problem IS DISTINCT FROM %(problem)s::text;

-- name: rivals
-- Other buffers over the same table that workers serve: each would take events that are meant for the other.
SELECT d.buffer FROM busload.buffer AS d
 WHERE d.relation = %(relation)s::text AND d.buffer <> %(buffer)s::text
   AND EXISTS (SELECT FROM busload.worker AS w WHERE w.stopped_at IS NULL AND d.buffer = ANY (w.domains)
                  AND w.seen_at > now() - w.lease_for OFFSET 0)
 ORDER BY d.buffer LIMIT 1;

-- name: be_brief
-- Wait for nobody who has locked a table: whoever looks at one is not held up by its migration.
SELECT set_config('lock_timeout', %(within)s::text, true);

-- name: room
-- How many more groups may stand in the queue, and since when everything that is older leaves.
SELECT %(max_groups)s::integer - (SELECT count(*) FROM (
           SELECT FROM busload.queue WHERE domain = %(buffer)s::text AND crashes = 0 LIMIT %(max_groups)s::integer) AS q)::integer,
       coalesce((SELECT flushed_at FROM busload.buffer WHERE buffer = %(buffer)s::text), '-infinity')::text;

-- name: partitions
-- The partitions in which events wait, from one on, each by its oldest event: a step of the index each, however many wait.
WITH RECURSIVE part AS (
    (SELECT 1 AS nth, b.{partition_column} AS name, {since} AS since, b.{created_at} AS first
       FROM {table} AS b WHERE {filter} AND b.{group_id} IS NULL AND {beyond}
      ORDER BY b.{partition_column}, b.{created_at}, b.{id} LIMIT 1)
    UNION ALL
    SELECT part.nth + 1, n.name, n.since, n.first
      FROM part CROSS JOIN LATERAL (
           SELECT b.{partition_column} AS name, {since} AS since, b.{created_at} AS first
             FROM {table} AS b WHERE {filter} AND b.{group_id} IS NULL AND b.{partition_column} > part.name
            ORDER BY b.{partition_column}, b.{created_at}, b.{id} LIMIT 1) AS n
     WHERE part.nth < %(most)s::integer
)
SELECT name::text, first::text, {due_in}, since <= %(flushed_at)s::text::timestamptz FROM part ORDER BY nth;

-- name: oldest
-- The oldest event of one partition.
SELECT NULL, first::text, {due_in}, since <= %(flushed_at)s::text::timestamptz FROM (
    SELECT b.{created_at} AS first, {since} AS since FROM {table} AS b
     WHERE {filter} AND {within} AND b.{group_id} IS NULL ORDER BY b.{created_at}, b.{id} LIMIT 1) AS b;

-- name: weigh
-- How many wait in one partition, and how many bytes that is: counted no further than a group is large.
SELECT count(*)::integer, coalesce(sum(bytes), 0)::bigint FROM (
    SELECT CASE WHEN %(max_bytes)s::bigint IS NULL THEN 0 ELSE {bytes} END AS bytes
      FROM {table} AS b WHERE {filter} AND {within} AND b.{group_id} IS NULL AND {from_here}
     ORDER BY b.{created_at}, b.{id} LIMIT %(size)s::integer) AS b;

-- name: weigh_some
-- The same for several partitions, one after the other until enough rows were read.
WITH RECURSIVE w AS (
    SELECT 0 AS nth, 0 AS count, 0::bigint AS bytes, 0 AS read
    UNION ALL
    SELECT w.nth + 1, c.count, c.bytes, w.read + c.count
      FROM w CROSS JOIN LATERAL (
           SELECT count(*)::integer AS count, coalesce(sum(bytes), 0)::bigint AS bytes FROM (
               SELECT CASE WHEN %(max_bytes)s::bigint IS NULL THEN 0 ELSE {bytes} END AS bytes
                 FROM {table} AS b
                WHERE {filter} AND b.{group_id} IS NULL
                  AND b.{partition_column} = (%(partitions)s::text[])[w.nth + 1]::{partition_type}
                  AND b.{created_at} >= (%(starts)s::text[])[w.nth + 1]::{created_type}
                ORDER BY b.{created_at}, b.{id} LIMIT %(size)s::integer) AS b) AS c
     WHERE w.nth < cardinality(%(partitions)s::text[]) AND w.read < %(budget)s::integer
)
SELECT count, bytes FROM w WHERE nth > 0 ORDER BY nth;

-- name: take_turns
-- Claims of a buffer that merges come one after the other: what one has put into a group, the next one must see.
SELECT pg_advisory_xact_lock(hashtextextended('busload.buffer ' || %(buffer)s::text, 0));

-- name: claim
-- A slice of one partition becomes a group, and its command is sent: one without the other never exists. The slice is the
-- oldest events that nobody else holds; it leaves if it is full, or its oldest is old enough, or was there at a flush; or if
-- it is wanted `anyway`. What is too large for `max_bytes` leaves alone. Where several events of a key wait and become one item,
-- those that wait behind the slice for its keys come along (`same`): left behind, every claim would have to step over them.
-- But none overtakes an older one of its key that somebody holds, or that waits in another partition (`kept_back`).
WITH slice AS MATERIALIZED (
    SELECT b.{id} AS id, b.{created_at} AS at, {since} AS since, {partition} AS partition,
           CASE WHEN %(max_bytes)s::bigint IS NULL THEN 0 ELSE {bytes} END AS bytes
      FROM {table} AS b
     WHERE {filter} AND {within} AND b.{group_id} IS NULL AND {from_here} AND {free}
     ORDER BY b.{created_at}, b.{id} LIMIT %(size)s::integer FOR UPDATE OF b SKIP LOCKED
), weighed AS (
    SELECT *, sum(bytes) OVER (ORDER BY at, id ROWS UNBOUNDED PRECEDING) AS upto FROM slice
), due AS (
    SELECT count(*) >= %(size)s::integer OR sum(bytes) > %(max_bytes)s::bigint AS is_full FROM slice
    HAVING %(anyway)s::boolean OR count(*) >= %(size)s::integer OR sum(bytes) > %(max_bytes)s::bigint
        OR bool_or({early}) OR min(since) <= greatest(clock_timestamp() - %(max_age)s::interval,
               (SELECT flushed_at FROM busload.buffer WHERE buffer = %(buffer)s::text))
), chosen AS MATERIALIZED (
    SELECT id FROM weighed WHERE %(max_bytes)s::bigint IS NULL OR upto <= %(max_bytes)s::bigint OR upto = bytes
), same AS MATERIALIZED (
    {same}
), kept_back AS MATERIALIZED (
    {kept_back}
), taken AS (
    UPDATE {table} AS b SET {group_id} = %(group_id)s::uuid
     WHERE b.{id} = ANY (ARRAY(SELECT id FROM chosen UNION SELECT id FROM same EXCEPT SELECT id FROM kept_back))
       AND EXISTS (SELECT FROM due)
    RETURNING b.{id} AS id, b.{created_at} AS at
), sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data)
    SELECT nextval('busload.load_number') * 1024, %(buffer)s::text, %(group_id)s::uuid, 'busload.Group',
           json_build_object('buffer', %(buffer)s::text, 'items', count(*),
                             'partition', (SELECT nullif(partition, '') FROM slice LIMIT 1), 'table', %(told_table)s::text)
      FROM taken HAVING count(*) > 0
    RETURNING id
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain) SELECT id, id, %(buffer)s::text FROM sent RETURNING domain
)
SELECT {answer}, (SELECT pg_notify('busload_ready', domain) FROM queued);

-- name: flush
-- All that waits now leaves without waiting for more.
INSERT INTO busload.buffer AS d (buffer, size, max_age, flushed_at)
VALUES (%(buffer)s::text, %(size)s::integer, %(max_age)s::interval, clock_timestamp())
    ON CONFLICT (buffer) DO UPDATE SET flushed_at = greatest(d.flushed_at, excluded.flushed_at);

-- name: waiting
-- How many wait, counted up to a limit.
SELECT count(*)::integer FROM (SELECT FROM {table} AS b WHERE {filter} AND b.{group_id} IS NULL LIMIT %(most)s::integer) AS b;

-- name: since
-- When the oldest event that waits was added; of many partitions the first ones are looked at.
WITH RECURSIVE part AS (
    (SELECT 1 AS nth, b.{partition_column} AS name, {since} AS since
       FROM {table} AS b WHERE {filter} AND b.{group_id} IS NULL
      ORDER BY b.{partition_column}, b.{created_at}, b.{id} LIMIT 1)
    UNION ALL
    SELECT part.nth + 1, n.name, n.since FROM part CROSS JOIN LATERAL (
        SELECT b.{partition_column} AS name, {since} AS since
          FROM {table} AS b WHERE {filter} AND b.{group_id} IS NULL AND b.{partition_column} > part.name
         ORDER BY b.{partition_column}, b.{created_at}, b.{id} LIMIT 1) AS n
     WHERE part.nth < %(most)s::integer
)
SELECT min(since) FROM part WHERE isfinite(since);

-- name: since_in
SELECT CASE WHEN isfinite(since) THEN since END FROM (
    SELECT {since} AS since FROM {table} AS b WHERE {filter} AND {within} AND b.{group_id} IS NULL
     ORDER BY b.{created_at}, b.{id} LIMIT 1) AS b;

-- name: in_groups
-- How many events are in groups that have not ended, counted up to a limit.
SELECT count(*)::integer FROM (
    SELECT FROM {table} AS b WHERE b.{group_id} = ANY (%(groups)s::uuid[]) LIMIT %(most)s::integer) AS b;

-- name: groups
-- Where the groups of a buffer are. Reads the places from end to end: they hold loads, not commands.
WITH place AS (
    SELECT lo, hi, 'ready' AS place FROM busload.queue WHERE domain = %(buffer)s::text
    UNION ALL SELECT lo, hi, 'retrying' FROM busload.scheduled WHERE domain = %(buffer)s::text
    UNION ALL SELECT lo, hi, 'running' FROM busload.lease WHERE domain = %(buffer)s::text AND open > 0
    UNION ALL SELECT command, command, 'troubleshooting' FROM busload.troubleshooting WHERE domain = %(buffer)s::text
)
SELECT p.place, array_agg(c.command_id) FROM place AS p
  JOIN busload.command AS c ON c.id BETWEEN p.lo AND p.hi AND c.command_type = 'busload.Group'
 GROUP BY p.place;

-- name: declared
SELECT relation, id_column, group_column, created_column, key_column, partition_column, calls, done, vanished, size, max_age,
       problem
  FROM busload.buffer WHERE buffer = %(buffer)s::text;

-- name: names
-- Every buffer that was declared, and those of busload's own that only have events yet.
WITH RECURSIVE own AS (
    (SELECT buffer FROM busload.buffered WHERE group_id IS NULL ORDER BY buffer LIMIT 1)
    UNION ALL
    SELECT (SELECT b.buffer FROM busload.buffered AS b WHERE b.group_id IS NULL AND b.buffer > own.buffer ORDER BY b.buffer LIMIT 1)
      FROM own WHERE own.buffer IS NOT NULL
)
SELECT buffer FROM own WHERE buffer IS NOT NULL UNION SELECT buffer FROM busload.buffer ORDER BY 1;

-- name: count
-- Add up what workers have counted, in order, so that two of them cannot wait for each other.
UPDATE busload.buffer AS d SET calls = d.calls + t.calls, done = d.done + t.done, vanished = d.vanished + t.vanished
  FROM (SELECT b.buffer, t.calls, t.done, t.vanished
          FROM unnest(%(buffers)s::text[], %(calls)s::bigint[], %(done)s::bigint[], %(vanished)s::bigint[])
                      AS t (buffer, calls, done, vanished)
          JOIN busload.buffer AS b USING (buffer) ORDER BY b.buffer FOR NO KEY UPDATE OF b) AS t
 WHERE d.buffer = t.buffer;
