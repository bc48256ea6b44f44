-- PostgreSQL as a broker, for a database beside the one that holds the commands: messages that wait, or are on loan.

CREATE TABLE busload.message (
    queue      text        NOT NULL,
    id         text        NOT NULL,                     -- the same for each repetition, which is dropped while the first is here
    body       bytea       NOT NULL,
    visible_at timestamptz NOT NULL DEFAULT now(),       -- on loan until then
    deliveries integer     NOT NULL DEFAULT 0,           -- who has it on loan knows the number: a later one takes it away
    PRIMARY KEY (queue, id)
);
CREATE INDEX message_visible ON busload.message (queue, visible_at);
