-- name: limit_lock_waits
-- No lock is waited for any longer than that, until the end of the transaction.
SELECT set_config('lock_timeout', %(patience)s::integer::text, true);

-- name: lock_holders
-- Sessions that have written what others may wait for, in transactions that are open since before then; the
-- oldest first.
SELECT a.pid, a.application_name, a.state, a.xact_start
  FROM pg_catalog.pg_stat_activity AS a
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
   AND (a.xact_start IS NULL OR a.xact_start < clock_timestamp() - %(waited)s::interval)
   AND EXISTS (SELECT FROM pg_catalog.pg_locks AS l
                WHERE l.pid = a.pid AND l.granted AND l.mode <> 'AccessShareLock' AND l.locktype = 'relation'
                  -- none of PostgreSQL's own: the table of a buffer may be anybody's
                  AND l.relation >= 16384::oid)
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.pid = a.pid AND NOT l.granted)
 ORDER BY a.xact_start LIMIT 3;

-- name: joined_database
-- Which database a call has joined that was refused there, and whether its server is a standby.
SELECT current_database()::text, pg_is_in_recovery();
