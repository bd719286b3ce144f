-- +goose Up

-- What a session added to tenant_usage, by day, as JSON; '' for nothing. A deleted session keeps it until its content is removed and after.
ALTER TABLE sessions
    ADD COLUMN spent text NOT NULL DEFAULT '';
ALTER TABLE deleted_sessions
    ADD COLUMN spent   text NOT NULL DEFAULT '',
    ADD COLUMN removed boolean NOT NULL DEFAULT false;       -- its content is gone from streams and buckets

CREATE INDEX deleted_sessions_to_remove ON deleted_sessions (tenant, id) WHERE NOT removed;

-- The log knows what the sessions that are there took: each group is folded again from zero when its projector starts. Until then
-- nobody may take what is missing for what does not exist.
UPDATE checkpoints SET commit_id = 'folded before sessions.spent', caught_up = false WHERE position > 0;

-- +goose Down
DROP INDEX deleted_sessions_to_remove;
ALTER TABLE deleted_sessions DROP COLUMN spent, DROP COLUMN removed;
ALTER TABLE sessions DROP COLUMN spent;
