-- What holds commands back: pauses of domains, and rate limits of receivers.

-- In a paused domain, running commands finish and no new one starts. Workers leave the domain out of their
-- claims, so the claim itself does not read this table. They hear of changes on the channel busload_pause,
-- and read the table from time to time in case they did not hear. Who paused and who resumed is kept: a
-- domain is paused while it has a row without resumed_at.
CREATE TABLE busload.pause (
    pause      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    domain     text        NOT NULL,
    since      timestamptz NOT NULL DEFAULT now(),
    operator   text,
    reason     text,
    resumed_at timestamptz,
    resumed_by text
);
CREATE UNIQUE INDEX pause_of_domain ON busload.pause (domain) WHERE resumed_at IS NULL;

-- How often all workers together may call a receiver: a row per limit and, if the limit has a `by`, per
-- value of `by`. Calls are let go one after the other, `1 / rate` seconds apart, by the clock of the
-- database. A row that nobody has used for a day is removed.
CREATE TABLE busload.rate_limit (
    name          text        NOT NULL,
    subject       text        NOT NULL DEFAULT '',        -- the value of `by`; '' without a `by`
    adaptive      boolean     NOT NULL,
    rate          float8      NOT NULL,                   -- calls per second
    next_at       timestamptz NOT NULL DEFAULT now(),     -- the next call is due; a burst may come before
    blocked_until timestamptz NOT NULL DEFAULT 'epoch',   -- the receiver has asked for no calls until then
    -- How often the rate was cut. Calls that were made at an earlier rate do not count.
    round         integer     NOT NULL DEFAULT 0,
    ceiling       float8      NOT NULL,                   -- the rate that was refused last, if adaptive
    progress      float8      NOT NULL DEFAULT 1,         -- how far the rate has recovered: 1 is the ceiling
    back          float8      NOT NULL DEFAULT 2,         -- seconds that the recovery takes
    soon          integer     NOT NULL DEFAULT 0,         -- refusals in a row before it had recovered
    cut_at        timestamptz NOT NULL DEFAULT 'epoch',
    calls         bigint      NOT NULL DEFAULT 0,
    refused       bigint      NOT NULL DEFAULT 0,
    used_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, subject)
) WITH (fillfactor = 50);
