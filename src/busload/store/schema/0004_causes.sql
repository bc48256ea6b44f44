-- Failures that have the same cause have the same fingerprint, so that a person decides once for all of them.
--
-- A fingerprint is made of the error's type, its code, and its message without what differs from one command to the next:
-- times, e-mail addresses, ids, numbers, and what stands in quotes unless it is a name as programs have them (of a column, a
-- module, a class), which has no two digits in a row. An id is a UUID, a word of eight hex digits or more, one that starts with
-- 0x, or one with digits in two places. The code of an answer stays: three digits after "HTTP" or "status". A message that is
-- nothing but quoted text, as that of a KeyError, keeps it. Ids and numbers become the same sign, since a longer number may
-- look like an id.

CREATE FUNCTION busload.fingerprint(error json) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN left(md5(coalesce(error ->> 'type', '') || chr(31) || coalesce(error ->> 'code', '') || chr(31)
        || left(btrim(regexp_replace(regexp_replace(regexp_replace(regexp_replace(
               left(coalesce(error ->> 'message', ''), 1000),
               '\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?|[^\s@<>"''(]+@[^\s@<>"'')]+\.[[:alpha:]]+', '?', 'g'),
               '(?!^(?:''[^'']*''|"[^"]*")$)(?!["''`][[:alpha:]_](?:[[:alpha:]_.]|\d(?!\d))*["''`])(?:(?<!\w)''[^'']*''(?!\w)|"[^"]*"|`[^`]*`)', '?', 'g'),
               '(\m(?:http|status)(?:/\d(?:\.\d)?)?(?:[^[:alnum:]]{0,3}(?:status|code|error))*[^[:alnum:]]{1,3}[1-5]\d\d\M)'
               '|[+-]?(?:\m(?:[[:xdigit:]]{8}(?:-[[:xdigit:]]{4}){3}-[[:xdigit:]]{12}|0x[[:xdigit:]]+|[[:xdigit:]]{8,}'
               '|[[:alpha:]_]*\d+_*[[:alpha:]][[:alpha:]_]*\d\w*)\M|\d+(?:[.,:]\d+)*)', '\1#', 'gi'),
               '\s+', ' ', 'g')), 300)), 12);

ALTER TABLE busload.troubleshooting
    ADD COLUMN fingerprint text NOT NULL GENERATED ALWAYS AS (busload.fingerprint(error)) STORED;
CREATE INDEX troubleshooting_of_cause ON busload.troubleshooting (domain, fingerprint, command);

COMMENT ON TABLE busload.command IS 'The fact: inserted once. Only an operator''s patched retry updates it, and only its '
    'data, in the statement that keeps the data before and after in an OPERATOR_RETRIED event.';
