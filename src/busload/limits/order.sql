-- fragments of: busload.commands.claim

-- name: register_domain
-- Workers claim this domain in order.
INSERT INTO busload.ordered_domain (domain) VALUES (%(domain)s::text)
    ON CONFLICT (domain) DO UPDATE SET used_at = now()
 WHERE ordered_domain.used_at < now() - interval '1 hour';

-- name: forget_domains
-- Remove domains that no worker has claimed in order for a month. The next worker that does writes it again.
-- A paused domain stays: nobody claims it, but its commands wait to run in order.
DELETE FROM busload.ordered_domain AS o
 WHERE used_at < now() - interval '30 days'
   AND NOT EXISTS (SELECT FROM busload.pause AS p WHERE p.domain = o.domain AND p.resumed_at IS NULL);

-- name: look
-- Whether a claim of this domain may find something, and whether loads of it have owners. Not by EXISTS, for
-- which a plan could read the loads of all other domains.
SELECT (SELECT true
          FROM busload.ready
         WHERE domain = %(domain)s::text AND crashes = 0
         ORDER BY priority DESC, fair, hi
         LIMIT 1) IS TRUE
       OR %(suspects)s::integer > 0
          AND (SELECT true
                 FROM busload.ready
                WHERE domain = %(domain)s::text AND crashes > 0
                ORDER BY priority DESC, hi
                LIMIT 1) IS TRUE,
       EXISTS (SELECT FROM busload.owned_loads(%(domain)s::text, 1));

-- name: lock_domain
-- Be the only one who claims in this domain, until the transaction ends. A client that freezes meanwhile is
-- disconnected by the server, and its claim is undone. Returns what the entry into the order sets again,
-- because a claim does not wait for the disk.
SELECT current_setting('synchronous_commit'),
       set_config('idle_in_transaction_session_timeout', %(idle)s::integer::text, true),
       set_config('lock_timeout', %(patience)s::integer::text, true),
       pg_advisory_xact_lock(27711007, hashtext(%(domain)s::text));

-- name: disown
-- Let loads of this domain belong to nobody, because nobody takes turns in it. Then a claim reads about as
-- many loads as it takes, however many batches and keys there are.
WITH disowned AS (
    UPDATE busload.queue
       SET fair = 0
     WHERE hi = ANY (ARRAY(SELECT hi
                             FROM busload.queue
                            WHERE hi = ANY (ARRAY(SELECT hi FROM busload.owned_loads(%(domain)s::text,
                                                                                     %(most)s::integer)))
                              FOR UPDATE SKIP LOCKED))
    RETURNING hi
)
SELECT count(*)::integer FROM disowned;

-- name: claim_in_order
-- Take ready commands in the order of sending, whatever their priority and their owner. What comes behind a
-- load that somebody has locked stays: it must not overtake that load. So does what comes behind a load that
-- is not published yet. The second and the third column say whether there is a locked load, or either.
-- Suspects were claimed before, so the order knows them.
WITH {alive}, candidate AS MATERIALIZED (
    SELECT o.hi
      FROM alive
     CROSS JOIN busload.oldest_loads(%(domain)s::text, %(limit)s::integer) AS o
), free AS MATERIALIZED (
    SELECT {load}
      FROM busload.queue
     WHERE hi = ANY (ARRAY(SELECT hi FROM candidate))
       FOR UPDATE SKIP LOCKED
), barrier AS MATERIALIZED (
    SELECT least(
               (SELECT min(hi) FROM candidate WHERE hi NOT IN (SELECT hi FROM free)),
               (SELECT hi
                  FROM busload.unmarked
                 WHERE domain = %(domain)s::text AND hi < (SELECT max(hi) FROM candidate)
                 ORDER BY hi
                 LIMIT 1)
           ) AS hi
), {suspect}, taken AS (
    SELECT *, least(hi, lo + %(limit)s::integer - before - 1) AS upto
      FROM (
        SELECT *,
               sum((hi - lo + 1)::integer) OVER (ORDER BY crashes = 0, hi ROWS UNBOUNDED PRECEDING)
               - (hi - lo + 1) AS before
          FROM (
            SELECT {load} FROM suspect
            UNION ALL
            SELECT * FROM free WHERE (hi < (SELECT hi FROM barrier)) IS NOT FALSE
          ) AS load
      ) AS load
     WHERE before < %(limit)s::integer
), {lease_taken}
SELECT EXISTS (SELECT FROM alive),
       EXISTS (SELECT FROM candidate WHERE hi NOT IN (SELECT hi FROM free)),
       (SELECT hi IS NOT NULL FROM barrier),
       l.*, c.*
  {leases_and_commands};

-- name: enter
-- Enter claimed commands into the order; see busload.enter_order. The commit waits for the disk: a claim that
-- a crash of the server undid would let the same command run twice at a time.
SELECT busload.enter_order(
           %(worker)s::bigint, %(names)b::text[], %(subjects)b::text[], %(commands)b::bigint[],
           %(leases)b::uuid[], %(lease_ordinals)b::integer[]
       ),
       set_config('synchronous_commit', %(commit)s::text, true);

-- name: advance
-- Let the next of these keys run, if the first has ended; see busload.advance_order. It does not wait for the
-- disk: if a crash of the server undoes it, the sweep does it again.
SELECT busload.advance_order(%(names)b::text[], %(subjects)b::text[])
  FROM (SELECT set_config('synchronous_commit', 'off', true)) AS hasty;

-- name: stale
-- Keys whose first command has ended or stepped out, and nobody has said so: it was canceled, expired or
-- held, or its worker died. It looks at a page of keys behind the one at which the last look has ended, and
-- round once; if somebody else looks now, at none.
WITH at AS MATERIALIZED (
    SELECT limit_name, limit_subject FROM busload.order_sweep FOR UPDATE SKIP LOCKED
), page AS MATERIALIZED (
    SELECT k.*
      FROM at
     CROSS JOIN LATERAL (
        (SELECT 1 AS lap, f.limit_name, f.limit_subject, f.command
           FROM busload.first_in_order AS f
          WHERE (f.limit_name, f.limit_subject) > (at.limit_name, at.limit_subject)
          ORDER BY f.limit_name, f.limit_subject
          LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 2, f.limit_name, f.limit_subject, f.command
           FROM busload.first_in_order AS f
          WHERE (f.limit_name, f.limit_subject) <= (at.limit_name, at.limit_subject)
          ORDER BY f.limit_name, f.limit_subject
          LIMIT %(most)s::integer)
        LIMIT %(most)s::integer
     ) AS k
), moved AS (
    UPDATE busload.order_sweep AS s
       SET limit_name = p.limit_name, limit_subject = p.limit_subject
      FROM (SELECT * FROM page ORDER BY lap DESC, limit_name DESC, limit_subject DESC LIMIT 1) AS p
)
SELECT coalesce(array_agg(limit_name), '{}'), coalesce(array_agg(limit_subject), '{}')
  FROM page
 WHERE command = ANY (ARRAY(SELECT busload.not_first_any_more(ARRAY(SELECT command FROM page))));
