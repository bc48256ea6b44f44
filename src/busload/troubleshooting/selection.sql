-- fragments of: busload.troubleshooting.causes

-- fragment: selected
-- What a decision is about: commands of one cause, or those of them that are named.
t.domain = %(domain)s::text AND t.fingerprint = %(fingerprint)s::text AND {filtered}
AND CASE WHEN %(command_ids)s::uuid[] IS NULL THEN true ELSE t.command = ANY (ARRAY(
        SELECT n.id FROM busload.command AS n
         WHERE n.domain = %(domain)s::text AND n.command_id = ANY (%(command_ids)s::uuid[]))) END

-- fragment: seen
t.since <= %(until)s::timestamptz AND t.command <= %(last)s::bigint

-- fragment: kind
-- How many of each kind wait, with the hour of the last day in which they failed.
SELECT t.domain, t.fingerprint, t.reason, t.command_type, count(*) AS count, min(t.since) AS oldest,
       max(t.since) AS newest, min(t.command) AS first,
       CASE WHEN t.since >= now() - interval '24 hours' AND t.since < now()
            THEN date_bin('1 hour', t.since, now()) END AS hour
  FROM busload.troubleshooting AS t

-- fragment: caused
-- The causes of these kinds, the largest first. `text` is looked for in the error of the oldest command. The
-- two arrays are the hours of the last day in which some failed, from 1 to 24, and how many. All rows have
-- the totals of all pages.
cause AS (
    SELECT domain, fingerprint, array_agg(DISTINCT reason) AS reasons,
           array_agg(DISTINCT command_type) AS types, sum(count)::bigint AS count, min(oldest) AS oldest,
           max(newest) AS newest, min(first) AS first
      FROM kind
     GROUP BY domain, fingerprint
), told AS MATERIALIZED (
    SELECT c.*, t.error ->> 'type' AS error_type, t.error ->> 'code' AS error_code,
           t.error ->> 'message' AS message
      FROM cause AS c CROSS JOIN LATERAL (
            SELECT error FROM busload.troubleshooting WHERE command = c.first OFFSET 0) AS t
     WHERE {said}
), shown AS MATERIALIZED (
    SELECT * FROM told
     WHERE %(after_count)s::bigint IS NULL OR count < %(after_count)s::bigint
        OR count = %(after_count)s::bigint
           AND (domain, fingerprint) > (%(after_domain)s::text, %(after_fingerprint)s::text)
     ORDER BY count DESC, domain, fingerprint LIMIT %(limit)s::integer
), hour AS (
    SELECT k.domain, k.fingerprint, 25 - (date_part('epoch', now() - k.hour) / 3600::float8)::integer AS hour,
           sum(k.count)::bigint AS count
      FROM shown AS s JOIN kind AS k USING (domain, fingerprint)
     WHERE k.hour IS NOT NULL
     GROUP BY k.domain, k.fingerprint, k.hour
)
SELECT s.domain, s.fingerprint, s.reasons, s.error_type, s.error_code, s.message, s.types, s.count, s.oldest,
       s.newest,
       (SELECT c.command_id FROM busload.command AS c WHERE c.id = s.first),
       ARRAY(SELECT h.hour FROM hour AS h
              WHERE h.domain = s.domain AND h.fingerprint = s.fingerprint ORDER BY h.hour),
       ARRAY(SELECT h.count FROM hour AS h
              WHERE h.domain = s.domain AND h.fingerprint = s.fingerprint ORDER BY h.hour),
       (SELECT count(*) FROM told), (SELECT sum(count)::bigint FROM told)
  FROM shown AS s
 ORDER BY s.count DESC, s.domain, s.fingerprint

-- name: causes
-- The causes for which commands wait, in one domain or in all. The table is read once, whatever is asked.
WITH kind AS MATERIALIZED (
    {kind}
     WHERE CASE WHEN %(domain)s::text IS NULL THEN true ELSE t.domain = %(domain)s::text END AND {filtered}
     GROUP BY t.domain, t.fingerprint, t.reason, t.command_type, hour
), {caused};

-- name: cause
-- One cause, as far as its filter lets it through: only its own commands are read.
WITH kind AS MATERIALIZED (
    {kind}
     WHERE t.domain = %(domain)s::text AND t.fingerprint = %(fingerprint)s::text AND {filtered}
     GROUP BY t.domain, t.fingerprint, t.reason, t.command_type, hour
), {caused};

-- name: items
-- The commands of a cause, in their order, from the one after the cursor on.
SELECT t.command, c.command_id, t.command_type, t.batch_id, c.task_key, t.reason, t.attempt - t.forgiven,
       t.since, t.error ->> 'message'
  FROM busload.troubleshooting AS t
 CROSS JOIN LATERAL (SELECT command_id, task_key
                       FROM busload.command AS c WHERE c.id = t.command OFFSET 0) AS c
 WHERE {selected} AND t.command > %(after)s::bigint
 ORDER BY t.command LIMIT %(limit)s::integer;

-- name: preview
-- What a decision would touch, and how much of that somebody has `seen` before: up to the time `until` and
-- the command `last`. The digest differs if the set differs. In `completing` batches nothing is open but what
-- would be touched.
WITH kind AS MATERIALIZED (
    SELECT t.batch_id, t.command_type, t.reason, count(*) AS count, min(t.since) AS oldest,
           max(t.since) AS newest, max(t.command) AS last,
           bit_xor(hashint8extended(t.command, t.attempt)) AS digest,
           count(*) FILTER (WHERE {seen}) AS seen,
           bit_xor(hashint8extended(t.command, t.attempt)) FILTER (WHERE {seen}) AS seen_digest
      FROM busload.troubleshooting AS t
     WHERE {selected}
     GROUP BY t.batch_id, t.command_type, t.reason
), placed AS MATERIALIZED (
    SELECT k.*, b.name, b.canceled_at IS NOT NULL AND %(again)s::boolean AS kept,
           b.batch_id IS NOT NULL AND row_number() OVER of_batch = 1 AS is_batch,
           (sum(k.count) OVER of_batch)::bigint AS together,
           b.sealed_at IS NOT NULL AND b.completed_at IS NULL
           AND b.total_count - b.completed_count - b.failed_count - b.canceled_count
               = (sum(k.count) OVER of_batch)::bigint AS completing, b.held_at IS NOT NULL AS held
      FROM kind AS k LEFT JOIN busload.batch AS b ON b.batch_id = k.batch_id
    WINDOW of_batch AS (PARTITION BY k.batch_id)
), batch AS MATERIALIZED (
    SELECT batch_id, name, together AS count, completing, held FROM placed WHERE is_batch AND NOT kept
)
SELECT coalesce(sum(count), 0)::bigint,
       (SELECT coalesce(sum(count), 0)::bigint FROM placed WHERE kept),
       min(oldest), max(newest), max(last), coalesce(bit_xor(digest), 0),
       coalesce(sum(seen), 0)::bigint, coalesce(bit_xor(seen_digest), 0),
       coalesce(array_agg(DISTINCT command_type), '{}'), coalesce(array_agg(DISTINCT reason), '{}'),
       coalesce(sum(count) FILTER (WHERE batch_id IS NULL), 0)::bigint,
       (SELECT count(*) FROM batch),
       (SELECT count(*) FROM batch WHERE completing),
       (SELECT count(*) FROM batch WHERE held),
       (SELECT coalesce(sum(count), 0)::bigint FROM batch WHERE held),
       (SELECT coalesce(json_agg(json_build_array(batch_id, name, count, completing, held)), '[]')::text
          FROM (SELECT * FROM batch ORDER BY count DESC, batch_id LIMIT 5) AS largest)
  FROM placed
 WHERE NOT kept;

-- name: portion
-- The next commands of what was seen, with the bytes of their data if the decision patches it, and whether
-- their batch is held.
SELECT t.command, c.command_id, c.bytes,
       EXISTS (SELECT FROM busload.batch AS b WHERE b.batch_id = t.batch_id AND b.held_at IS NOT NULL)
  FROM busload.troubleshooting AS t
 CROSS JOIN LATERAL (
    SELECT command_id, CASE WHEN %(with_data)s::boolean THEN octet_length(c.data::text) END AS bytes
      FROM busload.command AS c WHERE c.id = t.command OFFSET 0) AS c
 WHERE {selected} AND t.command > %(after)s::bigint AND t.command <= %(last)s::bigint
   AND t.since <= %(until)s::timestamptz AND {may_be_tried_again}
 ORDER BY t.command LIMIT %(limit)s::integer;

-- name: data_after
-- The data of the next commands of a selection, as long as they fit into so many bytes.
WITH page AS MATERIALIZED (
    SELECT t.command, t.command_type FROM busload.troubleshooting AS t
     WHERE {selected} AND t.command > %(after)s::bigint AND {may_be_tried_again}
     ORDER BY t.command LIMIT %(limit)s::integer
), sized AS (
    SELECT p.command, c.command_id, p.command_type, c.data::text AS data,
           sum(octet_length(c.data::text)) OVER (ORDER BY p.command) - octet_length(c.data::text) AS before
      FROM page AS p CROSS JOIN LATERAL (
            SELECT command_id, coalesce(c.data, 'null') AS data
              FROM busload.command AS c WHERE c.id = p.command OFFSET 0) AS c
)
SELECT command, command_id, command_type, data FROM sized WHERE before < %(bytes)s::bigint ORDER BY command;
