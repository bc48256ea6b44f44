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
    stage                    jsonb
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
    compensated_at timestamptz
);
CREATE INDEX archived_job_of_id ON busload.archived_job (job_id);

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
