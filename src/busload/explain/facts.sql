-- fragment: here
-- A load of this batch in this domain, or the load that this command is in: its id is the first and the last
-- then.
hi BETWEEN %(first)s::bigint AND (%(last)s::bigint | 1023) AND lo <= %(last)s::bigint
   AND batch_id IS NOT DISTINCT FROM %(batch_id)s::uuid AND domain = %(domain)s::text

-- fragment: part
-- The part of a load that is asked for.
greatest(lo, %(first)s::bigint) AS lo, least(hi, %(last)s::bigint) AS hi

-- fragment: not_due
(SELECT {part}, run_at, reason, attempt FROM busload.scheduled WHERE {here} AND run_at > now())

-- name: batch
-- A batch, and the first and last id that its commands can have. Every place is searched between these ids by
-- its own key, so an explanation reads what waits there, and never what has ended.
SELECT now(), b.status, b.total_count, b.completed_count + b.failed_count + b.canceled_count,
       b.created_at, b.started_at, b.sealed_at, b.canceled_at, b.completed_at,
       (b.on_complete ->> 'command_id')::uuid, b.held_at, b.held_reason, b.held_by, b.held_note,
       first.id, last.id | 1023, b.canary_count, b.completed_count, b.canary_until,
       b.batch_type = 'JOBS', busload.outlook(b)::text
  FROM busload.batch AS b
  LEFT JOIN LATERAL (SELECT id FROM busload.command
                      WHERE batch_id = b.batch_id AND id & 1023 = 0 ORDER BY id LIMIT 1) AS first ON true
  LEFT JOIN LATERAL (SELECT id FROM busload.command
                      WHERE batch_id = b.batch_id AND id & 1023 = 0 ORDER BY id DESC LIMIT 1) AS last ON true
 WHERE b.batch_id = %(batch_id)s::uuid AND b.domain = %(domain)s::text AND b.pruned_at IS NULL;

-- name: domains
-- The domains in which commands of a batch have not ended: nearly always that of the batch alone.
SELECT DISTINCT domain
  FROM (SELECT domain, hi, batch_id FROM busload.queue
        UNION ALL SELECT domain, hi, batch_id FROM busload.scheduled
        UNION ALL SELECT domain, hi, batch_id FROM busload.outbox
        UNION ALL SELECT domain, hi, batch_id FROM busload.lease
        UNION ALL SELECT domain, command, batch_id FROM busload.troubleshooting) AS place
 WHERE hi BETWEEN %(first)s::bigint AND (%(last)s::bigint | 1023) AND batch_id = %(batch_id)s::uuid
 ORDER BY domain;

-- name: ready
-- By priority. A load that is due but not promoted yet is as good as ready.
SELECT load.priority, load.commands, c.created_at
  FROM (SELECT priority, sum(hi - lo + 1)::bigint AS commands, min(lo) AS oldest
          FROM (SELECT priority, {part} FROM busload.queue WHERE {here}
                UNION ALL
                SELECT priority, {part} FROM busload.scheduled WHERE {here} AND run_at <= now()) AS load
         GROUP BY priority) AS load
  LEFT JOIN busload.command AS c ON c.id = load.oldest
 ORDER BY load.priority DESC;

-- name: waiting
-- What waits for its time, by reason.
SELECT load.reason, load.commands, c.created_at, load.next_at, load.last_at
  FROM (SELECT reason, sum(hi - lo + 1)::bigint AS commands, min(lo) AS oldest,
               nullif(min(run_at), 'infinity') AS next_at, nullif(max(run_at), 'infinity') AS last_at
          FROM {not_due} AS load
         GROUP BY reason) AS load
  LEFT JOIN busload.command AS c ON c.id = load.oldest
 ORDER BY load.reason;

-- name: failures
-- Why the commands that are tried again next have failed. A thousand of them tell enough.
SELECT count(*), e.details ->> 'type', e.details ->> 'code', min(e.details ->> 'message'),
       (array_agg(c.command_id ORDER BY c.id))[1], min(e.finished_at)
  FROM (SELECT hi, attempt FROM {not_due} AS load WHERE reason = 'RETRY' ORDER BY run_at LIMIT 1000) AS load
 CROSS JOIN LATERAL (SELECT * FROM busload.execution
                      WHERE command = load.hi AND attempt = load.attempt - 1 OFFSET 0) AS e
 CROSS JOIN LATERAL (SELECT id, command_id FROM busload.command WHERE id = load.hi OFFSET 0) AS c
 GROUP BY e.details ->> 'type', e.details ->> 'code'
 ORDER BY count(*) DESC, 2, 3
 LIMIT 20;

-- name: unknown_types
-- The types that no worker knew, and since when: the first worker that gave them back left an event.
SELECT coalesce(array_agg(DISTINCT type ORDER BY type), '{}'), min(e.at)
  FROM (SELECT lo, hi FROM {not_due} AS load WHERE reason = 'NO_HANDLER' ORDER BY run_at LIMIT 1000) AS load
 CROSS JOIN LATERAL (SELECT at, details FROM busload.event
                      WHERE lo >> 10 = load.lo >> 10 AND lo <= load.lo AND hi >= load.hi
                        AND type = 'NO_HANDLER' OFFSET 0) AS e
 CROSS JOIN LATERAL json_array_elements_text(e.details -> 'command_types') AS type
 WHERE %(command_type)s::text IS NULL OR type = %(command_type)s::text;

-- name: limits
-- Which limits hold commands up, and since when: each limit left an event the first time.
SELECT coalesce(array_agg(DISTINCT e.details ->> 'limit' ORDER BY e.details ->> 'limit'), '{}'), min(e.at)
  FROM (SELECT lo, hi FROM {not_due} AS load WHERE reason = 'RATE_LIMITED' ORDER BY run_at LIMIT 1000) AS load
 CROSS JOIN LATERAL (SELECT at, details FROM busload.event
                      WHERE lo >> 10 = load.lo >> 10 AND lo <= load.hi AND hi >= load.lo
                        AND type = 'RATE_LIMITED' OFFSET 0) AS e;

-- name: concurrency_limits
-- Which concurrency limits commands wait for, and since when: each command has an event of the first time.
-- The third column says whether all of them wait for their predecessors.
SELECT coalesce(array_agg(DISTINCT load.limit_name ORDER BY load.limit_name), '{}'), min(e.at),
       coalesce(bool_and(load.per_call IS NULL), false)
  FROM (SELECT lo, hi, limit_name, per_call
          FROM busload.scheduled
         WHERE {here} AND reason = 'LIMITED' ORDER BY hi LIMIT 1000) AS load
  LEFT JOIN LATERAL (SELECT at FROM busload.event
                      WHERE lo >> 10 = load.lo >> 10 AND lo <= load.hi AND hi >= load.lo
                        AND type = 'LIMITED' OFFSET 0) AS e ON true;

-- name: unconfirmed
-- What waits to be published to a broker, by what the broker said.
SELECT transport, reason, sum(hi - lo + 1)::bigint, min(since), max(rounds), max(error), min(due_at)
  FROM (SELECT {part}, transport, reason, since, rounds, error, due_at
          FROM busload.outbox WHERE {here}) AS load
 GROUP BY transport, reason ORDER BY transport, reason;

-- name: running
-- By worker. A worker that has missed its heartbeat for half the time that its leases last is
-- most likely dead. A command may lie within two leases, so its own is named.
SELECT w.name, sum(l.open)::bigint, min(l.since), w.seen_at, least(w.stopped_at, w.seen_at + w.lease_for),
       w.worker IS NULL OR w.stopped_at IS NOT NULL OR w.seen_at < now() - w.lease_for / 2::float8,
       coalesce(sum(l.open) FILTER (WHERE l.since < now() - %(longer_than)s::interval), 0)::bigint
  FROM (SELECT worker, since, least(open, %(last)s::bigint - %(first)s::bigint + 1) AS open FROM busload.lease
         WHERE {here} AND (%(lease_id)s::uuid IS NULL OR lease_id = %(lease_id)s::uuid)) AS l
  LEFT JOIN busload.worker AS w USING (worker)
 GROUP BY l.worker, w.worker
 ORDER BY l.worker;

-- name: parked
-- In troubleshooting, by cause, the most frequent first; and how many commands all causes have together.
SELECT cause.commands, cause.since, t.reason, t.error ->> 'type', t.error ->> 'code', t.error ->> 'message',
       c.command_id, cause.fingerprint, cause.together
  FROM (SELECT fingerprint, count(*) AS commands, min(since) AS since, min(command) AS sample,
               (sum(count(*)) OVER ())::bigint AS together
          FROM busload.troubleshooting
         WHERE command BETWEEN %(first)s::bigint AND %(last)s::bigint
           AND batch_id IS NOT DISTINCT FROM %(batch_id)s::uuid AND domain = %(domain)s::text
         GROUP BY fingerprint ORDER BY count(*) DESC, fingerprint LIMIT 20) AS cause
  JOIN busload.troubleshooting AS t ON t.command = cause.sample
  JOIN busload.command AS c ON c.id = cause.sample
 ORDER BY cause.commands DESC, cause.fingerprint;

-- name: usual
-- How long attempts take: in this batch, by the first attempts of its first loads; if nothing has ended
-- there, at commands of the domain that were sent shortly before, of the same type if there are any.
WITH before AS (
    SELECT e.finished_at - e.started_at AS took, c.command_type
      FROM (SELECT command, started_at, finished_at FROM busload.execution
             WHERE command < %(first)s::bigint ORDER BY command DESC LIMIT 1000) AS e
     CROSS JOIN LATERAL (SELECT domain, command_type FROM busload.command WHERE id = e.command OFFSET 0) AS c
     WHERE c.domain = %(domain)s::text
)
SELECT coalesce(
           (SELECT avg(e.finished_at - e.started_at)
              FROM (SELECT id FROM busload.command
                     WHERE batch_id = %(batch_id)s::uuid AND id & 1023 = 0 ORDER BY id LIMIT 50) AS load
             CROSS JOIN LATERAL (SELECT started_at, finished_at FROM busload.execution
                                  WHERE command BETWEEN load.id AND load.id | 1023
                                  ORDER BY command LIMIT 20) AS e),
           (SELECT avg(took) FROM before WHERE command_type = %(command_type)s::text),
           (SELECT avg(took) FROM before));

-- name: surroundings
-- Who serves a domain, whether any worker lives, whether the domain is claimed in order, and whether it is
-- paused. A tracker has no concurrency, and takes only what it is told to. And the ready commands of others
-- with a higher priority than the one that is given, as many as the next ten thousand loads hold.
SELECT w.*, EXISTS (SELECT FROM busload.ordered_domain WHERE domain = %(domain)s::text),
       p.since, p.operator, p.reason, coalesce(a.commands, 0), a.highest
  FROM (SELECT count(*) FILTER (WHERE lives AND serves)::integer AS serving,
               max(last_seen) FILTER (WHERE serves) AS last_seen,
               coalesce(bool_or(lives), false) AS anybody
          FROM (SELECT stopped_at IS NULL AND seen_at > now() - lease_for AS lives,
                       %(domain)s::text = ANY (domains) AS serves,
                       CASE WHEN lost THEN seen_at ELSE coalesce(stopped_at, seen_at) END AS last_seen
                  FROM busload.worker WHERE concurrency > 0) AS w) AS w
  LEFT JOIN busload.pause AS p ON p.domain = %(domain)s::text AND p.resumed_at IS NULL
  LEFT JOIN LATERAL (
    SELECT sum(hi - lo + 1)::bigint AS commands, max(priority) AS highest
      FROM (SELECT lo, hi, priority FROM busload.queue
             WHERE domain = %(domain)s::text AND crashes = 0 AND priority > %(priority)s::smallint
               AND (%(batch_id)s::uuid IS NULL OR batch_id IS DISTINCT FROM %(batch_id)s::uuid)
             ORDER BY priority DESC, hi LIMIT 10000) AS load
  ) AS a ON NOT EXISTS (SELECT FROM busload.ordered_domain WHERE domain = %(domain)s::text);

-- name: barrier
-- The oldest load of a domain that is not published, if what is asked about is ready and was sent later.
SELECT c.command_id, o.transport, o.since, o.rounds, o.error, q.behind
  FROM (SELECT * FROM busload.unmarked WHERE domain = %(domain)s::text ORDER BY hi LIMIT 1) AS o
 CROSS JOIN LATERAL (SELECT sum(hi - lo + 1)::bigint AS behind
                       FROM (SELECT {part} FROM busload.queue WHERE {here} AND hi > o.hi) AS load) AS q
  JOIN busload.command AS c ON c.id = o.lo
 WHERE q.behind > 0;

-- name: command
-- A command, and the lease that it runs under. One that was asked to stop may be back in a place.
SELECT now(), s.id, s.batch_id, s.command_type, s.status, s.created_at, b.canceled_at,
       CASE WHEN s.status <> 'IN_TROUBLESHOOTING_QUEUE'
            THEN (SELECT since FROM busload.stopping WHERE command = s.id) END,
       CASE WHEN s.status = 'IN_PROGRESS' THEN (left(s.execution_id::text, 33) || '000')::uuid END,
       CASE WHEN s.command_type = 'busload.Group' THEN s.data ->> 'items' END,
       b.held_at, b.held_reason, b.held_by, b.held_note, b.canary_count, b.completed_count, b.canary_until
  FROM busload.command_status AS s
  LEFT JOIN busload.batch AS b ON b.batch_id = s.batch_id
 WHERE s.domain = %(domain)s::text AND s.command_id = %(command_id)s::uuid;
