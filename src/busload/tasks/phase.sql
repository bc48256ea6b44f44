-- name: current
-- The phase that an old tracker is in.
SELECT number, phase FROM busload.tracker_phase
 WHERE old_tracker = %(old_tracker)s::text ORDER BY number DESC LIMIT 1;

-- name: begin
-- An old tracker that nobody has heard of is in the first phase.
INSERT INTO busload.tracker_phase (old_tracker, number, phase)
VALUES (%(old_tracker)s::text, 1, 'shadow')
    ON CONFLICT (old_tracker, number) DO NOTHING;

-- name: record
-- Add what was compared in a phase. Of what the two trackers disagreed about, the newest rows are kept.
WITH counted AS (
    UPDATE busload.tracker_phase
       SET compared = compared + %(compared)s::bigint, agreed = agreed + %(agreed)s::bigint
     WHERE old_tracker = %(old_tracker)s::text AND number = %(number)s::integer
), surplus AS (
    DELETE FROM busload.tracker_disagreement
     WHERE old_tracker = %(old_tracker)s::text
       AND number = %(number)s::integer
       AND disagreement <= (SELECT disagreement FROM busload.tracker_disagreement
                             WHERE old_tracker = %(old_tracker)s::text AND number = %(number)s::integer
                             ORDER BY disagreement DESC
                            OFFSET greatest(0, %(most)s::integer - cardinality(%(task_keys)b::text[]))
                             LIMIT 1)
       AND cardinality(%(task_keys)b::text[]) > 0
)
INSERT INTO busload.tracker_disagreement (old_tracker, number, at, task_key, operation, old, busload)
SELECT %(old_tracker)s::text, %(number)s::integer, clock_timestamp() - make_interval(secs => d.ago),
       d.task_key, d.operation, d.old, d.busload
  FROM unnest(%(ago)s::float8[], %(task_keys)b::text[], %(operations)b::text[], %(old)b::text[],
              %(busload)b::text[]) AS d (ago, task_key, operation, old, busload);

-- name: reports
-- The phases of an old tracker, or of all, oldest first, with what was compared in each of them. The last
-- columns say when the two trackers last disagreed, how long ago that was, and whether the phase is over.
SELECT p.old_tracker, p.number, p.phase, p.since, p.operator, p.compared, p.agreed, d.at,
       clock_timestamp() - d.at,
       EXISTS (SELECT FROM busload.tracker_phase AS later
                WHERE later.old_tracker = p.old_tracker AND later.number > p.number OFFSET 0)
  FROM busload.tracker_phase AS p
 CROSS JOIN LATERAL (SELECT max(d.at) AS at FROM busload.tracker_disagreement AS d
                      WHERE d.old_tracker = p.old_tracker AND d.number = p.number OFFSET 0) AS d
 WHERE %(old_tracker)s::text IS NULL OR p.old_tracker = %(old_tracker)s::text
 ORDER BY p.old_tracker, p.number;

-- name: disagreements
-- What the two trackers have answered differently in a phase, the newest first.
SELECT task_key, operation, old, busload, at
  FROM busload.tracker_disagreement
 WHERE old_tracker = %(old_tracker)s::text AND number = %(number)s::integer
 ORDER BY disagreement DESC
 LIMIT %(limit)s::integer;

-- name: switch
-- From now on another phase holds. If somebody else has switched since the phase was read, nothing is
-- written, and no row is returned.
WITH switched AS (
    INSERT INTO busload.tracker_phase (old_tracker, number, phase, operator)
    VALUES (%(old_tracker)s::text, %(number)s::integer, %(phase)s::text, %(operator)s::text)
        ON CONFLICT (old_tracker, number) DO NOTHING
    RETURNING old_tracker, phase, number
), noted AS (
    INSERT INTO busload.event (type, operator, details)
    SELECT 'TRACKER_SWITCHED', %(operator)s::text,
           json_build_object('old_tracker', old_tracker, 'phase', phase, 'reason', %(reason)s::text)
      FROM switched
     WHERE %(operator)s::text IS NOT NULL
)
SELECT number FROM switched;
