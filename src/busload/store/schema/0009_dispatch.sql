-- With a broker, commands wait in the outbox until it has confirmed a message about them. The database stays the truth: a
-- message is a doorbell, and the claim decides. A load in the outbox was not announced yet (PENDING_QUEUE), or a round of
-- trying has failed (PENDING_RETRY).

CREATE TABLE busload.outbox (
    lo        bigint      NOT NULL,
    hi        bigint      PRIMARY KEY,
    domain    text        NOT NULL,
    batch_id  uuid,
    priority  smallint    NOT NULL DEFAULT 0,
    attempt   integer     NOT NULL DEFAULT 1,
    forgiven  integer     NOT NULL DEFAULT 0,
    crashes   smallint    NOT NULL DEFAULT 0,
    replies   boolean     NOT NULL DEFAULT false,
    transport text        NOT NULL,
    since     timestamptz NOT NULL DEFAULT now(),
    due_at    timestamptz NOT NULL DEFAULT now(),   -- when a relay may take it; later, while somebody announces it
    relay     uuid,                                 -- who announces it, or was the last to
    rounds    integer     NOT NULL DEFAULT 0,       -- how many have failed
    reason    text,                                 -- why the last one did
    error     text,
    CONSTRAINT one_load CHECK (lo <= hi AND lo >> 10 = hi >> 10)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX outbox_due      ON busload.outbox (transport, due_at, hi);
CREATE INDEX outbox_of_batch ON busload.outbox (batch_id, rounds);
CREATE INDEX outbox_failed   ON busload.outbox (transport, since, hi) WHERE rounds > 0;

-- Which database this is: one broker may serve several, whose ids are alike.
CREATE TABLE busload.identity (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    database uuid    NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO busload.identity DEFAULT VALUES;

-- What the broker has confirmed is ready like everything else, and remembers when that was: if nobody comes for it, the
-- message may be lost, and the sweep rings again, after a pause that doubles.
ALTER TABLE busload.queue ADD COLUMN transport     text,
                          ADD COLUMN announced_at  timestamptz,
                          ADD COLUMN announcements smallint;
CREATE INDEX queue_announced ON busload.queue (transport, announced_at, hi) WHERE announced_at IS NOT NULL;

-- A batch can be a stage of a job.
ALTER TABLE busload.batch ADD COLUMN job_id uuid, ADD COLUMN stage varchar(255);
CREATE INDEX batch_of_job ON busload.batch (job_id, created_at, batch_id) WHERE job_id IS NOT NULL;

-- How a batch was announced: one row per creation, for people and metrics; nothing is decided by it but where to resume.
CREATE TABLE busload.dispatch (
    batch_id        uuid        PRIMARY KEY REFERENCES busload.batch ON DELETE CASCADE,
    transport       text        NOT NULL,
    strategy        text        NOT NULL CHECK (strategy IN ('two_phase', 'checkpoint', 'optimistic', 'relay')),
    status          text        NOT NULL,
    total           integer,                -- commands the caller gave; null while an iterator has not come to its end
    written         integer     NOT NULL,   -- those in the database; fewer while checkpoints are missing
    rounds          integer     NOT NULL DEFAULT 0,   -- rounds of announcing that have failed
    retry_needed    boolean     NOT NULL DEFAULT false,
    error           text,
    warning         text,
    insert_ms       float8,
    send_ms         float8,
    mark_ms         float8,
    total_ms        float8,
    created_at      timestamptz NOT NULL DEFAULT now(),
    announced_at    timestamptz   -- when the last command left the outbox
);
CREATE INDEX dispatch_open   ON busload.dispatch (batch_id) WHERE announced_at IS NULL;
CREATE INDEX dispatch_newest ON busload.dispatch (created_at);

-- The cursor of a creation in checkpoints: the next one begins where the last one ended.
CREATE TABLE busload.checkpoint (
    batch_id     uuid        NOT NULL REFERENCES busload.batch ON DELETE CASCADE,
    checkpoint   integer     NOT NULL,   -- counted from 1
    commands     integer     NOT NULL,
    last_command uuid        NOT NULL,
    written_at   timestamptz NOT NULL DEFAULT now(),
    confirmed_at timestamptz,            -- null: its message was not confirmed in time; the relay announces it
    PRIMARY KEY (batch_id, checkpoint)
);

-- Where a command is, the outbox included.
CREATE OR REPLACE VIEW busload.command_status AS
SELECT c.id, c.domain, c.command_id, c.command_type, c.data, c.batch_id, c.task_key,
       coalesce(c.correlation_id, c.command_id) AS correlation_id, c.reply_to, c.priority, c.max_attempts, c.created_at,
       coalesce(s.run_at, c.run_at) AS run_at,
       CASE WHEN t.command IS NOT NULL THEN 'IN_TROUBLESHOOTING_QUEUE'
            WHEN q.hi IS NOT NULL THEN 'PENDING'
            WHEN s.hi IS NOT NULL THEN 'SCHEDULED'
            WHEN o.hi IS NOT NULL THEN CASE WHEN o.rounds > 0 THEN 'PENDING_RETRY' ELSE 'PENDING_QUEUE' END
            WHEN l.lease_id IS NOT NULL THEN 'IN_PROGRESS'
            WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.outcome
            WHEN f.type = 'OPERATOR_COMPLETED' THEN 'COMPLETED'
            WHEN f.type IN ('CANCELED', 'OPERATOR_CANCELED') THEN 'CANCELED'
            ELSE 'PENDING_QUEUE' END AS status,   -- in no place: other hands removed it, or nothing has put it there yet
       CASE WHEN t.command IS NOT NULL THEN t.attempt - t.forgiven
            WHEN q.hi IS NOT NULL THEN q.attempt - q.forgiven - 1
            WHEN s.hi IS NOT NULL THEN s.attempt - s.forgiven - 1
            WHEN o.hi IS NOT NULL THEN o.attempt - o.forgiven - 1
            WHEN l.lease_id IS NOT NULL THEN l.attempt - l.forgiven
            ELSE coalesce(e.attempt, 0) - coalesce(   -- as an operator's retry left it
                (SELECT max(r.attempt) FROM busload.event AS r
                  WHERE r.lo >> 10 = c.id >> 10 AND r.lo = c.id AND r.type = 'OPERATOR_RETRIED'), 0) END AS attempts,
       coalesce(l.since, e.started_at) AS started_at,
       CASE WHEN t.command IS NULL AND q.hi IS NULL AND s.hi IS NULL AND o.hi IS NULL AND l.lease_id IS NULL
            THEN coalesce(CASE WHEN e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') THEN e.finished_at END, f.at) END AS finished_at,
       (SELECT w.name FROM busload.worker AS w WHERE w.worker = coalesce(l.worker, e.worker)) AS worker,
       coalesce(busload.execution_id(l.lease_id, c.id), busload.execution_id(e.lease_id, c.id)) AS execution_id,
       coalesce(t.error, failure.details) AS error,
       CASE WHEN e.outcome = 'COMPLETED' THEN e.details WHEN f.type = 'OPERATOR_COMPLETED' THEN f.details -> 'result' END AS result,
       t.reason AS troubleshooting_reason, t.since AS troubleshooting_since, s.reason AS scheduled_reason
  FROM busload.command AS c
  LEFT JOIN busload.troubleshooting AS t ON t.command = c.id
  LEFT JOIN LATERAL (SELECT * FROM busload.queue AS q
                      WHERE q.hi BETWEEN c.id AND (c.id | 1023) AND q.lo <= c.id ORDER BY q.hi LIMIT 1) AS q ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.scheduled AS s
                      WHERE s.hi BETWEEN c.id AND (c.id | 1023) AND s.lo <= c.id ORDER BY s.hi LIMIT 1) AS s ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.outbox AS o
                      WHERE o.hi BETWEEN c.id AND (c.id | 1023) AND o.lo <= c.id ORDER BY o.hi LIMIT 1) AS o ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.execution AS e WHERE e.command = c.id ORDER BY e.attempt DESC LIMIT 1) AS e ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.lease AS l
                      WHERE l.hi BETWEEN c.id AND (c.id | 1023) AND l.lo <= c.id AND c.id <> ALL (l.returned)
                        AND l.attempt > coalesce(e.attempt, 0) ORDER BY l.hi LIMIT 1) AS l ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.execution AS x
                      WHERE x.command = c.id AND x.outcome <> 'COMPLETED' ORDER BY x.attempt DESC LIMIT 1) AS failure ON true
  LEFT JOIN LATERAL (SELECT * FROM busload.event AS f
                      WHERE f.lo >> 10 = c.id >> 10 AND c.id BETWEEN f.lo AND f.hi
                        AND f.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED') ORDER BY f.event DESC LIMIT 1) AS f ON true;

-- What needs another round, per job; commands without a job or a batch count together.
CREATE VIEW busload.dispatch_retry AS
SELECT o.domain, o.transport, b.job_id, sum(o.hi - o.lo + 1)::bigint AS commands, min(o.since) AS oldest, max(o.rounds) AS most_rounds
  FROM busload.outbox AS o LEFT JOIN busload.batch AS b USING (batch_id)
 WHERE o.rounds > 0 GROUP BY o.domain, o.transport, b.job_id;

-- Per day (UTC): batches that were created, those that were announced as a whole, and how many rounds that took on average.
-- It counts what happened, so that a day's figures do not change when its commands end.
CREATE VIEW busload.dispatch_daily AS
SELECT (created_at AT TIME ZONE 'UTC')::date AS day, count(*) AS batches, count(*) FILTER (WHERE announced_at IS NOT NULL AND written = total) AS announced, avg(rounds + 1)::float8 AS rounds
  FROM busload.dispatch GROUP BY 1;

-- Batches of the last hour, per job: where their commands are now.
CREATE VIEW busload.dispatch_recent AS
SELECT b.domain, b.job_id, sum(o.commands)::bigint AS pending,
       sum(b.total_count - b.completed_count - b.failed_count - b.canceled_count - b.in_troubleshooting_count - o.commands - l.commands)::bigint AS queued,
       sum(l.commands)::bigint AS processing, sum(b.completed_count)::bigint AS completed,
       sum(b.failed_count + b.canceled_count + b.in_troubleshooting_count)::bigint AS failed
  FROM busload.dispatch AS d JOIN busload.batch AS b USING (batch_id)
 CROSS JOIN LATERAL (SELECT coalesce(sum(hi - lo + 1), 0) AS commands FROM busload.outbox WHERE batch_id = b.batch_id) AS o
 CROSS JOIN LATERAL (
        SELECT coalesce(sum(l.open), 0) AS commands
          FROM (SELECT id >> 10 AS load FROM busload.command WHERE batch_id = b.batch_id AND id & 1023 = 0 OFFSET 0) AS c
         CROSS JOIN LATERAL (SELECT open FROM busload.lease WHERE hi BETWEEN c.load << 10 AND (c.load << 10 | 1023) OFFSET 0) AS l) AS l
 WHERE d.created_at > now() - interval '1 hour' AND b.pruned_at IS NULL
 GROUP BY b.domain, b.job_id;

ALTER TABLE busload.event
    DROP CONSTRAINT known_type,
    ADD CONSTRAINT known_type CHECK (type IN ('CANCELED', 'OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED', 'PARKED',
        'LEASE_LOST', 'RELEASED', 'NO_HANDLER', 'RATE_LIMITED', 'REROUTED', 'BATCH_STARTED', 'BATCH_STALLED', 'BATCH_COMPLETED', 'BATCH_SEALED',
        'BATCH_CANCELED')) NOT VALID;
