-- +goose Up

-- The stream sequence of the last commit that changed what lists of sessions show. Clients follow the sessions of a tenant by it.
ALTER TABLE sessions ADD COLUMN changed_at bigint NOT NULL DEFAULT 0;
ALTER TABLE deleted_sessions
    ADD COLUMN agent      text NOT NULL DEFAULT '',
    ADD COLUMN changed_at bigint NOT NULL DEFAULT 0;  -- of the commit that deleted it

CREATE INDEX sessions_by_change         ON sessions (tenant, grp, changed_at);
CREATE INDEX deleted_sessions_by_change ON deleted_sessions (tenant, grp, changed_at);

-- The log has what is missing: each group is folded again from zero when its projector starts.
UPDATE checkpoints SET commit_id = 'folded before sessions.changed_at', caught_up = false WHERE position > 0;

-- +goose Down
ALTER TABLE deleted_sessions DROP COLUMN changed_at, DROP COLUMN agent;
ALTER TABLE sessions DROP COLUMN changed_at;
