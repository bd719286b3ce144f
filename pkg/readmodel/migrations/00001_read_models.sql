-- +goose Up

-- One row for each projector group: how far the log is folded into the other tables. Rows and checkpoint change in one transaction.
CREATE TABLE checkpoints (
    grp        smallint PRIMARY KEY,            -- projector group, 0 to 7: the partition of a session id, mod 8
    shard      smallint NOT NULL DEFAULT 0,     -- of the log, in which all of the group's commits lie
    position   bigint NOT NULL DEFAULT 0,       -- stream sequence of the last commit that is folded; 0 for none
    commit_id  text NOT NULL DEFAULT '',        -- of that commit: verified against the log when a projector starts
    log_time   timestamptz,                     -- when the log stored that commit
    caught_up  boolean NOT NULL DEFAULT false,  -- false from the first fold, or a fold from zero, until the log's end was reached
    lag_ms     bigint NOT NULL DEFAULT 0,       -- how old that commit was when it was folded, while more waited; 0 at the log's end
    deltas_at  timestamptz,                     -- the text in flight published before this is stored; null for none
    updated_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

INSERT INTO checkpoints (grp) SELECT generate_series(0, 7);

CREATE TABLE sessions (
    tenant           text NOT NULL,
    id               text NOT NULL,
    grp              smallint NOT NULL,
    status           text NOT NULL,               -- open, closed
    agent            text NOT NULL,
    agent_version    text NOT NULL,
    architecture     text NOT NULL,
    provider         text NOT NULL,
    options          text NOT NULL,               -- JSON of events.Options
    metadata         text,                        -- JSON of the application, byte for byte; null for none
    created_at       timestamptz NOT NULL,
    updated_at       timestamptz NOT NULL,        -- time of its last event
    tip              bigint NOT NULL,             -- seq of its last event
    tip_position     text NOT NULL,               -- position of that event's commit, as clients see it
    active_execution text NOT NULL DEFAULT '',    -- dispatched and not ended
    queued           integer NOT NULL DEFAULT 0,  -- executions that wait
    executions       integer NOT NULL DEFAULT 0,  -- executions so far
    idle             boolean NOT NULL DEFAULT false, -- the idle timeout passed since the last dispatch
    PRIMARY KEY (tenant, id)
) WITH (fillfactor = 80);

-- Sessions that were deleted: their ids answer 404 and nothing brings them back.
CREATE TABLE deleted_sessions (
    tenant     text NOT NULL,
    id         text NOT NULL,
    grp        smallint NOT NULL,
    deleted_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, id)
);

CREATE TABLE executions (
    tenant             text NOT NULL,
    session            text NOT NULL,
    id                 text NOT NULL,
    ord                integer NOT NULL,          -- its place among the session's executions: 0, 1, 2, …
    phase              text NOT NULL,             -- queued, starting, running, completed, failed, cancelled
    code               text NOT NULL DEFAULT '',  -- of a failure
    message            text NOT NULL DEFAULT '',  -- of a failure
    reason             text NOT NULL DEFAULT '',  -- of a cancellation
    attempt            integer NOT NULL DEFAULT 0,
    executor           text NOT NULL DEFAULT '',  -- which claimed it last
    model              text NOT NULL DEFAULT '',
    input_tokens       bigint NOT NULL DEFAULT 0,
    output_tokens      bigint NOT NULL DEFAULT 0,
    cache_read_tokens  bigint NOT NULL DEFAULT 0,
    cache_write_tokens bigint NOT NULL DEFAULT 0,
    cost_usd           double precision NOT NULL DEFAULT 0,
    result             text NOT NULL DEFAULT '',  -- the agent's last words
    metadata           text,                      -- JSON of the message, byte for byte; null for none
    queued_at          timestamptz NOT NULL,      -- the message was accepted
    dispatched_at      timestamptz,
    started_at         timestamptz,               -- the first attempt
    ended_at           timestamptz,
    duration_ms        bigint NOT NULL DEFAULT 0,
    first_seq          bigint NOT NULL,
    PRIMARY KEY (tenant, session, id)
) WITH (fillfactor = 80);

CREATE INDEX executions_by_id ON executions (tenant, id);

-- Blocks are shown in the order of execution_ord, first_seq. The text of a pending block lies in text_in_flight.
CREATE TABLE blocks (
    tenant        text NOT NULL,
    session       text NOT NULL,
    id            text NOT NULL,
    execution     text NOT NULL,
    conversation  text NOT NULL,
    kind          text NOT NULL,
    status        text NOT NULL,      -- pending, complete, error
    execution_ord integer NOT NULL,
    first_seq     bigint NOT NULL,
    last_seq      bigint NOT NULL,
    block         text NOT NULL,      -- JSON of events.Block
    PRIMARY KEY (tenant, session, id)
);

-- Every kept event. JSON is text here and above since jsonb knows no NUL, loses the bytes as they were, and limits depth.
CREATE TABLE events (
    tenant  text NOT NULL,
    session text NOT NULL,
    seq     bigint NOT NULL,
    type    text NOT NULL,
    event   text NOT NULL,            -- JSON of events.WireEvent
    PRIMARY KEY (tenant, session, seq)
);

-- Text of blocks that are pending, or not known yet, in pieces. Pieces may overlap and leave holes: blocks.StreamedText joins them.
CREATE TABLE text_in_flight (
    tenant       text NOT NULL,
    session      text NOT NULL,
    block        text NOT NULL,
    "offset"     bigint NOT NULL,     -- in bytes of UTF-8
    grp          smallint NOT NULL,
    execution    text NOT NULL,
    conversation text NOT NULL,
    at           timestamptz NOT NULL,     -- when the piece was written
    text         text NOT NULL,
    PRIMARY KEY (tenant, session, block, "offset")
);

CREATE TABLE tool_calls (
    tenant       text NOT NULL,
    session      text NOT NULL,
    tool_use_id  text NOT NULL,            -- the agent's own id of the call, else the block's
    block        text NOT NULL,            -- of kind tool_use
    execution    text NOT NULL,
    conversation text NOT NULL,
    tool_name    text NOT NULL,
    decision     text NOT NULL DEFAULT '', -- allow, deny; '' when nobody was asked
    status       text NOT NULL,            -- pending, complete, error
    started_at   timestamptz NOT NULL,
    ended_at     timestamptz,
    duration_ms  bigint NOT NULL DEFAULT 0,
    first_seq    bigint NOT NULL,
    PRIMARY KEY (tenant, session, tool_use_id)
);

-- Conversations of sub-agents; the agent's own, main, has no row.
CREATE TABLE conversations (
    tenant      text NOT NULL,
    session     text NOT NULL,
    id          text NOT NULL,
    parent      text NOT NULL,
    execution   text NOT NULL,
    subagent    text NOT NULL,
    tool_use_id text NOT NULL,
    name        text NOT NULL,
    status      text NOT NULL,             -- running, completed, failed
    started_at  timestamptz NOT NULL,
    ended_at    timestamptz,
    duration_ms bigint NOT NULL DEFAULT 0,
    first_seq   bigint NOT NULL,
    PRIMARY KEY (tenant, session, id)
);

CREATE TABLE sandboxes (
    tenant     text NOT NULL,
    session    text NOT NULL,
    id         text NOT NULL,
    provider   text NOT NULL,
    engine     text NOT NULL,
    status     text NOT NULL,              -- creating, ready, replaced, terminated, failed
    reason     text NOT NULL DEFAULT '',   -- of its end; what was lost, or the failure's code and message
    created_at timestamptz NOT NULL,
    ready_at   timestamptz,
    ended_at   timestamptz,
    PRIMARY KEY (tenant, session, id)
);

CREATE TABLE keys (
    tenant     text NOT NULL,
    id         text NOT NULL,
    grp        smallint NOT NULL,
    name       text NOT NULL,
    prefix     text NOT NULL,
    sha256     text NOT NULL,
    created_at timestamptz NOT NULL,
    revoked_at timestamptz,
    PRIMARY KEY (tenant, id)
);

CREATE INDEX keys_by_hash ON keys (sha256);

-- Commits that could not be projected, or not wholly; DEAD names them as well. One that cannot be decoded counts no seq.
CREATE TABLE poison (
    grp      smallint NOT NULL,
    position text NOT NULL,
    subject  text NOT NULL,
    reason   text NOT NULL,
    at       timestamptz NOT NULL,         -- when the log stored it
    PRIMARY KEY (position)
);

-- Moves a checkpoint, which takes its row's lock until the transaction ends. SP001: another projector moved it.
-- +goose StatementBegin
CREATE FUNCTION advance(g smallint, previous bigint, next bigint, next_shard smallint, next_commit text, next_time timestamptz, lag bigint, caught boolean, deltas timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE checkpoints SET position = next, shard = next_shard, commit_id = next_commit, log_time = next_time, lag_ms = lag,
           caught_up = caught, deltas_at = deltas, updated_at = clock_timestamp()
     WHERE grp = g AND position = previous;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'checkpoint of group % is not at % any more', g, previous USING ERRCODE = 'SP001';
    END IF;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION advance;
DROP TABLE checkpoints, sessions, deleted_sessions, executions, blocks, events, text_in_flight, tool_calls, conversations, sandboxes, keys, poison;
