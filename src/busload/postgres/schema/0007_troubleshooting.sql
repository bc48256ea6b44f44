-- Commands that wait for a decision by a person.
--
-- Failures that have the same cause have the same fingerprint, so that a person decides once for all of
-- them. A fingerprint is made of the type of the error, its code, and its message without what differs from
-- one command to the next. These steps take that out, one after the other:
--
--   1. Times and e-mail addresses.
--   2. Text in quotes, unless it is a name as programs have them (of a column, a module, a class), which
--      has no two digits in a row. A message that is nothing but quoted text, as that of a KeyError, keeps
--      it.
--   3. Ids and numbers. An id is a UUID, a word of eight hex digits or more, a word that starts with 0x, or
--      a word with digits in two places. A longer number may look like an id, so both become the same sign.
--      The code of an answer stays: three digits after "HTTP" or "status".
--   4. White space becomes one blank.

CREATE FUNCTION busload.fingerprint(error json) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN left(md5(coalesce(error ->> 'type', '') || chr(31) || coalesce(error ->> 'code', '') || chr(31)
        || left(btrim(regexp_replace(regexp_replace(regexp_replace(regexp_replace(
               left(coalesce(error ->> 'message', ''), 1000),
               '\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?'
               '|[^\s@<>"''(]+@[^\s@<>"'')]+\.[[:alpha:]]+', '?', 'g'),
               '(?!^(?:''[^'']*''|"[^"]*")$)'
               '(?!["''`][[:alpha:]_](?:[[:alpha:]_.]|\d(?!\d))*["''`])'
               '(?:(?<!\w)''[^'']*''(?!\w)|"[^"]*"|`[^`]*`)', '?', 'g'),
               '(\m(?:http|status)(?:/\d(?:\.\d)?)?(?:[^[:alnum:]]{0,3}(?:status|code|error))*'
               '[^[:alnum:]]{1,3}[1-5]\d\d\M)'
               '|[+-]?(?:\m(?:[[:xdigit:]]{8}(?:-[[:xdigit:]]{4}){3}-[[:xdigit:]]{12}'
               '|0x[[:xdigit:]]+|[[:xdigit:]]{8,}'
               '|[[:alpha:]_]*\d+_*[[:alpha:]][[:alpha:]_]*\d\w*)\M|\d+(?:[.,:]\d+)*)', '\1#', 'gi'),
               '\s+', ' ', 'g')), 300)), 12);

CREATE TABLE busload.troubleshooting (
    command      bigint      PRIMARY KEY,
    domain       text        NOT NULL,
    command_type text        NOT NULL,   -- of the command: causes are counted by it
    batch_id     uuid,
    priority     smallint    NOT NULL,
    attempt      integer     NOT NULL,   -- the attempt that ended here
    forgiven     integer     NOT NULL,
    fair         bigint      NOT NULL DEFAULT 0,
    reason       text        NOT NULL
                 CHECK (reason IN ('PERMANENT', 'EXHAUSTED', 'CRASHED', 'UNDECODABLE', 'RESULT_INVALID')),
    error        json,
    since        timestamptz NOT NULL DEFAULT now(),
    fingerprint  text        NOT NULL GENERATED ALWAYS AS (busload.fingerprint(error)) STORED
);
CREATE INDEX troubleshooting_newest   ON busload.troubleshooting (domain, since DESC, command DESC);
CREATE INDEX troubleshooting_of_cause ON busload.troubleshooting (domain, fingerprint, command);
-- A job whose step or planner is parked may wait for a person: see 0005.
CREATE TRIGGER doubt_step AFTER INSERT ON busload.troubleshooting
    FOR EACH ROW WHEN (NEW.batch_id IS NULL) EXECUTE FUNCTION busload.doubt_step();
