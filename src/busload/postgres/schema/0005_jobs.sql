-- A job is a list of stages that run one after the other, each as a batch. The step to the next stage is a
-- command: the callback of the batch before, sent by the transaction that completes that batch. The step
-- locks the row of the job, creates the next batch and completes, all in one transaction. The ids of
-- batches and steps are chosen with the job, so a step that is repeated finds that it was taken before.
--
-- A job that fails or is canceled undoes the stages that have done something, the last one first. It goes
-- back as it came: each compensation is a batch, and its callback begins the next one.

CREATE TABLE busload.job (
    job_id                  uuid        PRIMARY KEY,
    domain                  text        NOT NULL,
    name                    text,
    custom_data             jsonb,
    status                  text        NOT NULL DEFAULT 'IN_PROGRESS',
    position                integer     NOT NULL DEFAULT 0,   -- the stage it is at; the first one is 0
    continue_after_failures boolean     NOT NULL,
    on_complete             json,       -- the command to send when the job completes
    operator                text,       -- who resumed or canceled it last
    reason                  text,
    created_at              timestamptz NOT NULL DEFAULT now(),
    completed_at            timestamptz,
    outcome                 text,        -- FAILED or CANCELED: the status that it has after its compensation
    compensated_at          timestamptz, -- when its compensation has ended
    batch_id                uuid,        -- the batch of jobs that it counts in
    CONSTRAINT valid_status CHECK (
        status IN ('IN_PROGRESS', 'COMPENSATING', 'COMPLETED', 'FAILED', 'CANCELED')),
    CONSTRAINT ended_or_not CHECK ((status IN ('IN_PROGRESS', 'COMPENSATING')) = (completed_at IS NULL)),
    CONSTRAINT compensates_or_not CHECK (status <> 'COMPENSATING' OR outcome IS NOT NULL)
) WITH (fillfactor = 50);
CREATE INDEX job_newest ON busload.job (domain, created_at DESC, job_id DESC);
CREATE INDEX job_created ON busload.job (created_at, job_id);
CREATE INDEX job_ended  ON busload.job (completed_at, job_id) WHERE completed_at IS NOT NULL;
CREATE INDEX job_of_batch ON busload.job (batch_id, job_id) WHERE batch_id IS NOT NULL;

CREATE TABLE busload.job_stage (
    job_id   uuid    NOT NULL REFERENCES busload.job ON DELETE CASCADE,
    position integer NOT NULL,
    name     text    NOT NULL,
    planned  boolean NOT NULL,
    batch_id uuid    NOT NULL,   -- of the batch that the stage has, or will have
    step_id  uuid    NOT NULL,   -- of the command that follows the stage: the callback of its batch
    plan_id  uuid    NOT NULL,   -- of the command that plans the stage, if it is planned
    status   text    NOT NULL DEFAULT 'PENDING' CHECK (status IN (
        'PENDING', 'PLANNING', 'IN_PROGRESS', 'COMPLETED', 'COMPLETED_WITH_FAILURES', 'SKIPPED')),
    -- What undoes the stage: a batch too, whose callback takes the job on to the stage before. Null: nothing.
    undo          text CHECK (undo IN ('PENDING', 'IN_PROGRESS', 'DONE', 'SKIPPED')),
    undo_batch_id uuid    NOT NULL,
    undo_step_id  uuid    NOT NULL,
    PRIMARY KEY (job_id, position),
    UNIQUE (job_id, name)
) WITH (fillfactor = 50);

-- The commands of stages that have not begun, and those that undo a stage: at the position -1 - position.
CREATE TABLE busload.job_part (
    job_id   uuid    NOT NULL REFERENCES busload.job ON DELETE CASCADE,
    position integer NOT NULL,
    part     integer NOT NULL,
    commands json    NOT NULL,
    PRIMARY KEY (job_id, position, part)
);

-- Jobs of batches of jobs that may wait for a person: all that was left of their stage was in
-- troubleshooting, or the command that is to take them on was parked there, canceled, or asked to stop.
-- Whoever counts those that do wait looks at these and at no others. Nobody locks a job to doubt it: its
-- commands are parked and decided by those who hold their batch already.
CREATE TABLE busload.job_in_doubt (
    job_id   uuid PRIMARY KEY REFERENCES busload.job ON DELETE CASCADE,
    batch_id uuid NOT NULL     -- the batch of jobs
);
CREATE INDEX job_in_doubt_of_batch ON busload.job_in_doubt (batch_id);

CREATE FUNCTION busload.doubt(doubtful uuid) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO busload.job_in_doubt (job_id, batch_id)
    SELECT job_id, batch_id FROM busload.job
     WHERE job_id = doubtful AND batch_id IS NOT NULL AND completed_at IS NULL
        ON CONFLICT DO NOTHING
$$;

CREATE FUNCTION busload.doubt_stage() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM busload.doubt(busload.uuid_of(NEW.job_id));
    RETURN NULL;
END $$;

-- Steps and planners belong to no batch, and their data tell the job.
CREATE FUNCTION busload.doubt_step() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    stopped bigint;
BEGIN
    IF TG_TABLE_NAME = 'event' THEN
        stopped := NEW.lo;
    ELSE
        stopped := NEW.command;
    END IF;
    PERFORM busload.doubt(busload.uuid_of(c.data ->> 'job_id'))
       FROM busload.command AS c
      WHERE c.id = stopped AND (c.command_type = 'busload.Stage' OR c.command_type LIKE 'busload.Plan.%');
    RETURN NULL;
END $$;

CREATE TRIGGER doubt_stage AFTER UPDATE OF stalled_at ON busload.batch
    FOR EACH ROW WHEN (OLD.stalled_at IS NULL AND NEW.stalled_at IS NOT NULL AND NEW.way = 'job')
    EXECUTE FUNCTION busload.doubt_stage();
CREATE TRIGGER doubt_step AFTER INSERT ON busload.event
    FOR EACH ROW WHEN (NEW.batch_id IS NULL AND NEW.type IN ('CANCELED', 'ASKED_TO_STOP'))
    EXECUTE FUNCTION busload.doubt_step();

-- A batch of jobs has no commands. Its counters follow the status of its jobs: whatever statement changes
-- that, this trigger counts it in the same transaction, and the last job that ends completes the batch. A job
-- that is resumed after it failed is taken out of the failures again. Whoever changes a job locks it before
-- its batch. A job that has ended, or has reached another stage, is in doubt no more.
CREATE FUNCTION busload.fold_jobs() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    d record;
BEGIN
    SELECT array_agg(batch_id) AS batches, array_agg(completed) AS completed, array_agg(failed) AS failed,
           array_agg(canceled) AS canceled, array_agg(0::bigint) AS troubleshooting,
           bool_or(completed + failed > 0) AS ran
      INTO d
      FROM (SELECT j.batch_id,
                   sum((j.status = 'COMPLETED')::integer - (o.status = 'COMPLETED')::integer) AS completed,
                   sum((j.status = 'FAILED')::integer - (o.status = 'FAILED')::integer) AS failed,
                   sum((j.status = 'CANCELED')::integer - (o.status = 'CANCELED')::integer) AS canceled
              FROM fresh AS j JOIN stale AS o USING (job_id)
             WHERE j.batch_id IS NOT NULL AND j.status <> o.status
               AND coalesce(j.completed_at, o.completed_at) IS NOT NULL
             GROUP BY j.batch_id) AS delta;
    IF d.batches IS NOT NULL THEN
        PERFORM busload.fold(d.batches, d.completed, d.failed, d.canceled, d.troubleshooting, d.ran);
    END IF;
    DELETE FROM busload.job_in_doubt
     WHERE job_id = ANY (ARRAY(SELECT j.job_id FROM fresh AS j JOIN stale AS o USING (job_id)
                                WHERE j.batch_id IS NOT NULL
                                  AND (j.completed_at IS NOT NULL OR j.position <> o.position)));
    RETURN NULL;
END $$;

CREATE TRIGGER count_jobs AFTER UPDATE ON busload.job
    REFERENCING OLD TABLE AS stale NEW TABLE AS fresh
    FOR EACH STATEMENT EXECUTE FUNCTION busload.fold_jobs();

-- The first job of a batch that begins starts the batch. A claim or a settlement has just begun the first
-- stage of the job, and waits for nobody: if somebody holds the row of the batch of jobs, the next stage that
-- begins, or the first job that ends, starts the batch.
CREATE FUNCTION busload.start_batch_of_jobs() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    begun uuid;
BEGIN
    SELECT b.batch_id INTO begun
      FROM busload.job AS j JOIN busload.batch AS b USING (batch_id)
     WHERE j.job_id = busload.uuid_of(NEW.job_id) AND b.status = 'PENDING'
       FOR NO KEY UPDATE OF b SKIP LOCKED;
    IF FOUND THEN
        UPDATE busload.batch SET status = 'IN_PROGRESS', started_at = NEW.started_at WHERE batch_id = begun;
        INSERT INTO busload.event (type, batch_id) VALUES ('BATCH_STARTED', begun);
        PERFORM pg_notify('busload_batch', begun::text);
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER start_batch_of_jobs AFTER UPDATE OF started_at ON busload.batch
    FOR EACH ROW WHEN (OLD.started_at IS NULL AND NEW.started_at IS NOT NULL AND NEW.way = 'job')
    EXECUTE FUNCTION busload.start_batch_of_jobs();
