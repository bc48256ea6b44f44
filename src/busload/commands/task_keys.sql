-- fragment: key_is_free
-- Nobody holds this task key any more: its time is over, and its command has ended.
t.held_until <= statement_timestamp() AND NOT busload.is_open(t.domain, t.command_id)

-- name: hold
-- Hold those of these keys that are free, in order, so that two such statements cannot wait for each other.
-- The rows of the others are locked until the end of the transaction: their holders stay the same meanwhile.
INSERT INTO busload.task AS t (domain, task_key, command_id, held_until)
SELECT %(domain)s::text, task_key, command_id, statement_timestamp() + %(window)s::interval
  FROM unnest(%(task_keys)b::text[], %(command_ids)b::uuid[]) AS wanted (task_key, command_id)
 ORDER BY task_key COLLATE "C"
    ON CONFLICT (domain, task_key) DO UPDATE
   SET command_id = excluded.command_id, held_until = excluded.held_until
 WHERE {key_is_free}
RETURNING task_key;

-- name: holders
-- The commands that hold these task keys.
SELECT task_key, command_id
  FROM busload.task
 WHERE domain = %(domain)s::text AND task_key = ANY (%(task_keys)b::text[]);
