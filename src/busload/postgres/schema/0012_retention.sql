-- What ended long ago is removed, or moved to an archive, in small transactions. The commands of a batch go
-- only with their batch: the batch is marked (batch.pruned_at) and no longer shown, then its loads go one
-- after the other, and its row goes with the last one. After a crash, the next worker finds the mark and
-- goes on.

CREATE TABLE busload.archive (
    LIKE busload.command,
    executions  json        NOT NULL,   -- an object per attempt, oldest first
    events      json        NOT NULL,   -- what was not an attempt, oldest first
    archived_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id)
);
-- Not unique: the id of a command that was removed may be used again.
CREATE INDEX archive_of_command ON busload.archive (domain, command_id);
CREATE INDEX archive_of_batch   ON busload.archive (batch_id, id) WHERE id & 1023 = 0;

CREATE TABLE busload.archived_batch (
    batch_id                 uuid        NOT NULL,
    domain                   text        NOT NULL,
    name                     text,
    custom_data              jsonb,
    status                   text        NOT NULL,
    total_count              integer     NOT NULL,
    completed_count          integer     NOT NULL,
    failed_count             integer     NOT NULL,
    canceled_count           integer     NOT NULL,
    in_troubleshooting_count integer     NOT NULL,
    created_at               timestamptz NOT NULL,
    started_at               timestamptz,
    completed_at             timestamptz,
    sealed_at                timestamptz,
    canceled_at              timestamptz,
    on_complete              json,
    events                   json        NOT NULL,
    archived_at              timestamptz NOT NULL DEFAULT now(),
    job_id                   text COLLATE "C",
    stage                    jsonb,
    batch_type               text        NOT NULL,
    headers                  json
);
CREATE INDEX archived_batch_of_id ON busload.archived_batch (batch_id);

CREATE TABLE busload.archived_job (
    job_id       uuid        NOT NULL,
    domain       text        NOT NULL,
    name         text,
    custom_data  jsonb,
    status       text        NOT NULL,
    operator     text,
    reason       text,
    created_at   timestamptz NOT NULL,
    completed_at timestamptz,
    stages       json        NOT NULL,   -- name, status and batch_id of each, and what has undone it
    archived_at  timestamptz NOT NULL DEFAULT now(),
    compensated_at timestamptz,
    batch_id     uuid
);
CREATE INDEX archived_job_of_id ON busload.archived_job (job_id);

-- What was created on a day, of that what is no longer there: whoever removes a batch, or commands without a
-- batch, adds them here in the same statement. No row is written when something is created, so senders do not
-- wait for each other. `busload.created_daily` adds what is still there.
CREATE TABLE busload.daily (
    day        date   NOT NULL,              -- of UTC
    domain     text   NOT NULL,
    way        text   NOT NULL,              -- the call: send, create_batch, open_batch or job; or busload
    strategy   text   NOT NULL DEFAULT '',   -- of a batch that a broker was told of
    commands   bigint NOT NULL,
    batches    bigint NOT NULL DEFAULT 0,
    published  bigint NOT NULL DEFAULT 0,    -- batches that were complete at the broker, or in the queue
    dispatched bigint NOT NULL DEFAULT 0,    -- batches that a broker was told of
    attempts   bigint NOT NULL DEFAULT 0,    -- rounds that these took together
    PRIMARY KEY (day, domain, way, strategy)
);

-- How a command without a batch came in. Steps of jobs and groups of events are busload's own.
CREATE FUNCTION busload.way_of(command_type text) RETURNS text
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN CASE WHEN starts_with(command_type, 'busload.') THEN 'busload' ELSE 'send' END;

-- What a batch of commands counts as. Nothing here is taken back later: a batch was published when all of it
-- was published for the first time or, without a broker, when it was sealed.
CREATE VIEW busload.counted_batch AS
SELECT b.batch_id,
       (b.created_at AT TIME ZONE 'UTC')::date AS day,
       b.domain,
       b.way,
       coalesce(d.strategy, '') AS strategy,
       b.total_count AS commands,
       CASE WHEN d.batch_id IS NULL THEN b.sealed_at ELSE d.first_published_at END IS NOT NULL AS published,
       coalesce(d.attempts, d.rounds + 1) AS attempts
  FROM busload.batch AS b LEFT JOIN busload.dispatch AS d USING (batch_id)
 WHERE b.batch_type = 'COMMANDS';

-- Of these commands, those that ended before a time and that no open lease covers. While neighbours still
-- run under a lease, its worker may repeat a settlement, and only the execution tells that it was recorded.
-- An end is for ever, so nothing needs to be locked. Events are looked up once per load, not once per
-- command.
--
-- The function has no search_path of its own, because the planner makes it a part of the statement that
-- calls it. So it names everything it calls by its schema.
CREATE FUNCTION busload.removable(commands bigint[], before timestamptz) RETURNS SETOF bigint
    LANGUAGE sql STABLE AS $$
    SELECT ended.id FROM (
        SELECT c.id FROM pg_catalog.unnest(commands) AS c (id)
         CROSS JOIN LATERAL (SELECT FROM busload.execution AS e
                              WHERE e.command = c.id AND e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED')
                                AND e.finished_at < before OFFSET 0) AS e
         UNION
        SELECT c.id FROM (SELECT DISTINCT id >> 10 AS load FROM pg_catalog.unnest(commands) AS id) AS l
         CROSS JOIN LATERAL (SELECT v.lo, v.hi FROM busload.event AS v
                              WHERE v.lo >> 10 = l.load
                                AND v.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
                                AND v.at < before OFFSET 0) AS v
         CROSS JOIN LATERAL pg_catalog.generate_series(v.lo, v.hi) AS covered (id)
          JOIN pg_catalog.unnest(commands) AS c (id) ON c.id = covered.id
    ) AS ended
     WHERE NOT EXISTS (SELECT FROM busload.lease AS l
                        WHERE l.hi BETWEEN ended.id AND (ended.id OPERATOR(pg_catalog.|) 1023)
                          AND l.lo <= ended.id OFFSET 0)
$$;
