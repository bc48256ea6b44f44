-- Only busload ends the transaction of a handler, because the effects of the handler and its completion commit together. Every such
-- transaction begins with a row in busload.guard, and busload calls release_transaction() before its own COMMIT. Any other COMMIT, by
-- whoever and in whatever form, fails and rolls the effects back. After a ROLLBACK, release_transaction() fails: nothing is left to complete.

-- A row lives as long as its transaction: it is there because only a row can have a trigger at COMMIT. The setting busload.guard says
-- where it is; the setting, too, is gone with the transaction.
CREATE UNLOGGED TABLE busload.guard () WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE FUNCTION busload.release_transaction() RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE place text := nullif(current_setting('busload.guard', true), '');
BEGIN
    DELETE FROM busload.guard WHERE ctid = place::tid;
    IF NOT FOUND THEN
        RAISE 'The transaction of the handler has ended before the handler did, and what it wrote was rolled back.'
              USING ERRCODE = 'invalid_transaction_termination';
    END IF;
    place := set_config('busload.guard', '', true);
END $$;

CREATE FUNCTION busload.refuse_commit() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('busload.guard', true) = '' THEN
        RETURN NULL;
    END IF;
    RAISE 'A handler cannot commit its ctx.transaction(): it commits together with the completion of the command. Everything was rolled back.'
          USING ERRCODE = 'invalid_transaction_termination',
                HINT = 'Return from the handler, and busload commits. For a part that may fail, use a savepoint: conn.transaction().';
END $$;

CREATE CONSTRAINT TRIGGER refuse_commit AFTER INSERT ON busload.guard DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION busload.refuse_commit();
