-- The task key of a command names what the command is about. If its senders ask for that, one open command
-- at a time holds a key. The primary key decides between any number of senders, and a sender that waits for
-- a winner wins in its place if the winner rolls back. Nothing is written here when a command ends: a key
-- is free if its holder has ended, and executions and events tell whether it has.

CREATE TABLE busload.task (
    domain     text COLLATE "C" NOT NULL,
    task_key   text COLLATE "C" NOT NULL,
    command_id uuid        NOT NULL,   -- of the last command that was sent for this key
    held_until timestamptz NOT NULL,   -- the key is held until then, even if its command ends before
    -- Keys differ more than domains, so they are found by fewer comparisons.
    PRIMARY KEY (task_key, domain)
) WITH (fillfactor = 80);

-- Whether a command exists and has not ended. The function is in PL/pgSQL and volatile, so that it sees
-- what was committed while the statement that calls it waited for another sender.
CREATE FUNCTION busload.is_open(of_domain text, of_command_id uuid) RETURNS boolean
    LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM busload.command AS c
         WHERE c.domain = of_domain AND c.command_id = of_command_id
           AND NOT EXISTS (SELECT FROM busload.execution AS e
                            WHERE e.command = c.id
                              AND e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') OFFSET 0)
           AND NOT EXISTS (SELECT FROM busload.event AS v
                            WHERE v.lo >> 10 = c.id >> 10
                              AND c.id BETWEEN v.lo AND v.hi
                              AND v.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
                           OFFSET 0));
END $$;
