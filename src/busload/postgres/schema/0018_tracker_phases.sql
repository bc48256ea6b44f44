-- The way from another tracker of tasks to this one goes through phases: shadow, dual_write and cut_over. The
-- newest row of an old tracker is the phase it is in. Every process reads that row before each call, so all
-- of them switch at once. Earlier rows stay: an operator has made each of them.

CREATE TABLE busload.tracker_phase (
    old_tracker text COLLATE "C" NOT NULL,
    number      integer     NOT NULL,
    phase       text        NOT NULL CHECK (phase IN ('shadow', 'dual_write', 'cut_over')),
    since       timestamptz NOT NULL DEFAULT now(),
    operator    text,                              -- who has switched to it
    compared    bigint      NOT NULL DEFAULT 0,    -- calls that both trackers have answered
    agreed      bigint      NOT NULL DEFAULT 0,    -- calls that both have answered in the same way
    PRIMARY KEY (old_tracker, number)
) WITH (fillfactor = 50);

-- The newest calls of each phase that the two have answered differently. They go by their number and age.
CREATE TABLE busload.tracker_disagreement (
    disagreement bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    old_tracker  text COLLATE "C" NOT NULL,
    number       integer     NOT NULL,             -- of the phase
    at           timestamptz NOT NULL,
    task_key     text        NOT NULL,
    operation    text        NOT NULL,
    old          text        NOT NULL,             -- what the old tracker has answered
    busload      text        NOT NULL
);
CREATE INDEX tracker_disagreement_newest ON busload.tracker_disagreement (old_tracker, number, disagreement);
CREATE INDEX tracker_disagreement_of_age ON busload.tracker_disagreement (at);
