-- name: add
-- One event. Returns its id, or null if a waiting event has taken it in: with a rule that is applied on
-- arrival (`once`), the event that waits for the same key takes the new one in. It is replaced if the last
-- event is to be kept, and otherwise stays as it is. It is locked either way, so that no group takes it
-- before this transaction ends. With `patience`, in milliseconds, the statement fails if somebody else holds
-- that row for longer. What is set comes from the parameters: to read it from `excluded` needs the right to
-- read events.
INSERT INTO busload.buffered AS b (buffer, partition, key, once, data, bytes)
SELECT %(buffer)s::text, %(partition)s::text, %(key)s::text, %(once)s::boolean, %(data)s::text::json,
       %(bytes)s::integer
 WHERE %(patience)s::integer IS NULL
    OR (SELECT set_config('lock_timeout', %(patience)s::integer::text, true)) IS NOT NULL
    ON CONFLICT (buffer, key) WHERE group_id IS NULL AND once
    DO UPDATE
   SET data = %(data)s::text::json, bytes = %(bytes)s::integer, partition = %(partition)s::text
 WHERE %(last)s::boolean
RETURNING CASE WHEN b.xmax = 0 THEN b.id END;

-- name: add_some
-- Many events, of which none is merged on arrival.
INSERT INTO busload.buffered AS b (buffer, partition, key, data, bytes)
SELECT %(buffer)s::text, e.partition, e.key, e.data::json, octet_length(e.data)
  FROM unnest(%(partitions)b::text[], %(keys)b::text[], %(data)b::text[])
       WITH ORDINALITY AS e (partition, key, data, nth)
 ORDER BY e.nth
RETURNING b.id, b.key;

-- name: merge_some
-- Many events, each of which may be merged into one that waits. They are in the order of their keys.
SELECT id, key
  FROM busload.merge_events(%(buffer)s::text, %(partitions)b::text[], %(keys)b::text[], %(data)b::text[],
                            %(last)s::boolean, %(patience)s::integer) AS merged;

-- name: insert_row
-- An event into an application's table.
INSERT INTO {table} AS b ({names}) VALUES ({values}) RETURNING b.{id};
