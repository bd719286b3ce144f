-- +goose Up

ALTER TABLE tenant_usage
    ADD COLUMN events      bigint NOT NULL DEFAULT 0,    -- that sessions added to the log
    ADD COLUMN event_bytes bigint NOT NULL DEFAULT 0;    -- of those events: text, data, and 256 for each

-- The log knows what was added so far: each group is folded again from zero when its projector starts, so that a rebuild gives
-- the same rows. Until then nobody may take what is missing for what does not exist.
UPDATE checkpoints SET commit_id = 'folded before tenant_usage.events', caught_up = false WHERE position > 0;

-- +goose Down
ALTER TABLE tenant_usage DROP COLUMN events, DROP COLUMN event_bytes;
