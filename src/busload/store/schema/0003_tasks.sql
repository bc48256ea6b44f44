-- What a command is about can have a name, its task key. One open command at a time holds a key, if its senders ask for
-- that: the primary key decides between any number of them, and who waits for a winner that rolls back wins in its place.
-- Nothing is written here when a command ends: a key is free if its holder has ended, which its executions and events tell.

CREATE TABLE busload.task (
    domain     text        NOT NULL,
    task_key   text        NOT NULL,
    command_id uuid        NOT NULL,   -- of the last command that was sent for this key
    held_until timestamptz NOT NULL,   -- even if its command ends before
    PRIMARY KEY (domain, task_key)
) WITH (fillfactor = 80);

-- All commands of a task: the trace.
CREATE INDEX command_of_task ON busload.command (task_key, id) WHERE task_key IS NOT NULL;

-- Whether a command exists and has not ended. In PL/pgSQL, and volatile, so that it sees what was committed while the
-- statement that calls it waited for another sender.
CREATE FUNCTION busload.is_open(of_domain text, of_command_id uuid) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM busload.command AS c
         WHERE c.domain = of_domain AND c.command_id = of_command_id
           AND NOT EXISTS (SELECT FROM busload.execution AS e
                            WHERE e.command = c.id AND e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED') OFFSET 0)
           AND NOT EXISTS (SELECT FROM busload.event AS v
                            WHERE v.lo >> 10 = c.id >> 10 AND c.id BETWEEN v.lo AND v.hi
                              AND v.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED') OFFSET 0));
END $$;
