-- fragments of: busload.commands.load
-- fragments of: busload.commands.search
-- fragments of: busload.commands.task_keys

-- fragment: run_of_task
-- A command that a tracker has enqueued for this task.
c.task_key = %(task_key)s::text AND c.command_type = 'TrackedTask' AND c.id & 1023 = 0

-- fragment: announced_id
-- The id by which a command `c` that waits can be claimed: that of the last retry, or that which enqueueing
-- it returned.
coalesce(
    (SELECT v.lease_id
       FROM busload.event AS v
      WHERE v.lo >> 10 = c.id >> 10
        AND v.lo = c.id
        AND v.type = 'OPERATOR_RETRIED'
        AND v.lease_id IS NOT NULL
      ORDER BY v.event DESC
      LIMIT 1),
    c.command_id
)

-- fragment: announced_id_is_used
-- Whether an execution has used up the id `a.lease_id`: a lease is the fence for its results, so its id is
-- used once.
(
    EXISTS (SELECT FROM busload.execution AS e WHERE e.command = a.id AND e.lease_id = a.lease_id OFFSET 0)
    OR EXISTS (
        SELECT
          FROM busload.event AS v
         WHERE v.lo >> 10 = a.id >> 10
           AND v.lo = a.id
           AND v.lease_id = a.lease_id
           AND v.type <> 'OPERATOR_RETRIED'
        OFFSET 0
    )
)

-- fragment: waiting_since
-- When the newest attempt of the command `c` was created: nothing has ended since then.
SELECT greatest(
    c.created_at,
    (SELECT max(e.finished_at) FROM busload.execution AS e WHERE e.command = c.id),
    (SELECT max(v.at)
       FROM busload.event AS v
      WHERE v.lo >> 10 = c.id >> 10
        AND v.lo = c.id
        AND v.type IN ('LEASE_LOST', 'RELEASED', 'OPERATOR_RETRIED'))
) AS at

-- fragment: events_of
-- The events of the command `c`: what the fragments of an attempt read. A task is alone in its load.
event AS MATERIALIZED (
    SELECT c.id, v.*
      FROM task AS c
     CROSS JOIN LATERAL (SELECT * FROM busload.event AS v
                          WHERE v.lo >> 10 = c.id >> 10 AND v.lo = c.id OFFSET 0) AS v
)

-- name: lock_task
-- Let nobody else look for the holder of a task until this transaction has ended.
SELECT pg_advisory_xact_lock(hashtextextended('busload.task ' || %(task_key)s::text, 0));

-- name: holder
-- Who holds a task in one of these domains.
SELECT t.domain, t.command_id
  FROM busload.task AS t
 WHERE t.domain = ANY (%(domains)b::text[]) AND t.task_key = %(task_key)s::text AND NOT ({key_is_free})
 LIMIT 1;

-- name: enqueued_at
-- When a task was enqueued.
SELECT created_at FROM busload.command WHERE domain = %(domain)s::text AND command_id = %(command_id)s::uuid;

-- name: find
-- The command of a task that an execution_id belongs to: the announced id, or the id of any lease that it
-- ever had. Two keys find the usual ones, however often the task has run: the domain of its newest run with
-- the announced id, and the lease. For other ids the runs of the task are read, from the newest back. With
-- `patience`, in milliseconds, no lock is waited for any longer than that from here on.
WITH domain AS MATERIALIZED (
    SELECT domain
      FROM busload.command
     WHERE task_key = %(task_key)s::text AND command_type = 'TrackedTask'
     ORDER BY id DESC
     LIMIT 1
)
SELECT id,
       CASE WHEN %(patience)s::integer IS NOT NULL
            THEN set_config('lock_timeout', %(patience)s::integer::text, true) END
  FROM (
SELECT id FROM busload.command
 WHERE domain = (SELECT domain FROM domain) AND command_id = %(execution_id)s::uuid
   AND task_key = %(task_key)s::text AND command_type = 'TrackedTask' AND id & 1023 = 0
UNION ALL
SELECT c.id
  FROM busload.lease AS l CROSS JOIN LATERAL (SELECT * FROM busload.command WHERE id = l.hi OFFSET 0) AS c
 WHERE l.lease_id = %(execution_id)s::uuid AND {run_of_task}
UNION ALL
(SELECT id FROM busload.command AS c
  WHERE {run_of_task}
    AND (c.command_id = %(execution_id)s::uuid
         OR EXISTS (SELECT
                      FROM busload.execution AS e
                     WHERE e.command = c.id AND e.lease_id = %(execution_id)s::uuid
                    OFFSET 0)
         OR EXISTS (SELECT FROM busload.event AS v
                     WHERE v.lo >> 10 = c.id >> 10 AND v.lo = c.id
                       AND v.lease_id = %(execution_id)s::uuid OFFSET 0))
  ORDER BY c.id DESC LIMIT 1)
LIMIT 1) AS found;

-- name: claim
-- Take one task, from wherever it waits. The place of its command decides, not the id by which it was found.
-- The announced id becomes the id of the lease, if no lease had it before. If the task is not taken, the
-- first columns say what was found: the worker that asks was declared dead, the task waits after all, its
-- lease has lapsed, or a worker that takes everything of its domains is about to give it back. Nothing is
-- taken from a paused queue.
WITH alive AS MATERIALIZED (
    SELECT worker, name FROM busload.worker WHERE worker = %(worker)s::bigint AND stopped_at IS NULL
), task AS MATERIALIZED (
    SELECT * FROM busload.command WHERE id = %(command)s::bigint
), {events_of}, announced AS (
    SELECT id, {announced_id} AS lease_id FROM task AS c
), fence AS (
    SELECT CASE WHEN {announced_id_is_used} THEN %(fresh)s::uuid ELSE a.lease_id END AS lease_id
      FROM announced AS a
), free AS MATERIALIZED (
    SELECT id
      FROM task
     WHERE NOT EXISTS (SELECT
                         FROM busload.pause AS p
                        WHERE p.resumed_at IS NULL AND p.domain = task.domain
                       OFFSET 0)
), ready AS (
    DELETE FROM busload.queue AS q USING free, alive WHERE q.hi = free.id RETURNING q.*
), later AS (
    DELETE FROM busload.scheduled AS s USING free, alive WHERE s.hi = free.id RETURNING s.*
), leased AS (
    INSERT INTO busload.lease (lease_id, {load}, worker, open)
    SELECT fence.lease_id, {load}, alive.worker, 1
      FROM (SELECT {load} FROM ready
            UNION ALL
            SELECT {load} FROM later) AS load
     CROSS JOIN fence CROSS JOIN alive
    RETURNING lease_id, domain, attempt, forgiven, since, NULL::timestamptz AS finished_at
), serves AS (
    UPDATE busload.worker AS w SET domains = w.domains || leased.domain FROM leased
     WHERE w.worker = %(worker)s::bigint AND leased.domain <> ALL (w.domains)
), held AS (
    SELECT w.worker IS NULL AS lapsed, w.concurrency > 0 AS passing
      FROM task JOIN busload.lease AS l ON l.hi = task.id AND task.id <> ALL (l.returned)
      LEFT JOIN busload.worker AS w
        ON w.worker = l.worker AND w.stopped_at IS NULL AND w.seen_at >= now() - w.lease_for
)
SELECT alive.worker IS NULL,
       EXISTS (SELECT FROM busload.queue WHERE hi = free.id)
       OR EXISTS (SELECT FROM busload.scheduled WHERE hi = free.id),
       EXISTS (SELECT FROM held WHERE lapsed),
       EXISTS (SELECT FROM held WHERE passing) AND free.id IS NOT NULL,
       a.lease_id, c.task_key, c.command_id, c.domain, a.attempt, 'processing', alive.name,
       {enqueued_at}, a.since, NULL::timestamptz, NULL::text, c.data::text, NULL::text, NULL::text,
       a.attempt - 1 - a.forgiven, a.attempt - a.forgiven < c.max_attempts
  FROM (SELECT) AS asked
  LEFT JOIN alive ON true
  LEFT JOIN task AS c ON true
  LEFT JOIN free ON true
  LEFT JOIN leased AS a ON true;

-- name: held
-- What a lease of these workers runs, and for how many seconds.
SELECT l.lease_id, l.lo, l.hi, l.domain, l.batch_id, l.priority, l.attempt, l.forgiven, l.crashes,
       c.created_at, c.command_id, c.command_type, c.task_key, c.max_attempts,
       extract(epoch FROM statement_timestamp() - l.since)::float8
  FROM busload.lease AS l JOIN busload.command AS c ON c.id = l.lo AND c.id = l.hi
 WHERE l.lease_id = %(execution_id)s::uuid AND c.command_id = %(command_id)s::uuid
   AND l.worker = ANY (%(workers)b::bigint[]);

-- name: ended
-- An attempt as it was recorded.
WITH task AS MATERIALIZED (
    SELECT * FROM busload.command WHERE domain = %(domain)s::text AND command_id = %(command_id)s::uuid
), {events_of}
SELECT a.lease_id, {execution}, NULL::text, {retries}
  FROM task AS c
  JOIN LATERAL (SELECT {recorded_attempt} FROM busload.execution AS e WHERE e.command = c.id) AS a ON true
 WHERE a.lease_id = %(execution_id)s::uuid;

-- name: retry
-- The newest command of a task that waits in troubleshooting goes back into the queue, with all its attempts
-- to use again. The event announces the id of its next execution. The runs of a task may be many, and so may
-- be the commands in troubleshooting. The search leaps from one list to the next entry of the other, from the
-- newest back, and reads nothing in between.
WITH RECURSIVE leap AS (
    (SELECT c.id, (SELECT max(t.command) FROM busload.troubleshooting AS t WHERE t.command <= c.id) AS parked
       FROM busload.command AS c
      WHERE {run_of_task}
      ORDER BY c.id DESC LIMIT 1)
    UNION ALL
    SELECT run.id, (SELECT max(t.command) FROM busload.troubleshooting AS t WHERE t.command <= run.id)
      FROM leap CROSS JOIN LATERAL (
            SELECT c.id FROM busload.command AS c
             WHERE {run_of_task} AND c.id <= leap.parked
             ORDER BY c.id DESC LIMIT 1) AS run
     WHERE leap.parked < leap.id
), newest AS MATERIALIZED (
    SELECT id FROM leap WHERE id = parked
), taken AS (
    DELETE FROM busload.troubleshooting AS t
     USING newest JOIN busload.command AS c USING (id)
     WHERE t.command = newest.id
    RETURNING t.command, t.domain, t.batch_id, t.priority, t.attempt, t.fair, c.task_key,
              c.command_id, c.data, c.max_attempts
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, fair)
    SELECT command, command, domain, batch_id, priority, attempt + 1, attempt, fair FROM taken
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, operator)
    SELECT 'OPERATOR_RETRIED', command, command, batch_id, attempt, %(execution_id)s::uuid, %(operator)s::text
      FROM taken
    RETURNING at
)
SELECT %(execution_id)s::uuid, task_key, command_id, domain, attempt + 1, 'queued', NULL::text, noted.at,
       NULL::timestamptz, NULL::timestamptz, NULL::text, data::text, NULL::text, NULL::text, 0,
       max_attempts > 1
  FROM taken CROSS JOIN noted;

-- name: announced
-- The ids by which waiting commands can be claimed, and whether an execution has used them up.
SELECT c.command_id, a.lease_id, {announced_id_is_used}
  FROM busload.command AS c
 CROSS JOIN LATERAL (SELECT c.id, {announced_id} AS lease_id) AS a
 WHERE c.task_key = %(task_key)s::text AND c.command_type = 'TrackedTask'
   AND c.command_id = ANY (%(command_ids)b::uuid[]);

-- name: current
-- The newest attempt of a command, whatever else its task has done. While the command waits, the id is one by
-- which it can be claimed. A command that is no task has no attempt here: only its type is returned.
WITH task AS MATERIALIZED (
    SELECT * FROM busload.command WHERE domain = %(domain)s::text AND command_id = %(command_id)s::uuid
), {attempts_of_task}
SELECT c.command_type, coalesce(a.lease_id, {announced_id}), {execution}, {actions}, {retries}
  FROM task AS c
  LEFT JOIN attempt AS a ON c.command_type = 'TrackedTask' AND a.status NOT IN ('lost', 'canceled')
 ORDER BY a.attempt DESC, a.finished_at DESC NULLS FIRST
 LIMIT 1;

-- name: waiting
-- Tasks of a queue that have waited for so long without being claimed: since they were enqueued, failed, were
-- lost with their worker, were handed back, or were retried by an operator. The oldest come first. A task
-- that was named before is not due until it has waited as long again. Nothing of a paused queue is due. A
-- task that a worker without a handler has given back waits for a time that means nothing here.
WITH place AS (
    SELECT hi, domain, attempt, forgiven FROM busload.queue
     WHERE domain = ANY (%(domains)b::text[]) AND crashes = 0 AND lo = hi
    UNION ALL
    SELECT hi, domain, attempt, forgiven FROM busload.queue
     WHERE domain = ANY (%(domains)b::text[]) AND crashes > 0 AND lo = hi
    UNION ALL
    SELECT hi, domain, attempt, forgiven FROM busload.scheduled
     WHERE (run_at <= now() OR reason = 'NO_HANDLER') AND domain = ANY (%(domains)b::text[]) AND lo = hi
)
SELECT c.id, {announced_id}, c.task_key, c.command_id, c.domain, place.attempt, 'queued', NULL::text,
       since.at, NULL::timestamptz, NULL::timestamptz, NULL::text, c.data::text, NULL::text, NULL::text,
       place.attempt - 1 - place.forgiven, place.attempt - place.forgiven < c.max_attempts
  FROM place
 CROSS JOIN LATERAL (SELECT * FROM busload.command AS c
                      WHERE c.id = place.hi AND c.command_type = 'TrackedTask' AND c.task_key IS NOT NULL
                        AND c.created_at <= now() - %(waiting_for)s::interval OFFSET 0) AS c
 CROSS JOIN LATERAL ({waiting_since}) AS since
 WHERE since.at <= now() - %(waiting_for)s::interval
   AND NOT EXISTS (SELECT
                     FROM busload.pause AS p
                    WHERE p.resumed_at IS NULL AND p.domain = place.domain
                   OFFSET 0)
 ORDER BY since.at, c.id
 LIMIT %(limit)s::integer;

-- name: postpone
-- These tasks are about to be published again. They wait on, and are not named again until they have waited
-- as long again. They can be claimed at any time. Returns the tasks that nobody else has claimed or named
-- meanwhile.
WITH ready AS (
    DELETE FROM busload.queue
     WHERE hi IN (SELECT hi
                    FROM busload.queue
                   WHERE hi = ANY (%(ids)b::bigint[])
                   ORDER BY hi
                     FOR UPDATE SKIP LOCKED)
    RETURNING *
), moved AS (
    INSERT INTO busload.scheduled ({load}, run_at, reason)
    SELECT {load}, now() + %(waiting_for)s::interval, 'RETRY' FROM ready
    RETURNING hi
), later AS (
    UPDATE busload.scheduled SET run_at = now() + %(waiting_for)s::interval, reason = 'RETRY'
     WHERE hi IN (SELECT hi FROM busload.scheduled
                   WHERE hi = ANY (%(ids)b::bigint[]) AND (run_at <= now() OR reason = 'NO_HANDLER')
                   ORDER BY hi FOR UPDATE SKIP LOCKED)
    RETURNING hi
)
SELECT hi FROM moved UNION ALL SELECT hi FROM later;

-- name: lost
-- Tasks of a queue that are held by workers that are not alive any more. A rescue would let them wait again.
SELECT l.lease_id, c.task_key, c.command_id, c.domain, l.attempt, 'lost', w.name, since.at, l.since,
       NULL::timestamptz, 'The worker died, or lost its lease.', c.data::text, NULL::text, NULL::text,
       l.attempt - 1 - l.forgiven, true
  FROM busload.lease AS l
 CROSS JOIN LATERAL (SELECT *
                       FROM busload.command
                      WHERE id = l.hi AND command_type = 'TrackedTask'
                     OFFSET 0) AS c
 CROSS JOIN LATERAL ({waiting_since}) AS since
  LEFT JOIN busload.worker AS w ON w.worker = l.worker
 WHERE l.domain = ANY (%(domains)b::text[]) AND l.lo = l.hi AND c.id <> ALL (l.returned)
   AND (w.worker IS NULL OR w.stopped_at IS NOT NULL OR w.seen_at < now() - w.lease_for)
 ORDER BY l.since, l.lease_id
 LIMIT %(limit)s::integer;

-- name: ids
-- The commands of these tasks.
SELECT c.id FROM unnest(%(domains)b::text[], %(command_ids)b::uuid[]) AS task (domain, command_id)
  JOIN busload.command AS c USING (domain, command_id);

-- name: leases
-- The leases that these workers hold.
SELECT lease_id FROM busload.lease WHERE worker = ANY (%(workers)b::bigint[]) ORDER BY lease_id;

-- name: retire
-- Stop the numbers of a tracker that run nothing any more. A number that still holds a lease stays, until its
-- leases lapse.
UPDATE busload.worker AS w SET stopped_at = now()
 WHERE worker = ANY (%(workers)b::bigint[]) AND stopped_at IS NULL
   AND NOT EXISTS (SELECT FROM busload.lease AS l WHERE l.worker = w.worker OFFSET 0);
