-- Commands, and what happened to them.
--
-- Commands travel in loads. A load is a run of neighbouring commands [lo, hi] that share domain, batch,
-- priority and attempt. The id of a command is `load number * 1024 + position`. So ids are known before the
-- insert, and a load never crosses a multiple of 1024.

CREATE SEQUENCE busload.load_number;

-- The columns of a fixed width come first, the widest of them before the others: so no byte is lost between
-- them, however long the texts are.
CREATE TABLE busload.command (
    id             bigint      PRIMARY KEY,
    created_at     timestamptz NOT NULL DEFAULT now(),
    run_at         timestamptz,
    command_id     uuid        NOT NULL,
    batch_id       uuid,
    correlation_id uuid,       -- null: the command_id
    priority       smallint    NOT NULL DEFAULT 0,
    max_attempts   smallint,   -- null: the retry policy of the handler decides
    domain         text        NOT NULL,
    command_type   text        NOT NULL,
    data           json,
    task_key       text,
    reply_to       text,
    headers        json,       -- texts by name, such as a trace context; those of its batch are in its batch
    CONSTRAINT command_once UNIQUE (domain, command_id)
);
-- All commands of a load have the same batch, so the index has one entry per load instead of one per command.
CREATE INDEX load_of_batch ON busload.command (batch_id, id) WHERE id & 1023 = 0;
-- All commands of a task: the trace.
CREATE INDEX command_of_task ON busload.command (task_key, id) WHERE task_key IS NOT NULL;

-- The headers of a command are those of its batch and its own, which win. Most often both are null.
CREATE FUNCTION busload.joined_headers(of_batch json, own json) RETURNS json
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN of_batch IS NULL THEN own
                WHEN own IS NULL THEN of_batch
                ELSE (of_batch::jsonb || own::jsonb)::json END;

COMMENT ON TABLE busload.command IS
    'The fact: inserted once. Only an operator''s patched retry updates it, and only its '
    'data, in the statement that keeps the data before and after in an OPERATOR_RETRIED event.';

CREATE TYPE busload.outcome AS ENUM ('COMPLETED', 'FAILED', 'CANCELED', 'TROUBLESHOOTING', 'FAILED_ATTEMPT');

-- Most rows that are ever written are rows of this table, so they are narrow. Eight columns are the most for
-- which PostgreSQL keeps in the first 24 bytes of a row which of them are null: a ninth costs 8 bytes. The
-- widest come first, so that no byte is lost between them. The batch of an attempt is that of its command.
CREATE TABLE busload.execution (
    command     bigint          NOT NULL,
    started_at  timestamptz     NOT NULL,
    finished_at timestamptz     NOT NULL,
    worker      bigint          NOT NULL,
    lease_id    uuid            NOT NULL,
    attempt     integer         NOT NULL,
    outcome     busload.outcome NOT NULL,
    details     json,           -- the result of a COMPLETED attempt, the error of any other
    PRIMARY KEY (command, attempt)
);

COMMENT ON TABLE busload.execution IS
    'One row per finished attempt: the retry chain, and what makes settling safe to repeat.';

-- An attempt is named by its lease and the position of the command in its load.
CREATE FUNCTION busload.execution_id(lease_id uuid, command bigint) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (left(lease_id::text, 33) || lpad(to_hex(command & 1023), 3, '0'))::uuid;

-- Everything that happened and is not an attempt. The type checks its values itself, and so do some of the
-- tables to come: PostgreSQL reads the text of a table's constraint again for each statement that writes.
CREATE DOMAIN busload.event_type AS text CONSTRAINT known_type CHECK (VALUE IN (
        'CANCELED', 'OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED', 'PARKED',
        'LEASE_LOST',     -- the worker was declared dead
        'NOT_CRASHED',    -- that worker came back, still running its commands, so they are no longer suspect
        'RELEASED', 'NO_HANDLER', 'RATE_LIMITED', 'LIMITED', 'REROUTED', 'RESCHEDULED', 'ASKED_TO_STOP',
        'SNOOZED',           -- its handler has put it off
        'PUBLISHED',         -- a broker has confirmed a message about them
        'PUBLISHED_AGAIN',   -- nobody came for them: another message
        'BATCH_CREATED',     -- by an operator
        'BATCH_STARTED', 'BATCH_STALLED', 'BATCH_COMPLETED', 'BATCH_SEALED', 'BATCH_CANCELED',
        'BATCH_HELD', 'BATCH_RESUMED', 'BATCH_CANARY_PASSED', 'BATCH_EXPIRED', 'BATCH_REPRIORITIZED',
        'BATCH_BUDGET_CHANGED',
        -- What operators did to something that is neither a command nor a batch: `details` name it.
        'WORKER_ASKED_TO_STOP', 'DOMAIN_PAUSED', 'DOMAIN_RESUMED', 'LIMIT_RESET', 'BUFFER_FLUSHED',
        'OUTBOX_RETRIED', 'OUTBOX_REPAIRED', 'JOB_RESUMED', 'JOB_CANCELED',
        'SCHEDULE_PAUSED', 'SCHEDULE_RESUMED', 'SCHEDULE_TRIGGERED', 'SCHEDULE_REMOVED',
        'TRACKER_SWITCHED'));
CREATE TABLE busload.event (
    event    bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    type     busload.event_type NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    lo       bigint,     -- the commands it is about; null for an event of the batch itself
    hi       bigint,
    batch_id uuid,
    attempt  integer,
    lease_id uuid,
    worker   bigint,
    operator text,
    details  json
);
CREATE INDEX event_of_load  ON busload.event ((lo >> 10)) WHERE lo IS NOT NULL;
CREATE INDEX event_of_batch ON busload.event (batch_id) WHERE lo IS NULL;
-- Who did what: the audit of operators.
CREATE INDEX event_of_operator ON busload.event (at, event) WHERE operator IS NOT NULL;
