-- Only busload ends the transaction of a handler, because the effects of the handler and its completion
-- commit together. Every such transaction begins with a row in busload.guard, and busload calls
-- release_transaction() before its own COMMIT. Any other COMMIT, by anybody and in any form, fails and
-- rolls the effects back. After a ROLLBACK, release_transaction() fails: nothing is left to complete.

-- A row lives as long as its transaction. It exists because only a row can have a trigger at COMMIT. The
-- setting busload.guard says where the row is; the setting, too, ends with the transaction.
CREATE UNLOGGED TABLE busload.guard ()
    WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE FUNCTION busload.release_transaction() RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE place text := nullif(current_setting('busload.guard', true), '');
BEGIN
    DELETE FROM busload.guard WHERE ctid = place::tid;
    IF NOT FOUND THEN
        RAISE 'The transaction of the handler has ended before the handler did, '
              'and what it wrote was rolled back.'
              USING ERRCODE = 'invalid_transaction_termination';
    END IF;
    place := set_config('busload.guard', '', true);
END $$;

-- SET CONSTRAINTS ALL IMMEDIATE also runs this trigger, although it ends nothing. It is told from a COMMIT
-- by what it does: it runs the trigger once, while a COMMIT runs deferred triggers until none is left. So
-- the trigger guards the transaction anew, and if it runs again and again within one command of the client,
-- that command is a COMMIT.
CREATE FUNCTION busload.refuse_commit() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most constant integer := 50;   -- checks of constraints in one command
    place text := current_setting('busload.guard', true);
    command text := extract(epoch FROM statement_timestamp())::text;
    -- The command in which it ran last, and how many times.
    seen text := current_setting('busload.guard_seen', true);
    times integer := CASE WHEN split_part(seen, ' ', 1) = command THEN split_part(seen, ' ', 2)::integer
                          ELSE 0 END;
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
    RAISE 'A handler cannot commit its ctx.transaction(): '
          'it commits together with the completion of the command. Everything was rolled back.'
          USING ERRCODE = 'invalid_transaction_termination',
                HINT = 'Return from the handler, and busload commits. '
                       'For a part that may fail, use a savepoint: conn.transaction().';
END $$;

CREATE CONSTRAINT TRIGGER refuse_commit AFTER INSERT ON busload.guard DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION busload.refuse_commit();
