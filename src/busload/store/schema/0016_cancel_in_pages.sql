-- A large batch is canceled in pages, each a short transaction. Meanwhile no worker claims commands of it, and whoever sweeps goes on
-- if the one who cancels has died.

ALTER TABLE busload.batch ADD COLUMN canceling_until timestamptz;   -- until then somebody is at it; null: nobody is, or it is done
CREATE INDEX batch_in_pages ON busload.batch (batch_id) WHERE canceling_until IS NOT NULL AND completed_at IS NULL;

-- What may be claimed. The planner takes IS NOT NULL for true of nearly all rows, as it is.
CREATE VIEW busload.ready AS
SELECT * FROM busload.queue
 WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT b.batch_id FROM busload.batch AS b WHERE b.canceling_until IS NOT NULL AND b.completed_at IS NULL))
            THEN NULL ELSE true END IS NOT NULL;
CREATE VIEW busload.unmarked AS
SELECT * FROM busload.outbox
 WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT b.batch_id FROM busload.batch AS b WHERE b.canceling_until IS NOT NULL AND b.completed_at IS NULL))
            THEN NULL ELSE true END IS NOT NULL;
