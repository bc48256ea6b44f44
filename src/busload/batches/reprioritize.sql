-- fragment: of_batch
hi BETWEEN i.first AND i.last AND batch_id = i.batch_id AND priority <> %(priority)s::smallint

-- name: reprioritize
-- Give everything that waits of a batch another priority. Loads change, not commands. The caller holds the
-- row of the batch. If a claim is splitting a load, this waits for it, and changes what is left. Returns how
-- many commands have another priority now.
WITH i AS MATERIALIZED (
    SELECT * FROM busload.ids_of(ARRAY[%(batch_id)s::uuid])
), ready AS (
    UPDATE busload.queue SET priority = %(priority)s::smallint, entered = pg_current_xact_id()
     WHERE hi = ANY (ARRAY(SELECT q.hi FROM i CROSS JOIN LATERAL (
                            SELECT hi FROM busload.queue WHERE {of_batch} ORDER BY hi FOR UPDATE) AS q))
    RETURNING hi - lo + 1 AS commands
), later AS (
    UPDATE busload.scheduled SET priority = %(priority)s::smallint
     WHERE hi = ANY (ARRAY(SELECT s.hi FROM i CROSS JOIN LATERAL (
                            SELECT hi FROM busload.scheduled WHERE {of_batch} ORDER BY hi FOR UPDATE) AS s))
    RETURNING hi - lo + 1 AS commands
), unpublished AS (
    UPDATE busload.outbox SET priority = %(priority)s::smallint
     WHERE hi = ANY (ARRAY(SELECT o.hi FROM i CROSS JOIN LATERAL (
                            SELECT hi FROM busload.outbox WHERE {of_batch} ORDER BY hi FOR UPDATE) AS o))
    RETURNING hi - lo + 1 AS commands
), changed AS (
    SELECT coalesce(sum(commands), 0)::integer AS commands
      FROM (SELECT * FROM ready UNION ALL SELECT * FROM later UNION ALL SELECT * FROM unpublished) AS load
), noted AS (
    INSERT INTO busload.event (type, batch_id, operator, details)
    SELECT 'BATCH_REPRIORITIZED', %(batch_id)s::uuid, %(operator)s::text,
           json_build_object('priority', %(priority)s::smallint, 'commands', commands)
      FROM changed
)
SELECT commands FROM changed;
