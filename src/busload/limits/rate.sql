-- fragments of: busload.commands.load

-- name: ask
-- Grant each limit as many calls as it allows within `ahead` seconds. The first call may begin `base - slack`
-- seconds from now, each further one `every` seconds later. The column after `every` says when the next call
-- could begin that was not granted. The last column is the time here. While a limit is blocked, nobody gets a
-- call. The rate of an adaptive limit only grows here, by what the calls of this round have shown (`steps`).
-- No call is due later than the present rate and burst can explain: a limit that was raised, or a clock that
-- was set back, counts at once. The statement does not wait for the disk: a crash gives back the calls of
-- some milliseconds. It does not wait for a lock for long either.
WITH hasty AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true) || set_config('lock_timeout', '1s', true) AS set
), asked AS MATERIALIZED (
    SELECT *
      FROM unnest(%(names)b::text[], %(subjects)b::text[], %(wanted)b::integer[], %(rates)b::float8[],
                  %(bursts)b::integer[], %(rounds)b::integer[], %(steps)b::float8[])
        AS a (name, subject, wanted, rate, burst, round, step)
), held AS MATERIALIZED (
    SELECT r.*
      FROM busload.rate_limit AS r
     WHERE (SELECT set FROM hasty) IS NOT NULL
       AND (r.name, r.subject) IN (SELECT name, subject FROM asked)
     ORDER BY r.name, r.subject
       FOR UPDATE
), paced AS (
    SELECT a.name, a.subject, a.wanted, a.burst, a.round IS NOT NULL AS adaptive,
           h.round, h.ceiling, h.back, h.soon,
           h.progress + CASE WHEN a.round = h.round THEN a.step ELSE 0 END AS progress,
           CASE WHEN a.round IS NULL THEN a.rate
                WHEN a.round = h.round THEN greatest(a.rate, h.rate)
                ELSE h.rate END AS rate,
           greatest(extract(epoch FROM h.next_at - now())::float8, 0) AS later,
           extract(epoch FROM h.blocked_until - now())::float8 AS blocked
      FROM asked AS a JOIN held AS h USING (name, subject)
), granted AS MATERIALIZED (
    SELECT *, CASE WHEN blocked > 0::float8 THEN 0
                   ELSE greatest(
                       least(wanted, floor((%(ahead)s::float8 + slack - base) / every) + 1::float8),
                       0::float8
                   )::integer END AS calls
      FROM (SELECT *, 1::float8 / rate AS every, (burst - 1)::float8 / rate AS slack,
                   least(later, %(ahead)s::float8 + burst::float8 / rate) AS base
              FROM paced) AS paced
), used AS (
    UPDATE busload.rate_limit AS r
       SET adaptive = g.adaptive, rate = g.rate, progress = g.progress, calls = r.calls + g.calls,
           used_at = now(),
           next_at = CASE WHEN blocked > 0::float8 THEN r.next_at
                          ELSE now() + (g.base + g.calls::float8 * g.every) * interval '1 second' END
      FROM granted AS g WHERE r.name = g.name AND r.subject = g.subject
)
SELECT g.name, g.subject, g.calls, g.base - g.slack, g.every,
       CASE WHEN blocked > 0::float8 THEN blocked ELSE g.base + g.calls::float8 * g.every - g.slack END,
       g.round, g.ceiling, g.progress, g.back, g.soon, extract(epoch FROM now())::float8
  FROM granted AS g;

-- name: begin
-- Create limits that were not known yet.
INSERT INTO busload.rate_limit (name, subject, adaptive, rate, ceiling)
SELECT name, subject, adaptive, rate, rate
  FROM unnest(%(names)b::text[], %(subjects)b::text[], %(adaptive)b::boolean[], %(rates)b::float8[])
    AS a (name, subject, adaptive, rate)
 ORDER BY name, subject
    ON CONFLICT (name, subject) DO NOTHING;

-- name: refuse
-- The receiver wants no calls for a while. That holds for new calls and for calls that were granted and have
-- not begun: whoever waits for one of those is notified. Afterwards there is no burst.
WITH hasty AS MATERIALIZED (
    SELECT set_config('lock_timeout', '1s', true) AS set
), refused AS (
    UPDATE busload.rate_limit
       SET blocked_until = greatest(blocked_until, now() + %(after)s::float8 * interval '1 second'),
           refused = refused + 1,
           next_at = greatest(blocked_until, now() + %(after)s::float8 * interval '1 second')
                     + (%(burst)s::integer - 1)::float8 / rate * interval '1 second',
           used_at = now()
     WHERE (SELECT set FROM hasty) IS NOT NULL AND name = %(name)s::text AND subject = %(subject)s::text
    RETURNING *
)
SELECT extract(epoch FROM blocked_until - now())::float8, round, ceiling, progress, back, soon,
       extract(epoch FROM now() - cut_at)::float8,
       pg_notify('busload_limit', json_build_array(name, subject)::text)
  FROM refused;

-- name: cut
-- Lower the rate, unless somebody else has lowered it in this round: callers that were refused together lower
-- it once.
UPDATE busload.rate_limit
   SET ceiling = %(ceiling)s::float8,
       progress = 0,
       back = %(back)s::float8,
       soon = %(soon)s::integer,
       rate = %(rate)s::float8,
       round = round + 1,
       cut_at = now()
 WHERE name = %(name)s::text AND subject = %(subject)s::text AND round = %(round)s::integer;

-- name: reset
-- A person says that the receiver takes calls again. What was learnt about its rate stays.
WITH freed AS (
    UPDATE busload.rate_limit SET blocked_until = now(), next_at = now()
     WHERE name = %(name)s::text AND (%(subject)s::text IS NULL OR subject = %(subject)s::text)
    RETURNING name, subject
), noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'LIMIT_RESET', %(operator)s::text,
           json_build_object('limit', concat_ws(' by ', %(name)s::text, nullif(%(subject)s::text, '')))
     WHERE %(operator)s::text IS NOT NULL AND EXISTS (SELECT FROM freed)
)
SELECT subject, pg_notify('busload_limit', json_build_array(name, subject)::text) FROM freed;

-- fragment: waits_for_it
s.reason = 'RATE_LIMITED' AND s.run_at > now()
AND EXISTS (SELECT
              FROM busload.event AS e
             WHERE e.lo >> 10 = s.lo >> 10
               AND e.lo <= s.hi
               AND e.hi >= s.lo
               AND e.type = 'RATE_LIMITED'
               AND e.details ->> 'limit' = %(name)s::text
            OFFSET 0)

-- name: bring_forward
-- Commands that wait for a limit of this name are tried now. It is not known which `by` value each of them
-- waits for: commands whose limit is still blocked wait again.
UPDATE busload.scheduled SET run_at = now()
 WHERE hi IN (SELECT s.hi FROM busload.scheduled AS s
               WHERE {waits_for_it}
               ORDER BY s.hi FOR UPDATE SKIP LOCKED);

-- name: would_reset
-- How many limits a reset would reset, and how many commands it would let try again.
SELECT (SELECT count(*) FROM busload.rate_limit
         WHERE name = %(name)s::text AND (%(subject)s::text IS NULL OR subject = %(subject)s::text)),
       (SELECT coalesce(sum(s.hi - s.lo + 1), 0) FROM busload.scheduled AS s
         WHERE {waits_for_it});

-- name: limits
-- What is known about every limit.
SELECT name, subject, adaptive, rate,
       CASE WHEN blocked_until > now() THEN blocked_until END,
       calls, refused, used_at
  FROM busload.rate_limit
 WHERE %(name)s::text IS NULL OR name = %(name)s::text
 ORDER BY name, subject LIMIT %(limit)s::integer;

-- name: forget
-- Remove limits that nobody has used for a day.
DELETE FROM busload.rate_limit WHERE (name, subject) IN (
    SELECT name, subject
      FROM busload.rate_limit
     WHERE used_at < now() - interval '1 day' AND blocked_until < now()
     ORDER BY name, subject LIMIT 10000 FOR UPDATE SKIP LOCKED);

-- name: postpone
-- Commands of some leases wait until a limit lets them go or, without the name of a limit, because their
-- handler has put them off. They burn no attempt. One event for each says that a limit has held it up, and
-- one each time that its handler has put it off. A lease remembers these commands, or is closed with its
-- last command, so to repeat this is harmless.
WITH held AS MATERIALIZED (
    SELECT * {leases_in_order}
), late AS MATERIALIZED (
    SELECT c.id, c.delay, c.name, h.lease_id
      FROM unnest(%(ids)b::bigint[], %(ordinals)b::integer[], %(delays)b::float8[], %(names)b::text[])
        AS c (id, ordinal, delay, name)
      JOIN unnest(%(leases)b::uuid[]) WITH ORDINALITY AS n (lease_id, ordinal) ON n.ordinal = c.ordinal
      JOIN held AS h ON h.lease_id = n.lease_id
     WHERE c.id <> ALL (h.returned)
), progress AS (
    SELECT h.lease_id, h.returned || l.ids AS returned, h.open - cardinality(l.ids) AS open
      FROM (SELECT lease_id, array_agg(id) AS ids FROM late GROUP BY lease_id) AS l
      JOIN held AS h USING (lease_id)
), closed AS (
    DELETE FROM busload.lease WHERE lease_id = ANY (ARRAY(SELECT lease_id FROM progress WHERE open <= 0))
), kept AS (
    UPDATE busload.lease AS l SET returned = p.returned, open = p.open FROM progress AS p
     WHERE l.lease_id = p.lease_id AND l.lease_id = ANY (ARRAY(SELECT lease_id FROM progress WHERE open > 0))
), scheduled AS (
    INSERT INTO busload.scheduled ({load}, run_at, reason)
    SELECT p.lo, p.hi, h.domain, h.batch_id, h.priority, h.attempt, h.forgiven, h.crashes, h.replies, h.fair,
           now() + p.delay * interval '1 second', CASE WHEN p.snoozed THEN 'SNOOZED' ELSE 'RATE_LIMITED' END
      FROM (SELECT lease_id, delay, snoozed, min(id) AS lo, max(id) AS hi
              FROM (SELECT *, name IS NULL AS snoozed,
                           id - row_number() OVER (PARTITION BY lease_id, delay, name IS NULL ORDER BY id)
                               AS island
                      FROM late) AS part
             GROUP BY lease_id, delay, snoozed, island) AS p JOIN held AS h USING (lease_id)
), noted AS (
    INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, details)
    SELECT 'RATE_LIMITED', p.lo, p.hi, h.batch_id, h.attempt, h.lease_id, h.worker,
           json_build_object('limit', p.name)
      FROM (SELECT lease_id, name, min(id) AS lo, max(id) AS hi
              FROM (SELECT *, id - row_number() OVER (PARTITION BY lease_id, name ORDER BY id) AS island
                      FROM late
                     WHERE name IS NOT NULL
                       AND NOT EXISTS (SELECT
                                         FROM busload.event AS e
                                        WHERE e.lo >> 10 = late.id >> 10
                                          AND late.id BETWEEN e.lo AND e.hi
                                          AND e.type = 'RATE_LIMITED'
                                       OFFSET 0)) AS part
             GROUP BY lease_id, name, island) AS p JOIN held AS h USING (lease_id)
    UNION ALL
    SELECT 'SNOOZED', c.id, c.id, h.batch_id, h.attempt, h.lease_id, h.worker,
           json_build_object('run_at', now() + c.delay * interval '1 second')
      FROM late AS c JOIN held AS h USING (lease_id) WHERE c.name IS NULL
)
SELECT count(*)::integer FROM late;
