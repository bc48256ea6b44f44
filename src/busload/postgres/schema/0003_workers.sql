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
    condition   json                  -- how it is, as its last heartbeat has told: for bus.health()
) WITH (fillfactor = 50);

-- Work that one worker does for all from time to time, and when it was done last.
CREATE TABLE busload.turn (
    what     text        PRIMARY KEY,
    taken_at timestamptz NOT NULL
);
INSERT INTO busload.turn (what, taken_at) VALUES ('prune', '-infinity');
