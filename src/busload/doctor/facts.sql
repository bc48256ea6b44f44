-- name: settings
-- Settings as they are for a new session of this role in this database, and where each comes from. A setting
-- that this role may not see, or that this server does not know, has no row.
SELECT name, reset_val, source, context FROM pg_settings WHERE name = ANY (%(names)s::text[]);

-- name: server
-- The server, and who and where we are.
SELECT current_setting('server_version_num')::integer,
       pg_is_in_recovery(),
       clock_timestamp(),
       current_user::text,
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
       inet_client_addr() IS NOT NULL,
       current_database()::text,
       pg_backend_pid(),
       pg_has_role('pg_read_all_stats', 'USAGE'),
       pg_notification_queue_usage(),
       (SELECT age(datfrozenxid) FROM pg_database WHERE datname = current_database());

-- name: connections
-- How many sessions there are, and which application of this database has most idle ones.
SELECT count(*)::integer,
       count(*) FILTER (WHERE starts_with(application_name, 'busload'))::integer,
       (SELECT json_build_array(application_name, count(*))::text
          FROM pg_stat_activity
         WHERE state = 'idle' AND pid <> pg_backend_pid()
         GROUP BY application_name
         ORDER BY count(*) DESC, application_name
         LIMIT 1)
  FROM pg_stat_activity
 WHERE backend_type = 'client backend';

-- name: snapshots
-- Whoever keeps vacuum from removing rows of this database, or has a transaction open, the oldest first:
-- sessions, prepared transactions, replication slots, and standbys that report what they still read.
(SELECT 'session' AS kind, pid::text AS name, application_name AS application, usename::text AS role,
        state AS state, xact_start AS since, query_start AS query_start, NULL::bigint AS bytes
   FROM pg_stat_activity
  WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
    AND xact_start < now() - %(transaction_after)s::interval
  ORDER BY xact_start
  LIMIT 10)
UNION ALL
(SELECT 'prepared', gid, NULL, owner::text, NULL, prepared, NULL, NULL
   FROM pg_prepared_xacts
  WHERE database = current_database() AND prepared < now() - %(transaction_after)s::interval
  ORDER BY prepared
  LIMIT 10)
UNION ALL
(SELECT 'slot', slot_name::text, plugin::text, NULL, wal_status, NULL, NULL,
        CASE WHEN NOT pg_is_in_recovery()
             THEN pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint END
   FROM pg_replication_slots
  WHERE NOT active
    AND CASE WHEN NOT pg_is_in_recovery()
             THEN pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint >= %(slot_bytes)s::bigint END
  ORDER BY restart_lsn
  LIMIT 10)
UNION ALL
(SELECT 'standby', coalesce(host(client_addr), 'local'), application_name, usename::text,
        age(backend_xmin)::text, NULL, NULL, NULL
   FROM pg_stat_replication
  WHERE age(backend_xmin) > %(standby_age)s::integer
  LIMIT 10);

-- name: locks
-- Who has waited too long for a lock in this database, and the first session that holds the lock.
SELECT w.pid, w.application_name, coalesce(w.waits_since, w.query_start), h.pid, h.application_name, h.state,
       h.xact_start
  FROM (
    SELECT a.pid, a.application_name, a.query_start,
           (SELECT min(l.waitstart) FROM pg_locks AS l WHERE l.pid = a.pid AND NOT l.granted) AS waits_since
      FROM pg_stat_activity AS a
     WHERE a.datname = current_database() AND a.wait_event_type = 'Lock'
     ORDER BY a.query_start
     LIMIT 10
  ) AS w
 CROSS JOIN LATERAL (SELECT b.pid FROM unnest(pg_blocking_pids(w.pid)) AS b (pid) LIMIT 1) AS blocker
  LEFT JOIN pg_stat_activity AS h ON h.pid = blocker.pid
 WHERE coalesce(w.waits_since, w.query_start) < clock_timestamp() - %(lock_after)s::interval;

-- name: tables
-- The tables of the schema: how they are kept, and how much vacuum has left.
SELECT c.relname::text,
       c.relpersistence::text = 'u',
       row_security_active(c.oid),
       coalesce('autovacuum_enabled=false' = ANY (c.reloptions)
                OR 'autovacuum_enabled=off' = ANY (c.reloptions),
                false),
       coalesce(s.n_dead_tup, 0),
       coalesce(s.n_live_tup, 0),
       greatest(s.last_autovacuum, s.last_vacuum)
  FROM pg_class AS c
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
 WHERE n.nspname = 'busload' AND c.relkind = 'r'
 ORDER BY c.relname;

-- name: objects
-- The indexes, triggers and functions of the schema, and whether each can be used: an index is valid, a
-- trigger is enabled, a function may be called. The schema itself: whether it may be used. The roles that
-- `busload schema grants` has made for it, with what each is for, and whether this login is a member. And
-- whether this login has each of these rights: what is not there, a table or a column, has no row.
SELECT 'index' AS kind, i.relname::text AS name, t.relname::text AS table, x.indisvalid AS usable
  FROM pg_index AS x
  JOIN pg_class AS i ON i.oid = x.indexrelid
  JOIN pg_class AS t ON t.oid = x.indrelid
  JOIN pg_namespace AS n ON n.oid = t.relnamespace
 WHERE n.nspname = 'busload' AND t.relkind = 'r'
UNION ALL
SELECT 'trigger', g.tgname::text, t.relname::text, g.tgenabled::text IN ('O', 'A')
  FROM pg_trigger AS g
  JOIN pg_class AS t ON t.oid = g.tgrelid
  JOIN pg_namespace AS n ON n.oid = t.relnamespace
 WHERE n.nspname = 'busload' AND NOT g.tgisinternal
UNION ALL
SELECT 'function', p.proname::text, '', has_function_privilege(p.oid, 'EXECUTE')
  FROM pg_proc AS p
  JOIN pg_namespace AS n ON n.oid = p.pronamespace
 WHERE n.nspname = 'busload'
UNION ALL
SELECT 'schema', n.nspname::text, '', has_schema_privilege(n.oid, 'USAGE')
  FROM pg_namespace AS n
 WHERE n.nspname = 'busload'
UNION ALL
SELECT 'role', r.rolname::text, r.purpose, r.is_member
  FROM (SELECT o.oid, o.rolname, pg_has_role(o.oid, 'USAGE') AND NOT me.rolsuper AS is_member,
               coalesce(substring(shobj_description(o.oid, 'pg_authid'), '^busload: (\w+)$'),
                        substring(o.rolname::text, '^busload_(\w+)$')) AS purpose
          FROM pg_roles AS o
          JOIN pg_roles AS me ON me.rolname = current_user) AS r
  JOIN pg_namespace AS n ON n.nspname = 'busload'
 WHERE r.purpose IN ('sender', 'worker', 'operator', 'reader')
   AND (r.is_member OR has_schema_privilege(r.oid, n.oid, 'USAGE'))
UNION ALL
SELECT 'right', concat_ws(' ', a.privilege, a.column_name), a.relation,
       CASE WHEN c.relkind = 'S' THEN has_sequence_privilege(c.oid, a.privilege)
            WHEN a.column_name IS NULL THEN has_table_privilege(c.oid, a.privilege)
            ELSE has_column_privilege(c.oid, t.attnum, a.privilege) END
  FROM unnest(%(relations)b::text[], %(privileges)b::text[], %(columns)b::text[])
           AS a (relation, privilege, column_name)
  JOIN pg_namespace AS n ON n.nspname = 'busload'
  JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = a.relation
  LEFT JOIN pg_attribute AS t ON t.attrelid = c.oid AND t.attname = a.column_name AND NOT t.attisdropped
 WHERE a.column_name IS NULL OR t.attnum IS NOT NULL;

-- name: migrations
-- Which files of the schema the database has.
SELECT version, name FROM busload.migration ORDER BY version;

-- name: workers
-- Workers that live. A column that this schema does not have is null.
SELECT w.name, w.seen_at, w.condition, to_jsonb(w) ->> 'version'
  FROM busload.worker AS w
 WHERE w.stopped_at IS NULL AND w.seen_at > now() - w.lease_for AND w.concurrency > 0
 ORDER BY w.worker;

-- name: work
-- What has stood still for too long, by kind and what it is about: how many, since when, and the domain. Only
-- places that stay small are read, and of each so many rows as `most` says.
(SELECT 'OUTBOX_WAITS' AS code, transport AS subject, sum(hi - lo + 1)::bigint AS count, min(since) AS since,
        NULL AS domain
   FROM (SELECT transport, lo, hi, since FROM busload.outbox
          WHERE rounds = 0 AND due_at < now() - %(overdue)s::interval LIMIT %(most)s::integer) AS o
  GROUP BY transport)
UNION ALL
(SELECT 'SCHEDULED_OVERDUE', domain, sum(hi - lo + 1)::bigint, min(run_at), domain
   FROM (SELECT domain, lo, hi, run_at FROM busload.scheduled
          WHERE run_at < now() - %(overdue)s::interval ORDER BY run_at LIMIT %(most)s::integer) AS s
  WHERE NOT EXISTS (SELECT FROM busload.pause AS p WHERE p.domain = s.domain AND p.resumed_at IS NULL)
  GROUP BY domain)
UNION ALL
(SELECT 'LEASES_LEFT', coalesce(w.name, 'worker ' || l.worker), sum(l.open)::bigint, min(l.since), NULL
   FROM (SELECT worker, open, since FROM busload.lease LIMIT %(most)s::integer) AS l
   LEFT JOIN busload.worker AS w ON w.worker = l.worker
  WHERE w.worker IS NULL OR w.stopped_at IS NOT NULL
     OR w.concurrency = 0 AND w.seen_at < now() - w.lease_for - %(overdue)s::interval
  GROUP BY w.name, l.worker)
UNION ALL
(SELECT 'PERMITS_LEFT', p.limit_name, count(*), min(p.since), NULL
   FROM (SELECT limit_name, worker, since FROM busload.permit LIMIT %(most)s::integer) AS p
   LEFT JOIN busload.worker AS w ON w.worker = p.worker
  WHERE (w.worker IS NULL OR w.stopped_at < now() - %(overdue)s::interval)
    AND p.since < now() - %(overdue)s::interval
  GROUP BY p.limit_name)
UNION ALL
(SELECT 'CANCEL_LEFT', batch_id::text, 1, canceling_until, domain
   FROM busload.batch
  WHERE canceling_until < now() - %(overdue)s::interval AND completed_at IS NULL
  LIMIT 10)
UNION ALL
(SELECT 'BATCH_HELD', batch_id::text, 1, held_at, domain
   FROM busload.batch
  WHERE held_at < now() - %(waits_after)s::interval AND completed_at IS NULL
  ORDER BY held_at
  LIMIT 10)
UNION ALL
(SELECT 'DOMAIN_PAUSED', domain, 1, since, domain
   FROM busload.pause
  WHERE resumed_at IS NULL AND since < now() - %(waits_after)s::interval
  ORDER BY since
  LIMIT 10)
UNION ALL
(SELECT 'TROUBLESHOOTING_PILES_UP', domain, count(*), min(since), domain
   FROM (SELECT domain, since FROM busload.troubleshooting ORDER BY domain, since DESC LIMIT 100000) AS t
  GROUP BY domain
 HAVING min(since) < now() - %(waits_after)s::interval OR count(*) >= %(troubles)s::bigint);

-- name: unfinished
-- Batches that were left open, or wait for nothing but a person, for too long. Leaps from domain to domain.
-- And schedules that were paused long ago.
WITH RECURSIVE known AS (
    SELECT min(domain) AS domain FROM busload.batch
    UNION ALL
    SELECT (SELECT min(b.domain) FROM busload.batch AS b WHERE b.domain > k.domain)
      FROM known AS k
     WHERE k.domain IS NOT NULL
), unfinished AS (
    SELECT b.*
      FROM known AS k
     CROSS JOIN (VALUES ('PENDING'), ('IN_PROGRESS')) AS s (status)
     CROSS JOIN LATERAL (
        SELECT batch_id, domain, created_at, sealed_at, stalled_at, batch_type
          FROM busload.batch
         WHERE domain = k.domain AND status = s.status AND pruned_at IS NULL
         ORDER BY created_at DESC
         LIMIT %(most)s::integer
     ) AS b
)
(SELECT 'BATCH_LEFT_OPEN', batch_id::text, 1::bigint, created_at, domain
   FROM unfinished
  WHERE sealed_at IS NULL AND batch_type = 'COMMANDS' AND created_at < now() - %(waits_after)s::interval
  ORDER BY created_at
  LIMIT 10)
UNION ALL
(SELECT 'BATCHES_STALLED', domain, count(*), min(stalled_at), domain
   FROM unfinished
  WHERE stalled_at < now() - %(waits_after)s::interval
  GROUP BY domain)
UNION ALL
(SELECT 'SCHEDULE_PAUSED', name, 1, paused_at, domain
   FROM busload.schedule
  WHERE paused_at < now() - %(waits_after)s::interval
  ORDER BY paused_at
  LIMIT 10);

-- name: history
-- When the oldest of what could be removed has ended: of batches, and of the first executions.
SELECT least(
    (SELECT completed_at FROM busload.batch
      WHERE completed_at IS NOT NULL AND pruned_at IS NULL ORDER BY completed_at LIMIT 1),
    (SELECT min(e.finished_at)
       FROM (SELECT command, outcome, finished_at
             FROM busload.execution ORDER BY command, attempt LIMIT 100) AS e
       JOIN busload.command AS c ON c.id = e.command
      WHERE e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') AND c.batch_id IS NULL));
