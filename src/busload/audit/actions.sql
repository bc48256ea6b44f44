-- name: actions
-- What operators did, the newest first: at most so many rows behind the cursor, whatever the filters. The
-- domain is that of the command, of the batch, or the one that the details name.
SELECT v.event, v.at, v.type, v.operator, coalesce(v.hi - v.lo + 1, 0)::integer, v.batch_id,
       CASE WHEN v.type LIKE 'BATCH\_%%' OR v.lo IS NOT NULL THEN coalesce(c.domain, b.domain)
            ELSE v.details ->> 'domain' END,
       c.command_id, v.details ->> 'reason', v.worker, v.details ->> 'worker', v.details ->> 'limit',
       v.details ->> 'buffer', v.details ->> 'job_id', v.details ->> 'priority',
       v.details ->> 'schedule', v.details ->> 'old_tracker', v.details ->> 'phase',
       v.type = 'OPERATOR_RETRIED' AND (v.details -> 'patch') IS NOT NULL
  FROM (SELECT * FROM busload.event
         WHERE operator IS NOT NULL
           AND (at, event) < (coalesce(%(before)s::timestamptz, 'infinity'),
                              coalesce(%(after)s::bigint, 9223372036854775807))
           AND (%(since)s::timestamptz IS NULL OR at >= %(since)s::timestamptz)
         ORDER BY at DESC, event DESC
         LIMIT %(most)s::integer) AS v
  LEFT JOIN LATERAL (SELECT domain, command_id FROM busload.command WHERE id = v.lo OFFSET 0) AS c ON true
  LEFT JOIN LATERAL (SELECT domain FROM busload.batch AS b WHERE b.batch_id = v.batch_id AND v.lo IS NULL
                     OFFSET 0) AS b ON true
 ORDER BY v.at DESC, v.event DESC;
