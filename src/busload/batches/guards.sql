-- name: hold_overdue
-- Hold the batches whose canary was to have ended by now. A batch that somebody has locked is looked at by
-- the next sweep: its canary may end just now.
SELECT coalesce(cardinality(busload.hold_batches(
           ARRAY(SELECT batch_id FROM busload.batch
                  WHERE canary_until <= now()
                    AND canary_ended_at IS NULL
                    AND completed_at IS NULL
                    AND canceled_at IS NULL
                    AND held_at IS NULL
                  ORDER BY batch_id
                  LIMIT 100
                    FOR NO KEY UPDATE SKIP LOCKED),
           'CANARY', NULL, 'Its canary has not ended within its time.')), 0);
