-- name: rare_work
-- Whether there may be work: workers to be declared dead and leases of dead ones, and leases of this worker,
-- whose batches may have to be started. Then work that most databases never have: canceled batches that have
-- not ended, commands and batches that have expired, canaries whose time is over, held batches, commands that
-- were asked to stop, permits and commands that wait for one, keys whose commands run in order, and limits
-- and orders that nobody uses any more. The statements that do this work are long to plan, and each is a
-- transaction.
SELECT EXISTS (
        SELECT
          FROM busload.worker
         WHERE %(judge)s::boolean
           AND stopped_at IS NULL
           AND seen_at < now() - lease_for
           AND worker <> %(worker)s::bigint
       )
       OR EXISTS (
        SELECT
          FROM busload.lease AS l
         WHERE NOT EXISTS (
            SELECT FROM busload.worker AS w WHERE w.worker = l.worker AND w.stopped_at IS NULL OFFSET 0
         )
       ),
       EXISTS (SELECT FROM busload.lease WHERE worker = %(worker)s::bigint),
       EXISTS (SELECT FROM busload.batch WHERE canceled_at IS NOT NULL AND completed_at IS NULL),
       EXISTS (SELECT FROM busload.expiry WHERE look_at <= now())
       OR EXISTS (SELECT FROM busload.batch WHERE expires_at <= now() AND completed_at IS NULL),
       EXISTS (SELECT FROM busload.batch
                WHERE canary_until <= now() AND canary_ended_at IS NULL AND completed_at IS NULL),
       EXISTS (SELECT FROM busload.batch
                WHERE (canceling_until IS NOT NULL OR held_at IS NOT NULL) AND completed_at IS NULL),
       EXISTS (SELECT FROM busload.stopping),
       EXISTS (SELECT FROM busload.permit)
       OR EXISTS (SELECT FROM busload.scheduled
                   WHERE reason = 'LIMITED' AND per_call IS NOT NULL AND limit_name >= ''),
       EXISTS (SELECT FROM busload.first_in_order),
       EXISTS (SELECT FROM busload.concurrency_limit WHERE used_at < now() - interval '1 day')
       OR EXISTS (SELECT FROM busload.ordered_domain WHERE used_at < now() - interval '30 days');
