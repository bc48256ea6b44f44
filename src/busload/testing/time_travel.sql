-- name: now
-- The time from which a journey to a moment is measured.
SELECT now();

-- name: updates
-- For each table of ours that has times, the statement that makes its rows older. What is left out is about
-- the schema or about whole minutes and days, not about commands.
SELECT format('UPDATE busload.%%I SET %%s', c.relname,
              string_agg(format('%%1$I = %%1$I - %%%%(by)s::interval', a.attname), ', '))
  FROM pg_class AS c
  JOIN pg_attribute AS a ON a.attrelid = c.oid
 WHERE c.relnamespace = 'busload'::regnamespace
   AND c.relkind = 'r'
   AND a.atttypid = 'timestamptz'::regtype
   AND NOT a.attisdropped
   AND a.attgenerated = ''
   AND c.relname <> ALL (ARRAY['migration', 'statistics', 'archive', 'archived_batch', 'archived_job'])
 GROUP BY c.relname
 ORDER BY c.relname;
