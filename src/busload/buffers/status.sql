-- fragments of: busload.buffers.claim

-- fragment: declared_columns
relation, id_column, group_column, created_column, key_column, partition_column, archive, size, max_age

-- fragment: newly_declared
excluded.relation, excluded.id_column, excluded.group_column, excluded.created_column, excluded.key_column,
excluded.partition_column, excluded.archive, excluded.size, excluded.max_age

-- name: declare
-- Keep what was declared, for whoever lists buffers or resolves their groups. Nothing is written if nothing
-- is new.
INSERT INTO busload.buffer AS d (buffer, {declared_columns})
VALUES (%(buffer)s::text, %(relation)s::text, %(id_column)s::text, %(group_column)s::text,
        %(created_column)s::text, %(key_column)s::text, %(partition_column)s::text, %(archive)s::boolean,
        %(size)s::integer, %(max_age)s::interval)
    ON CONFLICT (buffer) DO UPDATE
       SET ({declared_columns}, served_at) = ({newly_declared}, now())
 WHERE (d.relation, d.id_column, d.group_column, d.created_column, d.key_column, d.partition_column,
        d.archive, d.size, d.max_age) IS DISTINCT FROM ({newly_declared})
    OR d.served_at < now() - interval '1 minute';

-- name: declared
-- What was declared about a buffer, and what its workers have counted.
SELECT relation, id_column, group_column, created_column, key_column, partition_column, calls, done, vanished,
       size, max_age, problem
  FROM busload.buffer
 WHERE buffer = %(buffer)s::text;

-- name: note_problem
-- What a worker found wrong with a buffer; null if nothing is wrong.
UPDATE busload.buffer SET problem = %(problem)s::text
 WHERE buffer = %(buffer)s::text AND problem IS DISTINCT FROM %(problem)s::text;

-- name: rivals
-- Other buffers over the same table that workers serve: each would take events that are meant for the other.
SELECT d.buffer FROM busload.buffer AS d
 WHERE d.relation = %(relation)s::text AND d.buffer <> %(buffer)s::text
   AND EXISTS (SELECT
                 FROM busload.worker AS w
                WHERE w.stopped_at IS NULL
                  AND d.buffer = ANY (w.domains)
                  AND w.seen_at > now() - w.lease_for
               OFFSET 0)
 ORDER BY d.buffer
 LIMIT 1;

-- name: be_brief
-- Do not wait for anybody who has locked a table: whoever looks at one is not held up by its migration.
SELECT set_config('lock_timeout', %(within)s::text, true);

-- name: names
-- Every buffer that was declared, and those of busload's own that only have events yet.
WITH RECURSIVE own AS (
    (SELECT buffer FROM busload.buffered WHERE group_id IS NULL ORDER BY buffer LIMIT 1)
    UNION ALL
    SELECT (SELECT b.buffer
              FROM busload.buffered AS b
             WHERE b.group_id IS NULL AND b.buffer > own.buffer ORDER BY b.buffer LIMIT 1)
      FROM own WHERE own.buffer IS NOT NULL
)
SELECT buffer FROM own WHERE buffer IS NOT NULL UNION SELECT buffer FROM busload.buffer ORDER BY 1;

-- name: groups
-- Where the groups of a buffer are. Reads the places from end to end: they hold loads, not commands.
WITH place AS (
    SELECT lo, hi, 'ready' AS place FROM busload.queue WHERE domain = %(buffer)s::text
    UNION ALL SELECT lo, hi, 'retrying' FROM busload.scheduled WHERE domain = %(buffer)s::text
    UNION ALL SELECT lo, hi, 'running' FROM busload.lease WHERE domain = %(buffer)s::text AND open > 0
    UNION ALL
    SELECT command, command, 'in_troubleshooting' FROM busload.troubleshooting WHERE domain = %(buffer)s::text
)
SELECT p.place, array_agg(c.command_id) FROM place AS p
  JOIN busload.command AS c ON c.id BETWEEN p.lo AND p.hi AND c.command_type = 'busload.Group'
 GROUP BY p.place;

-- name: in_groups
-- How many events are in groups that have not ended, counted up to a limit.
SELECT count(*)::integer FROM (
    SELECT FROM {table} AS b WHERE b.{group_id} = ANY (%(groups)s::uuid[]) LIMIT %(most)s::integer) AS b;

-- name: waiting
-- How many events wait, counted up to a limit.
SELECT count(*)::integer FROM (SELECT FROM {table} AS b WHERE {waits} LIMIT %(most)s::integer) AS b;

-- name: since
-- When the oldest event that waits was added. If there are many partitions, only the first ones are looked
-- at.
WITH RECURSIVE {oldest_of_partitions}
SELECT min(since) FROM part WHERE isfinite(since);

-- name: since_in
-- When the oldest event was added that waits in one partition.
SELECT CASE WHEN isfinite(since) THEN since END FROM ({oldest_of_partition}) AS b;

-- name: flush
-- Everything that waits now leaves without waiting for more.
WITH noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'BUFFER_FLUSHED', %(operator)s::text,
           json_build_object('domain', %(buffer)s::text, 'buffer', %(buffer)s::text)
     WHERE %(operator)s::text IS NOT NULL
)
INSERT INTO busload.buffer AS d (buffer, size, max_age, flushed_at)
VALUES (%(buffer)s::text, %(size)s::integer, %(max_age)s::interval, clock_timestamp())
    ON CONFLICT (buffer) DO UPDATE SET flushed_at = greatest(d.flushed_at, excluded.flushed_at);

-- name: count
-- Add up what workers have counted, in order, so that two of them cannot wait for each other.
UPDATE busload.buffer AS d
   SET calls = d.calls + t.calls, done = d.done + t.done, vanished = d.vanished + t.vanished
  FROM (SELECT b.buffer, t.calls, t.done, t.vanished
          FROM unnest(%(buffers)s::text[], %(calls)s::bigint[], %(done)s::bigint[], %(vanished)s::bigint[])
                      AS t (buffer, calls, done, vanished)
          JOIN busload.buffer AS b USING (buffer) ORDER BY b.buffer FOR NO KEY UPDATE OF b) AS t
 WHERE d.buffer = t.buffer;
