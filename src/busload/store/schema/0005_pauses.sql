-- A paused domain: what runs finishes, nothing new starts. Workers leave it out of their claims, so the claim itself does
-- not read this table; they hear of changes on the channel busload_pause and look from time to time in case they did not.

-- Who paused and who resumed stays; a domain is paused while it has a row that was not resumed.

CREATE TABLE busload.pause (
    pause      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    domain     text        NOT NULL,
    since      timestamptz NOT NULL DEFAULT now(),
    operator   text,
    reason     text,
    resumed_at timestamptz,
    resumed_by text
);
CREATE UNIQUE INDEX pause_of_domain ON busload.pause (domain) WHERE resumed_at IS NULL;
