-- How often a receiver may be called, by all workers together: a row per limit and, where a limit has a `by`, per value of it.
-- Calls are let go one after the other, `1 / rate` seconds apart, by the clock of the database. A row that nobody has used for
-- a day is removed.

CREATE TABLE busload.rate_limit (
    name          text        NOT NULL,
    subject       text        NOT NULL DEFAULT '',   -- what `by` has said; '' without one
    adaptive      boolean     NOT NULL,
    rate          float8      NOT NULL,              -- calls per second
    next_at       timestamptz NOT NULL DEFAULT now(),     -- when the next call is due; a burst may come before it
    blocked_until timestamptz NOT NULL DEFAULT 'epoch',   -- the receiver has said so
    round         integer     NOT NULL DEFAULT 0,    -- how often the rate was cut; what was measured before does not count
    ceiling       float8      NOT NULL,              -- of an adaptive one: the rate that was refused last
    progress      float8      NOT NULL DEFAULT 1,    -- how far it has come back to that (1) or beyond
    back          float8      NOT NULL DEFAULT 2,    -- seconds that coming back takes
    soon          integer     NOT NULL DEFAULT 0,    -- refusals in a row that came before that
    cut_at        timestamptz NOT NULL DEFAULT 'epoch',
    calls         bigint      NOT NULL DEFAULT 0,
    refused       bigint      NOT NULL DEFAULT 0,
    used_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, subject)
) WITH (fillfactor = 50);

-- Every row there is fits the new checks, so none is read again.
ALTER TABLE busload.scheduled
    DROP CONSTRAINT scheduled_reason_check,
    ADD CONSTRAINT scheduled_reason_check CHECK (reason IN ('RUN_AT', 'RETRY', 'NO_HANDLER', 'RATE_LIMITED')) NOT VALID;
ALTER TABLE busload.event
    DROP CONSTRAINT known_type,
    ADD CONSTRAINT known_type CHECK (type IN ('CANCELED', 'OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED', 'PARKED',
        'LEASE_LOST', 'RELEASED', 'NO_HANDLER', 'RATE_LIMITED', 'BATCH_STARTED', 'BATCH_STALLED', 'BATCH_COMPLETED', 'BATCH_SEALED',
        'BATCH_CANCELED')) NOT VALID;
