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
    stop_requested_by text
) WITH (fillfactor = 50);

-- Work that one worker does for all from time to time, and when it was done last.
CREATE TABLE busload.turn (
    what     text        PRIMARY KEY,
    taken_at timestamptz NOT NULL,
    ended_at timestamptz,    -- when it was done to its end, by a worker or by `busload prune`
    details  json            -- what it has done then
);
INSERT INTO busload.turn (what, taken_at) VALUES ('prune', '-infinity');
