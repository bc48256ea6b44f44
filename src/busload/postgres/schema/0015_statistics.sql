-- How much came in, ended and waited, per minute and domain. Everybody only adds rows, so nobody waits for
-- anybody. One worker makes one row per minute and domain of them later, then one per hour, and in the end
-- one for all time. So the sum of all rows is what was ever counted.
--
-- What came in is not counted: it is what has ended, and what the places hold more than before.

CREATE TABLE busload.statistics (
    at                 timestamptz NOT NULL,   -- the beginning of a minute or hour; 1970: all before
    domain             text        NOT NULL,   -- empty in the row of a look at all places
    completed          bigint      NOT NULL DEFAULT 0,
    failed             bigint      NOT NULL DEFAULT 0,
    canceled           bigint      NOT NULL DEFAULT 0,
    retried            bigint      NOT NULL DEFAULT 0,   -- attempts after which the command is tried again
    troubled           bigint      NOT NULL DEFAULT 0,   -- commands that went to troubleshooting
    seconds            float8      NOT NULL DEFAULT 0,   -- what handlers took
    -- What was in each place at the end of the time; null if nobody looked. A domain without a row had
    -- nothing in any place, if somebody looked.
    ready              bigint,
    scheduled          bigint,
    running            bigint,
    in_troubleshooting bigint,
    unpublished        bigint,
    oldest_ready       float8                             -- seconds
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX statistics_at ON busload.statistics (at);

INSERT INTO busload.turn (what, taken_at) VALUES ('statistics', '-infinity');

-- Workers count the attempts that they settle. What ends or is parked without an attempt is an event.
CREATE FUNCTION busload.count_statistics() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM fresh
                WHERE type IN ('CANCELED', 'PARKED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')) THEN
        INSERT INTO busload.statistics (at, domain, completed, canceled, troubled)
        SELECT date_trunc('minute', clock_timestamp()), c.domain,
               coalesce(sum(f.hi - f.lo + 1) FILTER (WHERE f.type = 'OPERATOR_COMPLETED'), 0),
               coalesce(sum(f.hi - f.lo + 1) FILTER (WHERE f.type IN ('CANCELED', 'OPERATOR_CANCELED')), 0),
               coalesce(sum(f.hi - f.lo + 1) FILTER (WHERE f.type = 'PARKED'), 0)
          FROM fresh AS f
         CROSS JOIN LATERAL (SELECT domain FROM busload.command WHERE id = f.lo OFFSET 0) AS c
         WHERE f.type IN ('CANCELED', 'PARKED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
         GROUP BY c.domain;
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER count_statistics AFTER INSERT ON busload.event
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION busload.count_statistics();
