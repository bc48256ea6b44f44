-- fragments of: busload.commands.load

-- name: hold_session
-- Show for as long as this session lives that somebody listens in it.
SELECT pg_advisory_lock(27711008, pg_backend_pid());

-- name: listens
-- A worker waits for notifications in this session, or in none.
SELECT busload.listens(%(worker)s::bigint, %(session)s::integer);

-- name: tell_all
-- Tell all workers of these domains that commands are ready, where there still are some.
SELECT count(pg_notify('busload_ready', d.domain))
  FROM unnest(%(domains)b::text[]) AS d (domain)
 WHERE {has_ready};
