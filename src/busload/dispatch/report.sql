-- name: retry
-- What needs another round of publishing, per job: the most first.
SELECT domain, transport, job_id, commands, oldest, most_rounds
  FROM busload.dispatch_retry
 ORDER BY commands DESC, domain, job_id LIMIT %(most)s::integer;

-- name: daily
-- Batches of the last days (UTC), those that were published as a whole, and how many rounds that took on
-- average. The figures of a day do not fall when its commands end or are removed.
SELECT day, sum(batches)::bigint, sum(published)::bigint, sum(dispatched)::bigint,
       sum(attempts)::float8 / nullif(sum(dispatched), 0::numeric)::float8
  FROM (SELECT day, batches, published, dispatched, attempts
          FROM busload.daily
         WHERE day > (now() AT TIME ZONE 'UTC')::date - %(days)s::integer AND batches > 0
        UNION ALL
        SELECT c.day, 1, c.published::integer, (c.attempts IS NOT NULL)::integer, coalesce(c.attempts, 0)
          FROM busload.counted_batch AS c
         WHERE c.batch_id IN (
                SELECT batch_id FROM busload.batch
                 WHERE created_at >= ((now() AT TIME ZONE 'UTC')::date - %(days)s::integer + 1)::timestamp
                                     AT TIME ZONE 'UTC')) AS counted
 GROUP BY day ORDER BY day DESC;

-- name: recent
-- Batches of the last hour, per job: where their commands are now. Those with most to publish come first.
SELECT domain, job_id, sum(pending)::bigint, sum(queued)::bigint, sum(processing)::bigint,
       sum(completed)::bigint, sum(failed)::bigint
  FROM busload.batch_recent
 GROUP BY domain, job_id
 ORDER BY 3 DESC, 4 DESC, 5 DESC, domain, job_id LIMIT %(most)s::integer;
