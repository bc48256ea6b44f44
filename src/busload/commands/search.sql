-- fragments of: busload.commands.load

-- fragment: command
-- A command as its status view `s` shows it, with the traceback of the last attempt that did not succeed.
SELECT s.command_id, s.domain, s.command_type, s.data::text, s.batch_id, s.task_key, s.correlation_id,
       s.reply_to, s.priority, s.created_at, s.status, s.attempts, s.max_attempts, s.run_at, s.started_at,
       s.finished_at, s.worker, s.execution_id,
       s.error ->> 'type', s.error ->> 'code', s.error ->> 'message', s.result::text,
       (SELECT x.details ->> 'traceback'
          FROM busload.execution AS x
         WHERE x.command = s.id AND x.outcome <> 'COMPLETED'
         ORDER BY x.attempt DESC
         LIMIT 1),
       s.publish_attempts, s.last_publish_error, s.published_at, s.checkpoint,
       CASE WHEN s.finished_at IS NULL
            THEN least(
                (SELECT min(e.expires_at) FROM busload.expiry AS e
                  WHERE e.lo BETWEEN s.id & ~1023 AND s.id AND e.hi >= s.id),
                (SELECT b.expires_at FROM busload.batch AS b WHERE b.batch_id = s.batch_id)
            )
       END,
       busload.joined_headers(
           (SELECT b.headers FROM busload.batch AS b WHERE b.batch_id = s.batch_id), s.headers
       )::text

-- fragment: after_the_last
-- The commands `c` of a batch that come after the last one of the page before. The `first` command of each
-- load finds the others.
first.batch_id = (SELECT batch_id FROM busload.batch
                   WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND pruned_at IS NULL)
AND first.id & 1023 = 0
AND (%(after)s::uuid IS NULL OR c.id > (SELECT id FROM last) AND first.id >= (SELECT id & ~1023 FROM last))

-- fragment: last_of_page
-- The last command of the page before. If its domain was not told, it may be any domain in which commands of
-- the batch run: they are looked through only if the domain of the batch does not have it.
last AS (
    SELECT coalesce(
        (SELECT id FROM busload.command
          WHERE domain = %(after_domain)s::text AND command_id = %(after)s::uuid
            AND batch_id = %(batch_id)s::uuid),
        (SELECT max(c.id)
           FROM (SELECT DISTINCT domain FROM busload.command
                  WHERE batch_id = %(batch_id)s::uuid AND id & 1023 = 0 OFFSET 0) AS d
          CROSS JOIN LATERAL (SELECT id FROM busload.command AS c
                               WHERE c.domain = d.domain AND c.command_id = %(after)s::uuid OFFSET 0) AS c)
    ) AS id
)

-- fragment: item
-- A command in troubleshooting. The traceback is that of the attempt. A command that was parted from a group
-- has no attempt of its own: its error brings the traceback.
SELECT c.command_id, c.domain, c.command_type, c.data::text, c.batch_id, c.task_key,
       coalesce(c.correlation_id, c.command_id), c.reply_to,
       t.reason, t.attempt - t.forgiven, t.since,
       t.error ->> 'type', t.error ->> 'code', t.error ->> 'message', (t.error -> 'details')::text,
       t.fingerprint,
       coalesce(
           (SELECT e.details ->> 'traceback'
              FROM busload.execution AS e
             WHERE e.command = t.command AND e.attempt = t.attempt),
           t.error ->> 'traceback'
       )

-- fragment: recorded_attempt
-- An attempt as its execution `e` was recorded.
e.attempt, e.lease_id, e.worker, e.started_at, e.finished_at,
CASE WHEN e.outcome <> 'COMPLETED' THEN e.details ->> 'message' END AS error,
CASE e.outcome WHEN 'FAILED_ATTEMPT' THEN 'failed'
               WHEN 'TROUBLESHOOTING' THEN 'dlq'
               ELSE lower(e.outcome::text)
END AS status,
CASE WHEN e.outcome <> 'COMPLETED' THEN e.details ->> 'traceback' END AS traceback,
e.outcome = 'FAILED_ATTEMPT' AS again

-- fragment: holds_command
hi BETWEEN c.id AND (c.id | 1023) AND lo <= c.id

-- name: command
-- One command.
{command}
  FROM busload.command_status AS s
 WHERE domain = %(domain)s::text AND command_id = %(command_id)s::uuid;

-- name: ending
-- How far a command has come, without what was sent. A command that was canceled while it waited has no
-- error: the reason stands for its message.
SELECT s.batch_id, s.status, s.error ->> 'type', s.error ->> 'code',
       coalesce(
           s.error ->> 'message',
           CASE WHEN s.status = 'CANCELED'
                THEN (SELECT v.details ->> 'reason'
                        FROM busload.event AS v
                       WHERE v.lo >> 10 = s.id >> 10 AND s.id BETWEEN v.lo AND v.hi
                         AND v.type IN ('CANCELED', 'OPERATOR_CANCELED')
                       ORDER BY v.event DESC
                       LIMIT 1)
           END
       ),
       s.result::text
  FROM busload.command_status AS s
 WHERE domain = %(domain)s::text AND command_id = %(command_id)s::uuid;

-- name: commands
-- The commands of these that exist.
{command}
  FROM unnest(%(domains)b::text[], %(command_ids)b::uuid[]) AS wanted (domain, command_id)
 CROSS JOIN LATERAL (SELECT * FROM busload.command_status AS s
                      WHERE s.domain = wanted.domain AND s.command_id = wanted.command_id OFFSET 0) AS s;

-- name: batch_commands
-- The commands of a batch in the order in which they were sent; `after` is the last command of the page
-- before. The page is cut first, so that only its commands are looked for in the places.
WITH {last_of_page}, page AS MATERIALIZED (
    SELECT c.id
      FROM busload.command AS first JOIN busload.command AS c ON c.id BETWEEN first.id AND (first.id | 1023)
     WHERE {after_the_last}
     ORDER BY first.id, c.id
     {page}
)
{command}
  FROM page CROSS JOIN LATERAL (SELECT * FROM busload.command_status AS s WHERE s.id = page.id OFFSET 0) AS s
 ORDER BY s.id;

-- name: batch_commands_in
-- The commands of a batch that have one status. A status is known only by looking: load after load, until the
-- page is full.
WITH {last_of_page}
{command}
  FROM busload.command AS first
  JOIN busload.command AS c ON c.id BETWEEN first.id AND (first.id | 1023)
 CROSS JOIN LATERAL (SELECT * FROM busload.command_status AS s WHERE s.id = c.id OFFSET 0) AS s
 WHERE {after_the_last}
   AND s.status = %(status)s::text
 ORDER BY first.id, c.id
 {page};

-- name: troubleshooting
-- The commands of a domain in troubleshooting, the newest first.
{item}
  FROM busload.troubleshooting AS t JOIN busload.command AS c ON c.id = t.command
 WHERE t.domain = %(domain)s::text
   AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s::text)
 ORDER BY t.since DESC, t.command DESC
 {page};

-- fragment: troubled
-- The domains in which commands wait for a person. An index finds each next one.
troubled (domain) AS (
    SELECT min(domain) FROM busload.troubleshooting
    UNION ALL
    SELECT (SELECT min(t.domain) FROM busload.troubleshooting AS t WHERE t.domain > d.domain)
      FROM troubled AS d
     WHERE d.domain IS NOT NULL
)

-- name: troubleshooting_everywhere
-- The commands of all domains in troubleshooting, the newest first: so many of each domain, merged.
WITH RECURSIVE {troubled}, newest AS MATERIALIZED (
    SELECT t.command, t.since
      FROM troubled AS d
     CROSS JOIN LATERAL (
        SELECT t.command, t.since
          FROM busload.troubleshooting AS t
         WHERE t.domain = d.domain
           AND (%(command_type)s::text IS NULL OR t.command_type = %(command_type)s::text)
         ORDER BY t.since DESC, t.command DESC
         LIMIT %(limit)s::integer + %(offset)s::integer) AS t
     ORDER BY t.since DESC, t.command DESC
     {page}
)
{item}
  FROM newest AS n
 CROSS JOIN LATERAL (SELECT * FROM busload.troubleshooting WHERE command = n.command OFFSET 0) AS t
 CROSS JOIN LATERAL (SELECT * FROM busload.command WHERE id = n.command OFFSET 0) AS c
 ORDER BY t.since DESC, t.command DESC;

-- name: troubleshooting_domains
-- How many commands of each domain, of one type or of any, wait for a person, and since when.
SELECT t.domain, count(*)::integer, min(t.since), max(t.since)
  FROM busload.troubleshooting AS t
 WHERE (%(domain)s::text IS NULL OR t.domain = %(domain)s::text)
   AND (%(command_type)s::text IS NULL OR t.command_type = %(command_type)s::text)
 GROUP BY t.domain
 ORDER BY count(*) DESC, t.domain;

-- name: troubleshooting_find
-- Commands in troubleshooting that have this id, in whatever domain.
WITH RECURSIVE {troubled}
{item}
  FROM troubled AS d
 CROSS JOIN LATERAL (SELECT * FROM busload.command
                      WHERE domain = d.domain AND command_id = %(command_id)s::uuid OFFSET 0) AS c
 CROSS JOIN LATERAL (SELECT * FROM busload.troubleshooting WHERE command = c.id OFFSET 0) AS t
 ORDER BY c.domain;

-- name: troubleshooting_item
-- One command in troubleshooting.
{item}
  FROM busload.command AS c JOIN busload.troubleshooting AS t ON t.command = c.id
 WHERE c.domain = %(domain)s::text AND c.command_id = %(command_id)s::uuid;

-- name: audit_trail
-- What happened to a command.
SELECT a.type, a.at, a.execution_id, a.attempt, w.name, a.operator, a.batch_id, a.details::text
  FROM busload.audit AS a LEFT JOIN busload.worker AS w ON w.worker = a.worker
 WHERE a.domain = %(domain)s::text AND a.command_id = %(command_id)s::uuid
 ORDER BY a.at, a.attempt NULLS FIRST, a.step;

-- fragment: attempts_of_task
-- Every attempt of the commands in `task`: those that ended, those that were lost with their worker or
-- canceled while they waited, and the one that waits or runs now. `again` says whether the command is tried
-- again after the attempt, and is null while that is not decided.
event AS MATERIALIZED (
    SELECT c.id, v.* FROM task AS c
     CROSS JOIN LATERAL (SELECT * FROM busload.event AS v
                          WHERE v.lo >> 10 = c.id >> 10 AND c.id BETWEEN v.lo AND v.hi OFFSET 0) AS v
), attempt AS (
    SELECT c.id, {recorded_attempt}
      FROM task AS c CROSS JOIN LATERAL (SELECT * FROM busload.execution WHERE command = c.id OFFSET 0) AS e
    UNION ALL
    SELECT v.id, v.attempt, v.lease_id, v.worker, (v.details ->> 'since')::timestamptz, v.at,
           CASE v.type WHEN 'RELEASED' THEN 'The worker handed it back.'
                       ELSE 'The worker died, or lost its lease.' END,
           CASE WHEN EXISTS (SELECT
                               FROM event AS p
                              WHERE p.id = v.id AND p.type = 'PARKED' AND p.lease_id = v.lease_id)
                THEN 'dlq' ELSE 'lost' END,
           NULL,
           NOT EXISTS (SELECT
                         FROM event AS p
                        WHERE p.id = v.id AND p.type IN ('PARKED', 'CANCELED') AND p.lease_id = v.lease_id)
      FROM event AS v WHERE v.type IN ('LEASE_LOST', 'RELEASED')
    UNION ALL
    SELECT v.id, v.attempt, NULL, NULL, NULL, v.at, v.details ->> 'reason', 'canceled', NULL, false
      FROM event AS v WHERE v.type = 'CANCELED'
    UNION ALL
    SELECT c.id, place.attempt, NULL, NULL, NULL, NULL, place.error, 'queued', NULL, NULL
      FROM task AS c
     CROSS JOIN LATERAL (
        (SELECT attempt, NULL AS error FROM busload.queue WHERE {holds_command} ORDER BY hi LIMIT 1)
        UNION ALL (SELECT attempt, NULL FROM busload.scheduled WHERE {holds_command} ORDER BY hi LIMIT 1)
        UNION ALL (SELECT attempt, error FROM busload.outbox WHERE {holds_command} ORDER BY hi LIMIT 1)
     ) AS place
    UNION ALL
    SELECT c.id, l.attempt, l.lease_id, l.worker, l.since, NULL, NULL, 'processing', NULL, NULL FROM task AS c
     CROSS JOIN LATERAL (SELECT * FROM busload.lease AS l
                          WHERE {holds_command} AND c.id <> ALL (returned)
                            AND NOT EXISTS (SELECT
                                              FROM busload.execution AS e
                                             WHERE e.command = c.id AND e.attempt = l.attempt
                                            OFFSET 0)
                          OFFSET 0) AS l
)

-- fragment: enqueued_at
-- When the attempt `a` of the command `c` was created, by the events of the command in `event`: when the
-- command was sent, when the attempt before ended, when an operator retried the command, or when the worker
-- that was to run the attempt was lost or handed the command back.
greatest(
    c.created_at,
    (SELECT e.finished_at FROM busload.execution AS e WHERE e.command = c.id AND e.attempt = a.attempt - 1),
    (SELECT max(v.at)
       FROM event AS v
      WHERE v.id = c.id
        AND (v.type = 'OPERATOR_RETRIED' AND v.attempt = a.attempt - 1
             OR v.type IN ('LEASE_LOST', 'RELEASED') AND v.attempt = a.attempt
                AND v.lease_id IS DISTINCT FROM a.lease_id AND v.at <= coalesce(a.finished_at, 'infinity')))
)

-- fragment: retry_count
-- How many attempts of the same round had failed before the attempt `a`. An operator's retry begins a round.
a.attempt - 1 - coalesce(
    (SELECT max(v.attempt)
       FROM event AS v
      WHERE v.id = c.id AND v.type = 'OPERATOR_RETRIED' AND v.attempt < a.attempt),
    0
)

-- fragment: execution
-- What people see of an attempt `a` of the command `c`, beside its id and what operators did after it.
c.task_key, c.command_id, c.domain, a.attempt, a.status,
(SELECT w.name FROM busload.worker AS w WHERE w.worker = a.worker), {enqueued_at}, a.started_at,
a.finished_at, a.error, c.data::text

-- fragment: retries
-- The traceback of an attempt `a`, how many retries came before it, and whether another may follow.
a.traceback, {retry_count}, coalesce(a.again, {retry_count} + 1 < c.max_attempts)

-- fragment: actions
-- What operators did after an attempt `a` had ended.
(SELECT json_agg(json_build_array(v.type, v.at, v.operator, v.details) ORDER BY v.event)
   FROM event AS v
  WHERE v.id = c.id AND v.attempt = a.attempt
    AND (a.status = 'dlq' AND v.type IN ('OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
         OR a.status = 'canceled' AND v.type = 'CANCELED'))::text

-- name: trace
-- Every attempt of every command of a task.
WITH task AS MATERIALIZED (
    SELECT * FROM busload.command
     WHERE task_key = %(task_key)s::text AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
), {attempts_of_task}
SELECT busload.execution_id(a.lease_id, c.id), {execution}, {actions}, {retries}
  FROM attempt AS a JOIN task AS c USING (id)
 ORDER BY c.created_at, c.id, a.attempt, a.finished_at NULLS LAST;

-- name: batch_audit_trail
-- What happened to a batch.
SELECT e.type, e.at, NULL::uuid, NULL::integer, w.name, e.operator, e.batch_id, e.details::text
  FROM busload.event AS e LEFT JOIN busload.worker AS w ON w.worker = e.worker
 WHERE e.lo IS NULL AND e.batch_id = (SELECT batch_id FROM busload.batch
                                       WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text
                                         AND pruned_at IS NULL)
 ORDER BY e.at, e.event;

-- name: domains
-- Every domain that has something to show.
SELECT domain FROM busload.batch
UNION SELECT domain FROM busload.queue
UNION SELECT domain FROM busload.scheduled
UNION SELECT domain FROM busload.outbox
UNION SELECT domain FROM busload.lease
UNION SELECT domain FROM busload.troubleshooting
ORDER BY domain;

-- name: living_workers
-- Who serves a domain: workers that have not stopped and were seen within the time that their leases last.
SELECT name FROM busload.worker
 WHERE stopped_at IS NULL AND seen_at > now() - lease_for AND %(domain)s::text = ANY (domains)
 ORDER BY name;

-- name: find_batch
-- Batches by the beginning of their id, which is a range of ids.
SELECT domain, batch_id, concat_ws(', ', name, status) FROM busload.batch
 WHERE batch_id BETWEEN %(first)s::uuid AND %(last)s::uuid AND pruned_at IS NULL
   AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
 ORDER BY batch_id LIMIT %(limit)s::integer;

-- name: find_command
-- Commands by the beginning of their id. Their index begins with the domain: the search goes from each domain
-- to the next, and in each domain to the range.
WITH RECURSIVE place (domain) AS (
    SELECT coalesce(%(domain)s::text, (SELECT min(domain) FROM busload.command))
    UNION ALL
    SELECT (SELECT min(c.domain) FROM busload.command AS c WHERE c.domain > p.domain)
      FROM place AS p WHERE p.domain IS NOT NULL AND %(domain)s::text IS NULL
)
SELECT p.domain, c.command_id, c.command_type
  FROM place AS p
 CROSS JOIN LATERAL (SELECT command_id, command_type FROM busload.command
                      WHERE domain = p.domain AND command_id BETWEEN %(first)s::uuid AND %(last)s::uuid
                      ORDER BY command_id LIMIT %(limit)s::integer) AS c
 ORDER BY c.command_id, p.domain LIMIT %(limit)s::integer;

-- name: find_job
-- Jobs by the beginning of their id.
SELECT domain, job_id, concat_ws(', ', name, status) FROM busload.job
 WHERE job_id BETWEEN %(first)s::uuid AND %(last)s::uuid
   AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
 ORDER BY job_id LIMIT %(limit)s::integer;

-- name: find_job_of_batches
-- Ids by which batches are found: those of jobs, and those that applications have chosen.
SELECT domain, job_id, '' FROM busload.batch
 WHERE job_id BETWEEN %(first)s::uuid::text AND %(last)s::uuid::text
   AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
 GROUP BY domain, job_id ORDER BY job_id LIMIT %(limit)s::integer;

-- name: known_domains
-- Every domain in which anything ever happened. An index finds the next domain without reading what is in
-- between.
WITH RECURSIVE of_command (domain) AS (
    SELECT min(domain) FROM busload.command
    UNION ALL
    SELECT (SELECT min(c.domain) FROM busload.command AS c WHERE c.domain > d.domain)
      FROM of_command AS d
     WHERE d.domain IS NOT NULL
), of_batch (domain) AS (
    SELECT min(domain)::text FROM busload.batch
    UNION ALL
    SELECT (SELECT min(b.domain)::text FROM busload.batch AS b WHERE b.domain > d.domain)
      FROM of_batch AS d
     WHERE d.domain IS NOT NULL
), of_event (domain) AS (
    (SELECT buffer FROM busload.buffered WHERE group_id IS NULL ORDER BY buffer LIMIT 1)
    UNION ALL
    SELECT (SELECT e.buffer
              FROM busload.buffered AS e
             WHERE e.group_id IS NULL AND e.buffer > d.domain ORDER BY e.buffer LIMIT 1)
      FROM of_event AS d WHERE d.domain IS NOT NULL
)
SELECT domain FROM (
    SELECT domain FROM of_command
    UNION SELECT domain FROM of_batch
    UNION SELECT domain FROM of_event
    UNION SELECT buffer FROM busload.buffer
    UNION SELECT unnest(domains) FROM busload.worker
    UNION SELECT domain FROM busload.pause) AS known
 WHERE domain IS NOT NULL ORDER BY domain;
