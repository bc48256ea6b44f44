-- PostgreSQL as a broker, in a database beside the one that holds the commands: messages that wait, or are
-- on loan.

CREATE TABLE busload.message (
    queue      text        NOT NULL,
    -- A repetition has the same id. It is dropped while the first message is here.
    id         text        NOT NULL,
    body       bytea       NOT NULL,
    visible_at timestamptz NOT NULL DEFAULT now(),   -- on loan until then
    -- A receiver knows the number of its delivery. A later delivery takes the loan away from it.
    deliveries integer     NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, id)
);
CREATE INDEX message_visible ON busload.message (queue, visible_at);
