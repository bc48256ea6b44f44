-- SET CONSTRAINTS ALL IMMEDIATE runs the trigger that guards the transaction of a handler, although nothing ends. The trigger now
-- guards the transaction anew and lets it go on.
CREATE OR REPLACE FUNCTION busload.refuse_commit() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE place text := current_setting('busload.guard', true);
BEGIN
    IF place = '' THEN
        RETURN NULL;
    END IF;
    IF current_query() ~* '^\s*set\s+constraints\s[^;]*;?\s*$' THEN
        SET CONSTRAINTS busload.refuse_commit DEFERRED;
        DELETE FROM busload.guard WHERE ctid = place::tid;
        INSERT INTO busload.guard DEFAULT VALUES RETURNING ctid::text INTO place;
        place := set_config('busload.guard', place, true);
        RETURN NULL;
    END IF;
    RAISE 'A handler cannot commit its ctx.transaction(): it commits together with the completion of the command. Everything was rolled back.'
          USING ERRCODE = 'invalid_transaction_termination',
                HINT = 'Return from the handler, and busload commits. For a part that may fail, use a savepoint: conn.transaction().';
END $$;
