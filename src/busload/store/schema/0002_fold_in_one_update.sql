-- Most settlements neither start, complete nor stall a batch: they now lock and count in one statement, and only what has
-- come to an end by that is looked at again. What starts or completes together is written together.

-- The first command of a batch runs. Called by a claim that has the rows of these batches, so that a claim which starts
-- nothing writes no event at all: even an insert of no rows would wake the trigger on events.
CREATE FUNCTION busload.start_batches(batches uuid[], by bigint) RETURNS void LANGUAGE sql STRICT AS $$
    WITH started AS (
        UPDATE busload.batch SET status = 'IN_PROGRESS', started_at = now()
         WHERE batch_id = ANY (batches) AND status = 'PENDING'
        RETURNING batch_id
    )
    INSERT INTO busload.event (type, batch_id, worker) SELECT 'BATCH_STARTED', batch_id, by FROM started
$$;

-- Completion is decided here and nowhere else, in the transaction of the transition that ended the last command.
-- The caller holds the rows of these batches. All of them are completed together; only callbacks are sent one by one.
CREATE OR REPLACE FUNCTION busload.decide(batches uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    completed integer;
    awaited   uuid[];     -- completed ones that have a callback
    done      busload.batch;
    callback  bigint;
BEGIN
    WITH ended AS (
        UPDATE busload.batch
           SET completed_at = statement_timestamp(), notified_at = now(), stalled_at = NULL,
               status = CASE WHEN failed_count + canceled_count > 0 THEN 'COMPLETED_WITH_FAILURES' ELSE 'COMPLETED' END
         WHERE batch_id = ANY (batches) AND sealed_at IS NOT NULL AND completed_at IS NULL
           AND completed_count + failed_count + canceled_count = total_count
        RETURNING batch_id, on_complete IS NOT NULL AS has_callback
    ), noted AS (
        INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_COMPLETED', batch_id FROM ended
    )
    SELECT count(pg_notify('busload_batch', batch_id::text)), array_agg(batch_id) FILTER (WHERE has_callback)
      INTO completed, awaited
      FROM ended;

    FOR done IN SELECT * FROM busload.batch WHERE batch_id = ANY (awaited) LOOP
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
    IF completed = cardinality(batches) THEN
        RETURN;
    END IF;

    -- Only a person can move such a batch on, so say so, once for each time it gets there.
    WITH stalled AS (
        UPDATE busload.batch
           SET stalled_at = statement_timestamp(), notified_at = now()
         WHERE batch_id = ANY (batches) AND sealed_at IS NOT NULL AND completed_at IS NULL AND stalled_at IS NULL
           AND in_troubleshooting_count > 0
           AND completed_count + failed_count + canceled_count + in_troubleshooting_count = total_count
        RETURNING batch_id, in_troubleshooting_count
    ), noted AS (
        INSERT INTO busload.event (type, batch_id, details)
        SELECT 'BATCH_STALLED', batch_id, json_build_object('in_troubleshooting', in_troubleshooting_count) FROM stalled
    )
    SELECT count(pg_notify('busload_batch', batch_id::text)) INTO completed FROM stalled;
END $$;

-- Counters are a fold over executions and events. Batch rows are locked in id order first: two statements that settle
-- the same batches in another order would deadlock otherwise. Watchers hear of a batch at most ten times a second.
CREATE OR REPLACE FUNCTION busload.fold(batches uuid[], completed bigint[], failed bigint[], canceled bigint[], troubleshooting bigint[], ran boolean)
    RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    begun uuid[];     -- a claim that could not have the batch row at once leaves its start to us
    ended uuid[];     -- nothing of these is left to run
    heard uuid[];
BEGIN
    WITH before AS MATERIALIZED (
        SELECT batch_id, status FROM busload.batch WHERE batch_id = ANY (batches) ORDER BY batch_id FOR NO KEY UPDATE
    ), counted AS (
        UPDATE busload.batch AS b
           SET completed_count          = b.completed_count + d.completed,
               failed_count             = b.failed_count + d.failed,
               canceled_count           = b.canceled_count + d.canceled,
               in_troubleshooting_count = b.in_troubleshooting_count + d.troubleshooting,
               status                   = CASE WHEN ran AND before.status = 'PENDING' THEN 'IN_PROGRESS' ELSE b.status END,
               started_at               = CASE WHEN ran AND before.status = 'PENDING' THEN statement_timestamp() ELSE b.started_at END,
               stalled_at               = CASE WHEN d.completed + d.canceled + d.troubleshooting < 0 THEN NULL ELSE b.stalled_at END,
               notified_at              = CASE WHEN b.notified_at < now() - interval '100 ms' THEN now() ELSE b.notified_at END
          FROM before JOIN unnest(batches, completed, failed, canceled, troubleshooting)
                           AS d (batch_id, completed, failed, canceled, troubleshooting) ON d.batch_id = before.batch_id
         WHERE b.batch_id = before.batch_id
        RETURNING b.*, ran AND before.status = 'PENDING' AS begins
    )
    SELECT array_agg(batch_id) FILTER (WHERE begins),
           array_agg(batch_id) FILTER (WHERE completed_count + failed_count + canceled_count + in_troubleshooting_count = total_count),
           array_agg(batch_id) FILTER (WHERE notified_at = now())
      INTO begun, ended, heard
      FROM counted;

    IF begun IS NOT NULL THEN
        INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_STARTED', batch_id FROM unnest(begun) AS batch_id;
    END IF;
    IF ended IS NOT NULL THEN
        PERFORM busload.decide(ended);
    END IF;
    IF heard IS NOT NULL THEN
        PERFORM pg_notify('busload_batch', batch_id::text) FROM unnest(heard) AS batch_id;
    END IF;
END $$;
