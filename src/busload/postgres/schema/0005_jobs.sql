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
    CONSTRAINT valid_status CHECK (
        status IN ('IN_PROGRESS', 'COMPENSATING', 'COMPLETED', 'FAILED', 'CANCELED')),
    CONSTRAINT ended_or_not CHECK ((status IN ('IN_PROGRESS', 'COMPENSATING')) = (completed_at IS NULL)),
    CONSTRAINT compensates_or_not CHECK (status <> 'COMPENSATING' OR outcome IS NOT NULL)
) WITH (fillfactor = 50);
CREATE INDEX job_newest ON busload.job (domain, created_at DESC, job_id DESC);
CREATE INDEX job_ended  ON busload.job (completed_at, job_id) WHERE completed_at IS NOT NULL;

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
