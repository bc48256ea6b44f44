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
    -- Since when the batch is held: nothing of it starts until it is resumed. All four are null otherwise.
    held_at                  timestamptz,
    held_reason              text,        -- what holds it: a person, its canary or its failure budget
    held_by                  text,        -- the operator, if a person holds it
    held_note                text,        -- why, in words for people
    CONSTRAINT valid_status CHECK (
        status IN ('PENDING', 'IN_PROGRESS', 'COMPLETED', 'COMPLETED_WITH_FAILURES')),
    CONSTRAINT exact_counts CHECK (
            completed_count >= 0
        AND failed_count >= 0
        AND canceled_count >= 0
        AND in_troubleshooting_count >= 0
        AND completed_count + failed_count + canceled_count + in_troubleshooting_count <= total_count),
    CONSTRAINT held_for_a_reason CHECK (
        (held_at IS NULL) = (held_reason IS NULL) AND held_reason IN ('OPERATOR', 'CANARY', 'BUDGET')),
    CONSTRAINT longest_domain CHECK (length(domain) <= 255),
    CONSTRAINT longest_name CHECK (length(name) <= 255)
) WITH (fillfactor = 50);
CREATE INDEX batch_newest    ON busload.batch (domain, created_at DESC, batch_id DESC);
CREATE INDEX batch_by_status ON busload.batch (domain, status, created_at DESC, batch_id DESC);
CREATE INDEX batch_of_job    ON busload.batch (job_id, created_at, batch_id) WHERE job_id IS NOT NULL;
CREATE INDEX batch_canceling ON busload.batch (batch_id)
    WHERE canceled_at IS NOT NULL AND completed_at IS NULL;
CREATE INDEX batch_withheld  ON busload.batch (batch_id)
    WHERE (canceling_until IS NOT NULL OR held_at IS NOT NULL) AND completed_at IS NULL;
CREATE INDEX batch_ended     ON busload.batch (completed_at, batch_id)
    WHERE completed_at IS NOT NULL AND pruned_at IS NULL;
CREATE INDEX batch_pruned    ON busload.batch (batch_id) WHERE pruned_at IS NOT NULL;
-- Which batch a callback belongs to: the callback must not be removed before its batch.
CREATE INDEX batch_of_callback ON busload.batch (((on_complete ->> 'command_id')::uuid))
    WHERE on_complete IS NOT NULL;

-- A large batch is canceled in pages, each a short transaction. Meanwhile no worker claims commands of it
-- and no relay publishes them. If the process that cancels dies, the sweep goes on.
--
-- What may be claimed, and what may be published: nothing of a batch that is being canceled in pages, or
-- that is held. The planner takes IS NOT NULL to be true for nearly all
-- rows, and it is.
CREATE VIEW busload.ready AS
SELECT * FROM busload.queue
 WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT b.batch_id FROM busload.batch AS b
                                        WHERE (b.canceling_until IS NOT NULL OR b.held_at IS NOT NULL)
                                          AND b.completed_at IS NULL))
            THEN NULL ELSE true END IS NOT NULL;
CREATE VIEW busload.unmarked AS
SELECT * FROM busload.outbox
 WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT b.batch_id FROM busload.batch AS b
                                        WHERE (b.canceling_until IS NOT NULL OR b.held_at IS NOT NULL)
                                          AND b.completed_at IS NULL))
            THEN NULL ELSE true END IS NOT NULL;

-- The first and the last id that commands of these batches can have. Between them the loads of a batch are
-- found in a place by its key, whatever else waits there.
CREATE FUNCTION busload.ids_of(batches uuid[]) RETURNS TABLE (batch_id uuid, first bigint, last bigint)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT b.batch_id, first.id, last.id | 1023
      FROM unnest(batches) AS b (batch_id)
     CROSS JOIN LATERAL (SELECT id FROM busload.command
                          WHERE command.batch_id = b.batch_id AND id & 1023 = 0
                          ORDER BY id LIMIT 1) AS first
     CROSS JOIN LATERAL (SELECT id FROM busload.command
                          WHERE command.batch_id = b.batch_id AND id & 1023 = 0
                          ORDER BY id DESC LIMIT 1) AS last
     ORDER BY b.batch_id
$$;

-- Take the loads of these batches out of the queue and the outbox, so that claims do not have to pass them
-- by. They are HELD in `scheduled` until somebody resumes the batch. The caller holds the rows of the
-- batches, so no load can become HELD after its batch was resumed. If a claim is splitting a load, this
-- waits for it, and moves what is left.
CREATE FUNCTION busload.withhold(batches uuid[]) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b record;
BEGIN
    FOR b IN SELECT * FROM busload.ids_of(batches) LOOP
        WITH ready AS (
            DELETE FROM busload.queue
             WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue
                                    WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id
                                    ORDER BY hi FOR UPDATE))
            RETURNING lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies
        ), unpublished AS (
            DELETE FROM busload.outbox
             WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox
                                    WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id
                                    ORDER BY hi FOR UPDATE))
            RETURNING lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies
        )
        INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority,
                                       attempt, forgiven, crashes, replies, run_at, reason)
        SELECT load.*, 'infinity', 'HELD'
          FROM (SELECT * FROM ready UNION ALL SELECT * FROM unpublished) AS load;
    END LOOP;
END $$;

-- Put the HELD loads of these batches into the queue, and tell the workers of their domains. The caller holds
-- the rows of the batches.
CREATE FUNCTION busload.release_held(batches uuid[]) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b record;
BEGIN
    FOR b IN SELECT * FROM busload.ids_of(batches) LOOP
        WITH held AS (
            DELETE FROM busload.scheduled
             WHERE hi = ANY (ARRAY(SELECT hi FROM busload.scheduled
                                    WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id
                                      AND reason = 'HELD'
                                    ORDER BY hi FOR UPDATE))
            RETURNING lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies
        )
        INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies)
        SELECT * FROM held;
        PERFORM pg_notify('busload_ready', domain)
           FROM (SELECT DISTINCT domain FROM busload.queue
                  WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id) AS domains;
    END LOOP;
END $$;

-- Hold batches: nothing of them starts from the commit on, and what runs finishes. `what` holds them:
-- OPERATOR, CANARY or BUDGET; `who` is null unless it is a person; `why` is for people. A batch that is
-- held already, canceled or complete stays as it is. Returns those that are held from now on. Workers hand
-- back what stands in their lines. The rows of the batches are locked in order, as every statement does it.
CREATE FUNCTION busload.hold_batches(batches uuid[], what text, who text, why text) RETURNS uuid[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    held uuid[];
BEGIN
    WITH free AS MATERIALIZED (
        SELECT batch_id FROM busload.batch
         WHERE batch_id = ANY (batches)
           AND held_at IS NULL AND canceled_at IS NULL AND completed_at IS NULL
         ORDER BY batch_id FOR NO KEY UPDATE
    ), marked AS (
        UPDATE busload.batch AS b
           SET held_at = statement_timestamp(), held_reason = what, held_by = who, held_note = why
          FROM free WHERE b.batch_id = free.batch_id
        RETURNING b.batch_id
    ), noted AS (
        INSERT INTO busload.event (type, batch_id, operator, details)
        SELECT 'BATCH_HELD', batch_id, who,
               json_build_object('held_reason', what, 'reason', why)
          FROM marked
    )
    SELECT array_agg(batch_id) INTO held FROM marked;
    IF held IS NOT NULL THEN
        PERFORM busload.withhold(held);
        PERFORM pg_notify('busload_hold', batch_id::text), pg_notify('busload_batch', batch_id::text)
           FROM unnest(held) AS batch_id;
    END IF;
    RETURN held;
END $$;

-- Let held batches go on. Returns those that were held until now.
CREATE FUNCTION busload.resume_batches(batches uuid[], who text) RETURNS uuid[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    resumed uuid[];
BEGIN
    WITH held AS MATERIALIZED (
        SELECT batch_id, held_at, held_reason FROM busload.batch
         WHERE batch_id = ANY (batches) AND held_at IS NOT NULL AND completed_at IS NULL
         ORDER BY batch_id FOR NO KEY UPDATE
    ), marked AS (
        UPDATE busload.batch AS b
           SET held_at = NULL, held_reason = NULL, held_by = NULL, held_note = NULL
          FROM held WHERE b.batch_id = held.batch_id
        RETURNING b.batch_id
    ), noted AS (
        INSERT INTO busload.event (type, batch_id, operator, details)
        SELECT 'BATCH_RESUMED', batch_id, who,
               json_build_object('held_reason', held_reason, 'held_at', held_at)
          FROM held
    )
    SELECT array_agg(batch_id) INTO resumed FROM marked;
    IF resumed IS NOT NULL THEN
        PERFORM busload.release_held(resumed);
        PERFORM pg_notify('busload_batch', batch_id::text) FROM unnest(resumed) AS batch_id;
    END IF;
    RETURN resumed;
END $$;

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
               held_at = NULL, held_reason = NULL, held_by = NULL, held_note = NULL,
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
