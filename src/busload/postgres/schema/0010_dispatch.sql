-- How batches were published to a broker. The outbox itself is a place, in 0002_places.sql.

-- Which database this is: one broker may serve several, whose ids are alike.
CREATE TABLE busload.identity (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    database uuid    NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO busload.identity DEFAULT VALUES;

-- How a batch was published: a row per creation, for people and metrics. A creation that is resumed reads
-- here where to go on; nothing else is decided by it.
CREATE TABLE busload.dispatch (
    batch_id     uuid        PRIMARY KEY REFERENCES busload.batch ON DELETE CASCADE,
    transport    text        NOT NULL,
    strategy     text        NOT NULL CHECK (strategy IN ('two_phase', 'checkpoint', 'optimistic', 'relay')),
    status       text        NOT NULL,
    total        integer,                          -- null while an iterator of commands has not ended
    written      integer     NOT NULL,             -- fewer than total while checkpoints are missing
    confirmed    integer     NOT NULL DEFAULT 0,   -- what the broker has confirmed to the creator
    rounds       integer     NOT NULL DEFAULT 0,   -- rounds of publishing that have failed
    retry_needed boolean     NOT NULL DEFAULT false,
    error        text,
    warning      text,
    insert_ms    float8,
    send_ms      float8,
    mark_ms      float8,
    total_ms     float8,
    created_at   timestamptz NOT NULL DEFAULT now(),
    published_at timestamptz,                      -- when the last command left the outbox
    -- All of it was published for the first time, after so many rounds. These two are never taken back: a
    -- command that is tried again and has to be published again does not change what its day was like.
    first_published_at timestamptz,
    attempts     integer
);
CREATE INDEX dispatch_open   ON busload.dispatch (batch_id) WHERE published_at IS NULL;
CREATE INDEX dispatch_newest ON busload.dispatch (created_at);

-- The checkpoints of a creation: the next one begins where the last one ended.
CREATE TABLE busload.checkpoint (
    batch_id     uuid        NOT NULL REFERENCES busload.batch ON DELETE CASCADE,
    checkpoint   integer     NOT NULL,   -- counted from 1
    commands     integer     NOT NULL,
    last_command uuid        NOT NULL,
    last_load    bigint      NOT NULL,   -- the number of its last load: a command is found by it
    written_at   timestamptz NOT NULL DEFAULT now(),
    confirmed_at timestamptz,            -- null: not confirmed in time, so the relay publishes it
    PRIMARY KEY (batch_id, checkpoint)
);

-- What needs another round of publishing, per job. Commands without a job or a batch are counted together.
CREATE VIEW busload.dispatch_retry AS
SELECT o.domain,
       o.transport,
       b.job_id,
       sum(o.hi - o.lo + 1)::bigint AS commands,
       min(o.since) AS oldest,
       max(o.rounds) AS most_rounds
  FROM busload.outbox AS o LEFT JOIN busload.batch AS b USING (batch_id)
 WHERE o.rounds > 0
 GROUP BY o.domain, o.transport, b.job_id;
