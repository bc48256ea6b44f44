-- SET CONSTRAINTS ALL IMMEDIATE was known by the text of the query, so it was refused after a comment, in a DO block, in a function, and
-- beside another statement. It is now told from a COMMIT by what it does: it runs the trigger once. A COMMIT runs deferred triggers until
-- none is left, so one that defers itself anew is run again and again, within one command of the client.
CREATE OR REPLACE FUNCTION busload.refuse_commit() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most constant integer := 50;   -- checks of constraints in one command
    place text := current_setting('busload.guard', true);
    command text := extract(epoch FROM statement_timestamp())::text;
    seen text := current_setting('busload.guard_seen', true);   -- the command in which it ran last, and how many times
    times integer := CASE WHEN split_part(seen, ' ', 1) = command THEN split_part(seen, ' ', 2)::integer ELSE 0 END;
BEGIN
    IF place = '' THEN
        RETURN NULL;
    END IF;
    IF times < most THEN
        SET CONSTRAINTS busload.refuse_commit DEFERRED;
        DELETE FROM busload.guard WHERE ctid = place::tid;
        INSERT INTO busload.guard DEFAULT VALUES RETURNING ctid::text INTO place;
        place := set_config('busload.guard', place, true);
        seen := set_config('busload.guard_seen', concat_ws(' ', command, times + 1), true);
        RETURN NULL;
    END IF;
    RAISE 'A handler cannot commit its ctx.transaction(): it commits together with the completion of the command. Everything was rolled back.'
          USING ERRCODE = 'invalid_transaction_termination',
                HINT = 'Return from the handler, and busload commits. For a part that may fail, use a savepoint: conn.transaction().';
END $$;
