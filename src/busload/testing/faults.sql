-- name: lose_worker
-- The worker that holds a command has not been heard of for ever. If its process lives, it is told to look.
UPDATE busload.worker
   SET seen_at = '-infinity'
 WHERE worker = (
    SELECT l.worker
      FROM busload.command AS c
      JOIN busload.lease AS l ON c.id BETWEEN l.lo AND l.hi
     WHERE c.domain = %(domain)s::text AND c.command_id = %(command_id)s::uuid
 )
RETURNING pg_notify('busload_stop', worker::text);

-- name: forget_who_lost
-- A worker takes up again what it has lost itself, unless nobody knows who has lost it.
UPDATE busload.event SET worker = NULL WHERE type = 'LEASE_LOST' AND worker IS NOT NULL;
