-- Batches. Their counters are exact: triggers add up executions and events, in the transaction that writes
-- them. Those of a batch of jobs follow the jobs in the same way: see 0005.

-- The id of a job of ours; null for a job of the application's whose id is another text.
CREATE FUNCTION busload.uuid_of(job_id text) RETURNS uuid
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN CASE WHEN job_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN job_id::uuid END;

CREATE DOMAIN busload.way AS text CHECK (VALUE IN ('create_batch', 'open_batch', 'job'));
CREATE DOMAIN busload.batch_type AS text CHECK (VALUE IN ('COMMANDS', 'JOBS'));
CREATE DOMAIN busload.held_reason AS text CHECK (VALUE IN ('OPERATOR', 'CANARY', 'BUDGET'));

CREATE TABLE busload.batch (
    batch_id                 uuid        PRIMARY KEY,
    domain                   text        NOT NULL,
    name                     text,
    custom_data              jsonb,
    status                   text        NOT NULL DEFAULT 'PENDING',
    total_count              integer     NOT NULL DEFAULT 0,
    completed_count          integer     NOT NULL DEFAULT 0,
    failed_count             integer     NOT NULL DEFAULT 0,
    canceled_count           integer     NOT NULL DEFAULT 0,
    in_troubleshooting_count integer     NOT NULL DEFAULT 0,
    created_at               timestamptz NOT NULL DEFAULT now(),
    started_at               timestamptz,
    completed_at             timestamptz,
    sealed_at                timestamptz,
    canceled_at              timestamptz,
    stalled_at               timestamptz,
    notified_at              timestamptz NOT NULL DEFAULT '-infinity',
    on_complete              json,        -- the command to send when the batch completes
    pruned_at                timestamptz, -- when its removal began; it is no longer shown
    job_id                   text COLLATE "C",   -- the job that the batch is a stage of: a UUID, or any text
    stage                    jsonb,       -- a text or a number
    way                      busload.way NOT NULL DEFAULT 'create_batch',   -- the call that created it
    -- What it counts. Nothing is sent into a batch of jobs: each stage of a job is a batch of commands.
    batch_type               busload.batch_type NOT NULL DEFAULT 'COMMANDS',
    headers                  json,        -- what all its commands have among their headers
    fair_by                  text,        -- the key by which it takes turns with others; null: by itself
    -- Until then somebody cancels the batch in pages. Null: nobody does, or it is done.
    canceling_until          timestamptz,
    -- What has not started by then is canceled; null: it may always start.
    expires_at               timestamptz,
    expired_at               timestamptz,   -- when the first of it was canceled for that reason
    -- Since when the batch is held: nothing of it starts until it is resumed. All four are null otherwise.
    held_at                  timestamptz,
    held_reason              busload.held_reason,   -- a person, its canary or its failure budget
    held_by                  text,        -- the operator, if a person holds it
    held_note                text,        -- why, in words for people
    -- The canary: how many commands run before all others, and by when they are to have completed. The others
    -- were let go at canary_ended_at.
    canary_count             integer,
    canary_until             timestamptz,
    canary_ended_at          timestamptz,
    -- The failure budget: how large a share of all commands may fail, and how many at least. Failures before
    -- the last resume, budget_from, no longer count.
    budget_share             numeric,
    budget_at_least          integer,
    budget_per_cause         boolean,
    budget_from              integer,
    on_exceeded              json,        -- the command to send when the budget is exceeded
    -- The pace, for a forecast: how many commands have run to an end, where one that ended t seconds before
    -- paced_at counts exp(-t / n), for n = 1, 10, 100 and 1,000 seconds.
    paced_at                 timestamptz,
    pace_1                   float8      NOT NULL DEFAULT 0,
    pace_10                  float8      NOT NULL DEFAULT 0,
    pace_100                 float8      NOT NULL DEFAULT 0,
    pace_1000                float8      NOT NULL DEFAULT 0,
    CONSTRAINT valid_status CHECK (
        status IN ('PENDING', 'IN_PROGRESS', 'COMPLETED', 'COMPLETED_WITH_FAILURES')),
    CONSTRAINT exact_counts CHECK (
            completed_count >= 0
        AND failed_count >= 0
        AND canceled_count >= 0
        AND in_troubleshooting_count >= 0
        AND completed_count + failed_count + canceled_count + in_troubleshooting_count <= total_count),
    CONSTRAINT held_for_a_reason CHECK ((held_at IS NULL) = (held_reason IS NULL)),
    CONSTRAINT longest_domain CHECK (length(domain) <= 255),
    CONSTRAINT longest_name CHECK (length(name) <= 255)
) WITH (fillfactor = 50);
CREATE INDEX batch_newest    ON busload.batch (domain, created_at DESC, batch_id DESC);
CREATE INDEX batch_created   ON busload.batch (created_at);
CREATE INDEX batch_by_status ON busload.batch (domain, status, created_at DESC, batch_id DESC);
CREATE INDEX batch_of_job    ON busload.batch (job_id, created_at, batch_id) WHERE job_id IS NOT NULL;
CREATE INDEX batch_canceling ON busload.batch (batch_id)
    WHERE canceled_at IS NOT NULL AND completed_at IS NULL;
CREATE INDEX batch_withheld  ON busload.batch (batch_id)
    WHERE (canceling_until IS NOT NULL OR held_at IS NOT NULL) AND completed_at IS NULL;
CREATE INDEX batch_canary    ON busload.batch (canary_until)
    WHERE canary_until IS NOT NULL AND canary_ended_at IS NULL AND completed_at IS NULL;
CREATE INDEX batch_expiring  ON busload.batch (expires_at)
    WHERE expires_at IS NOT NULL AND completed_at IS NULL;
CREATE INDEX batch_ended     ON busload.batch (completed_at, batch_id)
    WHERE completed_at IS NOT NULL AND pruned_at IS NULL;
CREATE INDEX batch_pruned    ON busload.batch (batch_id) WHERE pruned_at IS NOT NULL;
-- Which batch a callback belongs to: the callback must not be removed before its batch.
CREATE INDEX batch_of_callback ON busload.batch (((on_complete ->> 'command_id')::uuid))
    WHERE on_complete IS NOT NULL;

-- A large batch is canceled in pages, each a short transaction. Meanwhile no worker claims commands of it
-- and no relay publishes them. If the process that cancels dies, the sweep goes on.
--
-- What may be claimed, and what may be published: nothing of a batch that is being canceled in pages, or
-- that is held. The planner takes IS NOT NULL to be true for nearly all
-- rows, and it is.
CREATE VIEW busload.ready AS
SELECT * FROM busload.queue
 WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT b.batch_id FROM busload.batch AS b
                                        WHERE (b.canceling_until IS NOT NULL OR b.held_at IS NOT NULL)
                                          AND b.completed_at IS NULL))
            THEN NULL ELSE true END IS NOT NULL;
CREATE VIEW busload.unmarked AS
SELECT * FROM busload.outbox
 WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT b.batch_id FROM busload.batch AS b
                                        WHERE (b.canceling_until IS NOT NULL OR b.held_at IS NOT NULL)
                                          AND b.completed_at IS NULL))
            THEN NULL ELSE true END IS NOT NULL;

-- What a worker wants to know of the batch of what it claims: how much of a batch that takes no more commands
-- has not ended, the failure budget, which is null if there is none, and the headers, as text.
CREATE VIEW busload.batch_to_claim AS
SELECT batch_id,
       CASE WHEN sealed_at IS NOT NULL
            THEN total_count - completed_count - failed_count - canceled_count - in_troubleshooting_count
       END AS remaining,
       budget_share,
       headers::text,
       status
  FROM busload.batch;

-- Whose turn it is: how many loads a claim of `most` commands takes of whom. Higher priorities come first.
-- Among equal ones the domains take turns, and within a domain the owners: an owner is all that has the same
-- `fair`, so the commands of a batch, those of a key of the application, or all that were sent by themselves.
--
-- `walk` leaps from owner to owner, beginning behind the one of `after`, and round once. It stops when it has
-- seen enough commands, and eight owners or all. Only if there are not enough, it goes down to the next
-- priority. `seen` says how many commands the first n loads of an owner hold. Each owner has an equal share,
-- and gets the loads that fit into it. What is left goes to owners who got less than half of their share, one
-- after the other. So a small batch starts at once beside a large one, large ones take turns, and a claim
-- splits one load at most: that of the owner with `split`. The next claim begins behind the owner whose
-- `rank` is 1. An owner is `alone` if there is no other one of its priority. Windows are over -priority, so
-- that all of them are in one order.
--
-- The planner puts this function in the place of its call, so it is planned with the claim.
CREATE FUNCTION busload.turns(domains text[], after bigint[], most integer)
    RETURNS TABLE (domain text, priority integer, fair bigint, loads integer, commands bigint, split boolean,
                   rank bigint, alone boolean)
    LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH RECURSIVE walk AS (
        SELECT d.domain, d.after, random() AS chance, 32768 AS priority, d.after AS fair, d.after AS until,
               NULL::bigint[] AS seen, 0 AS owners, 0::bigint AS commands
          FROM unnest(turns.domains, turns.after) AS d (domain, after)
        UNION ALL
        SELECT w.domain, w.after, w.chance, n.priority, n.fair, n.until, q.seen,
               w.owners + (q.seen IS NOT NULL)::integer,
               w.commands + coalesce(q.seen[cardinality(q.seen)], 0)
          FROM walk AS w
         CROSS JOIN LATERAL (
            (SELECT r.priority::integer, r.fair, w.until, r.hi - r.lo + 1 AS size
               FROM busload.ready AS r
              WHERE r.domain = w.domain AND r.crashes = 0 AND r.priority = w.priority
                AND r.fair > w.fair AND r.fair <= w.until
              ORDER BY r.fair, r.hi
              LIMIT 1)
            UNION ALL   -- once round, up to where it began
            (SELECT r.priority, r.fair, w.after, r.hi - r.lo + 1
               FROM busload.ready AS r
              WHERE r.domain = w.domain AND r.crashes = 0 AND r.priority = w.priority
                AND r.fair <= w.after AND w.until > w.after
              ORDER BY r.fair, r.hi
              LIMIT 1)
            UNION ALL   -- the next priority: no owner yet
            (SELECT r.priority, w.after, 9223372036854775807, NULL
               FROM busload.ready AS r
              WHERE r.domain = w.domain AND r.crashes = 0 AND r.priority < w.priority AND w.commands < most
              ORDER BY r.priority DESC
              LIMIT 1)
            LIMIT 1
         ) AS n
         CROSS JOIN LATERAL (
            SELECT CASE WHEN n.size >= most THEN ARRAY[n.size]
                        WHEN n.size IS NOT NULL THEN (
                            SELECT array_agg(load.seen)
                              FROM (
                                SELECT sum((r.hi - r.lo + 1)::integer) OVER (ORDER BY r.fair, r.hi) AS seen
                                  FROM busload.ready AS r
                                 WHERE r.domain = w.domain AND r.crashes = 0 AND r.priority = n.priority
                                   AND r.fair BETWEEN n.fair AND n.fair   -- not `=`: see claim.sql
                                 ORDER BY r.fair, r.hi
                                 LIMIT most
                              ) AS load
                        )
                   END AS seen
            OFFSET 0   -- else it would be computed once for each of its uses
         ) AS q
         WHERE w.commands < most OR w.owners < least(8, most)
    ), owner AS (
        SELECT o.*, rest / among_domains / among AS share,
               coalesce(seen[width_bucket(rest / among_domains / among, seen)], 0) AS fit
          FROM (
            SELECT w.domain, w.chance, w.priority, w.fair, w.seen, w.owners AS nth,
                   seen[cardinality(seen)] AS commands,
                   greatest(0, most - coalesce(sum(seen[cardinality(seen)]) OVER (
                       ORDER BY -w.priority GROUPS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                   ), 0))::bigint AS rest,
                   count(*) FILTER (WHERE seen IS NULL) OVER (PARTITION BY -w.priority) AS among_domains,
                   count(seen) OVER (PARTITION BY -w.priority, w.domain) AS among
              FROM walk AS w
          ) AS o
         WHERE seen IS NOT NULL
    ), turn AS (
        SELECT o.*,
               o.fit + least(o.commands - o.fit, greatest(0,
                   rest - sum(fit) OVER (PARTITION BY o.priority) + o.commands - fit
                   - sum(o.commands - fit) OVER (
                       PARTITION BY o.priority
                       ORDER BY 2 * fit > share, chance, CASE WHEN 2 * fit > share THEN -nth ELSE nth END
                       ROWS UNBOUNDED PRECEDING
                   )
               ))::bigint AS gets
          FROM owner AS o
    )
    SELECT t.domain, t.priority, t.fair, n.loads, t.gets, seen[n.loads] > gets,
           row_number() OVER (
               PARTITION BY t.domain
               ORDER BY t.priority, gets > fit DESC, CASE WHEN gets > fit OR all_served THEN -nth ELSE nth END
           ),
           t.among * t.among_domains = 1
      FROM (
        SELECT *, bool_and(gets > 0) OVER (PARTITION BY turn.domain, turn.priority) AS all_served FROM turn
      ) AS t
     CROSS JOIN LATERAL (SELECT width_bucket(gets - 1, seen) + 1 AS loads) AS n
     WHERE gets > 0;
END;

-- The same for a worker that has looked at the queue before, and knows who owns ready loads there. It has the
-- first load of each of these owners, so nothing is read that lies before that load: while somebody holds a
-- snapshot, dead entries of the index cannot be removed, and there may be a million of them.
--
-- `fresh` is what became ready since that look: the loads that were written by transactions which the look
-- at `since` could not see, because they began later or were under way. So nothing is missed, however late it
-- was committed. Owners of all domains that the worker serves are returned, and loads of the domains it asks
-- for.
--
-- Each domain has an equal share, and within it each owner. Loads that fit whole into a share come first, and
-- then the others, in the order in which the worker gave the owners. `ahead` is how many commands come
-- before.
--
-- `places` are those of the owners' domains among the `served` ones.
CREATE FUNCTION busload.known_turns(served text[], domains text[], since pg_snapshot, places integer[],
                                    priorities smallint[], fairs bigint[], his bigint[], most integer)
    RETURNS TABLE (domain text, priority smallint, fair bigint, first bigint, hi bigint, commands bigint,
                   split boolean, ahead bigint)
    LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH fresh AS MATERIALIZED (
        SELECT r.domain, r.priority, r.fair, min(r.hi) AS hi
          FROM (
            SELECT *
              FROM (
                SELECT q.* FROM busload.ready AS q WHERE q.entered >= pg_snapshot_xmax(since)
                OFFSET 0   -- else a plan could go by the domain, and read all that is dead
              ) AS later
            UNION ALL
            SELECT q.*
              FROM (
                SELECT pg_snapshot_xip(since) AS entered
                UNION   -- a snapshot does not name the transaction that it belongs to, which may be a test's
                SELECT pg_current_xact_id_if_assigned()
              ) AS x
             CROSS JOIN LATERAL (
                SELECT q.* FROM busload.ready AS q
                 WHERE q.entered = x.entered AND q.entered < pg_snapshot_xmax(since)
                OFFSET 0
             ) AS q
          ) AS r
         WHERE r.crashes = 0 AND r.domain = ANY (served)
         GROUP BY 1, 2, 3
    ), owner AS MATERIALIZED (
        SELECT o.domain, o.priority, o.fair, min(o.hi) AS hi, min(o.nth) AS nth
          FROM (
            SELECT served[k.place] AS domain, k.priority, k.fair, k.hi, k.nth
              FROM unnest(places, priorities, fairs, his) WITH ORDINALITY
                   AS k (place, priority, fair, hi, nth)
            UNION ALL
            SELECT f.*, NULL FROM fresh AS f
          ) AS o
         GROUP BY 1, 2, 3
    ), load AS MATERIALIZED (
        SELECT o.domain, o.priority, o.fair, o.nth, q.hi, q.size, q.before
          FROM owner AS o
         CROSS JOIN LATERAL (
            SELECT r.hi, r.hi - r.lo + 1 AS size,
                   sum((r.hi - r.lo + 1)::integer) OVER (
                       ORDER BY r.fair, r.hi
                       ROWS UNBOUNDED PRECEDING
                   ) - (r.hi - r.lo + 1) AS before
              FROM busload.ready AS r
             WHERE r.domain = o.domain AND r.crashes = 0 AND r.priority = o.priority
               AND r.fair BETWEEN o.fair AND o.fair AND r.hi >= o.hi   -- not `=`: see claim.sql
             ORDER BY r.fair, r.hi
             LIMIT most
         ) AS q
         WHERE q.before < most AND o.domain = ANY (domains)
    ), part AS (
        SELECT l.*, l.before + l.size > most / (d.domains * d.owners) AS split
          FROM load AS l
          JOIN (
            SELECT one.priority, one.domain, count(*) AS owners,
                   count(*) OVER (PARTITION BY one.priority) AS domains
              FROM (SELECT DISTINCT l.priority, l.domain, l.fair FROM load AS l) AS one
             GROUP BY 1, 2
          ) AS d USING (priority, domain)
    )
    SELECT o.domain, o.priority, o.fair,
           CASE WHEN o.domain = ANY (domains) THEN p.hi ELSE o.hi END,
           p.hi, p.size, p.split,
           (sum(p.size) OVER (
               ORDER BY -p.priority, p.split, p.nth, p.hi
               ROWS UNBOUNDED PRECEDING
           ) - p.size)::bigint
      FROM owner AS o
      LEFT JOIN part AS p USING (domain, priority, fair);
END;

-- The first and the last id that commands of these batches can have. Between them the loads of a batch are
-- found in a place by its key, whatever else waits there.
CREATE FUNCTION busload.ids_of(batches uuid[]) RETURNS TABLE (batch_id uuid, first bigint, last bigint)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT b.batch_id, first.id, last.id | 1023
      FROM unnest(batches) AS b (batch_id)
     CROSS JOIN LATERAL (SELECT id FROM busload.command
                          WHERE command.batch_id = b.batch_id AND id & 1023 = 0
                          ORDER BY id LIMIT 1) AS first
     CROSS JOIN LATERAL (SELECT id FROM busload.command
                          WHERE command.batch_id = b.batch_id AND id & 1023 = 0
                          ORDER BY id DESC LIMIT 1) AS last
     ORDER BY b.batch_id
$$;

-- Take the loads of these batches out of the queue and the outbox, so that claims do not have to pass them
-- by. They are HELD in `scheduled` until somebody resumes the batch. So are those that wait for a concurrency
-- limit: they ask again when the batch is resumed, and others do not have to wait behind them. The caller
-- holds the rows of the batches, so no load can become HELD after its batch was resumed. If a claim is
-- splitting a load, this waits for it, and moves what is left.
CREATE FUNCTION busload.withhold(batches uuid[]) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b record;
BEGIN
    FOR b IN SELECT * FROM busload.ids_of(batches) LOOP
        UPDATE busload.scheduled
           SET reason = 'HELD', run_at = 'infinity', limit_name = NULL, limit_subject = NULL, per_call = NULL
         WHERE hi = ANY (ARRAY(SELECT hi FROM busload.scheduled
                                WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id
                                  AND reason = 'LIMITED'
                                ORDER BY hi FOR UPDATE));
        WITH ready AS (
            DELETE FROM busload.queue
             WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue
                                    WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id
                                    ORDER BY hi FOR UPDATE))
            RETURNING lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair
        ), unpublished AS (
            DELETE FROM busload.outbox
             WHERE hi = ANY (ARRAY(SELECT hi FROM busload.outbox
                                    WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id
                                    ORDER BY hi FOR UPDATE))
            RETURNING *
        ), noted AS (   -- else nobody would know that the broker has refused them
            INSERT INTO busload.event (type, lo, hi, batch_id, attempt, details)
            SELECT 'REROUTED', lo, hi, batch_id, attempt,
                   json_build_object('transport', transport, 'attempts', rounds, 'last_error', error)
              FROM unpublished WHERE rounds > 0
        )
        INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority,
                                       attempt, forgiven, crashes, replies, fair, run_at, reason)
        SELECT load.*, 'infinity', 'HELD'
          FROM (SELECT * FROM ready
                UNION ALL
                SELECT lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair
                  FROM unpublished) AS load;
    END LOOP;
END $$;

-- Put the loads of these batches that wait for `what`, HELD or CANARY, into the queue, and tell the workers
-- of their domains. A load that has waited for the canary may have a run_at that has not come. The caller
-- holds the rows of the batches.
CREATE FUNCTION busload.release_held(batches uuid[], what text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b record;
BEGIN
    FOR b IN SELECT * FROM busload.ids_of(batches) LOOP
        -- What was handed back meanwhile lies in the queue, and claims pass it by until the batch goes on.
        UPDATE busload.queue SET entered = pg_current_xact_id()
         WHERE hi = ANY (ARRAY(SELECT hi FROM busload.queue
                                WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id
                                ORDER BY hi FOR UPDATE));
        WITH held AS (
            DELETE FROM busload.scheduled
             WHERE hi = ANY (ARRAY(SELECT hi FROM busload.scheduled
                                    WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id
                                      AND reason = what
                                    ORDER BY hi FOR UPDATE))
            RETURNING lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair
        ), load AS MATERIALIZED (
            SELECT held.*, c.run_at
              FROM held LEFT JOIN busload.command AS c ON c.id = held.lo AND what = 'CANARY'
        ), later AS (
            INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority,
                                           attempt, forgiven, crashes, replies, fair, run_at, reason)
            SELECT load.*, 'RUN_AT' FROM load WHERE run_at > now()
        )
        INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies,
                                   fair)
        SELECT lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair
          FROM load WHERE run_at IS NULL OR run_at <= now();
        PERFORM pg_notify('busload_ready', domain)
           FROM (SELECT DISTINCT domain FROM busload.queue
                  WHERE hi BETWEEN b.first AND b.last AND batch_id = b.batch_id) AS domains;
    END LOOP;
END $$;

-- Hold batches: nothing of them starts from the commit on, and what runs finishes. `what` holds them:
-- OPERATOR, CANARY or BUDGET; `who` is null unless it is a person; `why` is for people. A batch that is
-- held already, canceled or complete stays as it is. Returns those that are held from now on. Workers hand
-- back what stands in their lines. The rows of the batches are locked in order, as every statement does it.
CREATE FUNCTION busload.hold_batches(batches uuid[], what text, who text, why text) RETURNS uuid[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    held uuid[];
BEGIN
    WITH free AS MATERIALIZED (
        SELECT batch_id FROM busload.batch
         WHERE batch_id = ANY (batches)
           AND held_at IS NULL AND canceled_at IS NULL AND completed_at IS NULL
         ORDER BY batch_id FOR NO KEY UPDATE
    ), marked AS (
        UPDATE busload.batch AS b
           SET held_at = statement_timestamp(), held_reason = what, held_by = who, held_note = why
          FROM free WHERE b.batch_id = free.batch_id
        RETURNING b.*
    ), noted AS (
        INSERT INTO busload.event (type, batch_id, operator, details)
        SELECT 'BATCH_HELD', batch_id, who,
               CASE what WHEN 'OPERATOR' THEN json_build_object('held_reason', what, 'reason', why)
                    ELSE json_build_object(
                        'held_reason', what, 'reason', why, 'total', total_count,
                        'completed', completed_count, 'failed', failed_count,
                        'canceled', canceled_count, 'in_troubleshooting', in_troubleshooting_count) END
          FROM marked
    )
    SELECT array_agg(batch_id) INTO held FROM marked;
    IF held IS NOT NULL THEN
        PERFORM busload.withhold(held);
        PERFORM pg_notify('busload_hold', batch_id::text), pg_notify('busload_batch', batch_id::text)
           FROM unnest(held) AS batch_id;
    END IF;
    RETURN held;
END $$;

-- Let held batches go on. Returns those that were held until now. If a canary or a budget held them, a person
-- has decided: the canary is over, and the budget counts from here.
CREATE FUNCTION busload.resume_batches(batches uuid[], who text) RETURNS uuid[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    resumed uuid[];
    decided uuid[];     -- those that a canary or a budget held
BEGIN
    WITH held AS MATERIALIZED (
        SELECT batch_id, held_at, held_reason FROM busload.batch
         WHERE batch_id = ANY (batches) AND held_at IS NOT NULL AND completed_at IS NULL
         ORDER BY batch_id FOR NO KEY UPDATE
    ), marked AS (
        UPDATE busload.batch AS b
           SET held_at = NULL, held_reason = NULL, held_by = NULL, held_note = NULL,
               canary_ended_at = CASE WHEN b.canary_until IS NOT NULL AND held.held_reason <> 'OPERATOR'
                                      THEN coalesce(b.canary_ended_at, statement_timestamp())
                                      ELSE b.canary_ended_at END,
               budget_from = CASE WHEN b.budget_share IS NOT NULL AND held.held_reason = 'BUDGET'
                                  THEN b.failed_count + b.in_troubleshooting_count
                                  ELSE b.budget_from END
          FROM held WHERE b.batch_id = held.batch_id
        RETURNING b.batch_id, held.held_reason
    ), noted AS (
        INSERT INTO busload.event (type, batch_id, operator, details)
        SELECT 'BATCH_RESUMED', batch_id, who,
               json_build_object('held_reason', held_reason, 'held_at', held_at)
          FROM held
    )
    SELECT array_agg(batch_id), array_agg(batch_id) FILTER (WHERE held_reason <> 'OPERATOR')
      INTO resumed, decided FROM marked;
    IF resumed IS NOT NULL THEN
        PERFORM busload.release_held(resumed, 'HELD');
        IF decided IS NOT NULL THEN
            PERFORM busload.release_held(decided, 'CANARY');
            DELETE FROM busload.batch_cause WHERE batch_id = ANY (decided);
        END IF;
        PERFORM busload.guard(resumed);   -- while a person held them, a canary may have ended
        PERFORM pg_notify('busload_batch', batch_id::text) FROM unnest(resumed) AS batch_id;
    END IF;
    RETURN resumed;
END $$;

-- The first command of a batch runs. A claim calls this only if it may start one. A claim that starts none
-- writes no event at all, because even an insert of no rows would run the trigger on events. Batches whose
-- rows others hold are left out.
CREATE FUNCTION busload.start_batches(batches uuid[], by bigint) RETURNS void
    LANGUAGE sql STRICT SET search_path = pg_catalog, pg_temp AS $$
    WITH started AS (
        UPDATE busload.batch SET status = 'IN_PROGRESS', started_at = now()
         WHERE batch_id = ANY (ARRAY(SELECT batch_id FROM busload.batch
                                      WHERE batch_id = ANY (batches) AND status = 'PENDING'
                                        FOR NO KEY UPDATE SKIP LOCKED))
           AND status = 'PENDING'
        RETURNING batch_id
    )
    INSERT INTO busload.event (type, batch_id, worker) SELECT 'BATCH_STARTED', batch_id, by FROM started
$$;

-- What is left of a count that fades over so many seconds, since a time that may be null.
CREATE FUNCTION busload.fading(since timestamptz, over integer) RETURNS float8
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN exp(-least(greatest(date_part('epoch', now() - since), 0) / over, 500));

-- How many commands of a batch may fail before its budget is exceeded; null without a budget.
CREATE FUNCTION busload.failures_allowed(share numeric, at_least integer, total integer) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN greatest(at_least, floor(share * total)::integer);

-- Causes of failures in batches that have a budget for each cause, and how often each was the cause.
CREATE TABLE busload.batch_cause (
    batch_id    uuid    NOT NULL REFERENCES busload.batch ON DELETE CASCADE,
    fingerprint text    NOT NULL,
    failed      integer NOT NULL,
    PRIMARY KEY (batch_id, fingerprint)
);

-- Begin the canary of a batch, in the transaction that has written it: all its loads wait, but for `size`
-- commands, spread evenly over the batch, which are ready, or go to the outbox if there is a broker. The load
-- that such a command was in is parted around it.
--
-- A sender may not move what waits, so the function does this with the rights of its owner, and only for a
-- batch that this transaction has written.
CREATE FUNCTION busload.begin_canary(guarded uuid, size integer, within interval, broker text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b   record;
    ids bigint[];     -- the canary's commands
BEGIN
    IF NOT EXISTS (SELECT FROM busload.batch WHERE batch_id = guarded AND created_at = now()) THEN
        RAISE insufficient_privilege USING MESSAGE = format(
            'Batch %s was not written by this transaction, so no canary can begin.', guarded);
    END IF;
    SELECT * INTO b FROM busload.ids_of(ARRAY[guarded]);
    PERFORM busload.withhold(ARRAY[guarded]);
    UPDATE busload.scheduled AS s SET reason = 'CANARY', run_at = 'infinity'
     WHERE s.hi BETWEEN b.first AND b.last AND s.batch_id = guarded;
    WITH load AS MATERIALIZED (
        SELECT lo, hi, (sum(hi - lo + 1) OVER (ORDER BY hi))::bigint - (hi - lo + 1) AS before
          FROM busload.scheduled AS s WHERE s.hi BETWEEN b.first AND b.last AND s.batch_id = guarded
    ), total AS MATERIALIZED (
        SELECT sum(hi - lo + 1)::bigint AS commands, least(size, sum(hi - lo + 1))::bigint AS chosen FROM load
    )
    SELECT array_agg(load.lo + n.nth - load.before ORDER BY n.nth) INTO ids
      FROM (SELECT (2 * i + 1) * commands / (2 * chosen) AS nth
              FROM total CROSS JOIN LATERAL generate_series(0, chosen - 1) AS i) AS n
      JOIN load ON n.nth BETWEEN load.before AND load.before + load.hi - load.lo;
    UPDATE busload.batch SET canary_count = cardinality(ids), canary_until = now() + within
     WHERE batch_id = guarded;

    WITH parted AS (
        DELETE FROM busload.scheduled AS s
         WHERE s.hi BETWEEN b.first AND b.last AND s.batch_id = guarded
           AND EXISTS (SELECT FROM unnest(ids) AS id WHERE id BETWEEN s.lo AND s.hi)
        RETURNING s.*
    ), canary AS MATERIALIZED (
        SELECT p.*, c.id, c.run_at AS later,
               coalesce(lag(c.id) OVER around + 1, p.lo) AS after,
               lead(c.id) OVER around IS NULL AS last
          FROM parted AS p
          JOIN unnest(ids) AS i (id) ON i.id BETWEEN p.lo AND p.hi
          JOIN busload.command AS c ON c.id = i.id
        WINDOW around AS (PARTITION BY p.hi ORDER BY c.id)
    ), rest AS (
        INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, replies, fair, run_at, reason)
        SELECT after, id - 1, domain, batch_id, priority, replies, fair, run_at, reason
          FROM canary WHERE after < id
        UNION ALL
        SELECT id + 1, hi, domain, batch_id, priority, replies, fair, run_at, reason
          FROM canary WHERE last AND id < hi
        UNION ALL
        SELECT id, id, domain, batch_id, priority, replies, fair, later, 'RUN_AT'
          FROM canary WHERE later > now()
    ), published AS (
        INSERT INTO busload.outbox (lo, hi, domain, batch_id, priority, replies, fair, transport)
        SELECT id, id, domain, batch_id, priority, replies, fair, broker
          FROM canary WHERE broker IS NOT NULL AND (later IS NULL OR later <= now())
    )
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, replies, fair)
    SELECT id, id, domain, batch_id, priority, replies, fair
      FROM canary WHERE broker IS NULL AND (later IS NULL OR later <= now());
END $$;
REVOKE ALL ON FUNCTION busload.begin_canary FROM PUBLIC;

-- So many of the commands that run first, for people.
CREATE FUNCTION busload.of_canary(these integer, size integer) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN size = 1 THEN 'The command that runs first'
                ELSE these || ' of the ' || size || ' commands that run first' END;

-- Look after batches that have a canary or a failure budget. The caller holds their rows. A batch is held
-- when its budget is exceeded, or when a command of its canary has failed or was canceled. When the canary
-- has completed, the others are let go. If the whole batch expires, nothing is left to hold.
CREATE FUNCTION busload.guard(batches uuid[]) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b        busload.batch;
    failures integer;
    allowed  integer;
    used     integer;
    rest     integer;     -- commands that wait for the canary
    missing  integer;     -- commands of the canary that were canceled
BEGIN
    FOR b IN SELECT * FROM busload.batch
              WHERE batch_id = ANY (batches)
                AND held_at IS NULL AND canceled_at IS NULL AND completed_at IS NULL
              ORDER BY batch_id LOOP
        failures := b.failed_count + b.in_troubleshooting_count;
        allowed := busload.failures_allowed(b.budget_share, b.budget_at_least, b.total_count);
        used := CASE WHEN b.budget_per_cause
                     THEN (SELECT max(failed) FROM busload.batch_cause AS c WHERE c.batch_id = b.batch_id)
                     ELSE failures - b.budget_from END;
        IF used > allowed THEN
            PERFORM busload.hold_batches(ARRAY[b.batch_id], 'BUDGET', NULL, format(
                '%s of %s %s failed or %s for a person%s, and its budget allows %s.',
                used, b.total_count,
                CASE WHEN b.total_count = 1 THEN 'command has' WHEN used = 1 THEN 'commands has'
                     ELSE 'commands have' END,
                CASE used WHEN 1 THEN 'waits' ELSE 'wait' END,
                CASE WHEN b.budget_per_cause THEN ' for one cause'
                     WHEN b.budget_from > 0 THEN ' since it was resumed' ELSE '' END, allowed));
            IF b.on_exceeded IS NOT NULL THEN   -- the id that was chosen serves the first time
                PERFORM busload.send_callback(
                            h, h.on_exceeded,
                            CASE WHEN EXISTS (SELECT FROM busload.command AS c
                                               WHERE c.domain = h.domain
                                                 AND c.command_id = (h.on_exceeded ->> 'command_id')::uuid)
                                 THEN gen_random_uuid() ELSE (h.on_exceeded ->> 'command_id')::uuid END,
                            json_build_object(
                                'held_at', h.held_at,
                                'held_reason', h.held_reason,
                                'held_note', h.held_note,
                                'failure_budget', allowed,
                                'failure_budget_used', used,
                                'failure_cause', CASE WHEN h.budget_per_cause THEN (
                                    SELECT fingerprint FROM busload.batch_cause AS c
                                     WHERE c.batch_id = h.batch_id
                                     ORDER BY failed DESC, fingerprint LIMIT 1) END))
                   FROM busload.batch AS h WHERE h.batch_id = b.batch_id;
            END IF;
        ELSIF b.canary_until IS NOT NULL AND b.canary_ended_at IS NULL THEN
            IF failures > 0 THEN
                PERFORM busload.hold_batches(ARRAY[b.batch_id], 'CANARY', NULL, format(
                    '%s %s failed or %s for a person.', busload.of_canary(failures, b.canary_count),
                    CASE failures WHEN 1 THEN 'has' ELSE 'have' END,
                    CASE failures WHEN 1 THEN 'waits' ELSE 'wait' END));
            ELSIF b.completed_count >= b.canary_count THEN
                UPDATE busload.batch SET canary_ended_at = statement_timestamp() WHERE batch_id = b.batch_id;
                INSERT INTO busload.event (type, batch_id, details)
                VALUES ('BATCH_CANARY_PASSED', b.batch_id,
                        json_build_object('canary', b.canary_count, 'completed', b.completed_count));
                PERFORM busload.release_held(ARRAY[b.batch_id], 'CANARY');
                PERFORM pg_notify('busload_batch', b.batch_id::text);
            ELSIF b.canceled_count > 0 AND b.expired_at IS NULL THEN
                -- What was canceled may be of the canary, which can then never complete, or of the rest.
                SELECT sum(s.hi - s.lo + 1)::integer INTO rest
                  FROM busload.ids_of(ARRAY[b.batch_id]) AS i
                  JOIN busload.scheduled AS s
                    ON s.hi BETWEEN i.first AND i.last AND s.batch_id = b.batch_id AND s.reason = 'CANARY';
                missing := b.canary_count - (b.total_count - b.canceled_count - rest);
                IF missing > 0 THEN
                    PERFORM busload.hold_batches(ARRAY[b.batch_id], 'CANARY', NULL, format(
                        '%s %s canceled.', busload.of_canary(missing, b.canary_count),
                        CASE missing WHEN 1 THEN 'was' ELSE 'were' END));
                END IF;
            END IF;
        END IF;
    END LOOP;
END $$;

-- A reply is a command too: it goes to the domain that reply_to names. The transition that ends a command
-- sends it.
CREATE FUNCTION busload.reply(command bigint, outcome text, details json) RETURNS text
    LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH reply AS (
        INSERT INTO busload.command (id, domain, command_id, command_type, data, correlation_id, headers)
        SELECT nextval('busload.load_number') * 1024,
               c.reply_to,
               gen_random_uuid(),
               c.command_type || 'Reply',
               json_build_object('command_id', c.command_id,
                                 'correlation_id', coalesce(c.correlation_id, c.command_id),
                                 'outcome', $2,
                                 'data', CASE WHEN $2 = 'SUCCESS' THEN $3 END,
                                 'error', CASE WHEN $2 <> 'SUCCESS' THEN $3 END),
               coalesce(c.correlation_id, c.command_id),
               busload.joined_headers(
                   (SELECT b.headers FROM busload.batch AS b WHERE b.batch_id = c.batch_id), c.headers)
          FROM busload.command AS c WHERE c.id = $1 AND c.reply_to IS NOT NULL
        RETURNING id, domain
    ), queued AS (
        INSERT INTO busload.queue (lo, hi, domain) SELECT id, id, domain FROM reply
    )
    SELECT domain FROM reply
$$;

-- Send the callback of a batch, which is `asked` for with this id, with the batch in its data, and there what
-- `more` says of it. If somebody has used the id meanwhile, there is no callback.
CREATE FUNCTION busload.send_callback(done busload.batch, asked json, chosen uuid, more json DEFAULT NULL)
    RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    callback bigint := nextval('busload.load_number') * 1024;
BEGIN
    INSERT INTO busload.command (id, domain, command_id, command_type, data,
                                 correlation_id, reply_to, task_key, priority, max_attempts, headers)
    SELECT callback, done.domain, chosen, c.command_type,
           (SELECT json_object_agg(key, value) FROM (
                SELECT key, value FROM json_each(c.data)
                UNION ALL
                SELECT 'batch', json_object_agg(key, value) FROM (
                    SELECT key, value FROM json_each(json_build_object(
                        'batch_id', done.batch_id,
                        'name', done.name,
                        'custom_data', done.custom_data,
                        'status', done.status,
                        'total_count', done.total_count,
                        'completed_count', done.completed_count,
                        'failed_count', done.failed_count,
                        'canceled_count', done.canceled_count,
                        'in_troubleshooting_count', done.in_troubleshooting_count,
                        'created_at', done.created_at,
                        'started_at', done.started_at,
                        'completed_at', done.completed_at))
                    UNION ALL
                    SELECT key, value FROM json_each(more)) AS fact) AS pair),
           c.correlation_id, c.reply_to, c.task_key, c.priority, c.max_attempts,
           busload.joined_headers(done.headers, c.headers)
      FROM json_to_record(asked)
           AS c (command_type text, data json, correlation_id uuid,
                 reply_to text, task_key text, priority smallint, max_attempts smallint,
                 headers json)
        ON CONFLICT ON CONSTRAINT command_once DO NOTHING;
    INSERT INTO busload.queue (lo, hi, domain, priority, replies)
    SELECT id, id, domain, priority, reply_to IS NOT NULL FROM busload.command WHERE id = callback;
    PERFORM pg_notify(coalesce((SELECT l.channel FROM busload.one_listener AS l
                                 WHERE l.domain = done.domain), 'busload_ready'), done.domain);
END $$;

-- Completion is decided here and nowhere else, in the transaction of the transition that ended the last
-- command. The caller holds the rows of these batches. All of them are completed together; only callbacks
-- are sent one by one.
--
-- Who seals a batch may not read what its callback holds, so the function has the rights of its owner.
-- Whoever calls it, it completes only what is complete.
CREATE FUNCTION busload.decide(batches uuid[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    completed integer;
    awaited   uuid[];     -- those whose callback is to be sent
    done      busload.batch;
BEGIN
    WITH ended AS (
        UPDATE busload.batch
           SET completed_at = statement_timestamp(),
               notified_at = now(),
               stalled_at = NULL,
               held_at = NULL, held_reason = NULL, held_by = NULL, held_note = NULL,
               canary_ended_at = CASE WHEN completed_count >= canary_count AND failed_count = 0
                                      THEN coalesce(canary_ended_at, statement_timestamp())
                                      ELSE canary_ended_at END,
               status = CASE WHEN failed_count + canceled_count > 0 THEN 'COMPLETED_WITH_FAILURES'
                             ELSE 'COMPLETED' END
         WHERE batch_id = ANY (batches)
           AND sealed_at IS NOT NULL
           AND completed_at IS NULL
           AND completed_count + failed_count + canceled_count = total_count
        RETURNING batch_id, on_complete IS NOT NULL AS has_callback, canary_count, completed_count,
                  canary_ended_at = completed_at AS passes   -- its canary was all that was left of it
    ), noted AS (
        INSERT INTO busload.event (type, batch_id, details)
        SELECT 'BATCH_CANARY_PASSED', batch_id,
               json_build_object('canary', canary_count, 'completed', completed_count)
          FROM ended WHERE passes
        UNION ALL
        SELECT 'BATCH_COMPLETED', batch_id, NULL FROM ended
    )
    SELECT count(pg_notify('busload_batch', batch_id::text)), array_agg(batch_id) FILTER (WHERE has_callback)
      INTO completed, awaited
      FROM ended;

    IF completed < cardinality(batches) THEN
        -- Only a person can move a stalled batch on, so an event says so, once for each time that a batch
        -- stalls. The compensation of a job goes on: its callback is sent now, and not again at the end.
        WITH stalled AS (
            UPDATE busload.batch
               SET stalled_at = statement_timestamp(), notified_at = now()
             WHERE batch_id = ANY (batches)
               AND sealed_at IS NOT NULL
               AND completed_at IS NULL
               AND stalled_at IS NULL
               AND in_troubleshooting_count > 0
               AND completed_count + failed_count + canceled_count + in_troubleshooting_count = total_count
            RETURNING batch_id, in_troubleshooting_count, on_complete -> 'stalled_too' IS NOT NULL AS goes_on
        ), noted AS (
            INSERT INTO busload.event (type, batch_id, details)
            SELECT 'BATCH_STALLED', batch_id,
                   json_build_object('in_troubleshooting', in_troubleshooting_count)
              FROM stalled
        )
        SELECT count(pg_notify('busload_batch', batch_id::text)),
               awaited || array_agg(batch_id) FILTER (WHERE goes_on)
          INTO completed, awaited
          FROM stalled;
    END IF;

    FOR done IN SELECT * FROM busload.batch WHERE batch_id = ANY (awaited) LOOP
        -- The command_id was chosen when the batch was created, so there is never a second callback.
        PERFORM busload.send_callback(done, done.on_complete, (done.on_complete ->> 'command_id')::uuid);
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION busload.decide FROM PUBLIC;

-- Count what has ended. Most settlements neither start, complete nor stall a batch, so one statement locks
-- and counts, and only batches with nothing left to run are looked at again. Batch rows are locked in the
-- order of their ids: otherwise two statements that settle the same batches could deadlock. Watchers hear
-- of a batch at most ten times a second.
CREATE FUNCTION busload.fold(batches uuid[], completed bigint[], failed bigint[], canceled bigint[],
                             troubleshooting bigint[], ran boolean) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    begun uuid[];     -- a claim that could not have the row of the batch at once leaves the start to us
    ended uuid[];     -- nothing of these is left to run
    tested uuid[];    -- these have a canary that has not ended, or have used up their failure budget
    heard uuid[];
BEGIN
    WITH before AS MATERIALIZED (
        SELECT batch_id, status FROM busload.batch
         WHERE batch_id = ANY (batches) ORDER BY batch_id FOR NO KEY UPDATE
    ), counted AS (
        UPDATE busload.batch AS b
           SET completed_count          = b.completed_count + d.completed,
               failed_count             = b.failed_count + d.failed,
               canceled_count           = b.canceled_count + d.canceled,
               in_troubleshooting_count = b.in_troubleshooting_count + d.troubleshooting,
               status      = CASE WHEN ran AND b.status = 'PENDING' THEN 'IN_PROGRESS'
                                  ELSE b.status END,
               started_at  = CASE WHEN ran AND b.status = 'PENDING' THEN statement_timestamp()
                                  ELSE b.started_at END,
               stalled_at  = CASE WHEN d.completed + d.canceled + d.troubleshooting < 0 THEN NULL
                                  ELSE b.stalled_at END,
               notified_at = CASE WHEN b.notified_at < now() - interval '100 ms' THEN now()
                                  ELSE b.notified_at END,
               budget_from = CASE WHEN b.budget_from > 0   -- what is tried again is no failure now
                                  THEN least(b.budget_from, b.failed_count + d.failed
                                             + b.in_troubleshooting_count + d.troubleshooting)
                                  ELSE b.budget_from END,
               paced_at    = greatest(b.paced_at, now()),
               pace_1      = b.pace_1 * busload.fading(b.paced_at, 1) + d.ended,
               pace_10     = b.pace_10 * busload.fading(b.paced_at, 10) + d.ended,
               pace_100    = b.pace_100 * busload.fading(b.paced_at, 100) + d.ended,
               pace_1000   = b.pace_1000 * busload.fading(b.paced_at, 1000) + d.ended
          FROM (
            SELECT u.*, (CASE WHEN ran THEN u.completed + u.failed + u.canceled + u.troubleshooting
                              ELSE 0 END)::float8 AS ended
              FROM unnest(batches, completed, failed, canceled, troubleshooting)
                   AS u (batch_id, completed, failed, canceled, troubleshooting)
            OFFSET 0   -- else it would be computed, and planned, once for each of its uses
          ) AS d
         -- An array, and no join with `before`: else all batches would be read while they are few or new.
         WHERE b.batch_id = d.batch_id AND b.batch_id = ANY (ARRAY(SELECT batch_id FROM before))
        RETURNING b.batch_id,
                  ran AND b.batch_id = ANY (ARRAY(SELECT batch_id FROM before WHERE status = 'PENDING'))
                  AS begins,
                  b.completed_count + b.failed_count + b.canceled_count + b.in_troubleshooting_count
                  = b.total_count AS ends,
                  b.held_at IS NULL
                  AND (b.canary_until IS NOT NULL AND b.canary_ended_at IS NULL
                       OR b.failed_count + b.in_troubleshooting_count - b.budget_from
                          > busload.failures_allowed(b.budget_share, b.budget_at_least, b.total_count))
                  AS tests,
                  b.notified_at = now() AS tells
    )
    SELECT array_agg(batch_id) FILTER (WHERE begins),
           array_agg(batch_id) FILTER (WHERE ends),
           array_agg(batch_id) FILTER (WHERE tests),
           array_agg(batch_id) FILTER (WHERE tells)
      INTO begun, ended, tested, heard
      FROM counted;

    IF begun IS NOT NULL THEN
        INSERT INTO busload.event (type, batch_id)
        SELECT 'BATCH_STARTED', batch_id FROM unnest(begun) AS batch_id;
    END IF;
    IF ended IS NOT NULL THEN
        PERFORM busload.decide(ended);
    END IF;
    IF tested IS NOT NULL THEN
        PERFORM busload.guard(tested);
    END IF;
    IF heard IS NOT NULL THEN
        PERFORM pg_notify('busload_batch', batch_id::text) FROM unnest(heard) AS batch_id;
    END IF;
END $$;

-- All commands of a load have the same batch, so it is looked up once for those of a load that have ended.
-- A plan that was made while there were no commands would read all of them later, so none may.
CREATE FUNCTION busload.fold_executions() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    d record;
BEGIN
    SELECT array_agg(batch_id) AS batches, array_agg(completed) AS completed, array_agg(failed) AS failed,
           array_agg(canceled) AS canceled, array_agg(troubleshooting) AS troubleshooting,
           bool_or(failed + troubleshooting > 0) AS failing
      INTO d
      FROM (SELECT c.batch_id,
                   sum(completed)::bigint       AS completed,
                   sum(failed)::bigint          AS failed,
                   sum(canceled)::bigint        AS canceled,
                   sum(troubleshooting)::bigint AS troubleshooting
              FROM (SELECT min(command) AS command,
                           count(*) FILTER (WHERE outcome = 'COMPLETED')       AS completed,
                           count(*) FILTER (WHERE outcome = 'FAILED')          AS failed,
                           count(*) FILTER (WHERE outcome = 'CANCELED')        AS canceled,
                           count(*) FILTER (WHERE outcome = 'TROUBLESHOOTING') AS troubleshooting
                      FROM fresh
                     WHERE outcome <> 'FAILED_ATTEMPT'
                     GROUP BY command >> 10) AS l
             CROSS JOIN LATERAL (SELECT batch_id FROM busload.command
                                  WHERE id = l.command AND batch_id IS NOT NULL OFFSET 0) AS c
             GROUP BY c.batch_id) AS delta;
    IF d.batches IS NOT NULL THEN
        PERFORM busload.fold(d.batches, d.completed, d.failed, d.canceled, d.troubleshooting, true);
    END IF;
    IF d.failing THEN   -- few batches have a budget for each cause, and nothing is written for the others
        INSERT INTO busload.batch_cause AS c (batch_id, fingerprint, failed)
        SELECT b.batch_id, busload.fingerprint(f.details), count(*)
          FROM fresh AS f
         CROSS JOIN LATERAL (SELECT batch_id FROM busload.command WHERE id = f.command OFFSET 0) AS c
          JOIN busload.batch AS b ON b.batch_id = c.batch_id
         WHERE b.budget_per_cause AND f.outcome IN ('FAILED', 'TROUBLESHOOTING')
         GROUP BY 1, 2 ORDER BY 1, 2
            ON CONFLICT (batch_id, fingerprint) DO UPDATE SET failed = c.failed + excluded.failed;
        IF FOUND THEN
            PERFORM busload.guard(d.batches);
        END IF;
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION busload.fold_events() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    d record;
BEGIN
    SELECT array_agg(batch_id) AS batches, array_agg(completed) AS completed, array_agg(0::bigint) AS failed,
           array_agg(canceled) AS canceled, array_agg(troubleshooting) AS troubleshooting,
           bool_or(troubleshooting > 0) AS failing
      INTO d
      FROM (SELECT batch_id,
                   sum(CASE WHEN type = 'OPERATOR_COMPLETED' THEN hi - lo + 1
                            ELSE 0 END)::bigint AS completed,
                   sum(CASE WHEN type IN ('CANCELED', 'OPERATOR_CANCELED') THEN hi - lo + 1
                            ELSE 0 END)::bigint AS canceled,
                   sum(CASE type WHEN 'PARKED' THEN hi - lo + 1
                                 WHEN 'CANCELED' THEN 0
                                 ELSE lo - hi - 1 END)::bigint AS troubleshooting
              FROM fresh
             WHERE batch_id IS NOT NULL
               AND type IN ('CANCELED', 'PARKED',
                            'OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
             GROUP BY batch_id) AS delta;
    IF d.batches IS NOT NULL THEN
        PERFORM busload.fold(d.batches, d.completed, d.failed, d.canceled, d.troubleshooting, false);
    END IF;
    IF d.failing THEN   -- crashes are one cause
        INSERT INTO busload.batch_cause AS c (batch_id, fingerprint, failed)
        SELECT f.batch_id, 'CRASHED', sum(f.hi - f.lo + 1)
          FROM fresh AS f JOIN busload.batch AS b USING (batch_id)
         WHERE b.budget_per_cause AND f.type = 'PARKED'
         GROUP BY 1 ORDER BY 1
            ON CONFLICT (batch_id, fingerprint) DO UPDATE SET failed = c.failed + excluded.failed;
        IF FOUND THEN
            PERFORM busload.guard(d.batches);
        END IF;
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER count_executions AFTER INSERT ON busload.execution
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION busload.fold_executions();
CREATE TRIGGER count_events AFTER INSERT ON busload.event
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION busload.fold_events();
