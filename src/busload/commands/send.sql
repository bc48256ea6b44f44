-- fragments of: busload.commands.load
-- fragments of: busload.commands.task_keys

-- fragment: lock_timeout_is_set
-- From here on the statement fails if it has to wait for a lock for longer than `patience`, in milliseconds.
(%(patience)s::integer IS NULL OR set_config('lock_timeout', %(patience)s::integer::text, true) IS NOT NULL)

-- fragment: columns_of_one
id, domain, command_id, command_type, data, task_key, correlation_id, reply_to, priority, max_attempts,
headers

-- fragment: values_of_one
-- The given id follows one that this sender has drawn before. In a domain whose commands run in order it is
-- not used if anybody has drawn a number since: who sends after others have sent gets a higher id than they.
CASE WHEN %(id)s::bigint IS NOT NULL
          AND (pg_sequence_last_value('busload.load_number') = %(id)s::bigint >> 10
               OR NOT busload.is_ordered(%(domain)s::text))
     THEN %(id)s::bigint
     ELSE nextval('busload.load_number') * 1024
END,
%(domain)s::text,
%(command_id)s::uuid,
%(command_type)s::text,
%(data)s::text::json,
%(task_key)s::text,
%(correlation_id)s::uuid,
%(reply_to)s::text,
%(priority)s::smallint,
%(max_attempts)s::smallint,
%(headers)s::text::json

-- fragment: columns_of_batch
batch_id, domain, name, custom_data, on_complete, job_id, stage, way, fair_by, expires_at, headers

-- fragment: values_of_batch
%(batch_id)s::uuid,
%(domain)s::text,
%(name)s::text,
%(custom_data)s::text::jsonb,
%(on_complete)s::text::json,
%(job_id)s::text,
%(stage)s::text::jsonb,
%(way)s::text,
%(fair_by)s::text,
now() + %(expires_in)s::interval,
%(headers)s::text::json

-- fragment: numbered_loads
-- Each load gets a number. Its commands are the ones from the `first` to the `last` in the arrays of
-- commands.
SELECT shift + first AS lo, shift + last AS hi, shift, first, last, domain, priority, replies, run_at,
       busload.fair_of(fair_by, %(batch_id)s::uuid) AS fair
  FROM (
    SELECT nextval('busload.load_number') * 1024 - first AS shift,
           first, last, domain, priority, replies, run_at,
           coalesce(fair_by, (SELECT fair_by FROM batch)) AS fair_by
      FROM unnest(%(firsts)b::bigint[], %(lasts)b::bigint[], %(domains)b::text[], %(priorities)b::smallint[],
                  %(replies)b::boolean[], %(run_ats)b::timestamptz[], %(fair_bys)b::text[])
        AS load (first, last, domain, priority, replies, run_at, fair_by)
  ) AS load

-- fragment: written
-- The commands of the numbered loads.
written AS (
    INSERT INTO busload.command (id, domain, command_id, command_type, data, batch_id, task_key,
                                 correlation_id, reply_to, priority, max_attempts, run_at, headers)
    SELECT shift + c.nth, domain, c.command_id, c.command_type, c.data::json, %(batch_id)s::uuid, c.task_key,
           c.correlation_id, c.reply_to, priority, c.max_attempts, run_at, c.headers::json
      FROM unnest(%(command_ids)b::uuid[], %(command_types)b::text[], %(data)b::text[], %(task_keys)b::text[],
                  %(correlation_ids)b::uuid[], %(reply_tos)b::text[], %(max_attempts)b::smallint[],
                  %(command_headers)b::text[])
           WITH ORDINALITY
        AS c (command_id, command_type, data, task_key, correlation_id, reply_to, max_attempts, headers,
              nth)
      JOIN load ON c.nth BETWEEN first AND last
)

-- fragment: is_due
(run_at IS NULL OR run_at <= now())

-- fragment: placed
-- Where a new load goes. It is scheduled if its time has not come. Otherwise it is ready in the queue, or it
-- waits in the outbox if there is a `transport`: for the `relay` that the caller is, or for any relay. With
-- `optimistic` it is in the queue although there is a transport: the caller publishes it next.
queued AS (
    INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, replies, fair, transport, published_at)
    SELECT lo, hi, domain, %(batch_id)s::uuid, priority, replies, fair, %(transport)s::text,
           CASE WHEN %(optimistic)s::boolean THEN now() END
      FROM load
     WHERE (%(transport)s::text IS NULL OR %(optimistic)s::boolean) AND {is_due}
    RETURNING lo, hi, domain
), published AS (
    INSERT INTO busload.outbox (lo, hi, domain, batch_id, priority, replies, fair, transport, relay, due_at)
    SELECT lo, hi, domain, %(batch_id)s::uuid, priority, replies, fair, %(transport)s::text,
           %(relay)s::uuid,
           now() + CASE WHEN %(relay)s::uuid IS NULL THEN interval '0' ELSE %(hold)s::interval END
      FROM load
     WHERE %(transport)s::text IS NOT NULL AND NOT %(optimistic)s::boolean AND {is_due}
    RETURNING transport
), scheduled AS (
    INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, replies, fair, run_at, reason)
    SELECT lo, hi, domain, %(batch_id)s::uuid, priority, replies, fair, run_at, 'RUN_AT'
      FROM load
     WHERE run_at > now()
    RETURNING domain, run_at
)

-- fragment: due_loads
-- The loads that are due now, in the order of their numbers, as all of them were numbered, and a notification
-- to whoever is waiting for them: to all workers if there are more commands than one of them would take. What
-- is due soon has a notification without a domain.
ARRAY(SELECT lo FROM load WHERE {is_due}),
ARRAY(SELECT hi FROM load WHERE {is_due}),
ARRAY(SELECT domain FROM load WHERE {is_due}),
(SELECT count(pg_notify(CASE WHEN commands > 100::numeric THEN 'busload_ready' ELSE {channel} END, told))
   FROM (SELECT domain, domain AS told, sum(hi - lo + 1) AS commands
           FROM queued
          WHERE NOT %(optimistic)s::boolean
          GROUP BY domain
          UNION ALL
         SELECT DISTINCT domain, '', 1 FROM scheduled WHERE {is_soon}) AS ready),
(SELECT pg_notify('busload_outbox', %(transport)s::text)
  WHERE %(relay)s::uuid IS NULL AND EXISTS (SELECT FROM published))

-- name: send_ready
-- Send one command that is ready at once, as most commands are: a load of one, without batch, broker, later
-- time or window. Its id is the given one, next to the commands that its sender has sent before, or begins a
-- load. If another open transaction uses its command_id too, the statement waits for it, at most for
-- `patience`. `send` does the same for all commands, but each table that a statement may write to costs the
-- server some 20 µs, even if nothing goes there.
WITH sent AS (
    INSERT INTO busload.command ({columns_of_one})
    SELECT {values_of_one}
     WHERE {lock_timeout_is_set}
    RETURNING id, domain, priority, reply_to
), queued AS (
    INSERT INTO busload.queue (lo, hi, domain, priority, replies, fair)
    SELECT id, id, domain, priority, reply_to IS NOT NULL, busload.fair_of(%(fair_by)s::text, NULL)
      FROM sent
    RETURNING domain
)
SELECT id, (SELECT pg_notify({channel}, domain) FROM queued AS ready WHERE %(notify)s::boolean) FROM sent;

-- name: send
-- Send one command, as `send_ready` does, with everything that a command can have. A time that has passed
-- means now. With a `window` the command is sent only if its task key is free, and holds the key from then
-- on.
WITH held AS (
    INSERT INTO busload.task AS t (domain, task_key, command_id, held_until)
    SELECT %(domain)s::text,
           %(task_key)s::text,
           %(command_id)s::uuid,
           statement_timestamp() + %(window)s::interval
     WHERE %(window)s::interval IS NOT NULL AND {lock_timeout_is_set}
        ON CONFLICT (domain, task_key) DO UPDATE
       SET command_id = excluded.command_id, held_until = excluded.held_until
     WHERE {key_is_free}
    RETURNING command_id
), sent AS (
    INSERT INTO busload.command ({columns_of_one}, run_at)
    SELECT {values_of_one}, %(run_at)s::timestamptz
     WHERE {lock_timeout_is_set}
       AND (%(window)s::interval IS NULL OR EXISTS (SELECT FROM held))
    RETURNING id, domain, priority, run_at, reply_to
), load AS (
    SELECT id AS lo, id AS hi, domain, priority, reply_to IS NOT NULL AS replies, run_at,
           busload.fair_of(%(fair_by)s::text, NULL) AS fair
      FROM sent
), {placed}
SELECT id,
       (SELECT pg_notify({channel}, told)
          FROM (SELECT domain, domain AS told FROM queued WHERE %(notify)s::boolean
                 UNION ALL
                SELECT domain, '' FROM scheduled WHERE {is_soon}) AS ready),
       (SELECT pg_notify('busload_outbox', transport) FROM published WHERE %(notify)s::boolean)
  FROM sent;

-- name: send_some
-- Some loads with their commands, of any domains. With a batch, which is one of `domain`, its total rises by
-- as many. If there is no such batch, or it is sealed, nothing is written, and the first column is false.
-- Returns the loads that are due now.
WITH batch AS (
    UPDATE busload.batch
       SET total_count = total_count + cardinality(%(command_ids)b::uuid[])
     WHERE batch_id = %(batch_id)s::uuid
       AND domain = %(domain)s::text
       AND sealed_at IS NULL
       AND {lock_timeout_is_set}
    RETURNING fair_by
), load AS MATERIALIZED (
    {numbered_loads}
     WHERE (%(batch_id)s::uuid IS NULL OR EXISTS (SELECT FROM batch))
       AND {lock_timeout_is_set}
), {written}, {placed}
SELECT EXISTS (SELECT FROM load), {due_loads};

-- name: create_some
-- A sealed batch with some commands. None of them can have ended yet, so nothing is decided here. Returns the
-- loads that are due now.
WITH batch AS (
    INSERT INTO busload.batch ({columns_of_batch}, total_count, sealed_at)
    VALUES ({values_of_batch}, cardinality(%(command_ids)b::uuid[]), now())
    RETURNING fair_by
), noted AS (
    INSERT INTO busload.event (type, batch_id) VALUES ('BATCH_SEALED', %(batch_id)s::uuid)
), load AS MATERIALIZED (
    {numbered_loads}
), {written}, {placed}
SELECT {due_loads};

-- name: number_loads
-- Draw the numbers of loads before their commands are written, so that the commands can be copied in.
SELECT nextval('busload.load_number') FROM generate_series(1, %(loads)s::integer);

-- name: copy_commands
-- Many commands, in the binary format.
COPY busload.command (id, command_id, data, domain, batch_id, priority, run_at,
                      command_type, task_key, correlation_id, reply_to, max_attempts, headers)
FROM STDIN (FORMAT binary);

-- name: place_loads
-- Put loads whose commands were just copied in where they belong. Returns the loads that are due now.
WITH load AS (
    SELECT lo, hi, domain, priority, replies, run_at, busload.fair_of(fair_by, %(batch_id)s::uuid) AS fair
      FROM (
        SELECT lo, hi, domain, priority, replies, run_at,
               coalesce(
                   fair_by,
                   (SELECT fair_by FROM busload.batch WHERE batch_id = %(batch_id)s::uuid)
               ) AS fair_by
          FROM unnest(%(los)b::bigint[], %(his)b::bigint[], %(domains)b::text[], %(priorities)b::smallint[],
                      %(replies)b::boolean[], %(run_ats)b::timestamptz[], %(fair_bys)b::text[])
            AS load (lo, hi, domain, priority, replies, run_at, fair_by)
        OFFSET 0   -- else the planner does not put `fair_of` in the place of its call
      ) AS load
), {placed}
SELECT {due_loads};

-- name: notify
-- Tell workers that commands are ready, or relays that loads wait in the outbox.
SELECT CASE WHEN %(transport)s::text IS NULL
            THEN pg_notify({channel}, domain)
            ELSE pg_notify('busload_outbox', %(transport)s::text)
       END
  FROM unnest(%(domains)b::text[]) AS ready (domain);

-- name: existing_commands
-- Which of these ids are taken: asked only after a duplicate was found.
SELECT command_id
  FROM busload.command
 WHERE domain = %(domain)s::text AND command_id = ANY (%(command_ids)b::uuid[]);

-- name: open_batch
-- A batch without commands. It is sealed if the same transaction copies all its commands in.
WITH opened AS (
    INSERT INTO busload.batch ({columns_of_batch}, total_count, sealed_at)
    VALUES ({values_of_batch}, %(total)s::integer, CASE WHEN %(sealed)s::boolean THEN now() END)
    RETURNING batch_id, sealed_at
)
INSERT INTO busload.event (type, batch_id)
SELECT 'BATCH_SEALED', batch_id FROM opened WHERE sealed_at IS NOT NULL;

-- name: note_operator
-- Keep which operator has created a batch.
INSERT INTO busload.event (type, batch_id, operator)
VALUES ('BATCH_CREATED', %(batch_id)s::uuid, %(operator)s::text);

-- name: give_budget
-- Give a batch that was just written its failure budget.
UPDATE busload.batch
   SET budget_share = %(share)s::float8::numeric,
       budget_at_least = %(at_least)s::integer,
       budget_per_cause = %(per_cause)s::boolean,
       budget_from = 0,
       on_exceeded = %(on_exceeded)s::text::json
 WHERE batch_id = %(batch_id)s::uuid;

-- name: begin_canary
-- Have some commands of a batch that was just written run before all others.
SELECT busload.begin_canary(%(batch_id)s::uuid, %(canary)s::integer, %(within)s::interval,
                            %(transport)s::text);

-- name: raise_total
-- Whoever writes commands of a batch raises the total of the batch first. No row: there is no such batch, or
-- it is sealed.
UPDATE busload.batch
   SET total_count = total_count + %(count)s::integer
 WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND sealed_at IS NULL
RETURNING batch_id;

-- name: find_batch
-- One row if there is such a batch: whether it is one of jobs.
SELECT batch_type = 'JOBS'
  FROM busload.batch
 WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text;

-- name: seal
-- From here on the batch takes no more commands, so that it can complete.
WITH sealed AS (
    UPDATE busload.batch
       SET sealed_at = now()
     WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND sealed_at IS NULL
    RETURNING batch_id
), noted AS (
    INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_SEALED', batch_id FROM sealed
)
SELECT batch_id FROM sealed;

-- name: decide
-- Complete the batch if it is sealed and all its commands have ended.
SELECT busload.decide(ARRAY[%(batch_id)s::uuid]);
