-- fragments of: busload.limits.pause

-- fragment: counts
sum(completed)::bigint, sum(failed)::bigint, sum(canceled)::bigint, sum(retried)::bigint,
sum(troubled)::bigint, sum(seconds)::float8

-- fragment: columns
at, domain, completed, failed, canceled, retried, troubled, seconds,
ready, scheduled, running, in_troubleshooting, unpublished, oldest_ready

-- fragment: last_places
-- What the last look has found, of several.
max(ready) FILTER (WHERE at = looked.last), max(scheduled) FILTER (WHERE at = looked.last),
max(running) FILTER (WHERE at = looked.last), max(in_troubleshooting) FILTER (WHERE at = looked.last),
max(unpublished) FILTER (WHERE at = looked.last), max(oldest_ready) FILTER (WHERE at = looked.last)

-- name: record
-- Add what a worker has settled, by domain. It was settled within the last `ago` seconds, and counts in the
-- minute in which that time began.
INSERT INTO busload.statistics (at, domain, completed, failed, canceled, retried, troubled, seconds)
SELECT date_trunc('minute', clock_timestamp() - %(ago)s::float8 * interval '1 second'), d.*
  FROM unnest(%(domains)s::text[], %(completed)s::bigint[], %(failed)s::bigint[], %(canceled)s::bigint[],
              %(retried)s::bigint[], %(troubled)s::bigint[], %(seconds)s::float8[]) AS d;

-- name: take_turn
-- Take the turn to look at all places at the beginning of a minute, unless somebody else has it. Returns
-- whether it was taken, and how many seconds of the minute have passed.
WITH due AS (
    SELECT what
      FROM busload.turn
     WHERE what = 'statistics' AND taken_at < date_trunc('minute', clock_timestamp())
       FOR UPDATE SKIP LOCKED
), taken AS (
    UPDATE busload.turn AS t
       SET taken_at = date_trunc('minute', clock_timestamp())
      FROM due
     WHERE t.what = due.what
    RETURNING t.what
)
SELECT EXISTS (SELECT FROM taken), extract(second FROM clock_timestamp())::float8;

-- name: look
-- Note what is in each place, as of the end of the minute that has just ended. The row without a domain says
-- that somebody looked.
INSERT INTO busload.statistics (at, domain, ready, scheduled, running, in_troubleshooting, unpublished,
                                oldest_ready)
SELECT date_trunc('minute', clock_timestamp()) - interval '1 minute', look.*
  FROM (SELECT '', 0, 0, 0, 0, 0, NULL::float8
        UNION ALL
        SELECT domain, ready, scheduled, running, in_troubleshooting, unpublished,
               greatest(extract(epoch FROM now() - oldest_ready), 0)::float8
          FROM ({domains}) AS d
         WHERE ready + scheduled + running + in_troubleshooting + unpublished > 0) AS look;

-- name: merge_minutes
-- Of the minutes that are over, make one row per domain: workers have added several.
WITH several AS (
    SELECT at, domain
      FROM busload.statistics
     WHERE at >= now() - interval '1 hour' AND at < now() - interval '2 minutes'
     GROUP BY at, domain HAVING count(*) > 1
), gone AS (
    DELETE FROM busload.statistics AS s USING several AS m
     WHERE s.at = m.at AND s.domain = m.domain
    RETURNING s.*
)
INSERT INTO busload.statistics ({columns})
SELECT at, domain, {counts}, max(ready), max(scheduled), max(running), max(in_troubleshooting),
       max(unpublished), max(oldest_ready)
  FROM gone
 GROUP BY at, domain;

-- name: merge_hour
-- Make one row per domain of an hour whose minutes nobody needs any more. Of the looks at the places the last
-- one stays. Hours that nobody has merged for a day stay as they are: they can be read all the same.
WITH hour AS (
    SELECT date_trunc('hour', at, 'UTC') AS begins
      FROM busload.statistics
     WHERE at >= now() - %(minutes_for)s::interval - interval '1 day'
       AND at < date_trunc('hour', now() - %(minutes_for)s::interval, 'UTC')
       AND at <> date_trunc('hour', at, 'UTC')
     ORDER BY at
     LIMIT 1
), gone AS (
    DELETE FROM busload.statistics AS s USING hour AS h
     WHERE s.at >= h.begins AND s.at < h.begins + interval '1 hour'
    RETURNING s.*
), looked AS (
    SELECT max(at) AS last FROM gone WHERE domain = ''
)
INSERT INTO busload.statistics ({columns})
SELECT h.begins, g.domain, {counts}, {last_places}
  FROM gone AS g CROSS JOIN hour AS h CROSS JOIN looked
 GROUP BY h.begins, g.domain;

-- name: forget
-- Add hours that are too old to those of all time, a page at a time.
WITH old AS MATERIALIZED (
    SELECT at
      FROM busload.statistics
     WHERE at > 'epoch' AND at < now() - %(hours_for)s::interval
     ORDER BY at
     LIMIT %(limit)s::integer
), gone AS (
    DELETE FROM busload.statistics
     WHERE at <= (SELECT max(at) FROM old)
    RETURNING *
), looked AS (
    SELECT max(at) AS last FROM gone WHERE domain = ''
)
INSERT INTO busload.statistics ({columns})
SELECT 'epoch', g.domain, {counts}, {last_places}
  FROM gone AS g CROSS JOIN looked
 GROUP BY g.domain;

-- name: minutes
-- What was counted in each minute or hour from `since` on, in one domain or in all, and what the last look
-- at the places found. One look before that comes with it: what the places held at the beginning.
SELECT at, {counts}, bool_or(domain = '') AS looked,
       coalesce(sum(ready), 0)::bigint, coalesce(sum(scheduled), 0)::bigint,
       coalesce(sum(running), 0)::bigint, coalesce(sum(in_troubleshooting), 0)::bigint,
       coalesce(sum(unpublished), 0)::bigint, max(oldest_ready)
  FROM busload.statistics
 WHERE at >= coalesce((SELECT max(at)
                         FROM busload.statistics
                        WHERE domain = '' AND at < %(since)s::timestamptz),
                      %(since)s::timestamptz)
   AND (%(domain)s::text IS NULL OR domain IN (%(domain)s::text, ''))
 GROUP BY at
 ORDER BY at;

-- name: totals
-- What was ever counted, by domain.
SELECT domain, {counts} FROM busload.statistics WHERE domain <> '' GROUP BY domain ORDER BY domain;

-- name: now
-- The time of the database.
SELECT clock_timestamp();
