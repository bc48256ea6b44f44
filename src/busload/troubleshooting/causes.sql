-- fragments of: busload.troubleshooting.decisions

-- fragment: of_type
(%(command_type)s::text IS NULL OR t.command_type = %(command_type)s::text)

-- fragment: filtered
-- The server keeps one plan for every filter, and guesses how many rows pass. Of one CASE it guesses half; of
-- `IS NULL OR`, several times, nearly none. It would then sort and join 100,000 rows as if they were a few.
CASE WHEN t.command_type <> %(command_type)s::text THEN false
     WHEN t.reason <> %(reason)s::text THEN false
     WHEN %(batch_id)s::uuid IS NOT NULL AND t.batch_id IS DISTINCT FROM %(batch_id)s::uuid THEN false
     ELSE true END

-- fragment: said
-- Whether a text occurs in an error.
(%(text)s::text IS NULL
 OR strpos(lower(concat_ws(' ', t.error ->> 'type', t.error ->> 'code', t.error ->> 'message')),
           lower(%(text)s::text)) > 0)

-- name: groups
-- What waits in troubleshooting, by cause, the largest group first. The oldest few commands of each group are
-- samples of the others, with the messages that differ among its first hundred. `text` is looked for in the
-- error of the oldest command.
WITH kind AS (
    SELECT t.fingerprint, t.reason, t.command_type, count(*) AS count, min(t.since) AS oldest,
           max(t.since) AS newest, min(t.command) AS first
      FROM busload.troubleshooting AS t
     WHERE t.domain = %(domain)s::text AND {filtered}
     GROUP BY t.fingerprint, t.reason, t.command_type
), cause AS MATERIALIZED (
    SELECT fingerprint, array_agg(DISTINCT reason) AS reasons,
           array_agg(DISTINCT command_type) AS command_types,
           sum(count)::bigint AS count, min(oldest) AS oldest, max(newest) AS newest
      FROM kind GROUP BY fingerprint
    HAVING (SELECT {said} FROM busload.troubleshooting AS t WHERE t.command = min(kind.first))
     ORDER BY sum(count) DESC, fingerprint LIMIT %(limit)s::integer
)
SELECT cause.fingerprint, reasons, error ->> 'type', error ->> 'code', error ->> 'message', command_types,
       count, oldest, newest, command_ids, messages
  FROM cause CROSS JOIN LATERAL (
        WITH few AS MATERIALIZED (
            SELECT t.command, t.error, c.command_id
              FROM busload.troubleshooting AS t CROSS JOIN LATERAL (
                    SELECT command_id FROM busload.command AS c WHERE c.id = t.command OFFSET 0) AS c
             WHERE t.domain = %(domain)s::text AND t.fingerprint = cause.fingerprint
               AND {filtered}
             ORDER BY t.command LIMIT 100)
        SELECT (array_agg(error ORDER BY command))[1] AS error,
               (array_agg(command_id ORDER BY command))[1:3] AS command_ids,
               (SELECT coalesce(array_agg(message ORDER BY first), '{}')
                  FROM (SELECT few.error ->> 'message' AS message, min(few.command) AS first FROM few
                         WHERE few.error ->> 'message' IS NOT NULL
                         GROUP BY 1 ORDER BY 2 LIMIT 3) AS said) AS messages
          FROM few) AS sample
 ORDER BY count DESC, cause.fingerprint;

-- name: held_batches
-- Of these commands in troubleshooting, each that belongs to a batch that is held, by that batch.
SELECT t.batch_id
  FROM busload.command AS c
  JOIN busload.troubleshooting AS t ON t.command = c.id
  JOIN busload.batch AS b ON b.batch_id = t.batch_id
 WHERE c.domain = %(domain)s::text AND c.command_id = ANY (%(command_ids)b::uuid[]) AND b.held_at IS NOT NULL;

-- name: group_items
-- The next page of a group, in the order of its commands, each with its batch if that is held. Commands that
-- a retry would not move are left out.
-- OFFSET keeps the planner from merging all commands up to this page.
SELECT t.command, c.command_id, t.since, coalesce(t.error ->> 'code', t.error ->> 'type'), t.command_type,
       (SELECT b.batch_id FROM busload.batch AS b WHERE b.batch_id = t.batch_id AND b.held_at IS NOT NULL)
  FROM busload.troubleshooting AS t
 CROSS JOIN LATERAL (SELECT command_id FROM busload.command AS c WHERE c.id = t.command OFFSET 0) AS c
 WHERE t.domain = %(domain)s::text AND t.fingerprint = %(fingerprint)s::text AND t.command > %(after)s::bigint
   AND {of_type}
   AND {may_be_tried_again}
 ORDER BY t.command LIMIT %(limit)s::integer;

-- name: data_of
-- The data of the first of these commands, for as long as they fit into so many bytes, but at least of one.
-- The data is read one by one, so that what does not fit is not read at all. A command that is gone has none.
WITH RECURSIVE item AS (
    SELECT 0 AS n, 0::bigint AS bytes, NULL::text AS data
    UNION ALL
    SELECT n + 1, bytes + coalesce(octet_length(c.data), 0), c.data
      FROM item LEFT JOIN LATERAL (
            SELECT coalesce(data::text, 'null') AS data
              FROM busload.command WHERE id = (%(commands)b::bigint[])[n + 1] OFFSET 0) AS c
        ON true
     WHERE n < cardinality(%(commands)b::bigint[]) AND bytes < %(bytes)s::bigint
)
SELECT data FROM item WHERE n > 0 ORDER BY n;

-- name: group_domains
-- The domains in which a command of this type, or of any type, waits with this cause, or did when somebody
-- decided about it.
SELECT domain FROM busload.troubleshooting AS t
 WHERE fingerprint = %(fingerprint)s::text
   AND {of_type}
 UNION
SELECT domain FROM busload.batch
 WHERE custom_data ->> 'fingerprint' = %(fingerprint)s::text AND custom_data ? 'action'
   AND (%(command_type)s::text IS NULL OR custom_data ->> 'command_type' = %(command_type)s::text)
 ORDER BY domain;

-- name: clock
-- The time by the clock of the database.
SELECT now();
