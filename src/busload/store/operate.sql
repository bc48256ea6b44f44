-- name: retry
-- Back into the queue with all its attempts to use again, unless its batch was canceled. The numbering of attempts goes on,
-- so that the chain stays whole.
WITH taken AS (
    DELETE FROM busload.troubleshooting AS t USING busload.command AS c
     WHERE t.command = c.id AND c.domain = %(domain)s::text AND c.command_id = %(command_id)s::uuid
       AND NOT EXISTS (SELECT FROM busload.batch AS b WHERE b.batch_id = t.batch_id AND b.canceled_at IS NOT NULL)
    RETURNING t.*, c.reply_to
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, replies)
    SELECT command, command, domain, batch_id, priority, attempt + 1, attempt, reply_to IS NOT NULL FROM taken
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator)
    SELECT 'OPERATOR_RETRIED', command, command, batch_id, attempt, %(operator)s::text FROM taken
)
SELECT command, pg_notify('busload_ready', domain) FROM taken;

-- name: complete
WITH taken AS (
    DELETE FROM busload.troubleshooting AS t USING busload.command AS c
     WHERE t.command = c.id AND c.domain = %(domain)s::text AND c.command_id = %(command_id)s::uuid
    RETURNING t.*
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'OPERATOR_COMPLETED', command, command, batch_id, attempt, %(operator)s::text,
           json_build_object('result', %(result)s::text::json)
      FROM taken
), replied AS (
    SELECT busload.reply(command, 'SUCCESS', %(result)s::text::json) AS domain FROM taken
)
SELECT command, (SELECT count(pg_notify('busload_ready', domain)) FROM replied WHERE domain IS NOT NULL) FROM taken;

-- name: cancel
WITH taken AS (
    DELETE FROM busload.troubleshooting AS t USING busload.command AS c
     WHERE t.command = c.id AND c.domain = %(domain)s::text AND c.command_id = %(command_id)s::uuid
    RETURNING t.*
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, operator, details)
    SELECT 'OPERATOR_CANCELED', command, command, batch_id, attempt, %(operator)s::text,
           json_build_object('reason', %(reason)s::text)
      FROM taken
), replied AS (
    SELECT busload.reply(command, 'CANCELED', json_build_object('message', %(reason)s::text)) AS domain FROM taken
)
SELECT command, (SELECT count(pg_notify('busload_ready', domain)) FROM replied WHERE domain IS NOT NULL) FROM taken;
