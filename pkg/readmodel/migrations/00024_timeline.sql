-- +goose Up

ALTER TABLE events
    ADD COLUMN at           timestamptz,                -- time of the event
    ADD COLUMN conversation text NOT NULL DEFAULT '';   -- '' if the event does not concern a conversation

-- The marks of a timeline.
CREATE INDEX events_marks ON events (tenant, session, seq) WHERE type IN ('error', 'attempt_failed', 'sandbox_failed', 'approval_requested',
    'execution_started', 'execution_completed', 'execution_failed', 'execution_cancelled', 'execution_withdrawn');

-- Blocks of one conversation as they are shown.
CREATE INDEX blocks_by_conversation ON blocks (tenant, session, conversation, execution_ord, first_seq);

-- The log has what is missing: each group is folded again from zero when its projector starts.
UPDATE checkpoints SET commit_id = 'folded before events.at', caught_up = false WHERE position > 0;

-- +goose Down
DROP INDEX blocks_by_conversation, events_marks;
ALTER TABLE events DROP COLUMN at, DROP COLUMN conversation;
