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

-- fragment: page
LIMIT %(limit)s::integer
OFFSET %(offset)s::integer

-- name: ordered_domains
-- Which of these domains are claimed in the order of sending.
SELECT ARRAY(SELECT domain FROM busload.ordered_domain WHERE domain = ANY (%(domains)b::text[]));

-- name: now
-- The time of the transaction by the clock of the database.
SELECT now();
