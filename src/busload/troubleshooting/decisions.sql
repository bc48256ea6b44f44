-- fragment: take_items
DELETE FROM busload.troubleshooting AS t
 USING busload.command AS c
 WHERE t.command = ANY (%(commands)b::bigint[]) AND c.id = t.command

-- fragment: may_be_tried_again
-- A command of a canceled batch is not tried `again`.
(NOT %(again)s::boolean OR NOT EXISTS (
    SELECT FROM busload.batch AS b WHERE b.batch_id = t.batch_id AND b.canceled_at IS NOT NULL OFFSET 0
))

-- name: pick
-- Hold the commands that are to be resolved, so that nobody else resolves them. A decision about a cause
-- (`fingerprint`) takes the commands that have waited with that cause since before the decision (`until`):
-- nobody decided about what failed again later. Rows are locked in order. After them their batches are
-- locked, and the batch of the decision, as a settlement does.
WITH item AS MATERIALIZED (
    SELECT t.command, t.batch_id, c.command_id, t.command_type,
           CASE WHEN %(with_data)s::boolean THEN coalesce(c.data::text, 'null') END AS data
      FROM busload.troubleshooting AS t JOIN busload.command AS c ON c.id = t.command
     WHERE c.domain = %(domain)s::text AND c.command_id = ANY (%(command_ids)b::uuid[])
       AND (%(fingerprint)s::text IS NULL OR t.fingerprint = %(fingerprint)s::text
            AND t.since <= %(until)s::timestamptz)
       AND {may_be_tried_again}
     ORDER BY t.command FOR UPDATE OF t
), batch AS MATERIALIZED (
    SELECT batch_id FROM busload.batch
     WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM item UNION SELECT %(decision_batch)s::uuid))
     ORDER BY batch_id FOR NO KEY UPDATE
)
SELECT command, command_id, command_type, data, (SELECT count(*) FROM batch) FROM item;

-- name: retry
-- Back into the queue with all attempts to use again. The numbering of attempts goes on, so that the history
-- stays whole. If data was patched, the same statement keeps the data before and after, and the patch.
WITH item AS MATERIALIZED (
    SELECT command, data FROM unnest(%(commands)b::bigint[], %(data)b::text[]) AS item (command, data)
), taken AS (
    {take_items}
    RETURNING t.command, t.domain, t.batch_id, t.priority, t.attempt, t.fair, c.reply_to, c.data
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, replies, fair)
    SELECT command, command, domain, batch_id, priority, attempt + 1, attempt, reply_to IS NOT NULL, fair
      FROM taken
), patched AS (
    UPDATE busload.command AS c SET data = i.data::json
      FROM item AS i JOIN taken AS t USING (command) WHERE c.id = i.command AND i.data IS NOT NULL
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'OPERATOR_RETRIED', command, command, t.batch_id, t.attempt, %(operator)s::text,
           CASE WHEN i.data IS NOT NULL
                THEN json_build_object('batch_id', %(decision_batch)s::uuid, 'patch', %(patch)s::text::json,
                                                               'before', t.data, 'after', i.data::json)
                WHEN %(decision_batch)s::uuid IS NOT NULL
                THEN json_build_object('batch_id', %(decision_batch)s::uuid) END
      FROM taken AS t JOIN item AS i USING (command)
)
SELECT count(*)::integer,
       (SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM taken) AS told)
  FROM taken;

-- name: end
-- Complete or cancel these commands (`type`), and reply to their senders (`outcome`). The events of a group
-- end with its command.
WITH taken AS (
    {take_items}
    RETURNING t.command, t.batch_id, t.attempt, c.reply_to, c.command_type
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT %(type)s::text, command, command, batch_id, attempt, %(operator)s::text, %(details)s::text::json
      FROM taken
), replied AS (
    SELECT busload.reply(command, %(outcome)s::text, %(reply)s::text::json) AS domain
      FROM taken
     WHERE reply_to IS NOT NULL
)
SELECT count(*)::integer,
       busload.end_groups(array_agg(command) FILTER (WHERE command_type = 'busload.Group'), %(type)s::text),
       (SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM replied) AS told)
  FROM taken;

-- name: left_behind
-- The state of commands that a decision did not move, and why it did not.
SELECT s.command_id, s.status, t.fingerprint, t.since > %(until)s::timestamptz
  FROM busload.command AS c
 CROSS JOIN LATERAL (SELECT * FROM busload.command_status AS s WHERE s.id = c.id OFFSET 0) AS s
  LEFT JOIN busload.troubleshooting AS t ON t.command = c.id
 WHERE c.domain = %(domain)s::text AND c.command_id = ANY (%(command_ids)b::uuid[]);
