-- fragments of: busload.commands.load
-- fragments of: busload.commands.claim

-- name: lease_one
-- Lease one command that was just sent, as if it had been tried before: attempts count from 1.
WITH taken AS (
    DELETE FROM busload.queue
     WHERE hi = (SELECT id FROM busload.command
                  WHERE domain = %(domain)s::text AND command_id = %(command_id)s::uuid)
    RETURNING *
), leased AS (
    INSERT INTO busload.lease (lease_id, {load}, worker, open)
    SELECT {lease_id}, lo, hi, domain, batch_id, priority, %(attempt)s::integer, forgiven, crashes, replies,
           fair, %(worker)s::bigint, 1
      FROM taken
    RETURNING *
)
SELECT l.*, c.*
  {leases_and_commands};

-- name: left_in_other_domains
-- How many commands are ready in domains that nobody serves here.
SELECT domain, sum(hi - lo + 1)::bigint FROM busload.queue
 WHERE domain <> ALL (%(domains)s::text[]) GROUP BY domain ORDER BY domain;
