-- fragment: batch
batch_id, domain, name, custom_data, status, total_count, completed_count, failed_count, canceled_count,
in_troubleshooting_count, created_at, started_at, completed_at, sealed_at, canceled_at, on_complete, job_id,
stage, batch_type, headers

-- fragment: job
job_id, domain, name, custom_data, status, operator, reason, created_at, completed_at, compensated_at,
batch_id

-- fragment: key_of
-- The task key that a command `c` holds.
t.domain = c.domain AND t.task_key = c.task_key AND t.command_id = c.command_id

-- fragment: commands_of_loads
-- The commands `c` in loads of the batch `b`, beginning behind `after`. The first command of a load finds the
-- others.
FROM busload.command AS first
JOIN busload.command AS c ON c.id BETWEEN first.id AND (first.id | 1023)
WHERE first.batch_id = b.batch_id AND first.id & 1023 = 0 AND first.id > %(after)s::bigint

-- fragment: loads_of_ids
(SELECT DISTINCT id >> 10 AS load FROM unnest(%(ids)b::bigint[]) AS id)

-- fragment: nothing_is_left
-- No command that the event or the expiry `v` is about stays.
NOT EXISTS (
    SELECT
      FROM busload.command AS c
     WHERE c.id BETWEEN v.lo AND v.hi AND c.id NOT IN (SELECT unnest(%(ids)b::bigint[]))
    OFFSET 0
)

-- fragment: young
-- A batch `b` has not ended before the cutoff, or its callback has not.
(b.completed_at IS NULL OR b.completed_at >= %(cutoff)s::timestamptz
 OR b.on_complete IS NOT NULL AND EXISTS (
    SELECT FROM busload.command AS c
     WHERE c.domain = b.domain AND c.command_id = (b.on_complete ->> 'command_id')::uuid
       AND NOT EXISTS (SELECT FROM busload.removable(ARRAY[c.id], %(cutoff)s::timestamptz)) OFFSET 0))

-- fragment: in_young_batch
-- The job `j` counts in a batch of jobs that is young.
EXISTS (SELECT FROM busload.batch AS b WHERE b.batch_id = j.batch_id AND {young} OFFSET 0)

-- name: begin
-- One prune at a time, transaction by transaction; a dry run needs no turn. Nothing is read from end to end.
-- Nothing waits for the disk: what a crash undoes, the next prune removes.
SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true),
       set_config('synchronous_commit', 'off', true),
       CASE WHEN %(alone)s::boolean THEN pg_advisory_xact_lock(27711006262190437)::text END;

-- name: cutoff
-- Everything that ended before this time may go.
SELECT now() - %(older_than)s::interval;

-- name: remove_jobs
-- Remove jobs that ended before the cutoff. They go before their batches: whoever resumes a job finds all of
-- it, or nothing. Jobs of a batch of jobs stay as long as that batch is young.
WITH old AS MATERIALIZED (
    SELECT job_id FROM busload.job AS j
     WHERE completed_at IS NOT NULL AND completed_at < %(cutoff)s::timestamptz AND NOT {in_young_batch}
     ORDER BY completed_at, job_id LIMIT %(limit)s::integer FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM busload.job WHERE job_id = ANY (ARRAY(SELECT job_id FROM old)) RETURNING *
), archived AS (
    INSERT INTO busload.archived_job ({job}, stages)
    SELECT {job},
           (SELECT json_agg(
                       json_build_object(
                           'name', s.name,
                           'status', CASE WHEN s.status = 'PLANNING' AND j.status = 'CANCELED'
                                          THEN 'CANCELED' ELSE s.status END,
                           'batch_id', s.batch_id,
                           'compensation_batch_id', CASE WHEN s.undo = 'DONE' THEN s.undo_batch_id END
                       ) ORDER BY s.position)
              FROM busload.job_stage AS s
             WHERE s.job_id = j.job_id)
      FROM gone AS j
     WHERE %(archive)s::boolean
)
SELECT count(*)::integer FROM gone;

-- name: remove_fires
-- Remove what schedules have fired before the cutoff from their history.
WITH gone AS (
    DELETE FROM busload.fire
     WHERE fire = ANY (ARRAY(SELECT fire FROM busload.fire WHERE fired_at < %(cutoff)s::timestamptz
                              ORDER BY fired_at LIMIT %(limit)s::integer))
    RETURNING fire
)
SELECT count(*)::integer FROM gone;

-- name: remove_disagreements
-- Remove what two trackers have disagreed about before the cutoff.
WITH gone AS (
    DELETE FROM busload.tracker_disagreement
     WHERE disagreement = ANY (ARRAY(SELECT disagreement
                                       FROM busload.tracker_disagreement
                                      WHERE at < %(cutoff)s::timestamptz
                                      ORDER BY at
                                      LIMIT %(limit)s::integer))
    RETURNING disagreement
)
SELECT count(*)::integer FROM gone;

-- name: ended_batches
-- Batches that completed before the cutoff, and whose callback and job, if they have one, have ended before
-- it as well. A batch of jobs goes after its jobs.
SELECT b.batch_id, b.total_count, b.completed_at FROM busload.batch AS b
 WHERE b.completed_at IS NOT NULL AND b.pruned_at IS NULL AND b.completed_at < %(cutoff)s::timestamptz
   AND (b.completed_at, b.batch_id) > (%(after_time)s::timestamptz, %(after)s::uuid)
   AND NOT {young}
   AND (b.job_id IS NULL OR NOT EXISTS (
        SELECT FROM busload.job AS j
         WHERE j.job_id = busload.uuid_of(b.job_id)
           AND (j.completed_at IS NULL OR j.completed_at >= %(cutoff)s::timestamptz OR {in_young_batch})
        OFFSET 0))
   AND (b.batch_type = 'COMMANDS' OR %(dry_run)s::boolean OR NOT EXISTS (
        SELECT FROM busload.job AS j WHERE j.batch_id = b.batch_id OFFSET 0))
 ORDER BY b.completed_at, b.batch_id LIMIT %(limit)s::integer;

-- name: mark
-- From here on these batches are not shown any more, and will be removed. A row that somebody holds is left
-- to the next run.
UPDATE busload.batch SET pruned_at = now()
 WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM busload.batch
                              WHERE batch_id = ANY (%(batch_ids)b::uuid[]) AND pruned_at IS NULL
                              ORDER BY batch_id FOR NO KEY UPDATE SKIP LOCKED));

-- name: marked_batches
-- Batches that are marked, and not removed yet.
SELECT batch_id, total_count FROM busload.batch
 WHERE pruned_at IS NOT NULL AND batch_id > %(after)s::uuid ORDER BY batch_id LIMIT %(limit)s::integer;

-- name: members
-- The commands in the next whole loads of these batches: a load goes as a whole or not at all. A load with a
-- command that has not ended stays; a complete batch should have none.
WITH part AS (
    SELECT b.batch_id, p.upto FROM unnest(%(batch_ids)b::uuid[]) AS b (batch_id) CROSS JOIN LATERAL (
        SELECT max(id) | 1023 AS upto
          FROM (SELECT c.id {commands_of_loads} ORDER BY first.id LIMIT %(limit)s::integer) AS c) AS p
), member AS MATERIALIZED (
    SELECT c.id
      FROM part AS b
     CROSS JOIN LATERAL (SELECT c.id {commands_of_loads} AND first.id <= b.upto OFFSET 0) AS c
), ended AS MATERIALIZED (
    SELECT id FROM busload.removable(ARRAY(SELECT id FROM member), 'infinity') AS id
), kept AS (
    SELECT DISTINCT id >> 10 AS load FROM member WHERE id NOT IN (SELECT id FROM ended)
)
SELECT (SELECT count(*) FROM member)::integer, (SELECT max(upto) FROM part),
       ARRAY(SELECT id FROM ended WHERE id >> 10 NOT IN (SELECT load FROM kept));

-- name: seek
-- Find the next command that is old and has no batch. Loads are passed over by their first command: a load of
-- a batch as a whole, and a young load as a whole, because the commands of a load were sent one after the
-- other. The last column says whether anything old was found. Many young loads in a row mean that nothing
-- older follows.
WITH RECURSIVE load AS (
    (SELECT id, created_at < %(cutoff)s::timestamptz AS old, batch_id, 1 AS nth
       FROM busload.command WHERE id >= %(start)s::bigint ORDER BY id LIMIT 1)
    UNION ALL
    SELECT c.id, c.created_at < %(cutoff)s::timestamptz, c.batch_id, load.nth + 1
      FROM load CROSS JOIN LATERAL (
            SELECT * FROM busload.command AS c WHERE c.id > (load.id | 1023) ORDER BY c.id LIMIT 1) AS c
     WHERE load.nth < %(limit)s::integer AND NOT (load.old AND load.batch_id IS NULL)
)
SELECT max(id), coalesce(bool_or(old AND batch_id IS NULL), false), coalesce(bool_or(old), false) FROM load;

-- name: singles
-- The next commands that have no batch, up to the end of a load. A callback stays as long as its batch does.
WITH part AS (
    SELECT max(id) | 1023 AS upto
      FROM (SELECT id
              FROM busload.command WHERE id >= %(start)s::bigint ORDER BY id LIMIT %(limit)s::integer) AS c
), old AS MATERIALIZED (
    SELECT c.id FROM busload.command AS c
     WHERE c.id BETWEEN %(start)s::bigint AND (SELECT upto FROM part)
       AND c.batch_id IS NULL AND c.created_at < %(cutoff)s::timestamptz
       AND NOT EXISTS (
            SELECT FROM busload.batch AS b
             WHERE b.on_complete IS NOT NULL
               AND (b.on_complete ->> 'command_id')::uuid = c.command_id
               AND b.domain = c.domain
               AND b.pruned_at IS NULL
               AND NOT (%(dry_run)s::boolean AND b.completed_at < %(cutoff)s::timestamptz)
            OFFSET 0)
)
SELECT (SELECT upto FROM part),
       ARRAY(SELECT id FROM busload.removable(ARRAY(SELECT id FROM old), %(cutoff)s::timestamptz) AS id);

-- name: free_tasks
-- Free the task keys that these commands still hold although their time is over. Returns the loads of
-- commands that hold their keys for longer, and of commands whose keys a sender is just taking. To wait for
-- that sender could deadlock, and if it rolls back, the key needs its command. These loads are left to a
-- later run.
WITH held AS MATERIALIZED (
    SELECT c.id, c.domain, c.task_key, c.command_id FROM busload.command AS c
      JOIN busload.task AS t ON {key_of}
     WHERE c.id = ANY (%(ids)b::bigint[]) AND c.task_key IS NOT NULL
), locked AS MATERIALIZED (
    SELECT c.id, c.domain, c.task_key, c.command_id
      FROM held AS c
      JOIN busload.task AS t ON {key_of}
     WHERE t.held_until <= now()
       FOR UPDATE OF t SKIP LOCKED
), freed AS (
    DELETE FROM busload.task AS t USING locked AS c WHERE {key_of}
)
SELECT DISTINCT id >> 10 FROM held WHERE id NOT IN (SELECT id FROM locked);

-- name: holding
-- The loads of commands that still hold their keys: what `free_tasks` leaves to a later run, if nobody is
-- sending.
SELECT DISTINCT c.id >> 10 FROM busload.command AS c
  JOIN busload.task AS t ON {key_of}
 WHERE c.id = ANY (%(ids)b::bigint[]) AND c.task_key IS NOT NULL AND t.held_until > now();

-- name: remove
-- Remove commands with their executions, and those of their events and expiries that are about no other
-- command. If they go to the archive, they go there in the same statement. What they counted as is kept.
WITH gone AS (
    DELETE FROM busload.command WHERE id = ANY (%(ids)b::bigint[]) RETURNING *
), attempt AS (
    DELETE FROM busload.execution WHERE command = ANY (%(ids)b::bigint[]) RETURNING *
), event AS MATERIALIZED (
    SELECT v.* FROM {loads_of_ids} AS l
     CROSS JOIN LATERAL (SELECT * FROM busload.event AS v WHERE v.lo >> 10 = l.load OFFSET 0) AS v
), over AS (
    DELETE FROM busload.event WHERE event = ANY (ARRAY(
        SELECT v.event FROM event AS v
         WHERE {nothing_is_left}))
    RETURNING event
), untimed AS (
    DELETE FROM busload.expiry WHERE lo = ANY (ARRAY(
        SELECT v.lo FROM {loads_of_ids} AS l
         CROSS JOIN LATERAL (SELECT lo, hi FROM busload.expiry AS v
                              WHERE v.lo BETWEEN l.load << 10 AND (l.load << 10 | 1023) OFFSET 0) AS v
         WHERE {nothing_is_left}))
), counted AS (
    INSERT INTO busload.daily AS d (day, domain, way, commands)
    SELECT (created_at AT TIME ZONE 'UTC')::date, domain, busload.way_of(command_type), count(*)
      FROM gone WHERE batch_id IS NULL GROUP BY 1, 2, 3
        ON CONFLICT (day, domain, way, strategy) DO UPDATE SET commands = d.commands + excluded.commands
), archived AS (
    INSERT INTO busload.archive (id, domain, command_id, command_type, data, batch_id, task_key,
                                 correlation_id, reply_to, priority, max_attempts, run_at, created_at,
                                 headers, executions, events)
    SELECT g.id, g.domain, g.command_id, g.command_type, g.data, g.batch_id, g.task_key,
           g.correlation_id, g.reply_to, g.priority, g.max_attempts, g.run_at, g.created_at,
           g.headers, coalesce(a.executions, '[]'), coalesce(v.events, '[]')
      FROM gone AS g
      LEFT JOIN (SELECT a.command, json_agg(json_build_object(
                            'attempt', a.attempt, 'outcome', a.outcome,
                            'execution_id', busload.execution_id(a.lease_id, a.command), 'worker', w.name,
                            'started_at', a.started_at, 'finished_at', a.finished_at, 'details', a.details)
                            ORDER BY a.attempt) AS executions
                   FROM attempt AS a
                   LEFT JOIN busload.worker AS w USING (worker)
                  GROUP BY a.command) AS a ON a.command = g.id
      LEFT JOIN (SELECT id, json_agg(json_build_object(
                            'type', v.type, 'at', v.at, 'attempt', v.attempt,
                            'execution_id', busload.execution_id(v.lease_id, id), 'worker', w.name,
                            'operator', v.operator, 'details', v.details)
                            ORDER BY v.event) AS events
                   FROM event AS v LEFT JOIN busload.worker AS w USING (worker)
                  CROSS JOIN LATERAL generate_series(v.lo, v.hi) AS id GROUP BY id) AS v ON v.id = g.id
     WHERE %(archive)s::boolean
)
SELECT (SELECT count(*) FROM gone)::integer, (SELECT count(*) FROM attempt)::integer,
       (SELECT count(*) FROM over)::integer;

-- name: remove_batches
-- Remove those of these batches that have no command left, with their events. What they counted as is kept.
WITH empty AS MATERIALIZED (
    SELECT batch_id FROM busload.batch AS b
     WHERE batch_id = ANY (%(batch_ids)b::uuid[]) AND pruned_at IS NOT NULL
       AND NOT EXISTS (SELECT
                         FROM busload.command AS c
                        WHERE c.batch_id = b.batch_id AND c.id & 1023 = 0
                       OFFSET 0)
     ORDER BY batch_id FOR UPDATE SKIP LOCKED
), over AS (
    DELETE FROM busload.event WHERE lo IS NULL AND batch_id = ANY (ARRAY(SELECT batch_id FROM empty))
    RETURNING *
), gone AS (
    DELETE FROM busload.batch WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM empty)) RETURNING *
), counted AS (
    INSERT INTO busload.daily AS d
           (day, domain, way, strategy, commands, batches, published, dispatched, attempts)
    SELECT c.day, c.domain, c.way, c.strategy, sum(c.commands), count(*), count(*) FILTER (WHERE c.published),
           count(c.attempts), coalesce(sum(c.attempts), 0)
      FROM busload.counted_batch AS c JOIN gone USING (batch_id)
     GROUP BY c.day, c.domain, c.way, c.strategy
        ON CONFLICT (day, domain, way, strategy) DO UPDATE
       SET commands = d.commands + excluded.commands, batches = d.batches + excluded.batches,
           published = d.published + excluded.published, dispatched = d.dispatched + excluded.dispatched,
           attempts = d.attempts + excluded.attempts
), archived AS (
    INSERT INTO busload.archived_batch ({batch}, events)
    SELECT {batch}, coalesce(v.events, '[]')
      FROM gone LEFT JOIN (
            SELECT v.batch_id,
                   json_agg(json_build_object('type', v.type, 'at', v.at, 'worker', w.name,
                                              'operator', v.operator, 'details', v.details)
                            ORDER BY v.event) AS events
              FROM over AS v
              LEFT JOIN busload.worker AS w USING (worker)
             GROUP BY v.batch_id) AS v USING (batch_id)
     WHERE %(archive)s::boolean
)
SELECT (SELECT count(*) FROM gone)::integer, (SELECT count(*) FROM over)::integer;

-- name: count
-- What `remove` would remove.
SELECT cardinality(%(ids)b::bigint[]),
       (SELECT count(*) FROM unnest(%(ids)b::bigint[]) AS c (id)
         CROSS JOIN LATERAL (SELECT
                               FROM busload.execution AS e
                              WHERE e.command = c.id
                             OFFSET 0) AS e)::integer,
       (SELECT count(*) FROM {loads_of_ids} AS l
         CROSS JOIN LATERAL (SELECT lo, hi FROM busload.event AS v WHERE v.lo >> 10 = l.load OFFSET 0) AS v
         WHERE {nothing_is_left})::integer;

-- name: count_batches
-- What `remove_batches` would remove.
SELECT cardinality(%(batch_ids)b::uuid[]),
       (SELECT count(*)
          FROM busload.event
         WHERE lo IS NULL AND batch_id = ANY (%(batch_ids)b::uuid[]))::integer;

-- name: ended
-- A prune has come to its end.
UPDATE busload.turn SET ended_at = now(), details = %(details)s::json WHERE what = 'prune';

-- name: take_turn
-- Take the turn to prune, if it is time and nobody else has begun. Returns whether it was taken, and the
-- seconds until the next turn.
WITH taken AS (
    UPDATE busload.turn
       SET taken_at = now()
     WHERE what = 'prune' AND taken_at <= now() - %(every)s::interval
    RETURNING what
)
SELECT EXISTS (SELECT FROM taken),
       extract(
           epoch FROM greatest(taken_at, now() - %(every)s::interval) + %(every)s::interval - now()
       )::float8
  FROM busload.turn WHERE what = 'prune';
