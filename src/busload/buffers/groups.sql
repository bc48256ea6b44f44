-- fragments of: busload.commands.load

-- fragment: in_group
{filter} AND b.{group_id} = %(group_id)s::uuid

-- fragment: of_these
b.{id} IN (SELECT unnest(%(ids)b::{id_type}[]))

-- fragment: event
b.{id}, {key}, {since}, {version}, {data}

-- fragment: versions
unnest(%(ids)b::{id_type}[], %(versions)b::text[]) AS r (id, version)

-- fragment: as_read
-- Nobody but the transaction of the handler has updated this row since it was read. A migration that rewrites
-- the table writes its rows anew and updates none of them: the hash of such a row is the same.
(
    (b.{id}, b.xmin::text) IN (SELECT id, split_part(version, ' ', 1) FROM {versions})
    OR (b.{id}, hashtextextended((b.*)::text, 0)::text) IN (
        SELECT id, split_part(version, ' ', 2) FROM {versions}
    )
    OR pg_xact_status((pg_current_xact_id()::text::numeric - pg_current_xact_id()::xid::text::numeric
                       + b.xmin::text::numeric)::text::xid8) = 'in progress'
)

-- fragment: done_items
RETURNING b.{id}::text AS id, {key} AS key, CASE WHEN %(archive)s::boolean THEN {whole} END AS data,
          {since} AS created_at

-- fragment: archived
-- If the buffer keeps history, the same statement moves the events into its archive.
archived AS (
    INSERT INTO busload.buffer_archive (buffer, id, key, data, group_id, created_at, outcome)
    SELECT %(buffer)s::text, id, key, data, %(group_id)s::uuid, created_at, %(outcome)s::text
      FROM gone
     WHERE %(archive)s::boolean
)
SELECT count(*)::integer FROM gone

-- name: read
-- The events of a group, the oldest first. The version of each event tells whether it is updated later.
SELECT {event} FROM {table} AS b WHERE {in_group} ORDER BY b.{created_at}, b.{id};

-- name: read_keys
-- The ids and keys of a group alone, for rows that hold what Python cannot read.
SELECT b.{id}, {key} FROM {table} AS b WHERE {in_group} ORDER BY b.{created_at}, b.{id};

-- name: read_some
-- Some events of a group.
SELECT {event} FROM {table} AS b WHERE {in_group} AND {of_these};

-- name: kept
-- How many events of a group are there: of these, or of all if no ids are given.
SELECT count(*)::integer
  FROM {table} AS b
 WHERE {in_group} AND (%(ids)b::{id_type}[] IS NULL OR {of_these});

-- name: end_items
-- Events of a group are done: these, or all of them if no ids are given.
WITH gone AS (
    DELETE FROM {table} AS b
     WHERE {in_group} AND (%(ids)b::{id_type}[] IS NULL OR {of_these})
    {done_items}
), {archived};

-- name: end_items_as_read
-- Events of a group in an application's table are done: those that are still as they were read.
WITH gone AS (
    DELETE FROM {table} AS b
     WHERE {in_group} AND {as_read}
    {done_items}
), {archived};

-- name: updated
-- The events of these that were updated after they were read: what was delivered is not what they are now.
SELECT b.{id} FROM {table} AS b WHERE {in_group} AND {of_these} AND NOT {as_read};

-- name: part
-- Some events of a group become a group of their own, at the same attempt. With an error the new group waits
-- for a person at once. Without an error it is a suspect that runs alone. One statement makes the group and
-- its command, so that no group is without its command.
WITH held AS MATERIALIZED (
    SELECT lease_id, attempt, forgiven, worker FROM busload.lease WHERE lease_id = %(lease_id)s::uuid
), moved AS (
    UPDATE {table} AS b SET {group_id} = %(new_group)s::uuid
     WHERE {in_group} AND {of_these} AND EXISTS (SELECT FROM held)
    RETURNING 1
), sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, correlation_id, priority,
                                 max_attempts)
    SELECT nextval('busload.load_number') * 1024, c.domain, %(new_group)s::uuid, c.command_type,
           json_build_object('buffer', c.domain, 'items', n.count, 'partition', %(partition)s::text,
                             'table', %(table_name)s::text),
           coalesce(c.correlation_id, c.command_id), c.priority, c.max_attempts
      FROM busload.command AS c CROSS JOIN (SELECT count(*)::integer FROM moved) AS n
     WHERE c.id = %(command)s::bigint AND n.count > 0
    RETURNING id, domain, command_type, priority
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, priority, attempt, forgiven, crashes)
    SELECT s.id, s.id, s.domain, s.priority, h.attempt, h.forgiven, 1
      FROM sent AS s
     CROSS JOIN held AS h
     WHERE %(error)s::text IS NULL
    RETURNING domain
), parked AS (
    INSERT INTO busload.troubleshooting (command, domain, command_type, priority, attempt, forgiven, reason,
                                         error)
    SELECT s.id, s.domain, s.command_type, s.priority, h.attempt, h.forgiven, 'PERMANENT',
           %(error)s::text::json
      FROM sent AS s CROSS JOIN held AS h WHERE %(error)s::text IS NOT NULL
), noted AS (
    INSERT INTO busload.event (type, lo, hi, attempt, lease_id, worker, details)
    SELECT 'PARKED', s.id, s.id, h.attempt, h.lease_id, h.worker, %(error)s::text::json
      FROM sent AS s CROSS JOIN held AS h WHERE %(error)s::text IS NOT NULL
)
SELECT (SELECT count(*) FROM moved)::integer, (SELECT count(pg_notify('busload_ready', domain)) FROM queued);

-- name: unsuspect
-- The other half of a suspect group was parted off. What is left is only a suspect again: a group of several
-- events is never parked by name.
UPDATE busload.lease SET crashes = 1 WHERE lease_id = %(lease_id)s::uuid;

-- name: count_items
-- How many events a group holds after some have left it. An event that is missing then was taken by others.
UPDATE busload.command AS c
   SET data = json_build_object('buffer', c.domain, 'items', %(items)s::integer,
                                'partition', %(partition)s::text, 'table', %(table_name)s::text)
 WHERE c.id = %(command)s::bigint;

-- name: deliver_late
-- So many events of a group that others have by now were delivered: they have not vanished.
UPDATE busload.command AS c
   SET data = json_build_object('buffer', c.domain,
                                'items', greatest((c.data ->> 'items')::integer - %(done)s::integer, 0),
                                'partition', %(partition)s::text, 'table', c.data -> 'table')
 WHERE c.id = %(command)s::bigint AND json_typeof(c.data -> 'items') = 'number';

-- name: tell_exhausted
-- The attempts of a group are used up: send a command with what is left in it to the function that is
-- registered for that.
WITH sent AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, correlation_id, priority)
    SELECT nextval('busload.load_number') * 1024, c.domain, %(hook_id)s::uuid, %(hook_type)s::text,
           json_build_object('buffer', c.domain, 'group_id', c.command_id, 'partition', %(partition)s::text,
               'error', %(error)s::text::json,
               'items',
               (SELECT coalesce(json_agg(json_build_object('id', b.{id}, 'key', {key}, 'created_at', {since},
                                                           'data', {payload})
                                                  ORDER BY b.{created_at}, b.{id}), '[]')
                           FROM {table} AS b WHERE {in_group})),
           coalesce(c.correlation_id, c.command_id), c.priority
      FROM busload.command AS c WHERE c.id = %(command)s::bigint
        ON CONFLICT ON CONSTRAINT command_once DO NOTHING
    RETURNING id, domain, priority
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, priority) SELECT id, id, domain, priority FROM sent
    RETURNING domain
)
SELECT count(pg_notify({channel}, domain)) FROM queued AS ready;
