-- Send a command by SQL: for triggers, psql and every language other than Python. What is sent exists exactly
-- if the transaction commits. The rules and words are those of `bus.send`, with its default limits. Nothing
-- in it is dynamic, and it runs with the rights of its caller.

-- What is wrong with a name or a text, in the words of `busload.commands.checks`; null if nothing is.
CREATE FUNCTION busload.wrong_name(path text, name text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN name IS NULL OR name COLLATE "C" !~ '^[A-Za-z][A-Za-z0-9_.-]*$'
                THEN format('INVALID_NAME at /%s: found %s, wanted a letter, then letters, digits, ''_'', '
                            '''.'' or ''-''', path, left(quote_nullable(name), 80))
                WHEN length(name) > 255
                THEN format('INVALID_NAME at /%s: found %s bytes, at most 255 are allowed', path,
                            length(name))
           END;

CREATE FUNCTION busload.wrong_text(path text, value text, most integer) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN value = ''
                THEN format('INVALID_TEXT at /%s: found '''', wanted text without NUL that is not empty',
                            path)
                WHEN octet_length(value) > most
                THEN format('TOO_LONG at /%s: found %s bytes, at most %s are allowed', path,
                            octet_length(value), most)
           END;

-- A new id. The higher ones are the later ones, to the millisecond, so that an index grows at its end.
CREATE FUNCTION busload.new_id() RETURNS uuid
    LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN (SELECT (left(moment, 8) || '-' || right(moment, 4) || '-7'
                    || substr(gen_random_uuid()::text, 16))::uuid
              FROM lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') AS moment);

CREATE FUNCTION busload.send(
    domain         text,
    command_type   text,
    data           jsonb       DEFAULT NULL,
    command_id     uuid        DEFAULT NULL,   -- null: a new one
    task_key       text        DEFAULT NULL,
    dedup          interval    DEFAULT NULL,   -- the window of a Dedup; null: none
    on_conflict    text        DEFAULT 'skip', -- of dedup: skip and return_existing return the holder's id
    priority       integer     DEFAULT 0,
    run_at         timestamptz DEFAULT NULL,
    delay          interval    DEFAULT NULL,   -- instead of run_at
    max_attempts   integer     DEFAULT NULL,
    reply_to       text        DEFAULT NULL,
    correlation_id uuid        DEFAULT NULL,
    batch_id       uuid        DEFAULT NULL,   -- an open batch that the command joins
    headers        jsonb       DEFAULT NULL,
    expires_at     timestamptz DEFAULT NULL,
    fair_by        text        DEFAULT NULL,
    transport      text        DEFAULT NULL    -- whose relay publishes it; null: workers find it
) RETURNS uuid
    LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
<<mine>>
DECLARE
    nil      CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
    known    CONSTANT text := 'nats,pgmq,postgresql,rabbitmq,redis,servicebus';
    written  text := coalesce(send.data, 'null')::text;
    due      timestamptz := send.run_at;
    id       bigint;
    fair     bigint;
    of_batch text;
    holder   uuid;
    problem  text;
BEGIN
    problem = concat_ws('; ',
        busload.wrong_name('domain', send.domain),
        busload.wrong_name('command_type', send.command_type),
        CASE WHEN send.command_type IN ('busload.Group', 'busload.Exhausted')
             THEN format('INVALID_NAME at /command_type: found %L, which busload sends itself; choose '
                         'another name', send.command_type) END,
        CASE WHEN octet_length(written) > 1048576
             THEN format('TOO_LARGE at /data: found %s bytes of JSON, at most 1048576 are allowed; keep the '
                         'data elsewhere and pass a reference to it', octet_length(written)) END,
        CASE WHEN send.command_id = nil
             THEN 'INVALID_ID at /command_id: found the nil uuid, wanted another one' END,
        CASE WHEN send.priority NOT BETWEEN -32768 AND 32767 OR send.priority IS NULL
             THEN format('INVALID_OPTION at /priority: found %s, wanted a whole number from -32768 to 32767',
                         coalesce(send.priority::text, 'NULL')) END);
    IF octet_length(written) > 128 AND jsonb_path_exists(
        send.data, 'strict $.**{64 to last} ? (@.type() == "object" || @.type() == "array")') THEN
        problem = concat_ws('; ', nullif(problem, ''),
            'TOO_DEEP at /data: found more than 64 nested containers');
    END IF;
    IF octet_length(written) > 4300 THEN
        -- jsonb writes numbers without exponents, so digits that Python cannot read cover a sample.
        IF EXISTS (SELECT FROM convert_to(written, 'UTF8') AS bytes,
                               generate_series(1, octet_length(written), 4200) AS n
                         WHERE encode(substr(bytes, n, 64), 'escape') ~ '^[0-9]{64}$')
           AND jsonb_path_exists(send.data, 'strict $.** ? (@ >= 1e4300 || @ <= -1e4300)') THEN
            problem = concat_ws('; ', nullif(problem, ''),
                'NUMBER_TOO_LONG at /data: found a number of more than 4300 digits, at most 4300 are '
                'allowed; pass it as a string');
        END IF;
    END IF;
    -- What few commands have is looked at only if this one has it.
    IF send.delay IS NOT NULL THEN
        IF send.run_at IS NOT NULL OR send.delay < interval '0' THEN
            problem = concat_ws('; ', nullif(problem, ''),
                'INVALID_OPTION at /delay: wanted zero or more, and run_at or delay, not both');
        END IF;
        due = now() + send.delay;
    END IF;
    IF due < '0002-01-02 00:00+00' THEN   -- no Python reads what is before the year 1; what is past means now
        due = NULL;
    END IF;
    IF coalesce(send.task_key, send.reply_to, send.fair_by, send.headers::text, send.transport) IS NOT NULL
       OR coalesce(due, send.expires_at) IS NOT NULL OR send.max_attempts IS NOT NULL
       OR coalesce(send.correlation_id, send.batch_id) IS NOT NULL OR send.dedup IS NOT NULL THEN
        problem = concat_ws('; ', nullif(problem, ''),
            busload.wrong_text('task_key', send.task_key, 512),
            busload.wrong_text('fair_by', send.fair_by, 255),
            CASE WHEN send.transport <> ALL (string_to_array(concat_ws(
                    ',', known, nullif(current_setting('busload.transports', true), '')), ','))
                 THEN format('INVALID_OPTION at /transport: found %L, wanted the name of a transport: %s. A '
                             'transport of your own is named by the setting busload.transports',
                             left(send.transport, 80), replace(known, ',', ', ')) END,
            CASE WHEN send.reply_to IS NOT NULL THEN busload.wrong_name('reply_to', send.reply_to) END,
            CASE WHEN send.max_attempts NOT BETWEEN 1 AND 32767
                 THEN format('INVALID_OPTION at /max_attempts: found %s, wanted a whole number from 1 to '
                             '32767', send.max_attempts) END,
            CASE WHEN send.correlation_id = nil
                 THEN 'INVALID_ID at /correlation_id: found the nil uuid, wanted another one' END,
            CASE WHEN due > now() + interval '36525 days'
                 THEN format('INVALID_TIME at /run_at: found %s, which is over 100 years away', due) END,
            CASE WHEN send.expires_at > now() + interval '36525 days'
                 THEN format('INVALID_TIME at /expires_at: found %s, which is over 100 years away',
                             send.expires_at)
                 WHEN send.expires_at <= now()
                 THEN format('INVALID_TIME at /expires_at: found %s, which has passed; wanted a time to '
                             'come, or NULL', send.expires_at)
                 WHEN send.expires_at <= due
                 THEN format('INVALID_TIME at /expires_at: found %s, wanted a time after run_at, %s',
                             send.expires_at, due) END,
            CASE WHEN send.fair_by IS NOT NULL AND send.batch_id IS NOT NULL
                 THEN format('INVALID_OPTION at /fair_by: found %L, but commands of a batch take their '
                             'turns by it; pass it to open_batch', left(send.fair_by, 80)) END,
            CASE WHEN send.dedup IS NOT NULL AND send.task_key IS NULL
                 THEN 'INVALID_OPTION at /task_key: found none, wanted the key that dedup is about' END,
            CASE WHEN send.dedup NOT BETWEEN interval '0' AND interval '36525 days'
                 THEN format('INVALID_OPTION at /dedup: found %s, wanted an interval from zero to 36525 days',
                             send.dedup) END,
            CASE WHEN send.on_conflict IS NULL OR send.on_conflict NOT IN ('skip', 'raise', 'return_existing')
                 THEN format('INVALID_OPTION at /on_conflict: found %L, wanted one of skip, raise, '
                             'return_existing', left(send.on_conflict, 80)) END,
            CASE WHEN jsonb_typeof(send.headers) <> 'object'
                 THEN 'INVALID_OPTION at /headers: wanted an object of texts, for example {"tenant": "acme"}'
                 WHEN jsonb_path_exists(send.headers, 'strict $.* ? (@.type() <> "string")')
                      OR jsonb_exists(send.headers, '')
                 THEN 'INVALID_TEXT at /headers: wanted texts as values, and names that are not empty'
                 WHEN octet_length(send.headers::text) > 8192
                 THEN format('TOO_LONG at /headers: found %s bytes of JSON, at most 8192 are allowed; put '
                             'more into the data', octet_length(send.headers::text)) END);
    END IF;
    IF problem <> '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = problem || '. Nothing was written.';
    END IF;

    command_id = coalesce(send.command_id, busload.new_id());
    IF send.dedup IS NOT NULL THEN
        LOOP
            INSERT INTO busload.task AS t (domain, task_key, command_id, held_until)
            VALUES (send.domain, send.task_key, send.command_id, statement_timestamp() + send.dedup)
                ON CONFLICT (domain, task_key) DO UPDATE
               SET command_id = excluded.command_id, held_until = excluded.held_until
             WHERE t.held_until <= statement_timestamp() AND NOT busload.is_open(t.domain, t.command_id);
            EXIT WHEN FOUND;
            SELECT t.command_id INTO holder
              FROM busload.task AS t WHERE t.domain = send.domain AND t.task_key = send.task_key;
            IF FOUND AND send.on_conflict = 'raise' THEN
                RAISE EXCEPTION USING ERRCODE = 'unique_violation',
                    MESSAGE = format('In domain %L the task %L is held by command %s. Nothing was written; '
                                     'wait until it has ended, or send with on_conflict => ''skip''.',
                                     send.domain, left(send.task_key, 200), holder);
            ELSIF FOUND THEN
                RETURN holder;
            END IF;   -- else the holder was pruned meanwhile, and the key is free
        END LOOP;
    END IF;

    IF send.batch_id IS NOT NULL THEN
        UPDATE busload.batch AS b
           SET total_count = b.total_count + 1
         WHERE b.batch_id = send.batch_id AND b.domain = send.domain AND b.sealed_at IS NULL
        RETURNING b.fair_by INTO of_batch;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                MESSAGE = CASE WHEN EXISTS (SELECT FROM busload.batch AS b
                                             WHERE b.batch_id = send.batch_id AND b.domain = send.domain)
                    THEN format('Batch %s in domain %L is sealed and takes no more commands. Open a batch '
                                'with `open_batch` to add commands over time.', send.batch_id, send.domain)
                    ELSE format('There is no batch %s in domain %L. Check the domain, or list what there is '
                                'with `busload batch ls`.', send.batch_id, send.domain) END;
        END IF;
    END IF;

    id = nextval('busload.load_number') * 1024;
    INSERT INTO busload.command (id, domain, command_id, command_type, data, batch_id, task_key,
                                 correlation_id, reply_to, priority, max_attempts, run_at, headers)
    VALUES (mine.id, send.domain, send.command_id, send.command_type, written::json, send.batch_id,
            send.task_key, send.correlation_id, send.reply_to, send.priority, send.max_attempts, due,
            nullif(send.headers, '{}')::json)
        ON CONFLICT (domain, command_id) DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'unique_violation', TABLE = 'command', CONSTRAINT = 'command_once',
            MESSAGE = format('Domain %L already has command %s. Nothing was written; look at it with '
                             '`busload command show`, or send with another command_id.', send.domain,
                             send.command_id);
    END IF;

    fair = busload.fair_of(coalesce(send.fair_by, of_batch), send.batch_id);
    IF due > now() THEN
        INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, replies, fair, run_at, reason)
        VALUES (mine.id, mine.id, send.domain, send.batch_id, send.priority, send.reply_to IS NOT NULL,
                mine.fair, due, 'RUN_AT');
        IF due < now() + interval '5 seconds' THEN   -- sooner than a worker without work looks by itself
            PERFORM pg_notify(coalesce((SELECT l.channel FROM busload.one_listener AS l
                                         WHERE l.domain = send.domain), 'busload_ready'), '');
        END IF;
    ELSIF send.transport IS NULL THEN
        INSERT INTO busload.queue (lo, hi, domain, batch_id, priority, replies, fair)
        VALUES (mine.id, mine.id, send.domain, send.batch_id, send.priority, send.reply_to IS NOT NULL,
                mine.fair);
        PERFORM pg_notify(coalesce((SELECT l.channel FROM busload.one_listener AS l
                                     WHERE l.domain = send.domain), 'busload_ready'), send.domain);
    ELSE
        INSERT INTO busload.outbox (lo, hi, domain, batch_id, priority, replies, fair, transport)
        VALUES (mine.id, mine.id, send.domain, send.batch_id, send.priority, send.reply_to IS NOT NULL,
                mine.fair, send.transport);
        PERFORM pg_notify('busload_outbox', send.transport);
    END IF;
    IF send.expires_at IS NOT NULL THEN
        INSERT INTO busload.expiry (lo, hi, batch_id, expires_at, look_at)
        VALUES (mine.id, mine.id, send.batch_id, send.expires_at, send.expires_at);
    END IF;
    RETURN send.command_id;
END $$;

COMMENT ON FUNCTION busload.send IS
    'Send a command in this transaction; the parameters are those of bus.send. Returns its command_id.';
