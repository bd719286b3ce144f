-- +goose Up

ALTER TABLE sessions
    ADD COLUMN parent text NOT NULL DEFAULT '',           -- the session that it was forked from; '' for none
    ADD COLUMN forked text NOT NULL DEFAULT '';           -- JSON of events.SessionForked; '' for none
ALTER TABLE deleted_sessions
    ADD COLUMN parent text NOT NULL DEFAULT '',
    ADD COLUMN forked text NOT NULL DEFAULT '';

CREATE INDEX sessions_by_parent         ON sessions (tenant, parent, created_at, id) WHERE parent <> '';
CREATE INDEX deleted_sessions_by_parent ON deleted_sessions (tenant, parent) WHERE parent <> '';

-- From here on events and blocks of a deleted session stay until run_retired, since its forks read them. Those of sessions that
-- were deleted before are in the log: each group is folded again from zero when its projector starts, so that a rebuild gives
-- the same rows. Until then nobody may take what is missing for what does not exist.
UPDATE checkpoints SET commit_id = 'folded before sessions.parent', caught_up = false WHERE position > 0;

-- +goose Down
DELETE FROM events e USING deleted_sessions d WHERE e.tenant = d.tenant AND e.session = d.id;
DELETE FROM blocks b USING deleted_sessions d WHERE b.tenant = d.tenant AND b.session = d.id;
ALTER TABLE deleted_sessions DROP COLUMN parent, DROP COLUMN forked;
ALTER TABLE sessions DROP COLUMN parent, DROP COLUMN forked;
