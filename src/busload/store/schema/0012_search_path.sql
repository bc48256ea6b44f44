-- Nothing of a stranger's runs in our statements: whoever may create in a schema of the search_path could else plant a function or
-- an operator that fits better than PostgreSQL's own. Statements name what they call, or compare exactly the types that PostgreSQL
-- has an operator for, which varchar is not. Functions look nowhere else, but for two that name what they call: `removable`, which
-- becomes part of the statement that calls it, and `end_groups`, which deletes from tables of users, whose triggers expect the
-- search_path of their session.

DROP VIEW busload.dispatch_recent;
ALTER TABLE busload.batch
    ALTER COLUMN domain TYPE text, ALTER COLUMN name TYPE text, ALTER COLUMN status TYPE text, ALTER COLUMN stage TYPE text,
    ALTER COLUMN status SET DEFAULT 'PENDING',
    ADD CONSTRAINT longest_domain CHECK (length(domain) <= 255),
    ADD CONSTRAINT longest_name CHECK (length(name) <= 255);
ALTER TABLE busload.archived_batch
    ALTER COLUMN domain TYPE text, ALTER COLUMN name TYPE text, ALTER COLUMN status TYPE text, ALTER COLUMN stage TYPE text;
ALTER TABLE busload.job ALTER COLUMN domain TYPE text, ALTER COLUMN name TYPE text;
ALTER TABLE busload.archived_job ALTER COLUMN domain TYPE text, ALTER COLUMN name TYPE text;

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

ALTER FUNCTION busload.decide(uuid[]) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION busload.fold(uuid[], bigint[], bigint[], bigint[], bigint[], boolean) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION busload.fold_executions() SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION busload.fold_events() SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION busload.reply(bigint, text, json) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION busload.start_batches(uuid[], bigint) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION busload.is_open(text, uuid) SET search_path = pg_catalog, pg_temp;

CREATE OR REPLACE FUNCTION busload.removable(commands bigint[], before timestamptz) RETURNS SETOF bigint LANGUAGE sql STABLE AS $$
    SELECT ended.id FROM (
        SELECT c.id FROM pg_catalog.unnest(commands) AS c (id)
         CROSS JOIN LATERAL (SELECT FROM busload.execution AS e
                              WHERE e.command = c.id AND e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED')
                                AND e.finished_at < before OFFSET 0) AS e
         UNION
        SELECT c.id FROM (SELECT DISTINCT id >> 10 AS load FROM pg_catalog.unnest(commands) AS id) AS l
         CROSS JOIN LATERAL (SELECT v.lo, v.hi FROM busload.event AS v
                              WHERE v.lo >> 10 = l.load AND v.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
                                AND v.at < before OFFSET 0) AS v
         CROSS JOIN LATERAL pg_catalog.generate_series(v.lo, v.hi) AS covered (id)
          JOIN pg_catalog.unnest(commands) AS c (id) ON c.id = covered.id
    ) AS ended
     WHERE NOT EXISTS (SELECT FROM busload.lease AS l
                        WHERE l.hi BETWEEN ended.id AND (ended.id OPERATOR(pg_catalog.|) 1023) AND l.lo <= ended.id OFFSET 0)
$$;

CREATE OR REPLACE FUNCTION busload.end_groups(commands bigint[], outcome text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    ended   bigint := 0;
    removed bigint;
    kept    bigint;
    place   text;
    names   text[];
    g       record;
BEGIN
    FOR g IN
        SELECT c.domain, c.told, pg_catalog.array_agg(c.command_id) AS ids, b.buffer IS NOT NULL AS known, b.relation, b.id_column,
               b.group_column, b.created_column, b.key_column, coalesce(b.archive, false) AS archive
          FROM (SELECT c.domain, c.command_id,
                       CASE WHEN c.data OPERATOR(pg_catalog.->) 'table' IS NULL THEN b.relation ELSE c.data OPERATOR(pg_catalog.->>) 'table' END AS told
                  FROM busload.command AS c LEFT JOIN busload.buffer AS b ON b.buffer = c.domain
                 WHERE c.id = ANY (commands)) AS c LEFT JOIN busload.buffer AS b ON b.buffer = c.domain
         GROUP BY c.domain, c.told, b.buffer
    LOOP
        removed := 0;
        IF g.told IS NULL THEN
            place := 'busload.buffered';
            names := ARRAY[place, 'AND b.buffer = $2', 'id', 'group_id', 'created_at', 'b.key', 'b.data'];
        ELSE
            place := coalesce(pg_catalog.to_regclass(g.told), pg_catalog.to_regclass(g.relation))::text;
            names := ARRAY[place, '', coalesce(g.id_column, 'id'), coalesce(g.group_column, 'group_id'),
                           coalesce(g.created_column, 'created_at'), coalesce('b.' || g.key_column || '::text', 'NULL::text'), 'pg_catalog.row_to_json(b.*)'];
        END IF;
        IF place IS NOT NULL THEN
            EXECUTE pg_catalog.format(
                'WITH gone AS (DELETE FROM %1$s AS b WHERE b.%4$s = ANY ($1) %2$s RETURNING b.%3$s::text AS id, %6$s AS key,'
                ' CASE WHEN $3 THEN %7$s END AS data, b.%4$s AS group_id, b.%5$s::timestamptz AS created_at),'
                ' archived AS (INSERT INTO busload.buffer_archive (buffer, id, key, data, group_id, created_at, outcome)'
                ' SELECT $2, id, key, data, group_id, created_at, $4 FROM gone WHERE $3) SELECT count(*) FROM gone',
                VARIADIC names) INTO removed USING g.ids, g.domain, g.archive, outcome;
            EXECUTE pg_catalog.format('SELECT count(*) FROM %1$s AS b WHERE b.%4$s = ANY ($1) %2$s', VARIADIC names)
               INTO kept USING g.ids, g.domain;
            IF kept > 0 THEN
                RAISE EXCEPTION USING ERRCODE = 'BUS01', MESSAGE = pg_catalog.format(
                    '%s events of buffer %s are still there after they were deleted: a trigger or a rule of %s keeps them.',
                    kept, g.domain, place);
            END IF;
        END IF;
        IF removed = 0 AND g.known AND pg_catalog.to_regclass(g.told) IS NULL AND g.told IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'BUS01', MESSAGE = pg_catalog.format(
                'The table %s of buffer %s is not there, so its events cannot be deleted. If it has another name now, declare the '
                'buffer with it and start a worker; if it was dropped with all its events, forget the buffer '
                '(DELETE FROM busload.buffer WHERE buffer = %L) and try again.', g.told, g.domain, g.domain);
        END IF;
        ended := ended + removed;
    END LOOP;
    RETURN ended;
END $$;
