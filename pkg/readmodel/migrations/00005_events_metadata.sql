-- +goose Up

-- The events that set a session's metadata: an event shows the metadata of the last one at or before its seq.
-- Queries repeat the predicate word for word, since the planner uses a partial index only where it is implied.
CREATE INDEX events_metadata ON events (tenant, session, seq)
    WHERE type IN ('session_created', 'session_options_updated') AND strpos(event, '"metadata":') > 0;

-- +goose Down
DROP INDEX events_metadata;
