-- Failures that have the same cause have the same fingerprint, so that a person decides once for all of them.
--
-- A fingerprint is made of the error's type, its code, and its message without what differs from one command to the next:
-- times, e-mail addresses, what stands in quotes, ids (a word of six characters or more that has a digit, or hex digits
-- only) and numbers. A part of a path counts as a word. A message that is nothing but a quoted word, as that of a KeyError,
-- keeps it: there the word is the cause.

CREATE FUNCTION busload.fingerprint(error json) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN left(md5(coalesce(error ->> 'type', '') || chr(31) || coalesce(error ->> 'code', '') || chr(31)
        || left(btrim(regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(
               left(coalesce(error ->> 'message', ''), 1000),
               '\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?|[^\s@<>"''(]+@[^\s@<>"'')]+\.[[:alpha:]]+', '?', 'g'),
               '(?!^(?:''[^'']*''|"[^"]*")$)(?:(?<!\w)''[^'']*''(?!\w)|"[^"]*"|`[^`]*`)', '?', 'g'),
               '\m(?:(?=[\w-]{6})[[:alpha:]_-]*\d[\w-]*|[[:xdigit:]]{8,}\M)', '?', 'g'),
               '[+-]?\d+(?:[.,:]\d+)*', '#', 'g'),
               '\s+', ' ', 'g')), 300)), 12);

ALTER TABLE busload.troubleshooting
    ADD COLUMN fingerprint text NOT NULL GENERATED ALWAYS AS (busload.fingerprint(error)) STORED;
CREATE INDEX troubleshooting_of_cause ON busload.troubleshooting (domain, fingerprint, command);

COMMENT ON TABLE busload.command IS 'The fact: inserted once. Only an operator''s patched retry updates it, and only its '
    'data, in the statement that keeps the data before and after in an OPERATOR_RETRIED event.';
