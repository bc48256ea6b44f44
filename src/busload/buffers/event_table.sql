-- name: find_table
-- An application's table, by the name as it is or, if it is one that SQL could hold, as SQL would read it.
SELECT c.oid::bigint, quote_ident(n.nspname) || '.' || quote_ident(c.relname), c.relkind::text,
       has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
         AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE')
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.oid = coalesce(to_regclass(quote_ident(%(name)s::text)),
                        CASE WHEN %(readable)s::boolean THEN to_regclass(%(name)s::text) END)::oid;

-- name: find_columns
-- Types without a length: a cast to one would cut off what is longer, and without -1 it would be 1 for some.
SELECT attname::text, quote_ident(attname), format_type(atttypid, -1), attnotnull
  FROM pg_catalog.pg_attribute
 WHERE attrelid = %(table)s::bigint::oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum;

-- name: find_indexes
-- The columns of every index that works, in order, with its condition. An expression counts as a column
-- without a name.
SELECT ARRAY(SELECT coalesce((SELECT attname::text FROM pg_catalog.pg_attribute
                               WHERE attrelid = i.indrelid AND attnum = k.attnum), '')
               FROM unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (attnum, nth)
              WHERE k.nth <= i.indnkeyatts ORDER BY k.nth),
       i.indisunique, pg_get_expr(i.indpred, i.indrelid), i.indisprimary
  FROM pg_catalog.pg_index AS i
 WHERE i.indrelid = %(table)s::bigint::oid AND i.indisvalid;
