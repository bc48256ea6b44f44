-- Schedules are declared in code and kept here: any worker fires any of them, also one of another release.
-- The transaction that advances next_due_at also writes the command of the due time and its row in `fire`.
-- So a due time is fired once, whatever number of workers look at the same moment or die.

CREATE TABLE busload.schedule (
    name          text COLLATE "C" PRIMARY KEY,
    domain        text        NOT NULL,
    rule          jsonb       NOT NULL,   -- when it is due: cron expressions and their zone, or an interval
    command       json        NOT NULL,   -- what it sends
    expires_in    interval,               -- the command is canceled if it has not started so long after that
    catch_up      text        NOT NULL CHECK (catch_up IN ('skip', 'one', 'all')),
    catch_up_limit integer    NOT NULL,
    missed_after  interval    NOT NULL,
    declaration   text        NOT NULL,   -- a fingerprint of all of the above
    declared_at   timestamptz NOT NULL DEFAULT now(),
    release       text,                   -- of the application that declared it: see busload.release
    next_due_at   timestamptz,            -- null: it has ended
    last_due_at   timestamptz,
    paused_at     timestamptz,
    paused_by     text,
    pause_reason  text
) WITH (fillfactor = 50);
CREATE INDEX schedule_due ON busload.schedule (next_due_at) WHERE paused_at IS NULL;

-- When a release of an application, which is known by the schedules that it declares, was seen for the first
-- time, or was declared by hand. The newest one of those that run decides how a schedule is.
CREATE TABLE busload.release (
    release text        PRIMARY KEY,
    since   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- What was fired, triggered and skipped. Rows outlive their schedule, and go by their age.
CREATE TABLE busload.fire (
    fire       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule   text COLLATE "C" NOT NULL,
    type       text        NOT NULL CHECK (type IN ('DUE', 'TRIGGERED', 'SKIPPED')),
    due_at     timestamptz NOT NULL,
    fired_at   timestamptz NOT NULL DEFAULT now(),
    domain     text        NOT NULL,
    command_id uuid,                     -- null: skipped
    batch_id   uuid,                     -- of the batch that its planner creates
    operator   text,                     -- who has triggered it
    skipped    integer     NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX fire_of_due_time ON busload.fire (schedule, due_at) WHERE type = 'DUE';
CREATE INDEX fire_newest ON busload.fire (schedule, fire DESC);
CREATE INDEX fire_of_age ON busload.fire (fired_at);
