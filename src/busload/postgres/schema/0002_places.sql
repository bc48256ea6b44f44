-- The places of a load: queue, scheduled, outbox and lease. A command that has not ended is in exactly one
-- place: in one of these or, alone, in troubleshooting.
--
-- A load is split by moving its `lo`. Its `hi` never changes, so `hi` is the key of a load in every place:
-- a split is an update that touches no index, and a statement that waited for a split finds the row again.

-- The columns of a load, the same in every place.
CREATE TABLE busload.load (
    lo       bigint   NOT NULL,
    hi       bigint   NOT NULL,
    domain   text     NOT NULL,
    batch_id uuid,
    priority smallint NOT NULL DEFAULT 0,
    -- The attempt that the load is for, or in.
    attempt  integer  NOT NULL DEFAULT 1,
    -- The attempts before the last retry by an operator, which no longer count.
    forgiven integer  NOT NULL DEFAULT 0,
    -- 0, or 1 for a load that a worker held when it died, and one more for each worker that died while the
    -- load was the only suspect.
    crashes  smallint NOT NULL DEFAULT 0,
    -- Whether a command of the load has a reply_to.
    replies  boolean  NOT NULL DEFAULT false,
    -- Who owns the load when loads of equal priority take turns: see `fair_of`. 0: it was sent by itself.
    fair     bigint   NOT NULL DEFAULT 0,
    CONSTRAINT one_load CHECK (lo BETWEEN hi & '-1024' AND hi)
);

-- The owner of a load, as a number: a key of the application, if there is one, or else a batch. Ids that
-- busload makes begin with their time, and so do the numbers of such batches: older ones come first. The time
-- is cut to 44 bits, which last until the year 2527, and 20 bits tell those of one millisecond apart.
CREATE FUNCTION busload.fair_of(fair_by text, batch_id uuid) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN fair_by IS NOT NULL THEN hashtextextended(fair_by, 0)
                WHEN batch_id IS NULL THEN 0
                ELSE ('x' || substr(batch_id::text, 2, 7) || substr(batch_id::text, 10, 4)
                          || substr(batch_id::text, 16, 3) || substr(batch_id::text, 21, 2))::bit(64)::bigint
           END;

CREATE TABLE busload.queue (
    LIKE busload.load INCLUDING DEFAULTS INCLUDING CONSTRAINTS,
    -- The three are null unless a broker has confirmed a message about the load. If no worker comes for the
    -- load, the message may be lost, and the sweep sends another one, after a pause that doubles.
    transport     text,
    published_at  timestamptz,
    publications  smallint,
    -- The transaction that has made the load ready here. A worker that has looked at the queue finds what
    -- became ready since then by the transactions that its look could not see: see commands/marks.sql.
    entered       xid8 NOT NULL DEFAULT pg_current_xact_id(),
    PRIMARY KEY (hi)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX queue_ready     ON busload.queue (domain, priority DESC, fair, hi) WHERE crashes = 0;
CREATE INDEX queue_suspect   ON busload.queue (domain, priority DESC, hi) WHERE crashes > 0;
CREATE INDEX queue_published ON busload.queue (transport, published_at, hi) WHERE published_at IS NOT NULL;
CREATE INDEX queue_entered   ON busload.queue (entered);

CREATE TABLE busload.scheduled (
    LIKE busload.load INCLUDING DEFAULTS INCLUDING CONSTRAINTS,
    run_at timestamptz NOT NULL,
    reason text        NOT NULL
           CHECK (reason IN ('RUN_AT', 'RETRY', 'NO_HANDLER', 'RATE_LIMITED', 'LIMITED', 'HELD', 'CANARY',
                            'SNOOZED')),
    -- Of LIMITED: the concurrency limit and the value of its `by` that the command waits for, and how many
    -- commands one call takes. If per_call is null, the commands run in order, and it waits for its
    -- predecessors.
    limit_name    text COLLATE "C",
    limit_subject text COLLATE "C",
    per_call      integer,
    PRIMARY KEY (hi),
    -- What is HELD, waits for the CANARY of its batch, or for its predecessors, is never due: whoever lets it
    -- go puts it into the queue.
    CONSTRAINT held_for_ever CHECK (
        (reason IN ('HELD', 'CANARY') OR reason = 'LIMITED' AND per_call IS NULL) = (run_at = 'infinity'))
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX scheduled_due ON busload.scheduled (run_at);
CREATE INDEX scheduled_limited ON busload.scheduled (limit_name, limit_subject, hi)
    WHERE reason = 'LIMITED' AND per_call IS NOT NULL;
CREATE INDEX scheduled_in_order ON busload.scheduled (limit_name, limit_subject, hi)
    WHERE reason = 'LIMITED' AND per_call IS NULL;

-- With a broker, a load waits in the outbox until the broker has confirmed a message about it. The database
-- stays the truth: a message only says that commands are ready, and the claim decides. A load in the outbox
-- was not published yet (PENDING_QUEUE), or a round of publishing has failed (PENDING_RETRY).
CREATE TABLE busload.outbox (
    LIKE busload.load INCLUDING DEFAULTS INCLUDING CONSTRAINTS,
    transport text        NOT NULL,
    since     timestamptz NOT NULL DEFAULT now(),
    -- A relay may take the load from then on. While a relay publishes it, the time is in the future.
    due_at    timestamptz NOT NULL DEFAULT now(),
    relay     uuid,                                 -- the relay that publishes it, or was the last to do so
    rounds    integer     NOT NULL DEFAULT 0,       -- how many rounds of publishing have failed
    reason    text,                                 -- why the last round failed
    error     text,
    failed_at timestamptz,                          -- when the last round failed
    PRIMARY KEY (hi)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX outbox_due      ON busload.outbox (transport, due_at, hi);
CREATE INDEX outbox_of_batch ON busload.outbox (batch_id, rounds);
CREATE INDEX outbox_failed   ON busload.outbox (transport, since, hi) WHERE rounds > 0;

CREATE TABLE busload.lease (
    -- The low 12 bits of a lease_id are 0: an execution_id has the position of the command there.
    lease_id uuid        PRIMARY KEY,
    LIKE busload.load INCLUDING CONSTRAINTS,
    worker   bigint      NOT NULL,
    since    timestamptz NOT NULL DEFAULT now(),
    open     integer     NOT NULL,                -- commands not settled yet; the last one closes the lease
    returned bigint[]    NOT NULL DEFAULT '{}'    -- commands given back one by one; the others are still held
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
-- Not unique: a command that failed or was given back can run again while its neighbours still run under
-- the old lease.
CREATE INDEX lease_load ON busload.lease (hi);
CREATE INDEX lease_of_worker ON busload.lease (worker);

-- Commands that ran when somebody canceled them, and were asked to stop. That attempt is the last one, unless
-- an operator's retry forgives it. A row stays until a sweep sees that the command has ended, so there are
-- few.
CREATE TABLE busload.stopping (
    command  bigint      PRIMARY KEY,
    attempt  integer     NOT NULL,
    operator text,
    reason   text,
    since    timestamptz NOT NULL DEFAULT now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Loads that must have started by a time of their own. A row is only for the sweep: it is there for few
-- commands, and goes when nothing of the load can still start too late.
CREATE TABLE busload.expiry (
    lo         bigint      PRIMARY KEY,
    hi         bigint      NOT NULL,
    batch_id   uuid,
    expires_at timestamptz NOT NULL,
    look_at    timestamptz NOT NULL    -- when to look for what has not started
);
CREATE INDEX expiry_due ON busload.expiry (look_at);

DROP TABLE busload.load;   -- the places have its columns now
