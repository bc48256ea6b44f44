-- What has ended long ago is removed, or moved to an archive, in small transactions. The commands of a batch go only with
-- their batch: it is marked first, and no longer shown, then its loads go one after the other, and its row with the last
-- one. Whoever comes after a crash finds the mark and goes on.

ALTER TABLE busload.batch ADD COLUMN pruned_at timestamptz;
CREATE INDEX batch_ended  ON busload.batch (completed_at, batch_id) WHERE completed_at IS NOT NULL AND pruned_at IS NULL;
CREATE INDEX batch_pruned ON busload.batch (batch_id) WHERE pruned_at IS NOT NULL;
-- Which batch a callback belongs to: it must not go before its batch.
CREATE INDEX batch_of_callback ON busload.batch (((on_complete ->> 'command_id')::uuid)) WHERE on_complete IS NOT NULL;

CREATE TABLE busload.archive (
    id             bigint      PRIMARY KEY,
    domain         text        NOT NULL,
    command_id     uuid        NOT NULL,
    command_type   text        NOT NULL,
    data           json,
    batch_id       uuid,
    task_key       text,
    correlation_id uuid,
    reply_to       text,
    priority       smallint    NOT NULL,
    max_attempts   smallint,
    run_at         timestamptz,
    created_at     timestamptz NOT NULL,
    executions     json        NOT NULL,   -- one object per attempt, oldest first
    events         json        NOT NULL,   -- what was not an attempt, oldest first
    archived_at    timestamptz NOT NULL DEFAULT now()
);
-- Not unique: the id of a command that was removed may be used again.
CREATE INDEX archive_of_command ON busload.archive (domain, command_id);
CREATE INDEX archive_of_batch   ON busload.archive (batch_id, id) WHERE id & 1023 = 0;

CREATE TABLE busload.archived_batch (
    batch_id                 uuid         NOT NULL,
    domain                   varchar(255) NOT NULL,
    name                     varchar(255),
    custom_data              jsonb,
    status                   varchar(50)  NOT NULL,
    total_count              integer      NOT NULL,
    completed_count          integer      NOT NULL,
    failed_count             integer      NOT NULL,
    canceled_count           integer      NOT NULL,
    in_troubleshooting_count integer      NOT NULL,
    created_at               timestamptz  NOT NULL,
    started_at               timestamptz,
    completed_at             timestamptz,
    sealed_at                timestamptz,
    canceled_at              timestamptz,
    on_complete              json,
    events                   json         NOT NULL,
    archived_at              timestamptz  NOT NULL DEFAULT now()
);
CREATE INDEX archived_batch_of_id ON busload.archived_batch (batch_id);

-- What one worker does for all of them from time to time, and when the last one did.
CREATE TABLE busload.turn (
    what     text        PRIMARY KEY,
    taken_at timestamptz NOT NULL
);
INSERT INTO busload.turn (what, taken_at) VALUES ('prune', '-infinity');

-- Of these commands, those that ended before a time, and that no lease is open for: while neighbours still run under it, its
-- worker may repeat a settlement, and only the execution tells that it was recorded. Ended is for ever, so nothing needs to
-- be locked. Events are looked up once per load, not once per command.
CREATE FUNCTION busload.removable(commands bigint[], before timestamptz) RETURNS SETOF bigint LANGUAGE sql STABLE AS $$
    SELECT ended.id FROM (
        SELECT c.id FROM unnest(commands) AS c (id)
         CROSS JOIN LATERAL (SELECT FROM busload.execution AS e
                              WHERE e.command = c.id AND e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED')
                                AND e.finished_at < before OFFSET 0) AS e
         UNION
        SELECT c.id FROM (SELECT DISTINCT id >> 10 AS load FROM unnest(commands) AS id) AS l
         CROSS JOIN LATERAL (SELECT v.lo, v.hi FROM busload.event AS v
                              WHERE v.lo >> 10 = l.load AND v.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
                                AND v.at < before OFFSET 0) AS v
         CROSS JOIN LATERAL generate_series(v.lo, v.hi) AS covered (id)
          JOIN unnest(commands) AS c (id) ON c.id = covered.id
    ) AS ended
     WHERE NOT EXISTS (SELECT FROM busload.lease AS l
                        WHERE l.hi BETWEEN ended.id AND (ended.id | 1023) AND l.lo <= ended.id OFFSET 0)
$$;
