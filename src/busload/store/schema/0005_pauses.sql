-- A paused domain: what runs finishes, nothing new starts. Workers leave it out of their claims, so the claim itself does
-- not read this table; they hear of changes on the channel busload_pause and look from time to time in case they did not.

CREATE TABLE busload.pause (
    domain   text        PRIMARY KEY,
    since    timestamptz NOT NULL DEFAULT now(),
    operator text,
    reason   text
);
