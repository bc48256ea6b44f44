-- fragments of: busload.commands.load

-- fragment: columns
-- In the order of `BatchMetadata`.
batch_id, domain, name, custom_data::text, status, total_count, completed_count, failed_count,
       canceled_count, in_troubleshooting_count, created_at, started_at, completed_at, job_id, stage::text,
       expires_at, held_at, held_reason, held_by, held_note, canary_count, canary_until, canary_ended_at,
       failure_budget, failure_budget_used, fair_by, headers::text, batch_type, callback_id, callback_type

-- fragment: listed_batch
-- With what a forecast of it needs to know, if that is asked for.
SELECT {columns}, CASE WHEN %(forecast)s::boolean THEN outlook::text END FROM busload.batch_metadata

-- fragment: newest_batches
-- The newest batch comes first; `after` is the last batch of the page before.
AND (%(status)s::text IS NULL OR status = %(status)s::text)
AND (%(batch_type)s::text IS NULL OR batch_type = %(batch_type)s::text)
AND (%(name)s::text IS NULL OR strpos(lower(name), lower(%(name)s::text)) > 0)
AND (%(created_after)s::timestamptz IS NULL OR created_at >= %(created_after)s::timestamptz)
AND (%(created_before)s::timestamptz IS NULL OR created_at < %(created_before)s::timestamptz)
AND (%(after)s::uuid IS NULL OR (created_at, batch_id) <
     (SELECT created_at, batch_id FROM busload.batch_metadata WHERE batch_id = %(after)s::uuid))
ORDER BY created_at DESC, batch_id DESC
{page}

-- name: batch
-- One batch, and what a forecast of it needs to know.
SELECT {columns}, outlook::text FROM busload.batch_metadata
 WHERE batch_id = %(batch_id)s::uuid AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
   AND pruned_at IS NULL;

-- name: batches
-- The batches of a domain.
{listed_batch}
 WHERE domain = %(domain)s::text AND pruned_at IS NULL
   {newest_batches};

-- name: batches_of_job
-- The batches of a job, in one domain or in all.
{listed_batch}
 WHERE job_id = %(job_id)s::text AND (%(domain)s::text IS NULL OR domain = %(domain)s::text)
   AND pruned_at IS NULL
   {newest_batches};

-- name: batches_everywhere
-- The batches of all domains.
{listed_batch}
 WHERE pruned_at IS NULL
   {newest_batches};

-- name: existing_batches
-- The batches of these that exist: whoever waits for many batches asks once.
SELECT {columns} FROM busload.batch_metadata
 WHERE batch_id = ANY (%(batch_ids)b::uuid[]);
