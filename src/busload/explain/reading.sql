-- fragment: columns
-- What is asked for, by number: batches or commands, each in one domain.
%(numbers)s::integer[], %(batch_ids)s::uuid[], %(domains)s::text[], %(firsts)s::bigint[], %(lasts)s::bigint[],
%(command_types)s::text[]

-- fragment: asked
unnest({columns}) AS asked (number, batch_id, domain, first, last, command_type)

-- fragment: here
-- A load of this batch in this domain, or the load that this command is in: its id is the first and the last
-- then.
hi BETWEEN asked.first AND (asked.last | 1023) AND lo <= asked.last
   AND batch_id IS NOT DISTINCT FROM asked.batch_id AND domain = asked.domain

-- fragment: part
-- The part of a load that is asked for.
greatest(lo, asked.first) AS lo, least(hi, asked.last) AS hi

-- fragment: not_due
(SELECT {part}, run_at, reason, attempt FROM busload.scheduled WHERE {here} AND run_at > now())

-- name: batches
-- Batches, the first and last id that their commands can have, and the domains in which some have not ended:
-- nearly always that of the batch alone. Every place is searched between these ids by its own key, so an
-- explanation reads what waits there, and never what has ended.
SELECT b.batch_id, (b.on_complete ->> 'command_id')::uuid, first.id, last.id | 1023,
       CASE WHEN b.completed_at IS NULL THEN ARRAY(
           SELECT DISTINCT domain
             FROM (SELECT domain, hi, batch_id FROM busload.queue
                   UNION ALL SELECT domain, hi, batch_id FROM busload.scheduled
                   UNION ALL SELECT domain, hi, batch_id FROM busload.outbox
                   UNION ALL SELECT domain, hi, batch_id FROM busload.lease
                   UNION ALL SELECT domain, command, batch_id FROM busload.troubleshooting) AS place
            WHERE hi BETWEEN first.id AND (last.id | 1023) AND batch_id = b.batch_id
            ORDER BY domain) ELSE '{}' END,
       now(), b.status, b.total_count, b.completed_count + b.failed_count + b.canceled_count,
       b.created_at, b.started_at, b.sealed_at, b.canceled_at, b.completed_at,
       b.batch_type = 'JOBS', CASE WHEN %(forecast)s::boolean THEN busload.outlook(b)::text END,
       b.held_at, b.held_reason, b.held_by, b.held_note, b.canary_count, b.completed_count, b.canary_until
  FROM busload.batch AS b
  LEFT JOIN LATERAL (SELECT id FROM busload.command
                      WHERE batch_id = b.batch_id AND id & 1023 = 0 ORDER BY id LIMIT 1) AS first ON true
  LEFT JOIN LATERAL (SELECT id FROM busload.command
                      WHERE batch_id = b.batch_id AND id & 1023 = 0 ORDER BY id DESC LIMIT 1) AS last ON true
 WHERE b.batch_id = ANY (%(batch_ids)s::uuid[]) AND b.domain = %(domain)s::text AND b.pruned_at IS NULL;

-- name: commands
-- Commands, and the leases that they run under. One that was asked to stop may be back in a place.
SELECT s.id, CASE WHEN s.status = 'IN_PROGRESS' THEN (left(s.execution_id::text, 33) || '000')::uuid END,
       now(), s.command_id, s.batch_id, s.command_type, s.status, s.created_at, b.canceled_at,
       CASE WHEN s.status <> 'IN_TROUBLESHOOTING_QUEUE'
            THEN (SELECT since FROM busload.stopping WHERE command = s.id) END,
       CASE WHEN s.command_type = 'busload.Group' THEN s.data ->> 'items' END,
       b.held_at, b.held_reason, b.held_by, b.held_note, b.canary_count, b.completed_count, b.canary_until
  FROM busload.command_status AS s
  LEFT JOIN busload.batch AS b ON b.batch_id = s.batch_id
 WHERE s.domain = %(domain)s::text AND s.command_id = ANY (%(command_ids)s::uuid[]);

-- name: places
-- What is ready, by priority; what waits for its time, by reason; and what waits to be published to a broker,
-- by what the broker said. A load that is due but not promoted yet is as good as ready.
SELECT asked.number, place.*
  FROM {asked}
 CROSS JOIN LATERAL (
    SELECT 'ready', load.priority, NULL::text, NULL::text, load.commands, c.created_at,
           NULL::timestamptz, NULL::timestamptz, NULL::integer, NULL::text
      FROM (SELECT priority, sum(hi - lo + 1)::bigint AS commands, min(lo) AS oldest
              FROM (SELECT priority, {part} FROM busload.queue WHERE {here}
                    UNION ALL
                    SELECT priority, {part} FROM busload.scheduled WHERE {here} AND run_at <= now()) AS load
             GROUP BY priority) AS load
      LEFT JOIN busload.command AS c ON c.id = load.oldest
    UNION ALL
    SELECT 'waiting', NULL, load.reason, NULL, load.commands, c.created_at, load.next_at, load.last_at, NULL,
           NULL
      FROM (SELECT reason, sum(hi - lo + 1)::bigint AS commands, min(lo) AS oldest,
                   nullif(min(run_at), 'infinity') AS next_at, nullif(max(run_at), 'infinity') AS last_at
              FROM {not_due} AS load
             GROUP BY reason) AS load
      LEFT JOIN busload.command AS c ON c.id = load.oldest
    UNION ALL
    SELECT 'unconfirmed', NULL, reason, transport, sum(hi - lo + 1)::bigint, min(since), min(due_at), NULL,
           max(rounds), max(error)
      FROM (SELECT {part}, transport, reason, since, rounds, error, due_at
              FROM busload.outbox WHERE {here}) AS load
     GROUP BY transport, reason
 ) AS place (name, priority, reason, transport, commands, since, next_at, last_at, rounds, error)
 ORDER BY asked.number, place.name, place.priority DESC, place.transport, place.reason;

-- name: causes
-- Why commands wait. A thousand of each reason tell enough.
--   RETRY: how the attempts have failed that are tried again next.
--   NO_HANDLER: the types that no worker knew; the first worker that gave them back left an event.
--   RATE_LIMITED: which limits hold them up; each limit left an event the first time.
--   LIMITED: which concurrency limits they wait for, since when, and whether all wait for their predecessors.
SELECT asked.number, cause.*
  FROM {asked}
 CROSS JOIN LATERAL (
    (SELECT 'RETRY', min(e.finished_at), NULL::text[], NULL::boolean, count(*), e.details ->> 'type',
            e.details ->> 'code', min(e.details ->> 'message'), (array_agg(c.command_id ORDER BY c.id))[1]
       FROM (SELECT hi, attempt FROM {not_due} AS load
              WHERE reason = 'RETRY' ORDER BY run_at LIMIT 1000) AS load
      CROSS JOIN LATERAL (SELECT * FROM busload.execution
                           WHERE command = load.hi AND attempt = load.attempt - 1 OFFSET 0) AS e
      CROSS JOIN LATERAL (SELECT id, command_id FROM busload.command WHERE id = load.hi OFFSET 0) AS c
      GROUP BY e.details ->> 'type', e.details ->> 'code'
      ORDER BY count(*) DESC, 6, 7
      LIMIT 20)
    UNION ALL
    SELECT 'NO_HANDLER', min(e.at), coalesce(array_agg(DISTINCT type ORDER BY type), '{}'), NULL, NULL, NULL,
           NULL, NULL, NULL
      FROM (SELECT lo, hi FROM {not_due} AS load
             WHERE reason = 'NO_HANDLER' ORDER BY run_at LIMIT 1000) AS load
     CROSS JOIN LATERAL (SELECT at, details FROM busload.event
                          WHERE lo >> 10 = load.lo >> 10 AND lo <= load.lo AND hi >= load.hi
                            AND type = 'NO_HANDLER' OFFSET 0) AS e
     CROSS JOIN LATERAL json_array_elements_text(e.details -> 'command_types') AS type
     WHERE asked.command_type IS NULL OR type = asked.command_type
    UNION ALL
    SELECT 'RATE_LIMITED', min(e.at),
           coalesce(array_agg(DISTINCT e.details ->> 'limit' ORDER BY e.details ->> 'limit'), '{}'),
           NULL, NULL, NULL, NULL, NULL, NULL
      FROM (SELECT lo, hi FROM {not_due} AS load
             WHERE reason = 'RATE_LIMITED' ORDER BY run_at LIMIT 1000) AS load
     CROSS JOIN LATERAL (SELECT at, details FROM busload.event
                          WHERE lo >> 10 = load.lo >> 10 AND lo <= load.hi AND hi >= load.lo
                            AND type = 'RATE_LIMITED' OFFSET 0) AS e
    UNION ALL
    SELECT 'LIMITED', min(e.at),
           coalesce(array_agg(DISTINCT load.limit_name ORDER BY load.limit_name), '{}'),
           coalesce(bool_and(load.per_call IS NULL), false), NULL, NULL, NULL, NULL, NULL
      FROM (SELECT lo, hi, limit_name, per_call
              FROM busload.scheduled
             WHERE {here} AND reason = 'LIMITED' ORDER BY hi LIMIT 1000) AS load
      LEFT JOIN LATERAL (SELECT at FROM busload.event
                          WHERE lo >> 10 = load.lo >> 10 AND lo <= load.hi AND hi >= load.lo
                            AND type = 'LIMITED' OFFSET 0) AS e ON true
 ) AS cause (reason, since, names, ordered, commands, error_type, error_code, message, command_id);

-- name: running
-- By worker. A worker that has missed its heartbeat for half the time that its leases last is
-- most likely dead. A command may lie within two leases, so its own is named.
SELECT asked.number, found.*
  FROM unnest({columns}, %(longer_than)s::interval[], %(lease_ids)s::uuid[])
    AS asked (number, batch_id, domain, first, last, command_type, longer_than, lease_id)
 CROSS JOIN LATERAL (
    SELECT w.name, sum(l.open)::bigint, min(l.since), w.seen_at, least(w.stopped_at, w.seen_at + w.lease_for),
           w.worker IS NULL OR w.stopped_at IS NOT NULL OR w.seen_at < now() - w.lease_for / 2::float8,
           coalesce(sum(l.open) FILTER (WHERE l.since < now() - asked.longer_than), 0)::bigint
      FROM (SELECT worker, since, least(open, asked.last - asked.first + 1) AS open FROM busload.lease
             WHERE {here} AND (asked.lease_id IS NULL OR lease_id = asked.lease_id)) AS l
      LEFT JOIN busload.worker AS w USING (worker)
     GROUP BY l.worker, w.worker
     ORDER BY l.worker
 ) AS found;

-- name: parked
-- In troubleshooting, by cause, the most frequent first; and how many commands all causes have together.
SELECT asked.number, found.*
  FROM {asked}
 CROSS JOIN LATERAL (
    SELECT cause.commands, cause.since, t.reason, t.error ->> 'type', t.error ->> 'code',
           t.error ->> 'message', c.command_id, cause.fingerprint, cause.together
      FROM (SELECT fingerprint, count(*) AS commands, min(since) AS since, min(command) AS sample,
                   (sum(count(*)) OVER ())::bigint AS together
              FROM busload.troubleshooting
             WHERE command BETWEEN asked.first AND asked.last
               AND batch_id IS NOT DISTINCT FROM asked.batch_id AND domain = asked.domain
             GROUP BY fingerprint ORDER BY count(*) DESC, fingerprint LIMIT 20) AS cause
      JOIN busload.troubleshooting AS t ON t.command = cause.sample
      JOIN busload.command AS c ON c.id = cause.sample
     ORDER BY cause.commands DESC, cause.fingerprint
 ) AS found;

-- name: usual
-- How long attempts take: in this batch, by the first attempts of its first loads; if nothing has ended
-- there, at commands of the domain that were sent shortly before, of the same type if there are any. The more
-- is asked for, the fewer of these are looked at.
SELECT asked.number, coalesce(
           (SELECT avg(e.finished_at - e.started_at)
              FROM (SELECT id FROM busload.command
                     WHERE batch_id = asked.batch_id AND id & 1023 = 0 ORDER BY id LIMIT 50) AS load
             CROSS JOIN LATERAL (SELECT started_at, finished_at FROM busload.execution
                                  WHERE command BETWEEN load.id AND load.id | 1023
                                  ORDER BY command LIMIT 20) AS e),
           (SELECT coalesce(avg(before.took) FILTER (WHERE before.command_type = asked.command_type),
                            avg(before.took))
              FROM (SELECT e.finished_at - e.started_at AS took, c.command_type
                      FROM (SELECT command, started_at, finished_at FROM busload.execution
                             WHERE command < asked.first ORDER BY command DESC
                             LIMIT greatest(1000 / cardinality(%(numbers)s::integer[]), 20)) AS e
                     CROSS JOIN LATERAL (SELECT domain, command_type FROM busload.command
                                          WHERE id = e.command OFFSET 0) AS c
                     WHERE c.domain = asked.domain) AS before))
  FROM {asked};

-- name: surroundings
-- Who serves a domain, whether any worker lives, whether the domain is claimed in order, and whether it is
-- paused. A tracker has no concurrency, and takes only what it is told to. And the ready commands of others
-- with a higher priority than the one that is given, as many as the next ten thousand loads hold. And, in a
-- domain that is claimed in order, its oldest load that is not published, if what is asked about is ready and
-- was sent later. And the oldest snapshot that somebody holds, if dead rows of the queue pile up behind it.
SELECT asked.number, w.*, ordered, p.since, p.operator, p.reason, coalesce(a.commands, 0), a.highest,
       s.pid, s.application_name, s.xact_start, s.dead, barrier.*
  FROM unnest({columns}, %(priorities)s::smallint[], %(own_batch_ids)s::uuid[])
    AS asked (number, batch_id, domain, first, last, command_type, priority, own_batch_id)
 CROSS JOIN LATERAL (
    SELECT EXISTS (SELECT FROM busload.ordered_domain WHERE domain = asked.domain) AS ordered OFFSET 0
 ) AS o
 CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE lives AND serves)::integer AS serving,
           max(last_seen) FILTER (WHERE serves) AS last_seen,
           coalesce(bool_or(lives), false) AS anybody
      FROM (SELECT stopped_at IS NULL AND seen_at > now() - lease_for AS lives,
                   asked.domain = ANY (domains) AS serves,
                   CASE WHEN lost THEN seen_at ELSE coalesce(stopped_at, seen_at) END AS last_seen
              FROM busload.worker WHERE concurrency > 0) AS w
 ) AS w
  LEFT JOIN busload.pause AS p ON p.domain = asked.domain AND p.resumed_at IS NULL
 CROSS JOIN LATERAL (
    SELECT sum(hi - lo + 1)::bigint AS commands, max(priority) AS highest
      FROM (SELECT lo, hi, priority FROM busload.queue
             WHERE domain = asked.domain AND crashes = 0 AND NOT o.ordered
               AND priority BETWEEN asked.priority + 1 AND 32767  -- expected to be few, so the index is used
               AND (asked.own_batch_id IS NULL OR batch_id IS DISTINCT FROM asked.own_batch_id)
             ORDER BY priority DESC, hi LIMIT 10000) AS load
 ) AS a
  LEFT JOIN LATERAL (
    SELECT c.command_id, o.transport, o.since, o.rounds, o.error, q.behind
      FROM (SELECT * FROM busload.unmarked WHERE domain = asked.domain AND ordered ORDER BY hi LIMIT 1) AS o
     CROSS JOIN LATERAL (SELECT sum(hi - lo + 1)::bigint AS behind
                           FROM (SELECT {part} FROM busload.queue WHERE {here} AND hi > o.hi) AS load) AS q
      JOIN busload.command AS c ON c.id = o.lo
     WHERE q.behind > 0
 ) AS barrier ON true
  LEFT JOIN LATERAL (
    SELECT h.pid, h.application_name, h.xact_start, dead
      FROM pg_stat_get_dead_tuples('busload.queue'::regclass) AS dead
     CROSS JOIN LATERAL (
        SELECT pid, application_name, xact_start
          FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()
           AND coalesce(backend_xmin, backend_xid) IS NOT NULL
           AND xact_start < now() - %(snapshot_after)s::interval
         ORDER BY xact_start
         LIMIT 1
     ) AS h
     WHERE dead >= %(dead)s::bigint
  ) AS s ON true
 ORDER BY asked.number;
