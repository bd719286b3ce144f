-- +goose Up

-- How long metered sandboxes ran, and what they cost by the executors' price. No event before this migration says so: there is
-- nothing to fold again.
ALTER TABLE sessions
    ADD COLUMN sandbox_ms       bigint NOT NULL DEFAULT 0,
    ADD COLUMN sandbox_cost_usd double precision NOT NULL DEFAULT 0;
ALTER TABLE executions
    ADD COLUMN sandbox_ms       bigint NOT NULL DEFAULT 0,     -- within the execution: what is between executions is the session's alone
    ADD COLUMN sandbox_cost_usd double precision NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE executions DROP COLUMN sandbox_ms, DROP COLUMN sandbox_cost_usd;
ALTER TABLE sessions DROP COLUMN sandbox_ms, DROP COLUMN sandbox_cost_usd;
