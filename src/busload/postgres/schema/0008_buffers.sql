-- Single events collect in a buffer and leave it in groups, one bulk call for each. The events are in
-- busload.buffered or in a table of the application. A group is run by a command of type busload.Group, in
-- the domain that has the name of the buffer. The command_id of that command is the group_id, and one
-- statement makes both. So an event waits (no group_id), is in the group of a command that has not ended,
-- or is gone.

CREATE TABLE busload.buffered (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    buffer     text        NOT NULL,
    partition  text        NOT NULL DEFAULT '',
    -- The subject. With a merge rule, events of one subject leave one after the other.
    key        text,
    -- Whether at most one event of its key waits: a further event is merged when it arrives.
    once       boolean     NOT NULL DEFAULT false,
    data       json        NOT NULL,
    bytes      integer     NOT NULL,
    group_id   uuid,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);
CREATE INDEX buffered_waiting ON busload.buffered (buffer, partition, created_at, id) WHERE group_id IS NULL;
CREATE INDEX buffered_group   ON busload.buffered (group_id) WHERE group_id IS NOT NULL;
CREATE INDEX buffered_running ON busload.buffered (buffer, key)
    WHERE group_id IS NOT NULL AND key IS NOT NULL;
CREATE INDEX buffered_subject ON busload.buffered (buffer, key, created_at, id)
    WHERE group_id IS NULL AND NOT once AND key IS NOT NULL;
CREATE UNIQUE INDEX buffered_once ON busload.buffered (buffer, key) WHERE group_id IS NULL AND once;

-- Add events to a buffer whose rule is applied on arrival (`once`), in the order of the arrays: the order of
-- their keys, so that two such calls cannot wait for each other. The event that waits for the same key takes
-- the new one in. It is replaced if the `last` event is to be kept, and otherwise stays as it is. It is
-- locked either way, so that no group takes it before this transaction ends. Fails if a row is held for
-- longer than `patience`, in milliseconds. Returns null for the id of an event that was merged.
--
-- To take data from one row into another, PostgreSQL wants the right to read them. A sender must not read the
-- events of others, so the function has the rights of its owner.
CREATE FUNCTION busload.merge_events(
    of_buffer text, partitions text[], keys text[], events text[], last boolean, patience integer
) RETURNS TABLE (id bigint, key text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience::text, true);
    END IF;
    RETURN QUERY
    INSERT INTO busload.buffered AS b (buffer, partition, key, once, data, bytes)
    SELECT of_buffer, e.partition, e.key, true, e.data::json, octet_length(e.data)
      FROM unnest(partitions, keys, events) WITH ORDINALITY AS e (partition, key, data, nth)
     ORDER BY e.nth
        ON CONFLICT (buffer, key) WHERE group_id IS NULL AND once
        DO UPDATE
       SET data = excluded.data, bytes = excluded.bytes, partition = excluded.partition
     WHERE last
    RETURNING CASE WHEN b.xmax = 0 THEN b.id END, b.key;
END $$;
REVOKE ALL ON FUNCTION busload.merge_events FROM PUBLIC;

-- A buffer as the worker that served it last declares it, and what has happened since it was first seen.
-- Names of columns of an application's table are kept as SQL spells them, so that a decision about a group
-- can remove its events.
CREATE TABLE busload.buffer (
    buffer           text        PRIMARY KEY,
    relation         text,       -- the table of the application as SQL spells it; null: busload.buffered
    id_column        text,
    group_column     text,
    created_column   text,
    key_column       text,
    partition_column text,
    archive          boolean     NOT NULL DEFAULT false,
    size             integer     NOT NULL,
    max_age          interval    NOT NULL,
    flushed_at       timestamptz NOT NULL DEFAULT '-infinity',   -- older events leave at once
    calls            bigint      NOT NULL DEFAULT 0,
    done             bigint      NOT NULL DEFAULT 0,
    vanished         bigint      NOT NULL DEFAULT 0,
    served_at        timestamptz NOT NULL DEFAULT now(),
    problem          text        -- why its workers make no groups, as they found last; null: they do
) WITH (fillfactor = 50);

-- History, for buffers that keep it. `data` is the payload, or the whole row of an application's table.
CREATE TABLE busload.buffer_archive (
    buffer     text        NOT NULL,
    id         text        NOT NULL,
    key        text,
    data       json        NOT NULL,
    group_id   uuid        NOT NULL,
    created_at timestamptz NOT NULL,
    ended_at   timestamptz NOT NULL DEFAULT now(),
    outcome    text        NOT NULL
               CHECK (outcome IN ('DONE', 'EXHAUSTED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED'))
);
CREATE INDEX buffer_archive_newest ON busload.buffer_archive (buffer, ended_at DESC);

-- How many events of a buffer wait, counted up to a limit, and since when the oldest of those waits. A table
-- that is gone, locked or not ours to read is a problem to be told, and no error. PostgreSQL has spelled the
-- names. The function names everything it calls by its schema, for it runs with the search_path of a session.
CREATE FUNCTION busload.buffer_depth(
    of_buffer text, relation text, group_column text, created_column text, most integer,
    OUT waiting integer, OUT oldest timestamptz, OUT problem text
) LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF relation IS NULL THEN
        SELECT pg_catalog.count(*), pg_catalog.min(b.created_at) INTO waiting, oldest
          FROM (SELECT e.created_at FROM busload.buffered AS e
                 WHERE e.buffer OPERATOR(pg_catalog.=) of_buffer AND e.group_id IS NULL LIMIT most) AS b;
    ELSE
        EXECUTE pg_catalog.format(
            'SELECT pg_catalog.count(*), pg_catalog.min(b.since)::timestamptz'
            ' FROM (SELECT e.%s AS since FROM %s AS e WHERE e.%s IS NULL LIMIT $1) AS b',
            coalesce(created_column, 'created_at'), relation, coalesce(group_column, 'group_id'))
           INTO waiting, oldest USING most;
    END IF;
EXCEPTION
    WHEN lock_not_available THEN
        waiting := NULL;
        problem := 'The table is locked by another transaction, so nothing can be counted until that ends.';
    WHEN syntax_error_or_access_rule_violation OR invalid_schema_name THEN
        waiting := NULL;
        problem := SQLERRM;
END $$;

-- A decision of an operator about a group holds for its events: they end in the transaction that ends its
-- command. They are in the table that the command names. If that table is gone, they are in the table that
-- the buffer is declared to have now, because the table was renamed. While the events may be left in a
-- table that is not found, nothing ends, unless somebody has forgotten the buffer too. PostgreSQL has
-- spelled the names. What is refused here has the code BUS01.
--
-- The function keeps the search_path of the session, because triggers of the application's table expect
-- that. So it names everything it calls by its schema.
CREATE FUNCTION busload.end_groups(commands bigint[], outcome text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    ended   bigint := 0;
    removed bigint;
    kept    bigint;
    place   text;
    names   text[];
    g       record;
BEGIN
    FOR g IN
        SELECT c.domain, pg_catalog.array_agg(c.command_id) AS ids, b.buffer IS NOT NULL AS known,
               CASE WHEN c.data OPERATOR(pg_catalog.->) 'table' IS NULL THEN b.relation
                    ELSE c.data OPERATOR(pg_catalog.->>) 'table' END AS told,
               b.relation, b.id_column, b.group_column, b.created_column, b.key_column,
               coalesce(b.archive, false) AS archive
          FROM busload.command AS c LEFT JOIN busload.buffer AS b ON b.buffer = c.domain
         WHERE c.id = ANY (commands)
         GROUP BY c.domain, told, b.buffer
    LOOP
        removed := 0;
        IF g.told IS NULL THEN
            place := 'busload.buffered';
            names := ARRAY[place, 'AND b.buffer = $2', 'id', 'group_id', 'created_at', 'b.key', 'b.data'];
        ELSE
            place := coalesce(pg_catalog.to_regclass(g.told), pg_catalog.to_regclass(g.relation))::text;
            names := ARRAY[place,
                           '',
                           coalesce(g.id_column, 'id'),
                           coalesce(g.group_column, 'group_id'),
                           coalesce(g.created_column, 'created_at'),
                           coalesce('b.' || g.key_column || '::text', 'NULL::text'),
                           'pg_catalog.row_to_json(b.*)'];
        END IF;
        IF place IS NOT NULL THEN
            EXECUTE pg_catalog.format(
                'WITH gone AS ('
                'DELETE FROM %1$s AS b WHERE b.%4$s = ANY ($1) %2$s'
                ' RETURNING b.%3$s::text AS id, %6$s AS key,'
                ' CASE WHEN $3 THEN %7$s END AS data, b.%4$s AS group_id, b.%5$s::timestamptz AS created_at),'
                ' archived AS ('
                'INSERT INTO busload.buffer_archive (buffer, id, key, data, group_id, created_at, outcome)'
                ' SELECT $2, id, key, data, group_id, created_at, $4 FROM gone WHERE $3)'
                ' SELECT count(*) FROM gone',
                VARIADIC names) INTO removed USING g.ids, g.domain, g.archive, outcome;
            EXECUTE pg_catalog.format(
                'SELECT count(*) FROM %1$s AS b WHERE b.%4$s = ANY ($1) %2$s', VARIADIC names)
               INTO kept USING g.ids, g.domain;
            IF kept > 0 THEN
                RAISE EXCEPTION USING ERRCODE = 'BUS01', MESSAGE = pg_catalog.format(
                    '%s events of buffer %s are still there after they were deleted: '
                    'a trigger or a rule of %s keeps them.',
                    kept, g.domain, place);
            END IF;
        END IF;
        IF removed = 0 AND g.known AND pg_catalog.to_regclass(g.told) IS NULL AND g.told IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'BUS01', MESSAGE = pg_catalog.format(
                'The table %s of buffer %s is not there, so its events cannot be deleted. '
                'If it has another name now, declare the buffer with it and start a worker; '
                'if it was dropped with all its events, forget the buffer '
                '(DELETE FROM busload.buffer WHERE buffer = %L) and try again.', g.told, g.domain, g.domain);
        END IF;
        ended := ended + removed;
    END LOOP;
    RETURN ended;
END $$;
