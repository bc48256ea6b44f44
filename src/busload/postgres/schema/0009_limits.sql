-- What holds commands back: pauses of domains, and limits of receivers.

-- In a paused domain, running commands finish and no new one starts. Workers leave the domain out of their
-- claims, so the claim itself does not read this table. They hear of changes on the channel busload_pause,
-- and read the table from time to time in case they did not hear. Who paused and who resumed is kept: a
-- domain is paused while it has a row without resumed_at.
CREATE TABLE busload.pause (
    pause      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    domain     text        NOT NULL,
    since      timestamptz NOT NULL DEFAULT now(),
    operator   text,
    reason     text,
    resumed_at timestamptz,
    resumed_by text
);
CREATE UNIQUE INDEX pause_of_domain ON busload.pause (domain) WHERE resumed_at IS NULL;

-- How often all workers together may call a receiver: a row per limit and, if the limit has a `by`, per
-- value of `by`. Calls are let go one after the other, `1 / rate` seconds apart, by the clock of the
-- database. A row that nobody has used for a day is removed.
CREATE TABLE busload.rate_limit (
    name          text        NOT NULL,
    subject       text        NOT NULL DEFAULT '',        -- the value of `by`; '' without a `by`
    adaptive      boolean     NOT NULL,
    rate          float8      NOT NULL,                   -- calls per second
    next_at       timestamptz NOT NULL DEFAULT now(),     -- the next call is due; a burst may come before
    blocked_until timestamptz NOT NULL DEFAULT 'epoch',   -- the receiver has asked for no calls until then
    -- How often the rate was cut. Calls that were made at an earlier rate do not count.
    round         integer     NOT NULL DEFAULT 0,
    ceiling       float8      NOT NULL,                   -- the rate that was refused last, if adaptive
    progress      float8      NOT NULL DEFAULT 1,         -- how far the rate has recovered: 1 is the ceiling
    back          float8      NOT NULL DEFAULT 2,         -- seconds that the recovery takes
    soon          integer     NOT NULL DEFAULT 0,         -- refusals in a row before it had recovered
    cut_at        timestamptz NOT NULL DEFAULT 'epoch',
    calls         bigint      NOT NULL DEFAULT 0,
    refused       bigint      NOT NULL DEFAULT 0,
    used_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, subject)
) WITH (fillfactor = 50);

-- How many calls may run at a time, all workers together: the limits that workers have asked for. A row that
-- nobody has used for a day is removed.
CREATE TABLE busload.concurrency_limit (
    name    text        COLLATE "C" PRIMARY KEY,
    most    integer     NOT NULL,                   -- calls at a time, for each value of `by`
    used_at timestamptz NOT NULL DEFAULT now()      -- to the hour
);

-- A call that runs, or is about to begin. A permit belongs to a worker: whoever asks for permits counts those
-- of workers that live, and of workers that are silent but not declared dead yet.
CREATE TABLE busload.permit (
    -- The numbers of permits that were granted together follow each other, so the sequence takes large steps.
    permit        bigint      GENERATED ALWAYS AS IDENTITY (INCREMENT 4096 CACHE 100),
    limit_name    text        COLLATE "C" NOT NULL,
    limit_subject text        COLLATE "C" NOT NULL, -- the value of `by`; '' without a `by`
    worker        bigint      NOT NULL,
    command       bigint      NOT NULL,             -- the first command of the call
    since         timestamptz NOT NULL DEFAULT now(),
    -- Finds a permit, and counts those of a limit. The subject comes first: it is what differs.
    PRIMARY KEY (limit_subject, limit_name, permit)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Lock limits until the transaction ends: all of one name, or each with its own; all there are if `subjects`
-- is null. Limits share the locks of a `space`, so that a transaction takes no more of them than the server
-- has room for, and always in the same order. To find out which locks many limits need costs more than to
-- take them all. Where everybody is alone, there are 128 and one more, which stands for all: whoever needs
-- many limits takes only that one, and whoever needs few holds it beside others. Where most are beside
-- others, there are 16. The statement that calls one of the functions below is the whole transaction: a
-- client that freezes holds nobody up. Plans are kept, and may be made while the tables are empty: by their
-- settings they are right at any size.
--
-- Space 27711006: whoever takes permits is alone with their limits.
-- Space 27711008: whoever frees permits, or wakes commands that wait for them, does it beside others. But
-- whoever is about to let a command wait is alone, and counts again: so it either sees the permit as free, or
-- its command is seen by who frees the permit. Most often nobody has to wait, and then those who take and
-- free do not meet.
-- Space 27711009: whoever enters commands into an order, or lets the next one run, is alone with their keys.
CREATE FUNCTION busload.lock_limits(space integer, names text[], subjects text[], alone boolean) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    few CONSTANT boolean := coalesce(cardinality($3) < 250, false);
    most CONSTANT integer := CASE WHEN space = 27711008 THEN 16 ELSE 128 END;
    parts integer[];
BEGIN
    IF space <> 27711008 THEN
        IF NOT few THEN
            PERFORM pg_advisory_xact_lock(space, most);
            RETURN;
        END IF;
        PERFORM pg_advisory_xact_lock_shared(space, most);
    END IF;
    IF few THEN
        parts := ARRAY(
            SELECT DISTINCT
                   (hashtextextended(coalesce(k.name, $2[1]) || ' ' || k.subject, 0) & (most - 1))::integer
              FROM unnest($2, $3) AS k (name, subject)
             ORDER BY 1
        );
    ELSE
        parts := ARRAY(SELECT generate_series(0, most - 1));
    END IF;
    IF alone THEN
        PERFORM pg_advisory_xact_lock(space, part) FROM unnest(parts) AS part;
    ELSE
        PERFORM pg_advisory_xact_lock_shared(space, part) FROM unnest(parts) AS part;
    END IF;
END $$;

-- Ask for permits, each for one call with some commands of some leases. Returns for each request its permit,
-- 0 if there is none, or null if the worker holds none of its commands any more. If all are granted, it may
-- return only the first permit: the numbers of the others follow. If they are many, it also returns where in
-- the table the first and the last of them are: most often the others are between. Of one limit, the request
-- with the lowest command comes first. What gets none leaves its lease and waits, as the same attempt, until
-- a permit is free; an hour at most, in case that nobody wakes it. Every statement after the locks sees what
-- the others did before. The commit does not wait for the disk, so that others wait less for the locks:
-- whoever asks waits for the disk before it uses a permit.
--
-- `names`, `most` and `sizes` have one element for all requests, or one for each. A command has the position
-- of its request in `requests`, and of its lease in `lease_ordinals`. If `requests` is empty, each request
-- has one command; if `lease_ordinals` is empty, there is one lease. `different` says that no two requests
-- have the same subject.
CREATE FUNCTION busload.take_permits(
    taker bigint, names text[], subjects text[], most integer[], sizes integer[],
    leases uuid[], commands bigint[], requests integer[], lease_ordinals integer[], different boolean,
    OUT permits bigint[], OUT first_row text, OUT last_row text
)
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_nestloop = off AS $$
DECLARE
    asked record;
    intact boolean;
    fits boolean;
    number bigint;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT count(*) = cardinality($6) AND bool_and(l.returned = '{}')
      INTO intact
      FROM (SELECT returned FROM busload.lease
             WHERE lease_id = ANY ($6) AND worker = $1
             ORDER BY lease_id FOR UPDATE) AS l;
    PERFORM busload.lock_limits(27711006, $2, $3, true);
    IF EXISTS (SELECT
                 FROM unnest($2, $4) AS n (name, most)
                WHERE NOT EXISTS (SELECT FROM busload.concurrency_limit AS k
                                   WHERE k.name = n.name AND k.most = n.most
                                     AND k.used_at > now() - interval '1 hour' OFFSET 0)) THEN
        INSERT INTO busload.concurrency_limit AS l (name, most)
        SELECT DISTINCT ON (n.name) n.name, n.most FROM unnest($2, $4) AS n (name, most) ORDER BY n.name
            ON CONFLICT (name) DO UPDATE SET most = excluded.most, used_at = now();
    END IF;
    -- Most often each call has one command, and there are permits for all: then nothing has to wait.
    fits := intact AND cardinality($7) = cardinality($3) AND cardinality($7) <= 4096
            AND EXISTS (SELECT FROM busload.worker AS w WHERE w.worker = $1 AND w.stopped_at IS NULL);
    -- And if each has a key of its own that no call has, there is nothing to count.
    IF fits AND NOT (different AND cardinality($2) = 1
                     AND NOT EXISTS (SELECT FROM busload.permit
                                      WHERE limit_name = $2[1] AND limit_subject = ANY ($3))) THEN
        FOR asked IN
            SELECT $2[1] AS name, $4[1] AS most, $3 AS subjects WHERE cardinality($2) = 1
             UNION ALL
            SELECT r.name, min(r.most), array_agg(r.subject)
              FROM unnest($2, $3, $4) AS r (name, subject, most)
             WHERE cardinality($2) > 1
             GROUP BY r.name
        LOOP
            SELECT coalesce(max(k.calls) <= asked.most, true)
              INTO fits
              FROM (
                SELECT count(*) AS calls
                  FROM (
                    SELECT unnest(asked.subjects) AS subject
                     UNION ALL
                    SELECT limit_subject
                      FROM busload.permit
                     WHERE limit_name = asked.name AND limit_subject = ANY (asked.subjects)
                  ) AS call
                 GROUP BY subject COLLATE "C"
              ) AS k;
            EXIT WHEN NOT fits;
        END LOOP;
    END IF;
    IF fits THEN
        number := nextval('busload.permit_permit_seq');
        INSERT INTO busload.permit (permit, limit_name, limit_subject, worker, command)
        OVERRIDING SYSTEM VALUE
        SELECT number + r.ordinal - 1, coalesce(r.name, $2[1]), r.subject, $1, r.command
          FROM unnest($2, $3, $7) WITH ORDINALITY AS r (name, subject, command, ordinal);
        permits := ARRAY[number];
        IF cardinality($3) >= 100 THEN
            SELECT p.ctid
              INTO first_row
              FROM busload.permit AS p
             WHERE p.limit_subject = $3[1] AND p.limit_name = $2[1] AND p.permit = number;
            SELECT p.ctid
              INTO last_row
              FROM busload.permit AS p
             WHERE p.limit_subject = $3[cardinality($3)] AND p.limit_name = $2[cardinality($2)]
               AND p.permit = number + cardinality($3) - 1;
        END IF;
        RETURN;
    END IF;
    PERFORM busload.lock_limits(27711008, $2, $3, true);
    WITH request AS (
        SELECT r.ordinal, coalesce(r.name, $2[1]) AS name, r.subject, coalesce(r.most, $4[1]) AS most,
               coalesce(r.size, $5[1]) AS size
          FROM unnest($2, $3, $4, $5) WITH ORDINALITY AS r (name, subject, most, size, ordinal)
    ), command AS MATERIALIZED (
        SELECT c.id, coalesce(c.request, c.ordinal) AS request, l.*
          FROM unnest($7, $8, $9) WITH ORDINALITY AS c (id, request, lease, ordinal)
          JOIN unnest($6) WITH ORDINALITY AS n (lease_id, ordinal) ON n.ordinal = coalesce(c.lease, 1)
          JOIN busload.lease AS l ON l.lease_id = n.lease_id AND l.worker = $1
         WHERE c.id <> ALL (l.returned)
           AND EXISTS (SELECT FROM busload.worker AS w WHERE w.worker = $1 AND w.stopped_at IS NULL)
    ), key AS MATERIALIZED (
        SELECT k.name, k.subject,
               (SELECT count(*) FROM busload.permit AS p
                 WHERE p.limit_name = k.name AND p.limit_subject = k.subject) AS calls
          FROM (SELECT DISTINCT r.name, r.subject FROM request AS r) AS k
    ), judged AS MATERIALIZED (
        SELECT r.*, f.first,
               row_number() OVER (
                   PARTITION BY r.name COLLATE "C", r.subject COLLATE "C" ORDER BY f.first
               ) <= r.most - k.calls AS granted
          FROM request AS r
          JOIN key AS k ON k.name = r.name AND k.subject = r.subject
          JOIN (SELECT request, min(id) AS first FROM command GROUP BY request) AS f ON f.request = r.ordinal
    ), granted AS (
        INSERT INTO busload.permit (limit_name, limit_subject, worker, command)
        SELECT name, subject, $1, first FROM judged WHERE granted
        RETURNING permit, command
    ), late AS MATERIALIZED (
        SELECT c.*, j.name, j.subject, j.size
          FROM command AS c
          JOIN judged AS j ON j.ordinal = c.request
         WHERE NOT j.granted
    ), progress AS (
        SELECT lease_id, array_agg(id) AS ids, min(open) - count(*)::integer AS open
          FROM late
         GROUP BY lease_id
    ), closed AS (
        DELETE FROM busload.lease WHERE lease_id = ANY (ARRAY(SELECT lease_id FROM progress WHERE open <= 0))
    ), kept AS (
        UPDATE busload.lease AS l SET returned = l.returned || p.ids, open = p.open FROM progress AS p
         WHERE l.lease_id = p.lease_id
           AND l.lease_id = ANY (ARRAY(SELECT lease_id FROM progress WHERE open > 0))
    ), scheduled AS (
        INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, attempt, forgiven, crashes,
                                       replies, fair, run_at, reason, limit_name, limit_subject, per_call)
        SELECT id, id, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair,
               now() + interval '1 hour', 'LIMITED', name, subject, size
          FROM late
    ), noted AS (   -- the first time; later ones would only repeat it
        INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, details)
        SELECT 'LIMITED', min(id), max(id), batch_id, attempt, lease_id, $1,
               json_build_object('limit', name, 'by', subject)
          FROM (SELECT *,
                       id - row_number() OVER (PARTITION BY lease_id, name, subject ORDER BY id) AS island
                  FROM late
                 WHERE NOT EXISTS (SELECT
                                     FROM busload.event AS e
                                    WHERE e.lo >> 10 = late.id >> 10
                                      AND late.id BETWEEN e.lo AND e.hi
                                      AND e.type = 'LIMITED'
                                   OFFSET 0)) AS part
         GROUP BY lease_id, batch_id, attempt, name, subject, island
    )
    SELECT array_agg(CASE WHEN j.first IS NOT NULL THEN coalesce(g.permit, 0) END ORDER BY r.ordinal)
      INTO permits
      FROM request AS r
      LEFT JOIN judged AS j ON j.ordinal = r.ordinal
      LEFT JOIN granted AS g ON g.command = j.first;
END $$;

-- Let the commands with the lowest ids that wait for these limits ask again: as many as so many calls take,
-- but not more than there are permits for. Commands that nobody may claim, of batches that are held or being
-- canceled and of paused domains, are passed over: they would keep the others waiting. When the batch or the
-- domain goes on, the next sweep finds them. Returns how many commands.
CREATE FUNCTION busload.wake_limited(names text[], subjects text[], calls bigint[]) RETURNS bigint
    LANGUAGE sql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
    SELECT busload.lock_limits(27711008, $1, $2, false);
    WITH room AS (
        SELECT k.name, k.subject,
               least(k.calls,
                     l.most - (SELECT count(*) FROM busload.permit AS p
                                WHERE p.limit_name = k.name AND p.limit_subject = k.subject)) AS calls,
               ARRAY(SELECT domain FROM busload.pause WHERE resumed_at IS NULL) AS paused,
               ARRAY(SELECT batch_id FROM busload.batch
                      WHERE (canceling_until IS NOT NULL OR held_at IS NOT NULL)
                        AND completed_at IS NULL) AS stopped
          FROM unnest($1, $2, $3) AS k (name, subject, calls)
          JOIN busload.concurrency_limit AS l ON l.name = k.name
    ), next AS (
        SELECT w.hi
          FROM room AS r
         CROSS JOIN LATERAL (
            SELECT s.hi
              FROM busload.scheduled AS s
             WHERE s.reason = 'LIMITED' AND s.per_call IS NOT NULL
               AND s.limit_name = r.name AND s.limit_subject = r.subject
               AND s.domain <> ALL (r.paused) AND (s.batch_id <> ALL (r.stopped)) IS NOT FALSE
             ORDER BY s.hi
             LIMIT greatest(r.calls, 0) * (
                SELECT f.per_call
                  FROM busload.scheduled AS f
                 WHERE f.reason = 'LIMITED' AND f.per_call IS NOT NULL
                   AND f.limit_name = r.name AND f.limit_subject = r.subject
                   AND f.domain <> ALL (r.paused) AND (f.batch_id <> ALL (r.stopped)) IS NOT FALSE
                 ORDER BY f.hi
                 LIMIT 1
             )
               FOR UPDATE SKIP LOCKED
         ) AS w
    ), due AS (
        DELETE FROM busload.scheduled WHERE hi = ANY (ARRAY(SELECT hi FROM next)) RETURNING *
    ), queued AS (
        INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies,
                                   fair)
        SELECT lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair FROM due
        RETURNING domain
    ), told AS (
        SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM queued) AS d
    )
    SELECT (SELECT count(*) FROM due) FROM told
$$;

-- Calls have ended, or their worker is dead: give their permits back, and let as many calls ask that wait for
-- them. `names` has one element for all permits, or one for each. If a crash of the server undoes this, a
-- worker finds that it does not use these permits, and frees them again. With `workers`, a permit is given
-- back only if it still belongs to its worker: one that was declared dead may have come back meanwhile, and
-- have counted its call again.
CREATE FUNCTION busload.free_permits(
    names text[], subjects text[], permits bigint[], workers bigint[] DEFAULT NULL
) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off AS $$
DECLARE
    gone_names text[];
    gone_subjects text[];
    calls bigint[];
BEGIN
    IF cardinality($3) = 0 THEN
        RETURN 0;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM busload.lock_limits(27711008, $1, $2, false);
    IF NOT EXISTS (SELECT FROM busload.scheduled
                    WHERE reason = 'LIMITED' AND per_call IS NOT NULL AND limit_name = ANY ($1)) THEN
        DELETE FROM busload.permit AS p
         USING unnest($3, $4) AS f (permit, worker)
         WHERE p.limit_name = ANY ($1) AND p.limit_subject = ANY ($2) AND p.permit = f.permit
           AND (f.worker IS NULL OR p.worker = f.worker);
        RETURN 0;
    END IF;
    WITH gone AS (
        DELETE FROM busload.permit AS p
         USING unnest($3, $4) AS f (permit, worker)
         WHERE p.limit_name = ANY ($1) AND p.limit_subject = ANY ($2) AND p.permit = f.permit
           AND (f.worker IS NULL OR p.worker = f.worker)
        RETURNING p.limit_name, p.limit_subject
    )
    SELECT array_agg(g.limit_name), array_agg(g.limit_subject), array_agg(g.calls)
      INTO gone_names, gone_subjects, calls
      FROM (SELECT limit_name, limit_subject, count(*) AS calls FROM gone GROUP BY 1, 2) AS g;
    RETURN CASE WHEN calls IS NULL THEN 0 ELSE busload.wake_limited(gone_names, gone_subjects, calls) END;
END $$;

-- The same for permits that were granted together: for each part of them, between which rows of the table
-- they are, and between which numbers. So they are found without their index. Returns also how many were
-- given back: if they are fewer, the table was written anew, or others have freed some, and the caller gives
-- them back one by one.
CREATE FUNCTION busload.free_rows(
    names text[], first_rows text[], last_rows text[], first_permits bigint[], last_permits bigint[],
    OUT freed bigint, OUT woken bigint
)
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    waited_for boolean;
    part record;
    found bigint;
    gone_names text[];
    gone_subjects text[];
BEGIN
    freed := 0;
    woken := 0;
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM busload.lock_limits(27711008, $1, NULL, false);
    waited_for := EXISTS (SELECT FROM busload.scheduled
                           WHERE reason = 'LIMITED' AND per_call IS NOT NULL AND limit_name = ANY ($1));
    FOR part IN
        SELECT p.first_row::tid, p.last_row::tid, p.first_permit, p.last_permit
          FROM unnest($2, $3, $4, $5) AS p (first_row, last_row, first_permit, last_permit)
    LOOP
        IF waited_for THEN
            WITH gone AS (
                DELETE FROM busload.permit
                 WHERE ctid BETWEEN part.first_row AND part.last_row
                   AND permit BETWEEN part.first_permit AND part.last_permit
                RETURNING limit_name, limit_subject
            )
            SELECT gone_names || array_agg(limit_name), gone_subjects || array_agg(limit_subject), count(*)
              INTO gone_names, gone_subjects, found
              FROM gone;
        ELSE
            DELETE FROM busload.permit
             WHERE ctid BETWEEN part.first_row AND part.last_row
               AND permit BETWEEN part.first_permit AND part.last_permit;
            GET DIAGNOSTICS found = ROW_COUNT;
        END IF;
        freed := freed + found;
    END LOOP;
    IF gone_names IS NOT NULL THEN
        SELECT busload.wake_limited(array_agg(g.name), array_agg(g.subject), array_agg(g.calls))
          INTO woken
          FROM (SELECT g.name, g.subject, count(*) AS calls
                  FROM unnest(gone_names, gone_subjects) AS g (name, subject)
                 GROUP BY 1, 2) AS g;
    END IF;
END $$;

-- Order: commands of one value of `by` run one at a time, in the order of their ids. The key of a command is
-- known only to the workers, so a claim of such a domain and the entry of its commands into the order are one
-- transaction, one at a time in each domain. What was ever claimed is then known to the order: it is the
-- first of its key, or it waits in `scheduled` as LIMITED, without per_call, behind the first.

-- Domains that workers claim in order. Single sends into them take no id that is lower than one drawn before.
CREATE TABLE busload.ordered_domain (
    domain  text        COLLATE "C" PRIMARY KEY,
    used_at timestamptz NOT NULL DEFAULT now()      -- to the hour
);
-- A function, so that a statement which need not ask does not even open the table.
CREATE FUNCTION busload.is_ordered(of_domain text) RETURNS boolean
    LANGUAGE sql STABLE
    RETURN EXISTS (SELECT FROM busload.ordered_domain WHERE domain = of_domain);

-- The first command of each key: only this one may run. It is the first whatever becomes of its call and its
-- worker: also while it is tried again, handed back or rescued, until it has ended or stepped out. A key has
-- a row while commands of it wait.
CREATE TABLE busload.first_in_order (
    limit_name    text        COLLATE "C" NOT NULL,
    limit_subject text        COLLATE "C" NOT NULL, -- the value of `by`
    command       bigint      NOT NULL,
    since         timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (limit_name, limit_subject)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- The key at which the last sweep of the orders has ended: the next one, of any worker, goes on behind it.
CREATE TABLE busload.order_sweep (
    limit_name    text COLLATE "C" NOT NULL,
    limit_subject text COLLATE "C" NOT NULL
) WITH (fillfactor = 10);
INSERT INTO busload.order_sweep VALUES ('', '');

-- Which of these commands are not the first of their key any more. A command stays the first while it runs,
-- is ready, or comes back by itself. It has stepped out if it has ended, waits for a person, for a later time
-- or for its batch to go on. One statement, so one snapshot: a command that moves from one place to another
-- is seen in one of them.
CREATE FUNCTION busload.not_first_any_more(commands bigint[]) RETURNS SETOF bigint
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
    SELECT c.id
      FROM unnest($1) AS c (id)
     WHERE (EXISTS (
                SELECT
                  FROM busload.lease AS l
                 WHERE l.hi BETWEEN c.id AND (c.id | 1023) AND l.lo <= c.id AND c.id <> ALL (l.returned)
                   AND NOT EXISTS (SELECT FROM busload.execution AS e
                                    WHERE e.command = c.id AND e.attempt = l.attempt OFFSET 0)
                OFFSET 0
            )
            OR (SELECT q.lo FROM busload.ready AS q
                 WHERE q.hi BETWEEN c.id AND (c.id | 1023) ORDER BY q.hi LIMIT 1) <= c.id
            OR (SELECT s.lo <= c.id AND s.reason IN ('RETRY', 'RATE_LIMITED', 'NO_HANDLER', 'SNOOZED')
                  FROM busload.scheduled AS s
                 WHERE s.hi BETWEEN c.id AND (c.id | 1023) ORDER BY s.hi LIMIT 1)) IS NOT TRUE
$$;

-- Loads of a domain that have an owner, suspects left out. In a domain that is claimed in order nobody takes
-- turns, so a claim first lets new loads belong to nobody, and then reads those without an owner by their id.
-- The planner puts this function in the place of its call, and so it does with the next one.
CREATE FUNCTION busload.owned_loads(domain text, most integer) RETURNS TABLE (hi bigint)
    LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH RECURSIVE level AS (
        (SELECT q.priority
           FROM busload.queue AS q
          WHERE q.domain = owned_loads.domain AND q.crashes = 0
          ORDER BY q.priority DESC
          LIMIT 1)
        UNION ALL
        SELECT n.priority
          FROM level AS l
         CROSS JOIN LATERAL (
            SELECT q.priority
              FROM busload.queue AS q
             WHERE q.domain = owned_loads.domain AND q.crashes = 0 AND q.priority < l.priority
             ORDER BY q.priority DESC
             LIMIT 1
         ) AS n
    )
    SELECT o.hi
      FROM level AS l
     CROSS JOIN LATERAL (
        (SELECT q.hi
           FROM busload.queue AS q
          WHERE q.domain = owned_loads.domain AND q.crashes = 0 AND q.priority = l.priority AND q.fair < 0
          ORDER BY q.fair, q.hi
          LIMIT most)
        UNION ALL
        (SELECT q.hi
           FROM busload.queue AS q
          WHERE q.domain = owned_loads.domain AND q.crashes = 0 AND q.priority = l.priority AND q.fair > 0
          ORDER BY q.fair, q.hi
          LIMIT most)
     ) AS o
     LIMIT most;
END;

-- The ready loads of a domain in the order of sending, whatever their priority and their owner, suspects left
-- out. `owner` leaps from owner to owner and finds the first load of each; only of as many owners as loads
-- are wanted it reads on. Nearly always all loads belong to nobody, so that there is one for each priority.
CREATE FUNCTION busload.oldest_loads(domain text, most integer) RETURNS TABLE (hi bigint)
    LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH RECURSIVE owner AS (
        (SELECT r.priority::integer, r.fair, r.hi
           FROM busload.ready AS r
          WHERE r.domain = oldest_loads.domain AND r.crashes = 0
          ORDER BY r.priority DESC, r.fair, r.hi
          LIMIT 1)
        UNION ALL
        SELECT n.priority, n.fair, n.hi
          FROM owner AS o
         CROSS JOIN LATERAL (
            (SELECT r.priority::integer, r.fair, r.hi
               FROM busload.ready AS r
              WHERE r.domain = oldest_loads.domain AND r.crashes = 0
                AND r.priority = o.priority AND r.fair > o.fair
              ORDER BY r.fair, r.hi
              LIMIT 1)
            UNION ALL   -- the next priority
            (SELECT r.priority, r.fair, r.hi
               FROM busload.ready AS r
              WHERE r.domain = oldest_loads.domain AND r.crashes = 0 AND r.priority < o.priority
              ORDER BY r.priority DESC, r.fair, r.hi
              LIMIT 1)
            LIMIT 1
         ) AS n
    )
    SELECT q.hi
      FROM (SELECT owner.priority, owner.fair FROM owner ORDER BY owner.hi LIMIT most) AS o
     CROSS JOIN LATERAL (
        SELECT r.hi
          FROM busload.ready AS r
         WHERE r.domain = oldest_loads.domain AND r.crashes = 0
           AND r.priority = o.priority AND r.fair BETWEEN o.fair AND o.fair   -- not `=`: see claim.sql
         ORDER BY r.fair, r.hi
         LIMIT most
     ) AS q
     ORDER BY q.hi
     LIMIT most;
END;

-- Enter commands that a worker has just claimed, each with the lease that it came in. Returns for each
-- whether it is the first of its key, and may run. The others leave their lease and wait, as the same
-- attempt. The caller has claimed them in this transaction, and holds the lock of their domain.
CREATE FUNCTION busload.enter_order(
    taker bigint, names text[], subjects text[], commands bigint[], leases uuid[], lease_ordinals integer[]
) RETURNS boolean[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_nestloop = off AS $$
DECLARE answer boolean[];
BEGIN
    PERFORM busload.lock_limits(27711009, $2, $3, true);
    WITH asked AS MATERIALIZED (
        SELECT a.name COLLATE "C" AS name, a.subject COLLATE "C" AS subject, a.id, a.ordinal, l.*
          FROM unnest($2, $3, $4, $6) WITH ORDINALITY AS a (name, subject, id, lease, ordinal)
          JOIN unnest($5) WITH ORDINALITY AS n (lease_id, ordinal) ON n.ordinal = a.lease
          JOIN busload.lease AS l ON l.lease_id = n.lease_id
    ), entered AS (   -- the first of a key of which nobody waits
        INSERT INTO busload.first_in_order (limit_name, limit_subject, command)
        SELECT name, subject, min(id) FROM asked GROUP BY name, subject
            ON CONFLICT (limit_name, limit_subject) DO NOTHING
        RETURNING limit_name, limit_subject, command
    ), first AS (
        SELECT * FROM entered
        UNION ALL
        SELECT f.limit_name, f.limit_subject, f.command
          FROM (SELECT DISTINCT name, subject FROM asked) AS k
         CROSS JOIN LATERAL (SELECT * FROM busload.first_in_order
                              WHERE limit_name = k.name AND limit_subject = k.subject OFFSET 0) AS f
    ), judged AS MATERIALIZED (
        SELECT a.*, a.id = f.command AS may_run
          FROM asked AS a
          JOIN first AS f ON f.limit_name = a.name AND f.limit_subject = a.subject
    ), late AS MATERIALIZED (
        SELECT * FROM judged WHERE NOT may_run
    ), progress AS (
        SELECT lease_id, array_agg(id) AS ids, min(open) - count(*)::integer AS open
          FROM late
         GROUP BY lease_id
    ), closed AS (
        DELETE FROM busload.lease WHERE lease_id = ANY (ARRAY(SELECT lease_id FROM progress WHERE open <= 0))
    ), kept AS (
        UPDATE busload.lease AS l SET returned = l.returned || p.ids, open = p.open FROM progress AS p
         WHERE l.lease_id = p.lease_id
           AND l.lease_id = ANY (ARRAY(SELECT lease_id FROM progress WHERE open > 0))
    ), scheduled AS (
        INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, attempt, forgiven, crashes,
                                       replies, fair, run_at, reason, limit_name, limit_subject)
        SELECT id, id, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair,
               'infinity', 'LIMITED', name, subject
          FROM late
    ), noted AS (   -- the first time; later ones would only repeat it
        INSERT INTO busload.event (type, lo, hi, batch_id, attempt, lease_id, worker, details)
        SELECT 'LIMITED', min(id), max(id), batch_id, attempt, lease_id, $1,
               json_build_object('limit', name, 'by', subject, 'ordered', true)
          FROM (SELECT *,
                       id - row_number() OVER (PARTITION BY lease_id, name, subject ORDER BY id) AS island
                  FROM late
                 WHERE NOT EXISTS (SELECT
                                     FROM busload.event AS e
                                    WHERE e.lo >> 10 = late.id >> 10
                                      AND late.id BETWEEN e.lo AND e.hi
                                      AND e.type = 'LIMITED'
                                   OFFSET 0)) AS part
         GROUP BY lease_id, batch_id, attempt, name, subject, island
    )
    SELECT array_agg(may_run ORDER BY ordinal) INTO answer FROM judged;
    RETURN answer;
END $$;

-- The first of these keys may have ended or stepped out: then the one with the lowest id that waits is the
-- first, and ready. Commands of batches that are held or being canceled are passed over; if only such wait,
-- one of them keeps the key known to the sweep. If somebody has locked the next one, it is the first all the
-- same, and the sweep makes it ready. Returns how many became ready. To repeat it is harmless.
CREATE FUNCTION busload.advance_order(names text[], subjects text[]) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    stopped uuid[];
    woken bigint;
BEGIN
    PERFORM busload.lock_limits(27711009, $1, $2, true);
    stopped := ARRAY(SELECT batch_id FROM busload.batch
                      WHERE (canceling_until IS NOT NULL OR held_at IS NOT NULL) AND completed_at IS NULL);
    WITH first AS MATERIALIZED (
        SELECT f.limit_name, f.limit_subject, f.command
          FROM (SELECT DISTINCT name, subject FROM unnest($1, $2) AS k (name, subject)) AS k
         CROSS JOIN LATERAL (SELECT * FROM busload.first_in_order
                              WHERE limit_name = k.name AND limit_subject = k.subject OFFSET 0) AS f
    ), key AS MATERIALIZED (
        SELECT *
          FROM first
         WHERE command = ANY (ARRAY(SELECT busload.not_first_any_more(ARRAY(SELECT command FROM first))))
    ), next AS MATERIALIZED (
        SELECT k.limit_name, k.limit_subject, k.command, coalesce(going.hi, stays.hi) AS next, going.hi
          FROM key AS k
          LEFT JOIN LATERAL (
            SELECT s.hi
              FROM busload.scheduled AS s
             WHERE s.reason = 'LIMITED' AND s.per_call IS NULL
               AND s.limit_name = k.limit_name AND s.limit_subject = k.limit_subject
               AND (s.batch_id <> ALL (stopped)) IS NOT FALSE
             ORDER BY s.hi LIMIT 1
          ) AS going ON true
          LEFT JOIN LATERAL (
            SELECT s.hi
              FROM busload.scheduled AS s
             WHERE s.reason = 'LIMITED' AND s.per_call IS NULL
               AND s.limit_name = k.limit_name AND s.limit_subject = k.limit_subject
               AND going.hi IS NULL
             ORDER BY s.hi LIMIT 1
          ) AS stays ON true
    ), ended AS (
        DELETE FROM busload.first_in_order AS f USING next AS n
         WHERE f.limit_name = n.limit_name AND f.limit_subject = n.limit_subject AND n.next IS NULL
    ), follows AS (
        UPDATE busload.first_in_order AS f SET command = n.next, since = now() FROM next AS n
         WHERE f.limit_name = n.limit_name AND f.limit_subject = n.limit_subject AND n.next <> n.command
    ), due AS (
        DELETE FROM busload.scheduled
         WHERE hi = ANY (ARRAY(SELECT s.hi FROM busload.scheduled AS s
                                WHERE s.hi = ANY (ARRAY(SELECT n.hi FROM next AS n)) AND s.reason = 'LIMITED'
                                  FOR UPDATE SKIP LOCKED))
        RETURNING *
    ), queued AS (
        INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies,
                                   fair)
        SELECT lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair FROM due
        RETURNING domain
    ), told AS (
        SELECT count(pg_notify('busload_ready', domain)) FROM (SELECT DISTINCT domain FROM queued) AS d
    )
    SELECT (SELECT count(*) FROM due) INTO woken FROM told;
    RETURN woken;
END $$;
