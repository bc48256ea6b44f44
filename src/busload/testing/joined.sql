-- name: catch_up
-- Within a transaction now() stands still, and a retry is due a moment later than that. What is due by the
-- clock is due now.
UPDATE busload.scheduled SET run_at = now() WHERE run_at > now() AND run_at <= clock_timestamp();
