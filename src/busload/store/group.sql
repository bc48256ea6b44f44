-- name: read
-- The events of a group, oldest first, each with what tells whether it is updated later.
SELECT b.{id}, {key}, {since}, {version}, {data} FROM {table} AS b
 WHERE {filter} AND b.{group_id} = %(group_id)s::uuid ORDER BY b.{created_at}, b.{id};

-- name: read_keys
-- Its ids and keys alone, where a row holds what Python cannot.
SELECT b.{id}, {key} FROM {table} AS b
 WHERE {filter} AND b.{group_id} = %(group_id)s::uuid ORDER BY b.{created_at}, b.{id};

-- name: read_some
SELECT b.{id}, {key}, {since}, {version}, {data} FROM {table} AS b
 WHERE {filter} AND b.{group_id} = %(group_id)s::uuid AND b.{id} IN (SELECT unnest(%(ids)b::{id_type}[]));

-- name: kept
-- How many of a group are there, of these or without ids of all.
SELECT count(*)::integer FROM {table} AS b
 WHERE {filter} AND b.{group_id} = %(group_id)s::uuid
   AND (%(ids)b::{id_type}[] IS NULL OR b.{id} IN (SELECT unnest(%(ids)b::{id_type}[])));

-- name: end_items
-- Events of a group are done: these, or without ids all of them. A buffer that keeps history has them in its archive from then
-- on, by the same statement.
WITH gone AS (
    DELETE FROM {table} AS b
     WHERE {filter} AND b.{group_id} = %(group_id)s::uuid AND {these}
    RETURNING b.{id}::text AS id, {key} AS key, CASE WHEN %(archive)s::boolean THEN {whole} END AS data, {since} AS created_at
), archived AS (
    INSERT INTO busload.buffer_archive (buffer, id, key, data, group_id, created_at, outcome)
    SELECT %(buffer)s::text, id, key, data, %(group_id)s::uuid, created_at, %(outcome)s::text FROM gone WHERE %(archive)s::boolean
)
SELECT count(*)::integer FROM gone;

-- name: updated
-- Those of these events that were updated after they were read: what was delivered is not what they are now.
SELECT b.{id} FROM {table} AS b
 WHERE {filter} AND b.{group_id} = %(group_id)s::uuid AND b.{id} IN (SELECT unnest(%(ids)b::{id_type}[])) AND NOT {these};

-- name: part
-- Some events of a group become a group of their own, at the same attempt: with an error it waits for a person at once, without
-- one it is a suspect that runs alone. No group is without its command: one statement makes both.
WITH held AS MATERIALIZED (
    SELECT lease_id, attempt, forgiven, worker FROM busload.lease WHERE lease_id = %(lease_id)s::uuid
), moved AS (
    UPDATE {table} AS b SET {group_id} = %(new_group)s::uuid
     WHERE {filter} AND b.{group_id} = %(group_id)s::uuid AND b.{id} IN (SELECT unnest(%(ids)b::{id_type}[])) AND EXISTS (SELECT FROM held)
    RETURNING 1
), sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, correlation_id, priority, max_attempts)
    SELECT nextval('busload.load_number') * 1024, c.domain, %(new_group)s::uuid, c.command_type,
           json_build_object('buffer', c.domain, 'items', n.count, 'partition', %(partition)s::text, 'table', %(told_table)s::text),
           coalesce(c.correlation_id, c.command_id), c.priority, c.max_attempts
      FROM busload.command AS c CROSS JOIN (SELECT count(*)::integer FROM moved) AS n
     WHERE c.id = %(command)s::bigint AND n.count > 0
    RETURNING id, domain, priority
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, priority, attempt, forgiven, crashes)
    SELECT s.id, s.id, s.domain, s.priority, h.attempt, h.forgiven, 1 FROM sent AS s CROSS JOIN held AS h WHERE %(error)s::text IS NULL
    RETURNING domain
), parked AS (
    INSERT INTO busload.troubleshooting (command, domain, priority, attempt, forgiven, reason, error)
    SELECT s.id, s.domain, s.priority, h.attempt, h.forgiven, 'PERMANENT', %(error)s::text::json
      FROM sent AS s CROSS JOIN held AS h WHERE %(error)s::text IS NOT NULL
), noted AS (
    INSERT INTO busload.event (type, lo, hi, attempt, lease_id, worker, details)
    SELECT 'PARKED', s.id, s.id, h.attempt, h.lease_id, h.worker, %(error)s::text::json
      FROM sent AS s CROSS JOIN held AS h WHERE %(error)s::text IS NOT NULL
)
SELECT (SELECT count(*) FROM moved)::integer, (SELECT count(pg_notify('busload_ready', domain)) FROM queued);

-- name: unsuspect
-- What is left of a group that was blamed, after its other half was parted off, is no more than a suspect again: only a single
-- item may be parked by name.
UPDATE busload.lease SET crashes = 1 WHERE lease_id = %(lease_id)s::uuid;

-- name: count_items
-- How many events a group holds after some have left it: what is missing then was taken by other hands.
UPDATE busload.command AS c
   SET data = json_build_object('buffer', c.domain, 'items', %(items)s::integer, 'partition', %(partition)s::text,
                                'table', %(told_table)s::text)
 WHERE c.id = %(command)s::bigint;

-- name: deliver_late
-- So many of a group that others have by now were delivered: they have not vanished.
UPDATE busload.command AS c
   SET data = json_build_object('buffer', c.domain, 'items', greatest((c.data ->> 'items')::integer - %(done)s::integer, 0),
                                'partition', %(partition)s::text, 'table', c.data -> 'table')
 WHERE c.id = %(command)s::bigint AND json_typeof(c.data -> 'items') = 'number';

-- name: tell_exhausted
-- The attempts of a group are used up: a command with what is left in it for the function that was registered for that.
WITH sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, correlation_id, priority)
    SELECT nextval('busload.load_number') * 1024, c.domain, %(hook_id)s::uuid, %(hook_type)s::text,
           json_build_object('buffer', c.domain, 'group_id', c.command_id, 'partition', %(partition)s::text,
               'error', %(error)s::text::json,
               'items', (SELECT coalesce(json_agg(json_build_object('id', b.{id}, 'key', {key}, 'created_at', {since}, 'data', {payload})
                                                  ORDER BY b.{created_at}, b.{id}), '[]')
                           FROM {table} AS b WHERE {filter} AND b.{group_id} = %(group_id)s::uuid)),
           coalesce(c.correlation_id, c.command_id), c.priority
      FROM busload.command AS c WHERE c.id = %(command)s::bigint
        ON CONFLICT ON CONSTRAINT command_once DO NOTHING
    RETURNING id, domain, priority
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, priority) SELECT id, id, domain, priority FROM sent RETURNING domain
)
SELECT count(pg_notify('busload_ready', domain)) FROM queued;
