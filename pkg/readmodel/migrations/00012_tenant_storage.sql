-- +goose Up

-- The row of a tenant and group whose day is '' holds what the tenant stores now: the events and objects of its sessions that were
-- not removed yet, definitions, and ZIPs of skills.
ALTER TABLE tenant_usage
    ADD COLUMN stored_bytes bigint NOT NULL DEFAULT 0;

-- The log knows what was stored so far: each group is folded again from zero when its projector starts, so that a rebuild gives
-- the same rows. Until then nobody may take what is missing for what does not exist.
UPDATE checkpoints SET commit_id = 'folded before tenant_usage.stored_bytes', caught_up = false WHERE position > 0;

-- +goose Down
DELETE FROM tenant_usage WHERE day = '';
ALTER TABLE tenant_usage DROP COLUMN stored_bytes;
