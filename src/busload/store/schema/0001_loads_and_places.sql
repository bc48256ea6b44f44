-- Commands travel in loads, and a load is in exactly one place.
--
-- A load is a run of neighbouring commands [lo, hi] that share domain, batch, priority and attempt. A command's id is
-- `load number * 1024 + position`, so a load never crosses a multiple of 1024, and ids are known before the insert.
-- A load is split by moving its `lo`; its `hi` never changes, so `hi` is its key in every place: a split is then an
-- update that touches no index, and a statement that waited for a split finds the row again.

CREATE SEQUENCE busload.load_number;

CREATE TABLE busload.command (
    id             bigint      PRIMARY KEY,
    domain         text        NOT NULL,
    command_id     uuid        NOT NULL,
    command_type   text        NOT NULL,
    data           json,
    batch_id       uuid,
    task_key       text,
    correlation_id uuid,       -- null: the command_id
    reply_to       text,
    priority       smallint    NOT NULL DEFAULT 0,
    max_attempts   smallint,   -- null: the handler's retry policy decides
    run_at         timestamptz,
    created_at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT command_once UNIQUE (domain, command_id)
);
-- All commands of a load have the same batch, so the first of each finds the others: an entry per load, not per command.
CREATE INDEX load_of_batch ON busload.command (batch_id, id) WHERE id & 1023 = 0;

COMMENT ON TABLE busload.command IS 'The immutable fact: inserted once, never updated.';

-- The places. `attempt` is the attempt the load is for, or in; `forgiven` are the attempts before the last operator
-- retry, which no longer count; `crashes` is 1 for a load that was there when a worker died, and one more for each worker
-- that died while it was the only suspect.

CREATE TABLE busload.queue (
    lo       bigint   NOT NULL,
    hi       bigint   PRIMARY KEY,
    domain   text     NOT NULL,
    batch_id uuid,
    priority smallint NOT NULL DEFAULT 0,
    attempt  integer  NOT NULL DEFAULT 1,
    forgiven integer  NOT NULL DEFAULT 0,
    crashes  smallint NOT NULL DEFAULT 0,
    replies  boolean  NOT NULL DEFAULT false,
    CONSTRAINT one_load CHECK (lo <= hi AND lo >> 10 = hi >> 10)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX queue_ready   ON busload.queue (domain, priority DESC, hi) WHERE crashes = 0;
CREATE INDEX queue_suspect ON busload.queue (domain, priority DESC, hi) WHERE crashes > 0;

CREATE TABLE busload.scheduled (
    lo       bigint      NOT NULL,
    hi       bigint      PRIMARY KEY,
    domain   text        NOT NULL,
    batch_id uuid,
    priority smallint    NOT NULL DEFAULT 0,
    attempt  integer     NOT NULL DEFAULT 1,
    forgiven integer     NOT NULL DEFAULT 0,
    crashes  smallint    NOT NULL DEFAULT 0,
    replies  boolean     NOT NULL DEFAULT false,
    run_at   timestamptz NOT NULL,
    reason   text        NOT NULL CHECK (reason IN ('RUN_AT', 'RETRY', 'NO_HANDLER')),
    CONSTRAINT one_load CHECK (lo <= hi AND lo >> 10 = hi >> 10)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX scheduled_due ON busload.scheduled (run_at);

CREATE TABLE busload.worker (
    worker      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text        NOT NULL,
    domains     text[]      NOT NULL,
    concurrency integer     NOT NULL,
    lease_for   interval    NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now(),
    stopped_at  timestamptz,          -- stopped by itself, or declared dead by a rescue
    lost        boolean     NOT NULL DEFAULT false
) WITH (fillfactor = 50);

CREATE TABLE busload.lease (
    lease_id uuid        PRIMARY KEY,   -- its low 12 bits are 0: an execution_id has the command's position there
    lo       bigint      NOT NULL,
    hi       bigint      NOT NULL,
    domain   text        NOT NULL,
    batch_id uuid,
    priority smallint    NOT NULL,
    attempt  integer     NOT NULL,
    forgiven integer     NOT NULL,
    crashes  smallint    NOT NULL,
    replies  boolean     NOT NULL,
    worker   bigint      NOT NULL,
    since    timestamptz NOT NULL DEFAULT now(),
    open     integer     NOT NULL,                -- commands not settled yet; with the last one the lease is closed
    returned bigint[]    NOT NULL DEFAULT '{}',   -- commands given back one by one; the rest is still held
    CONSTRAINT one_load CHECK (lo <= hi AND lo >> 10 = hi >> 10)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
-- Not unique: a command that failed or was given back can run again while its neighbours still run under the old lease.
CREATE INDEX lease_load ON busload.lease (hi);
CREATE INDEX lease_of_worker ON busload.lease (worker);

CREATE TABLE busload.troubleshooting (
    command  bigint      PRIMARY KEY,
    domain   text        NOT NULL,
    batch_id uuid,
    priority smallint    NOT NULL,
    attempt  integer     NOT NULL,   -- the attempt that ended here
    forgiven integer     NOT NULL,
    reason   text        NOT NULL CHECK (reason IN ('PERMANENT', 'EXHAUSTED', 'CRASHED', 'UNDECODABLE', 'RESULT_INVALID')),
    error    json,
    since    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX troubleshooting_newest ON busload.troubleshooting (domain, since DESC, command DESC);

-- What happened.

CREATE TABLE busload.execution (
    command     bigint      NOT NULL,
    attempt     integer     NOT NULL,
    outcome     text        NOT NULL CHECK (outcome IN ('COMPLETED', 'FAILED', 'CANCELED', 'TROUBLESHOOTING', 'FAILED_ATTEMPT')),
    lease_id    uuid        NOT NULL,
    batch_id    uuid,
    worker      bigint      NOT NULL,
    started_at  timestamptz NOT NULL,
    finished_at timestamptz NOT NULL,
    details     json,       -- the result of a COMPLETED one, the error of any other
    PRIMARY KEY (command, attempt)
);

COMMENT ON TABLE busload.execution IS 'One row per finished attempt: the retry chain, and what makes settling safe to repeat.';

CREATE TABLE busload.event (
    event    bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    type     text        NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    lo       bigint,     -- the commands it is about; null for an event of the batch itself
    hi       bigint,
    batch_id uuid,
    attempt  integer,
    lease_id uuid,
    worker   bigint,
    operator text,
    details  json,
    CONSTRAINT known_type CHECK (type IN ('CANCELED', 'OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED', 'PARKED',
        'LEASE_LOST', 'RELEASED', 'NO_HANDLER', 'BATCH_STARTED', 'BATCH_STALLED', 'BATCH_COMPLETED', 'BATCH_SEALED', 'BATCH_CANCELED'))
);
CREATE INDEX event_of_load  ON busload.event ((lo >> 10)) WHERE lo IS NOT NULL;
CREATE INDEX event_of_batch ON busload.event (batch_id) WHERE lo IS NULL;

CREATE TABLE busload.batch (
    batch_id                 uuid         PRIMARY KEY,
    domain                   varchar(255) NOT NULL,
    name                     varchar(255),
    custom_data              jsonb,
    status                   varchar(50)  NOT NULL DEFAULT 'PENDING',
    total_count              integer      NOT NULL DEFAULT 0,
    completed_count          integer      NOT NULL DEFAULT 0,
    failed_count             integer      NOT NULL DEFAULT 0,
    canceled_count           integer      NOT NULL DEFAULT 0,
    in_troubleshooting_count integer      NOT NULL DEFAULT 0,
    created_at               timestamptz  NOT NULL DEFAULT now(),
    started_at               timestamptz,
    completed_at             timestamptz,
    sealed_at                timestamptz,
    canceled_at              timestamptz,
    stalled_at               timestamptz,
    notified_at              timestamptz  NOT NULL DEFAULT '-infinity',
    on_complete              json,        -- the command to send when the batch completes
    CONSTRAINT valid_status CHECK (status IN ('PENDING', 'IN_PROGRESS', 'COMPLETED', 'COMPLETED_WITH_FAILURES')),
    CONSTRAINT exact_counts CHECK (completed_count >= 0 AND failed_count >= 0 AND canceled_count >= 0 AND in_troubleshooting_count >= 0
        AND completed_count + failed_count + canceled_count + in_troubleshooting_count <= total_count)
) WITH (fillfactor = 50);
CREATE INDEX batch_newest    ON busload.batch (domain, created_at DESC, batch_id DESC);
CREATE INDEX batch_by_status ON busload.batch (domain, status, created_at DESC, batch_id DESC);
CREATE INDEX batch_canceling ON busload.batch (batch_id) WHERE canceled_at IS NOT NULL AND completed_at IS NULL;

-- An attempt is named by its lease and the command's position in its load.
CREATE FUNCTION busload.execution_id(lease_id uuid, command bigint) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (left(lease_id::text, 33) || lpad(to_hex(command & 1023), 3, '0'))::uuid;

-- Completion is decided here and nowhere else, in the transaction of the transition that ended the last command.
-- The caller holds the rows of these batches.
CREATE FUNCTION busload.decide(batches uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    done     busload.batch;
    callback bigint;
BEGIN
    FOR done IN
        UPDATE busload.batch
           SET completed_at = statement_timestamp(), notified_at = now(), stalled_at = NULL,
               status = CASE WHEN failed_count + canceled_count > 0 THEN 'COMPLETED_WITH_FAILURES' ELSE 'COMPLETED' END
         WHERE batch_id = ANY (batches) AND sealed_at IS NOT NULL AND completed_at IS NULL
           AND completed_count + failed_count + canceled_count = total_count
        RETURNING *
    LOOP
        INSERT INTO busload.event (type, batch_id) VALUES ('BATCH_COMPLETED', done.batch_id);
        PERFORM pg_notify('busload_batch', done.batch_id::text);
        CONTINUE WHEN done.on_complete IS NULL;

        -- The command_id was chosen when the batch was created, so there can never be a second callback.
        callback := nextval('busload.load_number') * 1024;
        INSERT INTO busload.command (id, domain, command_id, command_type, data, correlation_id, reply_to, task_key, priority, max_attempts)
        SELECT callback, done.domain, c.command_id, c.command_type,
               (SELECT json_object_agg(key, value) FROM (
                    SELECT key, value FROM json_each(c.data)
                    UNION ALL
                    SELECT 'batch', json_build_object(
                        'batch_id', done.batch_id, 'name', done.name, 'custom_data', done.custom_data, 'status', done.status,
                        'total_count', done.total_count, 'completed_count', done.completed_count, 'failed_count', done.failed_count,
                        'canceled_count', done.canceled_count, 'in_troubleshooting_count', done.in_troubleshooting_count,
                        'created_at', done.created_at, 'started_at', done.started_at, 'completed_at', done.completed_at)) AS pair),
               c.correlation_id, c.reply_to, c.task_key, c.priority, c.max_attempts
          FROM json_to_record(done.on_complete) AS c (command_id uuid, command_type text, data json, correlation_id uuid,
                                                     reply_to text, task_key text, priority smallint, max_attempts smallint)
            ON CONFLICT ON CONSTRAINT command_once DO NOTHING;     -- somebody used the id meanwhile: no reason to hold the batch up
        INSERT INTO busload.queue (lo, hi, domain, priority, replies)
        SELECT id, id, domain, priority, reply_to IS NOT NULL FROM busload.command WHERE id = callback;
        PERFORM pg_notify('busload_ready', done.domain);
    END LOOP;

    -- Only a person can move such a batch on, so say so, once for each time it gets there.
    WITH stalled AS (
        UPDATE busload.batch
           SET stalled_at = statement_timestamp(), notified_at = now()
         WHERE batch_id = ANY (batches) AND sealed_at IS NOT NULL AND completed_at IS NULL AND stalled_at IS NULL
           AND in_troubleshooting_count > 0
           AND completed_count + failed_count + canceled_count + in_troubleshooting_count = total_count
        RETURNING batch_id, in_troubleshooting_count
    )
    INSERT INTO busload.event (type, batch_id, details)
    SELECT 'BATCH_STALLED', batch_id, json_build_object('in_troubleshooting', in_troubleshooting_count) FROM stalled;

    PERFORM pg_notify('busload_batch', batch_id::text)
       FROM busload.batch WHERE batch_id = ANY (batches) AND completed_at IS NULL AND notified_at = now();
END $$;

-- Counters are a fold over executions and events. Batch rows are locked in id order first: two statements that settle
-- the same batches in another order would deadlock otherwise. Watchers hear of a batch at most ten times a second.
CREATE FUNCTION busload.fold(batches uuid[], completed bigint[], failed bigint[], canceled bigint[], troubleshooting bigint[], ran boolean)
    RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM busload.batch WHERE batch_id = ANY (batches) ORDER BY batch_id FOR NO KEY UPDATE;

    IF ran THEN     -- a claim that could not have the batch row at once leaves its start to us
        WITH started AS (
            UPDATE busload.batch SET status = 'IN_PROGRESS', started_at = statement_timestamp()
             WHERE batch_id = ANY (batches) AND status = 'PENDING'
            RETURNING batch_id
        )
        INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_STARTED', batch_id FROM started;
    END IF;

    UPDATE busload.batch AS b
       SET completed_count          = b.completed_count + d.completed,
           failed_count             = b.failed_count + d.failed,
           canceled_count           = b.canceled_count + d.canceled,
           in_troubleshooting_count = b.in_troubleshooting_count + d.troubleshooting,
           stalled_at               = CASE WHEN d.completed + d.canceled + d.troubleshooting < 0 THEN NULL ELSE b.stalled_at END,
           notified_at              = CASE WHEN b.notified_at < now() - interval '100 ms' THEN now() ELSE b.notified_at END
      FROM unnest(batches, completed, failed, canceled, troubleshooting) AS d (batch_id, completed, failed, canceled, troubleshooting)
     WHERE b.batch_id = d.batch_id;

    PERFORM busload.decide(batches);
END $$;

CREATE FUNCTION busload.fold_executions() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    d record;
BEGIN
    SELECT array_agg(batch_id) AS batches, array_agg(completed) AS completed, array_agg(failed) AS failed,
           array_agg(canceled) AS canceled, array_agg(troubleshooting) AS troubleshooting
      INTO d
      FROM (SELECT batch_id,
                   count(*) FILTER (WHERE outcome = 'COMPLETED')       AS completed,
                   count(*) FILTER (WHERE outcome = 'FAILED')          AS failed,
                   count(*) FILTER (WHERE outcome = 'CANCELED')        AS canceled,
                   count(*) FILTER (WHERE outcome = 'TROUBLESHOOTING') AS troubleshooting
              FROM fresh WHERE batch_id IS NOT NULL AND outcome <> 'FAILED_ATTEMPT' GROUP BY batch_id) AS delta;
    IF d.batches IS NOT NULL THEN
        PERFORM busload.fold(d.batches, d.completed, d.failed, d.canceled, d.troubleshooting, true);
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION busload.fold_events() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    d record;
BEGIN
    SELECT array_agg(batch_id) AS batches, array_agg(completed) AS completed, array_agg(0::bigint) AS failed,
           array_agg(canceled) AS canceled, array_agg(troubleshooting) AS troubleshooting
      INTO d
      FROM (SELECT batch_id,
                   sum(CASE WHEN type = 'OPERATOR_COMPLETED' THEN hi - lo + 1 ELSE 0 END)::bigint               AS completed,
                   sum(CASE WHEN type IN ('CANCELED', 'OPERATOR_CANCELED') THEN hi - lo + 1 ELSE 0 END)::bigint AS canceled,
                   sum(CASE type WHEN 'PARKED' THEN hi - lo + 1 WHEN 'CANCELED' THEN 0 ELSE lo - hi - 1 END)::bigint AS troubleshooting
              FROM fresh
             WHERE batch_id IS NOT NULL
               AND type IN ('CANCELED', 'PARKED', 'OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
             GROUP BY batch_id) AS delta;
    IF d.batches IS NOT NULL THEN
        PERFORM busload.fold(d.batches, d.completed, d.failed, d.canceled, d.troubleshooting, false);
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER count_executions AFTER INSERT ON busload.execution
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION busload.fold_executions();
CREATE TRIGGER count_events AFTER INSERT ON busload.event
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION busload.fold_events();

-- A reply is a command too: in the domain named by reply_to, sent by the transition that ends the command.
CREATE FUNCTION busload.reply(command bigint, outcome text, details json) RETURNS text LANGUAGE sql AS $$
    WITH reply AS (
        INSERT INTO busload.command (id, domain, command_id, command_type, data, correlation_id)
        SELECT nextval('busload.load_number') * 1024, c.reply_to, gen_random_uuid(), c.command_type || 'Reply',
               json_build_object('command_id', c.command_id, 'correlation_id', coalesce(c.correlation_id, c.command_id),
                                 'outcome', $2,
                                 'data', CASE WHEN $2 = 'SUCCESS' THEN $3 END,
                                 'error', CASE WHEN $2 <> 'SUCCESS' THEN $3 END),
               coalesce(c.correlation_id, c.command_id)
          FROM busload.command AS c WHERE c.id = $1 AND c.reply_to IS NOT NULL
        RETURNING id, domain
    ), queued AS (
        INSERT INTO busload.queue (lo, hi, domain) SELECT id, id, domain FROM reply
    )
    SELECT domain FROM reply
$$;

-- Where a command is: what people and list_batch_commands read. Its load number finds its row in a place.
CREATE VIEW busload.command_status AS
SELECT c.id, c.domain, c.command_id, c.command_type, c.data, c.batch_id, c.task_key,
       coalesce(c.correlation_id, c.command_id) AS correlation_id, c.reply_to, c.priority, c.max_attempts, c.created_at,
       coalesce(s.run_at, c.run_at) AS run_at,
       CASE WHEN t.command IS NOT NULL THEN 'IN_TROUBLESHOOTING_QUEUE'
            WHEN q.hi IS NOT NULL THEN 'PENDING'
            WHEN s.hi IS NOT NULL THEN 'SCHEDULED'
            WHEN l.lease_id IS NOT NULL THEN 'IN_PROGRESS'
            WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.outcome
            WHEN f.type = 'OPERATOR_COMPLETED' THEN 'COMPLETED'
            WHEN f.type IN ('CANCELED', 'OPERATOR_CANCELED') THEN 'CANCELED'
            ELSE 'PENDING_QUEUE' END AS status,   -- in no place: other hands removed it, or nothing has put it there yet
       CASE WHEN t.command IS NOT NULL THEN t.attempt - t.forgiven
            WHEN q.hi IS NOT NULL THEN q.attempt - q.forgiven - 1
            WHEN s.hi IS NOT NULL THEN s.attempt - s.forgiven - 1
            WHEN l.lease_id IS NOT NULL THEN l.attempt - l.forgiven
            ELSE coalesce(e.attempt, 0) - coalesce(   -- as an operator's retry left it
                (SELECT max(r.attempt) FROM busload.event AS r
                  WHERE r.lo >> 10 = c.id >> 10 AND r.lo = c.id AND r.type = 'OPERATOR_RETRIED'), 0) END AS attempts,
       coalesce(l.since, e.started_at) AS started_at,
       CASE WHEN t.command IS NULL AND q.hi IS NULL AND s.hi IS NULL AND l.lease_id IS NULL
            THEN coalesce(CASE WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.finished_at END, f.at) END AS finished_at,
       (SELECT w.name FROM busload.worker AS w WHERE w.worker = coalesce(l.worker, e.worker)) AS worker,
       coalesce(busload.execution_id(l.lease_id, c.id), busload.execution_id(e.lease_id, c.id)) AS execution_id,
       coalesce(t.error, failure.details) AS error,
       CASE WHEN e.outcome = 'COMPLETED' THEN e.details WHEN f.type = 'OPERATOR_COMPLETED' THEN f.details -> 'result' END AS result,
       t.reason AS troubleshooting_reason, t.since AS troubleshooting_since, s.reason AS scheduled_reason
  FROM busload.command AS c
  LEFT JOIN busload.troubleshooting AS t ON t.command = c.id
  LEFT JOIN LATERAL (SELECT * FROM busload.queue AS q
                      WHERE q.hi BETWEEN c.id AND (c.id | 1023) AND q.lo <= c.id ORDER BY q.hi LIMIT 1) AS q ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.scheduled AS s
                      WHERE s.hi BETWEEN c.id AND (c.id | 1023) AND s.lo <= c.id ORDER BY s.hi LIMIT 1) AS s ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.execution AS e WHERE e.command = c.id ORDER BY e.attempt DESC LIMIT 1) AS e ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.lease AS l
                      WHERE l.hi BETWEEN c.id AND (c.id | 1023) AND l.lo <= c.id AND c.id <> ALL (l.returned)
                        AND l.attempt > coalesce(e.attempt, 0) ORDER BY l.hi LIMIT 1) AS l ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.execution AS x
                      WHERE x.command = c.id AND x.outcome <> 'COMPLETED' ORDER BY x.attempt DESC LIMIT 1) AS failure ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.event AS f
                      WHERE f.lo >> 10 = c.id >> 10 AND c.id BETWEEN f.lo AND f.hi
                        AND f.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED') ORDER BY f.event DESC LIMIT 1) AS f ON true;

-- The audit trail of a command: what was sent, every attempt, and everything that is not an attempt.
CREATE VIEW busload.audit AS
SELECT c.id AS command, c.domain, c.command_id, c.batch_id, a.*
  FROM busload.command AS c
 CROSS JOIN LATERAL (
    SELECT c.created_at AS at, 0 AS step, 'SENT' AS type, NULL::integer AS attempt, NULL::uuid AS execution_id,
           NULL::bigint AS worker, NULL::text AS operator, NULL::json AS details
    UNION ALL
    SELECT l.since, 1, 'RECEIVED', l.attempt, busload.execution_id(l.lease_id, c.id), l.worker, NULL, NULL
      FROM busload.lease AS l
     WHERE l.hi BETWEEN c.id AND (c.id | 1023) AND l.lo <= c.id AND c.id <> ALL (l.returned)
       AND NOT EXISTS (SELECT FROM busload.execution AS e WHERE e.command = c.id AND e.attempt = l.attempt)
    UNION ALL
    SELECT e.started_at, 1, 'RECEIVED', e.attempt, busload.execution_id(e.lease_id, c.id), e.worker, NULL, NULL
      FROM busload.execution AS e WHERE e.command = c.id
    UNION ALL
    SELECT e.finished_at, 2, CASE e.outcome WHEN 'TROUBLESHOOTING' THEN 'MOVED_TO_TROUBLESHOOTING' ELSE e.outcome END,
           e.attempt, busload.execution_id(e.lease_id, c.id), e.worker, NULL, e.details
      FROM busload.execution AS e WHERE e.command = c.id
    UNION ALL   -- a lease that ended without a result: the event remembers when it began
    SELECT (v.details ->> 'since')::timestamptz, 1, 'RECEIVED', v.attempt, busload.execution_id(v.lease_id, c.id), v.worker, NULL, NULL
      FROM busload.event AS v
     WHERE v.lo >> 10 = c.id >> 10 AND c.id BETWEEN v.lo AND v.hi AND v.type IN ('LEASE_LOST', 'RELEASED')
    UNION ALL
    SELECT v.at, 3, CASE v.type WHEN 'PARKED' THEN 'MOVED_TO_TROUBLESHOOTING' ELSE v.type END, v.attempt,
           busload.execution_id(v.lease_id, c.id), v.worker, v.operator, v.details
      FROM busload.event AS v WHERE v.lo >> 10 = c.id >> 10 AND c.id BETWEEN v.lo AND v.hi
 ) AS a;
