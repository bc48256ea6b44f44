-- fragment: key_is_free
-- Nobody holds this task key any more: its time is over, and its command has ended.
t.held_until <= statement_timestamp() AND NOT busload.is_open(t.domain, t.command_id)

-- fragment: keys_in_order
-- In order, so that two such statements cannot wait for each other.
SELECT %(domain)s::text, task_key, command_id, statement_timestamp() + %(window)s::interval
  FROM (
    SELECT *
      FROM unnest(%(task_keys)b::text[], %(command_ids)b::uuid[]) AS key (task_key, command_id)
     ORDER BY task_key COLLATE "C"
  ) AS wanted

-- name: hold_new
-- Hold these keys if none of them has ever been held: half the price of `hold`, which has to be ready for
-- each row that is there already. If there is one, this holds nothing and says so. If somebody else has held
-- one since this statement began, it fails. So all keys are always held by one statement in their order.
WITH known AS MATERIALIZED (
    SELECT EXISTS (
        SELECT
          FROM unnest(%(task_keys)b::text[]) AS wanted (task_key)
         CROSS JOIN LATERAL (
            SELECT FROM busload.task AS t
             WHERE t.domain = %(domain)s::text AND t.task_key = wanted.task_key
            OFFSET 0
         ) AS held
    ) AS any_is_held
), held AS (
    INSERT INTO busload.task (domain, task_key, command_id, held_until)
    {keys_in_order}
     WHERE NOT (SELECT any_is_held FROM known)
)
SELECT NOT any_is_held FROM known;

-- name: hold
-- Hold those of these keys that are free. The rows of the others are locked until the end of the transaction:
-- their holders stay the same meanwhile.
INSERT INTO busload.task AS t (domain, task_key, command_id, held_until)
{keys_in_order}
    ON CONFLICT (domain, task_key) DO UPDATE
   SET command_id = excluded.command_id, held_until = excluded.held_until
 WHERE {key_is_free}
RETURNING task_key;

-- name: holders
-- The commands that hold these task keys.
SELECT task_key, command_id
  FROM busload.task
 WHERE domain = %(domain)s::text AND task_key = ANY (%(task_keys)b::text[]);
