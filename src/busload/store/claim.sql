-- name: claim
-- Take as many ready commands as there are free slots: whole loads, and a part of the last one. Of each domain only as
-- many loads are locked as hold that many commands, because a locked load is invisible to the other workers. Loads that
-- were there when a worker died are suspects: a worker runs one of them at a time, so that the next crash has a name.
-- The first claim of a batch starts it, if its row is free; otherwise the first settlement will. A worker that was declared
-- dead gets nothing until its heartbeat has given it a new number: it would be taken away again, as from a dead one.
-- A claim does not wait for the disk: if a crash undoes it, the commands are ready again, and a result of theirs cannot be
-- durable without it.
WITH alive AS MATERIALIZED (
    SELECT worker FROM busload.worker WHERE worker = %(worker)s::bigint AND stopped_at IS NULL
), wanted AS (
    SELECT d.domain, (
        SELECT count(*) FROM (
            SELECT sum(q.hi - q.lo + 1) OVER (ORDER BY q.priority DESC, q.hi ROWS UNBOUNDED PRECEDING) - (q.hi - q.lo + 1) AS before
              FROM (SELECT lo, hi, priority FROM busload.queue
                     WHERE domain = d.domain AND crashes = 0 ORDER BY priority DESC, hi LIMIT %(limit)s::integer) AS q
        ) AS ready WHERE before < %(limit)s::integer) AS loads
      FROM alive CROSS JOIN unnest(%(domains)s::text[]) AS d (domain)
), ready AS (
    SELECT q.* FROM wanted AS w CROSS JOIN LATERAL (
        SELECT * FROM busload.queue
         WHERE domain = w.domain AND crashes = 0 ORDER BY priority DESC, hi LIMIT w.loads FOR UPDATE SKIP LOCKED) AS q
), suspect AS (
    SELECT * FROM busload.queue
     WHERE domain = ANY (%(domains)s::text[]) AND crashes > 0
     ORDER BY priority DESC, hi LIMIT CASE WHEN %(suspects)s::boolean THEN (SELECT count(*) FROM alive) ELSE 0 END FOR UPDATE SKIP LOCKED
), locked AS (
    SELECT *, sum(hi - lo + 1) OVER (ORDER BY priority DESC, hi ROWS UNBOUNDED PRECEDING) - (hi - lo + 1) AS before
      FROM (SELECT * FROM ready UNION ALL SELECT * FROM suspect) AS load
), taken AS (
    SELECT *, least(hi, lo + %(limit)s::integer - before - 1)::bigint AS upto FROM locked WHERE before < %(limit)s::integer
), whole AS (
    DELETE FROM busload.queue WHERE hi = ANY (ARRAY(SELECT hi FROM taken WHERE upto = hi))
), split AS (   -- only the last one can be: a scalar, so that no plan reads the whole queue for it
    UPDATE busload.queue SET lo = (SELECT upto FROM taken WHERE upto < hi) + 1 WHERE hi = (SELECT hi FROM taken WHERE upto < hi)
), leased AS (
    INSERT INTO busload.lease (lease_id, lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, worker, open)
    SELECT (left(gen_random_uuid()::text, 33) || '000')::uuid, lo, upto, domain, batch_id, priority, attempt, forgiven, crashes,
           replies, %(worker)s::bigint, upto - lo + 1
      FROM taken
    RETURNING *
), starting AS (
    SELECT batch_id FROM busload.batch
     WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM leased)) AND status = 'PENDING' FOR NO KEY UPDATE SKIP LOCKED
), started AS (
    UPDATE busload.batch SET status = 'IN_PROGRESS', started_at = now()
     WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM starting)) AND status = 'PENDING'
    RETURNING batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id, worker) SELECT 'BATCH_STARTED', batch_id, %(worker)s::bigint FROM started
)
SELECT CASE WHEN EXISTS (SELECT FROM alive) THEN (SELECT coalesce(sum(loads), 0) FROM wanted)::integer END AS seen,
       l.lease_id, l.lo, l.hi, l.domain, l.batch_id, l.priority, l.attempt, l.forgiven, l.crashes, c.*
  FROM (SELECT set_config('synchronous_commit', 'off', true)) AS hasty   -- always one row
  LEFT JOIN leased AS l ON true
  LEFT JOIN LATERAL (
        SELECT min(created_at) AS created_at,
               CASE WHEN count(*) < l.hi - l.lo + 1 THEN array_agg(id ORDER BY id) END AS ids,
               array_agg(command_id ORDER BY id) AS command_ids,
               array_agg(command_type ORDER BY id) AS command_types,
               array_agg(data::text ORDER BY id) AS data,
               CASE WHEN count(task_key) > 0 THEN array_agg(task_key ORDER BY id) END AS task_keys,
               CASE WHEN count(correlation_id) > 0 THEN array_agg(correlation_id ORDER BY id) END AS correlation_ids,
               CASE WHEN count(reply_to) > 0 THEN array_agg(reply_to ORDER BY id) END AS reply_tos,
               CASE WHEN count(max_attempts) > 0 THEN array_agg(max_attempts ORDER BY id) END AS max_attempts
          FROM busload.command WHERE id BETWEEN l.lo AND l.hi) AS c ON true
 ORDER BY l.priority DESC, l.hi;

-- name: promote
-- What has become due is ready; whoever polls moves it. Returns how many loads moved and when the next one is due.
WITH due AS (
    DELETE FROM busload.scheduled
     WHERE hi IN (SELECT hi FROM busload.scheduled WHERE run_at <= now() ORDER BY run_at LIMIT 1000 FOR UPDATE SKIP LOCKED)
    RETURNING *
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies)
    SELECT lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies FROM due
    RETURNING domain
), told AS (
    SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM queued) AS domains
)
SELECT (SELECT count(*) FROM due)::integer,
       extract(epoch FROM (SELECT min(run_at) FROM busload.scheduled WHERE run_at > now()) - now())::float8
  FROM told;

-- name: give_back
-- Commands of a lease whose type this worker does not know: they wait a while for one that does, and burn no attempt.
-- The lease remembers them, so repeating this is harmless. The first time leaves an event; later ones would only repeat it.
WITH lease AS (
    UPDATE busload.lease SET returned = returned || %(commands)b::bigint[], open = open - cardinality(%(commands)b::bigint[])
     WHERE lease_id = %(lease_id)s::uuid AND NOT returned && %(commands)b::bigint[]
    RETURNING *
), rest AS (
    SELECT id, id - row_number() OVER (ORDER BY id) AS island FROM lease CROSS JOIN unnest(%(commands)b::bigint[]) AS id
), load AS (
    SELECT min(id) AS lo, max(id) AS hi FROM rest GROUP BY island
), waiting AS (
    INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, run_at, reason)
    SELECT load.lo, load.hi, l.domain, l.batch_id, l.priority, l.attempt, l.forgiven, l.crashes, l.replies,
           now() + %(pause)s::float8 * interval '1 second', 'NO_HANDLER'
      FROM load CROSS JOIN lease AS l
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, details)
    SELECT 'NO_HANDLER', load.lo, load.hi, l.batch_id, l.attempt, l.lease_id, l.worker, %(details)s::text::json
      FROM load CROSS JOIN lease AS l
     WHERE NOT EXISTS (SELECT FROM busload.event AS e
                        WHERE e.lo >> 10 = load.lo >> 10 AND e.lo <= load.lo AND e.hi >= load.hi AND e.type = 'NO_HANDLER')
)
SELECT lease_id FROM lease;
