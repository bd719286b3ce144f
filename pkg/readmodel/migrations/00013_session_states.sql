-- +goose Up

-- What a session was after its events 500, 1000, 1500, …: the state at any other event is folded from the row before it.
CREATE TABLE session_states (
    tenant  text NOT NULL,
    session text NOT NULL,
    seq     bigint NOT NULL,
    version smallint NOT NULL,                  -- of the JSON; readers skip another one than their own
    state   text NOT NULL,                      -- JSON of history.State, up to 256 KiB: a larger one is left out
    PRIMARY KEY (tenant, session, seq)
);

-- Blocks as they are shown, up to an event.
CREATE INDEX blocks_shown ON blocks (tenant, session, execution_ord, first_seq);

-- Rows of sessions with 500 events or more are due for events that are folded already: each group is folded again from zero when
-- its projector starts, so that a rebuild gives the same rows.
UPDATE checkpoints SET commit_id = 'folded before session_states', caught_up = false WHERE position > 0;

-- +goose Down
DROP INDEX blocks_shown;
DROP TABLE session_states;
