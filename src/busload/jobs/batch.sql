-- name: create
-- A batch of jobs, which takes no more than these.
WITH created AS (
    INSERT INTO busload.batch (batch_id, domain, name, custom_data, on_complete, batch_type, way,
                               total_count, sealed_at, headers)
    VALUES (%(batch_id)s::uuid, %(domain)s::text, %(name)s::text, %(custom_data)s::text::jsonb,
            %(on_complete)s::text::json, 'JOBS', 'job', %(total)s::integer, now(),
            %(headers)s::text::json)
    RETURNING batch_id
)
INSERT INTO busload.event (type, batch_id) SELECT 'BATCH_SEALED', batch_id FROM created;

-- name: type
-- Whether a batch is one of jobs.
SELECT batch_type = 'JOBS'
  FROM busload.batch
 WHERE batch_id = %(batch_id)s::uuid AND domain = %(domain)s::text AND pruned_at IS NULL;
