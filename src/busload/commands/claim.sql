-- fragments of: busload.commands.load

-- fragment: lease_id
-- The sender draws one id. The database counts on from it in 16 bits, and leaves 12 bits for the position of
-- a command.
(left(%(lease)s::text, 29) || lpad(to_hex(row_number() OVER ()), 4, '0') || '000')::uuid

-- fragment: leases_and_commands
-- The leases and their commands, one array for each column. Most commands have no task key, reply and so on:
-- then that column is null. A claim does not wait for the disk: if a crash undoes it, the commands are ready
-- again, and a result of theirs cannot be durable without it. It starts the batches that begin with it. If
-- somebody else holds the row of a batch, its first settlement starts it. The last column has the
-- headers of the commands that have some of their own, by id.
FROM (SELECT set_config('synchronous_commit', 'off', true)) AS hasty
CROSS JOIN (
    SELECT array_agg(lease_id),
           array_agg(lo),
           array_agg(hi),
           array_agg(domain),
           array_agg(batch_id),
           array_agg(priority),
           array_agg(attempt),
           array_agg(forgiven),
           array_agg(crashes),
           array_agg(remaining),
           array_agg(budget_share),
           array_agg(headers),
           busload.start_batches(array_agg(batch_id) FILTER (WHERE status = 'PENDING'), %(worker)s::bigint)
      FROM (
        SELECT l.*, b.*
          FROM leased AS l
          LEFT JOIN LATERAL (
            SELECT remaining, budget_share, headers, status
              FROM busload.batch_to_claim
             WHERE batch_id = l.batch_id
            OFFSET 0
          ) AS b ON true
         ORDER BY l.priority DESC, l.hi
      ) AS lease
) AS l
CROSS JOIN (
    SELECT min(created_at),
           CASE WHEN min(created_at) < max(created_at) THEN array_agg(created_at) END,
           array_agg(id),
           array_agg(command_id),
           array_agg(command_type),
           array_agg(data::text),
           CASE WHEN count(task_key) > 0 THEN array_agg(task_key) END,
           CASE WHEN count(correlation_id) > 0 THEN array_agg(correlation_id) END,
           CASE WHEN count(reply_to) > 0 THEN array_agg(reply_to) END,
           CASE WHEN count(max_attempts) > 0 THEN array_agg(max_attempts) END,
           (json_object_agg(id, headers) FILTER (WHERE headers IS NOT NULL))::text
      FROM (SELECT * FROM leased ORDER BY priority DESC, hi) AS l
     CROSS JOIN LATERAL (SELECT * FROM busload.command WHERE id BETWEEN l.lo AND l.hi ORDER BY id) AS c
) AS c

-- fragment: alive
-- A worker that was declared dead gets nothing until its heartbeat has given it a new number.
alive AS (
    SELECT worker FROM busload.worker WHERE worker = %(worker)s::bigint AND stopped_at IS NULL
)

-- fragment: lock_wanted
-- Only as many loads are locked as are wanted, because a locked load is invisible to the other workers.
LIMIT w.loads
           FOR UPDATE SKIP LOCKED

-- fragment: loads_of_owner
-- The loads that an owner gets in a turn `w` of `busload.turns`.
SELECT *
          FROM busload.ready
         WHERE domain = w.domain AND crashes = 0 AND priority = w.priority
           -- Not `=`: a plan could then go by hi, and pass the loads of all others by.
           AND fair BETWEEN w.fair AND w.fair
         ORDER BY fair, hi
         {lock_wanted}

-- fragment: suspect
-- A load that was held by a worker when it died is a suspect. A worker runs one suspect at a time, so that
-- the next crash names its command.
suspect AS (
    SELECT *, false AS split
      FROM busload.ready
     WHERE domain = ANY (%(domains)s::text[]) AND crashes > 0
     ORDER BY priority DESC, hi
     LIMIT %(suspects)s::integer * (SELECT count(*) FROM alive)
       FOR UPDATE SKIP LOCKED
)

-- fragment: lease_taken
-- Lease the loads of `taken`, each up to `upto`: whole ones, and a part of the last one. Neighbours that were
-- sent one by one are leased together.
whole AS (
    DELETE FROM busload.queue WHERE hi = ANY (ARRAY(SELECT hi FROM taken WHERE upto = hi))
), split AS (   -- only the last load can be split: a scalar, so that no plan reads the whole queue for it
    UPDATE busload.queue
       SET lo = (SELECT upto FROM taken WHERE upto < hi) + 1
     WHERE hi = (SELECT hi FROM taken WHERE upto < hi)
), run AS (
    SELECT min(lo) AS lo, max(upto) AS hi, domain, batch_id, priority, attempt, forgiven, crashes, replies,
           fair
      FROM (
        SELECT *,
               upto - sum((upto - lo + 1)::integer) OVER (
                   PARTITION BY domain, batch_id, priority, attempt, forgiven, crashes, replies, fair,
                                hi >> 10
                   ORDER BY hi
                   ROWS UNBOUNDED PRECEDING
               ) AS island
          FROM taken
      ) AS part
     GROUP BY 3, 4, 5, 6, 7, 8, 9, 10, hi >> 10, island
), leased AS (
    INSERT INTO busload.lease (lease_id, {load}, worker, open)
    SELECT {lease_id}, run.*, %(worker)s::bigint, hi - lo + 1 FROM run
    RETURNING *
)

-- fragment: lease_ready
-- Lease the loads of `ready`: whole ones, and a part of the last one, which is one that may be `split`.
{suspect}, taken AS (
    SELECT *, least(hi, lo + %(limit)s::integer - before - 1) AS upto
      FROM (
        SELECT *,
               sum((hi - lo + 1)::integer) OVER (
                   ORDER BY priority DESC, crashes = 0, split, hi
                   ROWS UNBOUNDED PRECEDING
               ) - (hi - lo + 1) AS before
          FROM (SELECT * FROM suspect UNION ALL SELECT * FROM ready) AS load
      ) AS load
     WHERE before < %(limit)s::integer
), {lease_taken}

-- fragment: seen
-- How many commands were ready, as far as a claim looks; null for a worker that was declared dead.
CASE WHEN EXISTS (SELECT FROM alive)
     THEN (SELECT coalesce(sum(commands), 0) FROM wanted)::integer
END

-- name: claim
-- Take as many ready commands as were asked for. Higher priorities come first. Among equal ones
-- `busload.turns` says whose turn it is, and how many loads that are. `busload.ready` leaves out the batches
-- that are held or being canceled. The second column says for each domain whose turn was the last: the next
-- claim of this worker begins behind it. The third one says whether all that was in sight is of one owner.
WITH {alive}, wanted AS (
    SELECT t.*
      FROM alive
     CROSS JOIN busload.turns(%(domains)s::text[], %(after)s::bigint[], %(limit)s::integer) AS t
), ready AS (
    SELECT q.*, w.split
      FROM wanted AS w
     CROSS JOIN LATERAL (
        {loads_of_owner}
     ) AS q
), {lease_ready}
SELECT {seen},
       ARRAY(
        SELECT coalesce((SELECT fair FROM wanted AS w WHERE w.domain = d.domain AND rank = 1), after)
          FROM unnest(%(domains)s::text[], %(after)s::bigint[]) WITH ORDINALITY AS d (domain, after, nth)
         ORDER BY nth
       ),
       (SELECT count(*) = 1 AND bool_and(alone) FROM wanted),
       l.*, c.*
  {leases_and_commands};

-- name: claim_all
-- The same by a worker that has just found less than it asked for, or commands of one owner only: it need not
-- ask whose turn it is. If there is more by now, or of others too, this claim goes by age, and the next one
-- in turns. The third column says whether nobody has to wait for a turn: all of it fits, or no other owner of
-- this priority comes behind the first one.
WITH {alive}, wanted AS (
    SELECT d.domain, q.*
      FROM alive, unnest(%(domains)s::text[]) AS d (domain), LATERAL (
        SELECT count(*) AS loads, max(seen) AS commands, max(priority) AS priority, min(fair) AS fair
          FROM (
            SELECT *,
                   sum((hi - lo + 1)::integer) OVER (
                       ORDER BY priority DESC, fair, hi
                       ROWS UNBOUNDED PRECEDING
                   ) AS seen
              FROM busload.ready
             WHERE domain = d.domain AND crashes = 0
             ORDER BY priority DESC, fair, hi
             LIMIT %(limit)s::integer
          ) AS q
         WHERE seen - (hi - lo + 1) < %(limit)s::integer
     ) AS q
), ready AS (
    SELECT q.*, false AS split
      FROM wanted AS w, LATERAL (
        SELECT *
          FROM busload.ready
         WHERE domain = w.domain AND crashes = 0
         ORDER BY priority DESC, fair, hi
         {lock_wanted}
     ) AS q
), {lease_ready}
SELECT {seen},
       NULL::bigint[],
       (SELECT count(*) = 1 AND max((
            SELECT fair
              FROM busload.ready
             WHERE domain = w.domain AND crashes = 0 AND priority = w.priority AND fair > w.fair
               AND w.commands >= %(limit)s::integer
             ORDER BY fair
             LIMIT 1
          )) IS NULL
          FROM wanted AS w
         WHERE loads > 0),
       l.*, c.*
  {leases_and_commands};

-- name: claim_few
-- Take a few commands of owners with small loads, whole loads only: a claim for those who came while a large
-- batch is being run. What has crashed is left to `claim`.
WITH {alive}, taken AS (
    SELECT q.*, q.hi AS upto
      FROM alive
     CROSS JOIN busload.turns(%(domains)s::text[], %(after)s::bigint[], %(limit)s::integer) AS w
     CROSS JOIN LATERAL (
        {loads_of_owner}
     ) AS q
     WHERE NOT w.split
), {lease_taken}
SELECT l.*, c.*
  {leases_and_commands};

-- name: claim_delivered
-- Take commands of the loads that messages have named: as many of each load as was asked for. They come from
-- the queue, or from the outbox if their publisher has not yet marked them as published. Any command of the
-- load will do: a message only says that a look is worth it. Suspects are left to `claim`. The second column
-- has the loads that do not exist: not yet visible, pruned, or made up. The third one has the loads with
-- commands that could not be taken, because others have locked them.
WITH {alive}, load AS (
    SELECT r.*, load << 10 AS first
      FROM alive,
           unnest(%(loads)b::bigint[], %(wanted)b::integer[]) AS r (load, wanted)
), ready AS MATERIALIZED (
    SELECT q.*, r.load, r.wanted
      FROM load AS r, LATERAL (
        SELECT {load}
          FROM busload.ready
         WHERE hi BETWEEN r.first AND r.first + 1023 AND crashes = 0 AND domain = ANY (%(domains)s::text[])
           FOR UPDATE SKIP LOCKED
     ) AS q
), boxed AS MATERIALIZED (
    SELECT o.*, r.load, r.wanted
      FROM load AS r, LATERAL (
        SELECT {load}
          FROM busload.unmarked
         WHERE hi BETWEEN r.first AND r.first + 1023 AND crashes = 0 AND domain = ANY (%(domains)s::text[])
           FOR UPDATE SKIP LOCKED
     ) AS o
), taken AS (
    SELECT *, least(hi, lo + wanted - before - 1) AS upto
      FROM (
        SELECT *, sum((hi - lo + 1)::integer) OVER (PARTITION BY load ORDER BY hi) - (hi - lo + 1) AS before
          FROM (SELECT *, true AS queued FROM ready UNION ALL SELECT *, false FROM boxed) AS load
      ) AS load
     WHERE before < wanted
), whole AS (
    DELETE FROM busload.queue WHERE hi = ANY (ARRAY(SELECT hi FROM taken WHERE upto = hi AND queued))
), split AS (
    UPDATE busload.queue AS q
       SET lo = t.upto + 1
      FROM taken AS t
     WHERE q.hi = t.hi
       AND q.hi = ANY (ARRAY(SELECT hi FROM taken WHERE upto < hi AND queued))
       AND t.queued
), gone AS (
    DELETE FROM busload.outbox WHERE hi = ANY (ARRAY(SELECT hi FROM taken WHERE upto = hi AND NOT queued))
), cut AS (
    UPDATE busload.outbox AS o
       SET lo = t.upto + 1
      FROM taken AS t
     WHERE o.hi = t.hi
       AND o.hi = ANY (ARRAY(SELECT hi FROM taken WHERE upto < hi AND NOT queued))
       AND NOT t.queued
), leased AS (
    INSERT INTO busload.lease (lease_id, {load}, worker, open)
    SELECT {lease_id}, lo, upto, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair,
           %(worker)s::bigint, upto - lo + 1
      FROM taken
    RETURNING *
)
SELECT EXISTS (SELECT FROM alive),
       ARRAY(
        SELECT load
          FROM load
         WHERE NOT EXISTS (SELECT FROM busload.command WHERE id BETWEEN first AND first + 1023 OFFSET 0)
       ),
       ARRAY(
        SELECT load
          FROM load
         WHERE EXISTS (
            SELECT
              FROM (SELECT hi FROM busload.queue UNION ALL SELECT hi FROM busload.outbox) AS p
             WHERE hi BETWEEN first AND first + 1023
               AND hi <> ALL (ARRAY(SELECT hi FROM ready UNION ALL SELECT hi FROM boxed))
            OFFSET 0
         )
       ),
       l.*, c.*
  {leases_and_commands};

-- name: promote
-- Move loads that have become due into the queue. Every worker that polls does it. Returns how many loads
-- moved, the seconds until the next one is due, those of the given batches that are held, and whether
-- anything was ready before in the given domains.
WITH due AS (
    DELETE FROM busload.scheduled
     WHERE hi IN (
        SELECT hi
          FROM busload.scheduled
         WHERE run_at <= now()
         ORDER BY run_at
         LIMIT 1000
           FOR UPDATE SKIP LOCKED
     )
    RETURNING *
), queued AS (
    INSERT INTO busload.queue ({load})
    SELECT {load} FROM due
    RETURNING lo, hi, domain
), told AS (
    SELECT count(pg_notify(CASE WHEN commands > 100::numeric THEN 'busload_ready' ELSE {channel} END, domain))
      FROM (SELECT domain, sum(hi - lo + 1) AS commands FROM queued GROUP BY domain) AS ready
)
SELECT (SELECT count(*) FROM due)::integer,
       extract(epoch FROM (SELECT min(run_at) FROM busload.scheduled
                            WHERE run_at > now() AND run_at < 'infinity') - now())::float8,
       ARRAY(SELECT batch_id FROM busload.batch
              WHERE batch_id = ANY (%(batches)b::uuid[]) AND held_at IS NOT NULL),
       EXISTS (SELECT FROM unnest(%(domains)b::text[]) AS d (domain) WHERE {has_ready})
  FROM told;

-- fragment: returned_parts
-- The commands of some leases that their worker will not run, as loads. A lease remembers them, or is closed
-- with its last command: so to repeat this is harmless.
held AS MATERIALIZED (
    SELECT * {leases_in_order}
), asked AS MATERIALIZED (
    SELECT n.lease_id, n.details, array_agg(c.id ORDER BY c.id) AS ids
      FROM unnest(%(leases)b::uuid[], %(details)b::text[]) WITH ORDINALITY AS n (lease_id, details, ordinal)
      JOIN unnest(%(commands)b::bigint[], %(ordinals)b::integer[]) AS c (id, ordinal) USING (ordinal)
     GROUP BY n.lease_id, n.details
), given AS MATERIALIZED (
    SELECT h.*, a.ids, a.details, h.open - cardinality(a.ids) AS left_open
      FROM asked AS a
      JOIN held AS h USING (lease_id)
     WHERE NOT h.returned && a.ids
), closed AS (
    DELETE FROM busload.lease WHERE lease_id = ANY (ARRAY(SELECT lease_id FROM given WHERE left_open <= 0))
), kept AS (
    UPDATE busload.lease AS l
       SET returned = g.returned || g.ids, open = g.left_open
      FROM given AS g
     WHERE l.lease_id = g.lease_id
       AND l.lease_id = ANY (ARRAY(SELECT lease_id FROM given WHERE left_open > 0))
), rest AS (
    SELECT g.lease_id, id, id - row_number() OVER (PARTITION BY g.lease_id ORDER BY id) AS island
      FROM given AS g
     CROSS JOIN LATERAL unnest(g.ids) AS id
), load AS MATERIALIZED (
    SELECT part.lo, part.hi, g.domain, g.batch_id, g.priority, g.attempt, g.forgiven, g.crashes, g.replies,
           g.fair, g.lease_id, g.worker, g.since, g.details
      FROM (SELECT lease_id, min(id) AS lo, max(id) AS hi FROM rest GROUP BY lease_id, island) AS part
      JOIN given AS g USING (lease_id)
)

-- name: give_back
-- Commands of some leases that this worker will not run are ready again for the others. They burn no attempt.
WITH {returned_parts}, queued AS (
    INSERT INTO busload.queue ({load})
    SELECT {load} FROM load
    RETURNING domain
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, details)
    SELECT 'RELEASED', lo, hi, batch_id, attempt, lease_id, worker,
           json_build_object('since', since, 'crashes', crashes)
      FROM load
)
SELECT ARRAY(SELECT lease_id FROM given),
       (SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM queued) AS told);

-- name: set_aside
-- Commands of some leases whose type nobody here knows wait for a worker that knows it. They burn no attempt.
-- The event is written the first time; later ones would only repeat it.
WITH {returned_parts}, scheduled AS (
    INSERT INTO busload.scheduled ({load}, run_at, reason)
    SELECT {load}, now() + %(pause)s::float8 * interval '1 second', 'NO_HANDLER' FROM load
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, details)
    SELECT 'NO_HANDLER', lo, hi, batch_id, attempt, lease_id, worker, details::json
      FROM load
     WHERE NOT EXISTS (
        SELECT
          FROM busload.event AS e
         WHERE e.lo >> 10 = load.lo >> 10
           AND e.lo <= load.lo
           AND e.hi >= load.hi
           AND e.type = 'NO_HANDLER'
        OFFSET 0
     )
)
SELECT ARRAY(SELECT lease_id FROM given);
