-- The workers, and what one of them does for all.

CREATE TABLE busload.worker (
    worker      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text        NOT NULL,
    domains     text[]      NOT NULL,
    concurrency integer     NOT NULL,
    lease_for   interval    NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now(),
    stopped_at  timestamptz,          -- when it stopped by itself, or a rescue declared it dead
    lost        boolean     NOT NULL DEFAULT false,
    condition   json,                 -- how it is, as its last heartbeat has told: for bus.health()
    version     text,                 -- of busload, as the worker runs it
    host        text,                 -- the machine or container it runs on
    process_id  integer,              -- by which that machine knows its process
    release     text,                 -- a fingerprint of all schedules that its application declares
    stop_requested_at timestamptz,    -- an operator has asked it to stop: its next heartbeat tells it
    stop_requested_by text,
    session     integer               -- the server's process in which it waits for notifications
) WITH (fillfactor = 50);

-- The sessions in which workers of a domain wait for notifications: `sessions` repeats what the workers' rows
-- say, so that a sender finds a worker to wake by one key. It is written only when workers come and go. A
-- session holds the advisory lock (27711008, its number) for as long as it lives.
CREATE TABLE busload.listener (
    domain   text PRIMARY KEY,
    sessions integer[] NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- The channel of one worker that waits for commands of a domain; null if its session has ended, no row if
-- nobody listens. Who has made commands ready wakes this worker alone, or else all of them by
-- 'busload_ready'. A transaction finds the same worker again, so it wakes one however often it sends. A lock
-- that can be had is nobody's; it is given back at once.
CREATE VIEW busload.one_listener (domain, channel) AS
    SELECT l.domain,
           CASE WHEN NOT pg_try_advisory_lock_shared(27711008, chosen.session)
                THEN 'busload_wake_' || chosen.session
                WHEN pg_advisory_unlock_shared(27711008, chosen.session) THEN NULL END
      FROM busload.listener AS l
     CROSS JOIN LATERAL (
        SELECT l.sessions[1 + (hashint8(txid_current()) & 2147483647) % cardinality(l.sessions)] AS session
     ) AS chosen
     WHERE l.sessions <> '{}';

-- A worker waits for notifications in this session from now on, or in none if that is null. It repeats this
-- from time to time, and so also takes out others who were not heard of for longer than between two
-- heartbeats: they may be frozen, and what they are woken for would wait.
CREATE FUNCTION busload.listens(worker bigint, session integer) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE busload.worker AS w
       SET session = listens.session
     WHERE w.worker = listens.worker AND w.session IS DISTINCT FROM listens.session;
    INSERT INTO busload.listener AS l (domain, sessions)
    SELECT d.domain, ARRAY(SELECT w.session
                             FROM busload.worker AS w
                            WHERE w.stopped_at IS NULL AND w.session IS NOT NULL
                              AND d.domain = ANY (w.domains) AND w.seen_at > now() - w.lease_for / 2
                            ORDER BY w.session)
      FROM (SELECT DISTINCT unnest(w.domains) AS domain
              FROM busload.worker AS w
             WHERE w.worker = listens.worker) AS d
     ORDER BY d.domain
        ON CONFLICT (domain) DO UPDATE
       SET sessions = excluded.sessions
     WHERE l.sessions <> excluded.sessions;
END $$;

-- Work that one worker does for all from time to time, and when it was done last.
CREATE TABLE busload.turn (
    what     text        PRIMARY KEY,
    taken_at timestamptz NOT NULL,
    ended_at timestamptz,    -- when it was done to its end, by a worker or by `busload prune`
    details  json            -- what it has done then
);
INSERT INTO busload.turn (what, taken_at) VALUES ('prune', '-infinity');
