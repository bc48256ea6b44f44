-- What statements about loads share.

-- fragment: load
-- The columns that a load has in every place.
lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair

-- fragment: leases_in_order
-- Whoever locks leases locks them by their id, and before any batch: then two transactions never wait for
-- each other.
FROM busload.lease
WHERE lease_id = ANY (%(leases)b::uuid[])
ORDER BY lease_id
FOR UPDATE

-- fragment: canceled
-- What a cancel keeps of a load.
lo, hi, batch_id, attempt, replies, NULL::text AS transport, 0 AS rounds, NULL::text AS error

-- fragment: canceled_unpublished
-- The same of a load in the outbox, which may have been refused by its broker.
lo, hi, batch_id, attempt, replies, transport, rounds, error

-- fragment: cancel_details
-- What the event about such a load tells: else nobody would know that the broker has refused it.
json_strip_nulls(json_build_object(
    'reason', %(reason)s::text,
    'transport', CASE WHEN rounds > 0 THEN transport END,
    'attempts', CASE WHEN rounds > 0 THEN rounds END,
    'last_error', CASE WHEN rounds > 0 THEN error END))

-- fragment: page
LIMIT %(limit)s::integer
OFFSET %(offset)s::integer

-- name: ordered_domains
-- Which of these domains are claimed in the order of sending.
SELECT ARRAY(SELECT domain FROM busload.ordered_domain WHERE domain = ANY (%(domains)b::text[]));

-- name: now
-- The time of the transaction by the clock of the database.
SELECT now();

-- fragment: is_soon
-- A worker that has nothing to do looks every few seconds for what is due: it is told of what is due sooner.
run_at < now() + interval '5 seconds'

-- fragment: channel
-- Whom to tell that some commands of the domain in `ready` are ready: one worker, or all.
coalesce((SELECT channel FROM busload.one_listener AS l WHERE l.domain = ready.domain), 'busload_ready')

-- fragment: has_ready
-- Whether commands of the domain in `d` are ready. In the order of an index, of which this reads one entry:
-- a plan without an order would read the table, and all that is dead at its beginning.
EXISTS (SELECT FROM busload.queue AS q
         WHERE q.domain = d.domain AND q.crashes = 0 ORDER BY q.priority DESC, q.fair, q.hi OFFSET 0)
OR EXISTS (SELECT FROM busload.queue AS q
            WHERE q.domain = d.domain AND q.crashes > 0 ORDER BY q.priority DESC, q.hi OFFSET 0)
