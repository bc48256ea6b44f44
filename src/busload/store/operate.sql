-- name: pick
-- Hold what is to be resolved, so that nobody else does. A decision about a cause (`fingerprint`) takes what waits with
-- that cause since before it was made (`until`): what failed again later was not decided on. Nothing of a canceled batch
-- is tried again. Rows are locked in order, and after them their batches and that of the decision, as those who settle do.
WITH item AS MATERIALIZED (
    SELECT t.command, t.batch_id, c.command_id, CASE WHEN %(with_data)s::boolean THEN coalesce(c.data::text, 'null') END AS data
      FROM busload.troubleshooting AS t JOIN busload.command AS c ON c.id = t.command
     WHERE c.domain = %(domain)s::text AND c.command_id = ANY (%(command_ids)b::uuid[])
       AND (%(fingerprint)s::text IS NULL OR t.fingerprint = %(fingerprint)s::text AND t.since <= %(until)s::timestamptz)
       AND (NOT %(again)s::boolean OR NOT EXISTS (
            SELECT FROM busload.batch AS b WHERE b.batch_id = t.batch_id AND b.canceled_at IS NOT NULL OFFSET 0))
     ORDER BY t.command FOR UPDATE OF t
), batch AS MATERIALIZED (
    SELECT batch_id FROM busload.batch
     WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM item UNION SELECT %(action)s::uuid)) ORDER BY batch_id FOR NO KEY UPDATE
)
SELECT command, command_id, data, (SELECT count(*) FROM batch) FROM item;

-- name: retry
-- Back into the queue with all attempts to use again. The numbering of attempts goes on, so that the chain stays whole. Data
-- that was patched is replaced by the statement that keeps it, before and after, together with the patch.
WITH item AS MATERIALIZED (
    SELECT command, data FROM unnest(%(commands)b::bigint[], %(data)b::text[]) AS item (command, data)
), taken AS (
    DELETE FROM busload.troubleshooting AS t USING busload.command AS c
     WHERE t.command = ANY (%(commands)b::bigint[]) AND c.id = t.command
    RETURNING t.command, t.domain, t.batch_id, t.priority, t.attempt, c.reply_to, c.data
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, replies)
    SELECT command, command, domain, batch_id, priority, attempt + 1, attempt, reply_to IS NOT NULL FROM taken
), patched AS (
    UPDATE busload.command AS c SET data = i.data::json
      FROM item AS i JOIN taken AS t USING (command) WHERE c.id = i.command AND i.data IS NOT NULL
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'OPERATOR_RETRIED', command, command, t.batch_id, t.attempt, %(operator)s::text,
           CASE WHEN i.data IS NOT NULL THEN json_build_object('batch_id', %(action)s::uuid, 'patch', %(patch)s::text::json,
                                                               'before', t.data, 'after', i.data::json)
                WHEN %(action)s::uuid IS NOT NULL THEN json_build_object('batch_id', %(action)s::uuid) END
      FROM taken AS t JOIN item AS i USING (command)
)
SELECT count(*)::integer, (SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM taken) AS told)
  FROM taken;

-- name: complete
-- The events of a group end with its command.
WITH taken AS (
    DELETE FROM busload.troubleshooting AS t USING busload.command AS c
     WHERE t.command = ANY (%(commands)b::bigint[]) AND c.id = t.command
    RETURNING t.command, t.batch_id, t.attempt, c.reply_to, c.command_type
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'OPERATOR_COMPLETED', command, command, batch_id, attempt, %(operator)s::text,
           CASE WHEN %(action)s::uuid IS NULL THEN json_build_object('result', %(result)s::text::json)
                ELSE json_build_object('result', %(result)s::text::json, 'batch_id', %(action)s::uuid) END
      FROM taken
), replied AS (
    SELECT busload.reply(command, 'SUCCESS', %(result)s::text::json) AS domain FROM taken WHERE reply_to IS NOT NULL
)
SELECT count(*)::integer,
       busload.end_groups(array_agg(command) FILTER (WHERE command_type = 'busload.Group'), 'OPERATOR_COMPLETED'),
       (SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM replied) AS told)
  FROM taken;

-- name: cancel
WITH taken AS (
    DELETE FROM busload.troubleshooting AS t USING busload.command AS c
     WHERE t.command = ANY (%(commands)b::bigint[]) AND c.id = t.command
    RETURNING t.command, t.batch_id, t.attempt, c.reply_to, c.command_type
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'OPERATOR_CANCELED', command, command, batch_id, attempt, %(operator)s::text,
           CASE WHEN %(action)s::uuid IS NULL THEN json_build_object('reason', %(reason)s::text)
                ELSE json_build_object('reason', %(reason)s::text, 'batch_id', %(action)s::uuid) END
      FROM taken
), replied AS (
    SELECT busload.reply(command, 'CANCELED', json_build_object('message', %(reason)s::text)) AS domain
      FROM taken WHERE reply_to IS NOT NULL
)
SELECT count(*)::integer,
       busload.end_groups(array_agg(command) FILTER (WHERE command_type = 'busload.Group'), 'OPERATOR_CANCELED'),
       (SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM replied) AS told)
  FROM taken;

-- name: left_behind
-- Where commands are that a decision did not move, and why it did not.
SELECT s.command_id, s.status, t.fingerprint, t.since > %(until)s::timestamptz
  FROM busload.command AS c
 CROSS JOIN LATERAL (SELECT * FROM busload.command_status AS s WHERE s.id = c.id OFFSET 0) AS s
  LEFT JOIN busload.troubleshooting AS t ON t.command = c.id
 WHERE c.domain = %(domain)s::text AND c.command_id = ANY (%(command_ids)b::uuid[]);

-- name: groups
-- What waits, by cause, the largest group first; the oldest few commands of each speak for the others, with
-- what differs among the messages of the first hundred.
WITH kind AS (
    SELECT t.fingerprint, t.reason, c.command_type, count(*) AS count, min(t.since) AS oldest, max(t.since) AS newest
      FROM busload.troubleshooting AS t JOIN busload.command AS c ON c.id = t.command
     WHERE t.domain = %(domain)s::text AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s::text)
     GROUP BY t.fingerprint, t.reason, c.command_type
), cause AS MATERIALIZED (
    SELECT fingerprint, array_agg(DISTINCT reason) AS reasons, array_agg(DISTINCT command_type) AS command_types,
           sum(count)::bigint AS count, min(oldest) AS oldest, max(newest) AS newest
      FROM kind GROUP BY fingerprint
     ORDER BY sum(count) DESC, fingerprint LIMIT %(limit)s::integer
)
SELECT cause.fingerprint, reasons, error ->> 'type', error ->> 'code', error ->> 'message', command_types, count, oldest, newest,
       command_ids, messages
  FROM cause CROSS JOIN LATERAL (
        WITH few AS MATERIALIZED (
            SELECT t.command, t.error, c.command_id
              FROM busload.troubleshooting AS t CROSS JOIN LATERAL (
                    SELECT command_id, command_type FROM busload.command AS c WHERE c.id = t.command OFFSET 0) AS c
             WHERE t.domain = %(domain)s::text AND t.fingerprint = cause.fingerprint
               AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s::text)
             ORDER BY t.command LIMIT 100)
        SELECT (array_agg(error ORDER BY command))[1] AS error, (array_agg(command_id ORDER BY command))[1:3] AS command_ids,
               (SELECT coalesce(array_agg(message ORDER BY first), '{}')
                  FROM (SELECT few.error ->> 'message' AS message, min(few.command) AS first FROM few
                         WHERE few.error ->> 'message' IS NOT NULL GROUP BY 1 ORDER BY 2 LIMIT 3) AS said) AS messages
          FROM few) AS sample
 ORDER BY count DESC, cause.fingerprint;

-- name: group_items
-- The next page of a group, in the order of its commands. What a retry would not move is left out. OFFSET keeps the planner
-- from merging all commands up to this page.
SELECT t.command, c.command_id, t.since, coalesce(t.error ->> 'code', t.error ->> 'type')
  FROM busload.troubleshooting AS t
 CROSS JOIN LATERAL (SELECT command_id, command_type FROM busload.command AS c WHERE c.id = t.command OFFSET 0) AS c
 WHERE t.domain = %(domain)s::text AND t.fingerprint = %(fingerprint)s::text AND t.command > %(after)s::bigint
   AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s::text)
   AND (NOT %(again)s::boolean OR NOT EXISTS (
        SELECT FROM busload.batch AS b WHERE b.batch_id = t.batch_id AND b.canceled_at IS NOT NULL OFFSET 0))
 ORDER BY t.command LIMIT %(limit)s::integer;

-- name: data_of
-- The data of the first of these commands, for as long as they fit into so many bytes, but at least of one. It is read one by
-- one, so that what does not fit is not read at all. A command that is not there any more has none.
WITH RECURSIVE item AS (
    SELECT 0 AS n, 0::bigint AS bytes, NULL::text AS data
    UNION ALL
    SELECT n + 1, bytes + coalesce(octet_length(c.data), 0), c.data
      FROM item LEFT JOIN LATERAL (
            SELECT coalesce(data::text, 'null') AS data FROM busload.command WHERE id = (%(commands)b::bigint[])[n + 1] OFFSET 0) AS c
        ON true
     WHERE n < cardinality(%(commands)b::bigint[]) AND bytes < %(bytes)s::bigint
)
SELECT data FROM item WHERE n > 0 ORDER BY n;

-- name: group_domains
-- Where something of this type, or of any, waits with this cause, or did when somebody decided about it.
SELECT domain FROM busload.troubleshooting AS t
 WHERE fingerprint = %(fingerprint)s::text
   AND (%(command_type)s::text IS NULL OR EXISTS (
        SELECT FROM busload.command AS c WHERE c.id = t.command AND c.command_type = %(command_type)s::text OFFSET 0))
 UNION
SELECT domain FROM busload.batch
 WHERE custom_data ->> 'fingerprint' = %(fingerprint)s::text AND custom_data ? 'action'
   AND (%(command_type)s::text IS NULL OR custom_data ->> 'command_type' = %(command_type)s::text)
 ORDER BY domain;

-- name: clock
SELECT now();
