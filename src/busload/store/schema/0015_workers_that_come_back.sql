-- A worker that was declared dead and comes back, still running its commands, did not crash: the blame is taken back, and an event says so.
ALTER TABLE busload.event
    DROP CONSTRAINT known_type,
    ADD CONSTRAINT known_type CHECK (type IN ('CANCELED', 'OPERATOR_RETRIED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED', 'PARKED',
        'LEASE_LOST', 'NOT_CRASHED', 'RELEASED', 'NO_HANDLER', 'RATE_LIMITED', 'REROUTED', 'BATCH_STARTED', 'BATCH_STALLED',
        'BATCH_COMPLETED', 'BATCH_SEALED', 'BATCH_CANCELED')) NOT VALID;
