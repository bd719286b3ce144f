-- +goose Up

-- The failed execution that an execution continues; '' for none. No event before this migration names one: there is nothing to
-- fold again.
ALTER TABLE executions ADD COLUMN recovered_from text NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE executions DROP COLUMN recovered_from;
