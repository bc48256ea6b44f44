-- Batches. Their counters are exact: triggers add up executions and events, in the transaction that writes
-- them.

-- The id of a job of ours; null for a job of the application's whose id is another text.
CREATE FUNCTION busload.uuid_of(job_id text) RETURNS uuid
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN CASE WHEN job_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN job_id::uuid END;

CREATE TABLE busload.batch (
    batch_id                 uuid        PRIMARY KEY,
    domain                   text        NOT NULL,
    name                     text,
    custom_data              jsonb,
    status                   text        NOT NULL DEFAULT 'PENDING',
    total_count              integer     NOT NULL DEFAULT 0,
    completed_count          integer     NOT NULL DEFAULT 0,
    failed_count             integer     NOT NULL DEFAULT 0,
    canceled_count           integer     NOT NULL DEFAULT 0,
    in_troubleshooting_count integer     NOT NULL DEFAULT 0,
    created_at               timestamptz NOT NULL DEFAULT now(),
    started_at               timestamptz,
    completed_at             timestamptz,
    sealed_at                timestamptz,
    canceled_at              timestamptz,
    stalled_at               timestamptz,
    notified_at              timestamptz NOT NULL DEFAULT '-infinity',
    on_complete              json,        -- the command to send when the batch completes
    pruned_at                timestamptz, -- when its removal began; it is no longer shown
    job_id                   text COLLATE "C",   -- the job that the batch is a stage of: a UUID, or any text
    stage                    jsonb,       -- a text or a number
    -- Until then somebody cancels the batch in pages. Null: nobody does, or it is done.
    canceling_until          timestamptz,
    CONSTRAINT valid_status CHECK (
        status IN ('PENDING', 'IN_PROGRESS', 'COMPLETED', 'COMPLETED_WITH_FAILURES')),
    CONSTRAINT exact_counts CHECK (
            completed_count >= 0
        AND failed_count >= 0
        AND canceled_count >= 0
        AND in_troubleshooting_count >= 0
        AND completed_count + failed_count + canceled_count + in_troubleshooting_count <= total_count),
    CONSTRAINT longest_domain CHECK (length(domain) <= 255),
    CONSTRAINT longest_name CHECK (length(name) <= 255)
) WITH (fillfactor = 50);
CREATE INDEX batch_newest    ON busload.batch (domain, created_at DESC, batch_id DESC);
CREATE INDEX batch_by_status ON busload.batch (domain, status, created_at DESC, batch_id DESC);
CREATE INDEX batch_of_job    ON busload.batch (job_id, created_at, batch_id) WHERE job_id IS NOT NULL;
CREATE INDEX batch_canceling ON busload.batch (batch_id)
    WHERE canceled_at IS NOT NULL AND completed_at IS NULL;
CREATE INDEX batch_in_pages  ON busload.batch (batch_id)
    WHERE canceling_until IS NOT NULL AND completed_at IS NULL;
CREATE INDEX batch_ended     ON busload.batch (completed_at, batch_id)
    WHERE completed_at IS NOT NULL AND pruned_at IS NULL;
CREATE INDEX batch_pruned    ON busload.batch (batch_id) WHERE pruned_at IS NOT NULL;
-- Which batch a callback belongs to: the callback must not be removed before its batch.
CREATE INDEX batch_of_callback ON busload.batch (((on_complete ->> 'command_id')::uuid))
    WHERE on_complete IS NOT NULL;

-- A large batch is canceled in pages, each a short transaction. Meanwhile no worker claims commands of it
-- and no relay publishes them. If the process that cancels dies, the sweep goes on.
--
-- What may be claimed, and what may be published. The planner takes IS NOT NULL to be true for nearly all
-- rows, and it is.
CREATE VIEW busload.ready AS
SELECT * FROM busload.queue
 WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT b.batch_id FROM busload.batch AS b
                                        WHERE b.canceling_until IS NOT NULL AND b.completed_at IS NULL))
            THEN NULL ELSE true END IS NOT NULL;
CREATE VIEW busload.unmarked AS
SELECT * FROM busload.outbox
 WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT b.batch_id FROM busload.batch AS b
                                        WHERE b.canceling_until IS NOT NULL AND b.completed_at IS NULL))
            THEN NULL ELSE true END IS NOT NULL;

-- The first command of a batch runs. The claim that holds the rows of these batches calls this only if it
-- starts one. A claim that starts none writes no event at all, because even an insert of no rows would run
-- the trigger on events.
CREATE FUNCTION busload.start_batches(batches uuid[], by bigint) RETURNS void
    LANGUAGE sql STRICT SET search_path = pg_catalog, pg_temp AS $$
    WITH started AS (
        UPDATE busload.batch SET status = 'IN_PROGRESS', started_at = now()
         WHERE batch_id = ANY (batches) AND status = 'PENDING'
        RETURNING batch_id
    )
    INSERT INTO busload.event (type, batch_id, worker) SELECT 'BATCH_STARTED', batch_id, by FROM started
$$;

-- Completion is decided here and nowhere else, in the transaction of the transition that ended the last
-- command. The caller holds the rows of these batches. All of them are completed together; only callbacks
-- are sent one by one.
CREATE FUNCTION busload.decide(batches uuid[]) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    completed integer;
    awaited   uuid[];     -- those that completed and have a callback
    done      busload.batch;
    callback  bigint;
BEGIN
    WITH ended AS (
        UPDATE busload.batch
           SET completed_at = statement_timestamp(),
               notified_at = now(),
               stalled_at = NULL,
               status = CASE WHEN failed_count + canceled_count > 0 THEN 'COMPLETED_WITH_FAILURES'
                             ELSE 'COMPLETED' END
         WHERE batch_id = ANY (batches)
           AND sealed_at IS NOT NULL
           AND completed_at IS NULL
           AND completed_count + failed_count + canceled_count = total_count
        RETURNING batch_id, on_complete IS NOT NULL AS has_callback
    ), noted AS (
        INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_COMPLETED', batch_id FROM ended
    )
    SELECT count(pg_notify('busload_batch', batch_id::text)), array_agg(batch_id) FILTER (WHERE has_callback)
      INTO completed, awaited
      FROM ended;

    FOR done IN SELECT * FROM busload.batch WHERE batch_id = ANY (awaited) LOOP
        -- The command_id was chosen when the batch was created, so there is never a second callback. If
        -- somebody has used the id meanwhile, the batch completes without a callback.
        callback := nextval('busload.load_number') * 1024;
        INSERT INTO busload.command (id, domain, command_id, command_type, data,
                                     correlation_id, reply_to, task_key, priority, max_attempts)
        SELECT callback, done.domain, c.command_id, c.command_type,
               (SELECT json_object_agg(key, value) FROM (
                    SELECT key, value FROM json_each(c.data)
                    UNION ALL
                    SELECT 'batch', json_build_object(
                        'batch_id', done.batch_id,
                        'name', done.name,
                        'custom_data', done.custom_data,
                        'status', done.status,
                        'total_count', done.total_count,
                        'completed_count', done.completed_count,
                        'failed_count', done.failed_count,
                        'canceled_count', done.canceled_count,
                        'in_troubleshooting_count', done.in_troubleshooting_count,
                        'created_at', done.created_at,
                        'started_at', done.started_at,
                        'completed_at', done.completed_at)) AS pair),
               c.correlation_id, c.reply_to, c.task_key, c.priority, c.max_attempts
          FROM json_to_record(done.on_complete)
               AS c (command_id uuid, command_type text, data json, correlation_id uuid,
                     reply_to text, task_key text, priority smallint, max_attempts smallint)
            ON CONFLICT ON CONSTRAINT command_once DO NOTHING;
        INSERT INTO busload.queue (lo, hi, domain, priority, replies)
        SELECT id, id, domain, priority, reply_to IS NOT NULL FROM busload.command WHERE id = callback;
        PERFORM pg_notify('busload_ready', done.domain);
    END LOOP;
    IF completed = cardinality(batches) THEN
        RETURN;
    END IF;

    -- Only a person can move a stalled batch on, so an event says so, once for each time that a batch stalls.
    WITH stalled AS (
        UPDATE busload.batch
           SET stalled_at = statement_timestamp(), notified_at = now()
         WHERE batch_id = ANY (batches)
           AND sealed_at IS NOT NULL
           AND completed_at IS NULL
           AND stalled_at IS NULL
           AND in_troubleshooting_count > 0
           AND completed_count + failed_count + canceled_count + in_troubleshooting_count = total_count
        RETURNING batch_id, in_troubleshooting_count
    ), noted AS (
        INSERT INTO busload.event (type, batch_id, details)
        SELECT 'BATCH_STALLED', batch_id, json_build_object('in_troubleshooting', in_troubleshooting_count)
          FROM stalled
    )
    SELECT count(pg_notify('busload_batch', batch_id::text)) INTO completed FROM stalled;
END $$;

-- Count what has ended. Most settlements neither start, complete nor stall a batch, so one statement locks
-- and counts, and only batches with nothing left to run are looked at again. Batch rows are locked in the
-- order of their ids: otherwise two statements that settle the same batches could deadlock. Watchers hear
-- of a batch at most ten times a second.
CREATE FUNCTION busload.fold(batches uuid[], completed bigint[], failed bigint[], canceled bigint[],
                             troubleshooting bigint[], ran boolean) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    begun uuid[];     -- a claim that could not have the row of the batch at once leaves the start to us
    ended uuid[];     -- nothing of these is left to run
    heard uuid[];
BEGIN
    WITH before AS MATERIALIZED (
        SELECT batch_id, status FROM busload.batch
         WHERE batch_id = ANY (batches) ORDER BY batch_id FOR NO KEY UPDATE
    ), counted AS (
        UPDATE busload.batch AS b
           SET completed_count          = b.completed_count + d.completed,
               failed_count             = b.failed_count + d.failed,
               canceled_count           = b.canceled_count + d.canceled,
               in_troubleshooting_count = b.in_troubleshooting_count + d.troubleshooting,
               status      = CASE WHEN ran AND before.status = 'PENDING' THEN 'IN_PROGRESS'
                                  ELSE b.status END,
               started_at  = CASE WHEN ran AND before.status = 'PENDING' THEN statement_timestamp()
                                  ELSE b.started_at END,
               stalled_at  = CASE WHEN d.completed + d.canceled + d.troubleshooting < 0 THEN NULL
                                  ELSE b.stalled_at END,
               notified_at = CASE WHEN b.notified_at < now() - interval '100 ms' THEN now()
                                  ELSE b.notified_at END
          FROM before
          JOIN unnest(batches, completed, failed, canceled, troubleshooting)
               AS d (batch_id, completed, failed, canceled, troubleshooting) ON d.batch_id = before.batch_id
         WHERE b.batch_id = before.batch_id
        RETURNING b.*, ran AND before.status = 'PENDING' AS begins
    )
    SELECT array_agg(batch_id) FILTER (WHERE begins),
           array_agg(batch_id) FILTER (
              WHERE completed_count + failed_count + canceled_count + in_troubleshooting_count = total_count),
           array_agg(batch_id) FILTER (WHERE notified_at = now())
      INTO begun, ended, heard
      FROM counted;

    IF begun IS NOT NULL THEN
        INSERT INTO busload.event (type, batch_id)
        SELECT 'BATCH_STARTED', batch_id FROM unnest(begun) AS batch_id;
    END IF;
    IF ended IS NOT NULL THEN
        PERFORM busload.decide(ended);
    END IF;
    IF heard IS NOT NULL THEN
        PERFORM pg_notify('busload_batch', batch_id::text) FROM unnest(heard) AS batch_id;
    END IF;
END $$;

CREATE FUNCTION busload.fold_executions() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
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
              FROM fresh
             WHERE batch_id IS NOT NULL AND outcome <> 'FAILED_ATTEMPT'
             GROUP BY batch_id) AS delta;
    IF d.batches IS NOT NULL THEN
        PERFORM busload.fold(d.batches, d.completed, d.failed, d.canceled, d.troubleshooting, true);
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION busload.fold_events() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    d record;
BEGIN
    SELECT array_agg(batch_id) AS batches, array_agg(completed) AS completed, array_agg(0::bigint) AS failed,
           array_agg(canceled) AS canceled, array_agg(troubleshooting) AS troubleshooting
      INTO d
      FROM (SELECT batch_id,
                   sum(CASE WHEN type = 'OPERATOR_COMPLETED' THEN hi - lo + 1
                            ELSE 0 END)::bigint AS completed,
                   sum(CASE WHEN type IN ('CANCELED', 'OPERATOR_CANCELED') THEN hi - lo + 1
                            ELSE 0 END)::bigint AS canceled,
                   sum(CASE type WHEN 'PARKED' THEN hi - lo + 1
                                 WHEN 'CANCELED' THEN 0
                                 ELSE lo - hi - 1 END)::bigint AS troubleshooting
              FROM fresh
             WHERE batch_id IS NOT NULL
               AND type IN ('CANCELED', 'PARKED',
                            'OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
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
