-- fragment: in_time
-- With `patience`, in milliseconds, the statement fails if somebody else holds a row that it needs for
-- longer.
WHERE %(patience)s::integer IS NULL
   OR (SELECT set_config('lock_timeout', %(patience)s::integer::text, true)) IS NOT NULL

-- fragment: merged_on_arrival
-- With a rule that is applied on arrival (`once`), the event that waits for the same key takes the new one
-- in. It is replaced if the last event is to be kept, and otherwise stays as it is. It is locked either way,
-- so that no group takes it before this transaction ends.
ON CONFLICT (buffer, key) WHERE group_id IS NULL AND once
DO UPDATE
   SET data = excluded.data, bytes = excluded.bytes, partition = excluded.partition
 WHERE %(last)s::boolean

-- name: add
-- One event. Returns its id, or null if a waiting event has taken it in.
INSERT INTO busload.buffered AS b (buffer, partition, key, once, data, bytes)
SELECT %(buffer)s::text, %(partition)s::text, %(key)s::text, %(once)s::boolean, %(data)s::text::json,
       %(bytes)s::integer
 {in_time}
{merged_on_arrival}
RETURNING CASE WHEN b.xmax = 0 THEN b.id END;

-- name: add_some
-- Many events, in the order of the arrays: the order of their keys, so that two such statements cannot wait
-- for each other.
INSERT INTO busload.buffered AS b (buffer, partition, key, once, data, bytes)
SELECT %(buffer)s::text, e.partition, e.key, %(once)s::boolean, e.data::json, octet_length(e.data)
  FROM unnest(%(partitions)b::text[], %(keys)b::text[], %(data)b::text[])
       WITH ORDINALITY AS e (partition, key, data, nth)
 {in_time}
 ORDER BY e.nth
{merged_on_arrival}
RETURNING CASE WHEN b.xmax = 0 THEN b.id END, b.key;

-- name: insert_row
-- An event into an application's table.
INSERT INTO {table} AS b ({names}) VALUES ({values}) RETURNING b.{id};
