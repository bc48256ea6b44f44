-- name: known
-- What the database knows of these schedules, and its clock.
SELECT now(), ARRAY(SELECT name || ' ' || declaration
                      FROM busload.schedule
                     WHERE name = ANY (%(names)s::text[]));

-- name: see_release
-- Note when a release was seen for the first time. One that is declared by hand is the newest from now on.
-- If it is that already, nothing is written.
INSERT INTO busload.release (release)
SELECT %(release)s::text
 WHERE NOT EXISTS (
        SELECT
          FROM busload.release
         WHERE release = %(release)s::text
           AND (NOT %(newest)s::boolean OR since = (SELECT max(since) FROM busload.release))
 )
    ON CONFLICT (release) DO UPDATE SET since = clock_timestamp() WHERE %(newest)s::boolean;

-- name: declare
-- Keep schedules as they are declared now, in order, so that two releases cannot wait for each other. What a
-- newer release has declared stays as long as a worker of that release is alive. A pause stays. If the rule
-- is the same, so is the next due time. A due time that has come and was not fired yet is fired, though the
-- rule has changed since. Returns the names of those that are new or have changed, and the domain that each
-- of them had before.
WITH declared AS (
    INSERT INTO busload.schedule AS s (name, domain, rule, command, expires_in, catch_up, catch_up_limit,
                                       missed_after, declaration, next_due_at, release)
    SELECT name, domain, rule::jsonb, command::json, expires_in, catch_up, catch_up_limit, missed_after,
           declaration, next_due_at, %(release)s::text
      FROM unnest(%(names)s::text[], %(domains)s::text[], %(rules)s::text[], %(commands)s::text[],
                  %(expires_ins)s::interval[], %(catch_ups)s::text[], %(catch_up_limits)s::integer[],
                  %(missed_afters)s::interval[], %(declarations)s::text[], %(next_due_ats)s::timestamptz[])
        AS d (name, domain, rule, command, expires_in, catch_up, catch_up_limit, missed_after, declaration,
              next_due_at)
     ORDER BY name COLLATE "C"
        ON CONFLICT (name) DO UPDATE
       SET domain = excluded.domain,
           rule = excluded.rule,
           command = excluded.command,
           expires_in = excluded.expires_in,
           catch_up = excluded.catch_up,
           catch_up_limit = excluded.catch_up_limit,
           missed_after = excluded.missed_after,
           declaration = excluded.declaration,
           declared_at = now(),
           release = excluded.release,
           next_due_at = CASE WHEN s.rule = excluded.rule OR s.next_due_at <= now()
                              THEN s.next_due_at
                              ELSE excluded.next_due_at
                         END
     WHERE s.declaration <> excluded.declaration
       AND NOT EXISTS (
            SELECT
              FROM busload.release AS newer
              JOIN busload.release AS own ON own.release = excluded.release AND own.since < newer.since
              JOIN busload.worker AS w
                ON w.release = newer.release AND w.stopped_at IS NULL AND w.seen_at > now() - w.lease_for
             WHERE newer.release = s.release
       )
    RETURNING name
)
SELECT name, before.domain, pg_notify('busload_schedule', '')
  FROM declared
  LEFT JOIN busload.schedule AS before USING (name);   -- as it was when the statement began

-- name: undeclared
-- Schedules of these domains that are not among the declared ones.
SELECT name
  FROM busload.schedule
 WHERE domain = ANY (%(domains)s::text[]) AND name <> ALL (%(names)s::text[])
 ORDER BY name;
