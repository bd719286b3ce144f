-- +goose Up

-- What a session does, and totals of its executions.
ALTER TABLE sessions
    ADD COLUMN phase              text NOT NULL DEFAULT 'idle',           -- queued, running, waiting_for_approval, failed, idle
    ADD COLUMN phase_since        timestamptz NOT NULL DEFAULT 'epoch',   -- time of the event that began the phase
    ADD COLUMN failed_execution   text NOT NULL DEFAULT '',               -- the execution that ended last, if it failed; '' otherwise
    ADD COLUMN open_approvals     integer NOT NULL DEFAULT 0,             -- its approvals without ended_seq
    ADD COLUMN input_tokens       bigint NOT NULL DEFAULT 0,              -- sums of the columns of executions
    ADD COLUMN output_tokens      bigint NOT NULL DEFAULT 0,
    ADD COLUMN cache_read_tokens  bigint NOT NULL DEFAULT 0,
    ADD COLUMN cache_write_tokens bigint NOT NULL DEFAULT 0,
    ADD COLUMN cost_usd           double precision NOT NULL DEFAULT 0;

CREATE INDEX sessions_by_phase          ON sessions (tenant, phase, created_at, id);
CREATE INDEX sessions_by_open_approvals ON sessions (tenant, created_at, id) WHERE open_approvals > 0;

-- The log holds the times and the order in which executions ended: each group is folded again from zero when its projector starts,
-- so that a rebuild gives the same rows.
UPDATE checkpoints SET commit_id = 'folded before sessions.phase', caught_up = false WHERE position > 0;

-- +goose Down
DROP INDEX sessions_by_phase, sessions_by_open_approvals;
ALTER TABLE sessions DROP COLUMN phase, DROP COLUMN phase_since, DROP COLUMN failed_execution, DROP COLUMN open_approvals,
    DROP COLUMN input_tokens, DROP COLUMN output_tokens, DROP COLUMN cache_read_tokens, DROP COLUMN cache_write_tokens, DROP COLUMN cost_usd;
