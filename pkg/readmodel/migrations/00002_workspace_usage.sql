-- +goose Up

ALTER TABLE sessions
    ADD COLUMN snapshot        text NOT NULL DEFAULT '',     -- the last one of the workspace, in the bucket workspaces; '' for none
    ADD COLUMN snapshot_at     timestamptz,
    ADD COLUMN workspace_files bigint NOT NULL DEFAULT 0,    -- in that snapshot
    ADD COLUMN workspace_bytes bigint NOT NULL DEFAULT 0;    -- of all its files

-- executions.phase knows paused as well; sandboxes.status too.
ALTER TABLE sandboxes
    ADD COLUMN image        text NOT NULL DEFAULT '',
    ADD COLUMN health       text NOT NULL DEFAULT '',        -- healthy, unhealthy; '' before the first check
    ADD COLUMN health_why   text NOT NULL DEFAULT '',        -- of unhealthy
    ADD COLUMN memory_bytes bigint NOT NULL DEFAULT 0,       -- of the agent's processes, at the last change of health
    ADD COLUMN disk_bytes   bigint NOT NULL DEFAULT 0;       -- of workspace and agent's records, at the same time

-- What changed in a workspace, and which execution did it: the last change of each path. What a workspace holds is in its snapshot.
CREATE TABLE files (
    tenant     text NOT NULL,
    session    text NOT NULL,
    id         text NOT NULL,                   -- the path; of a long one its beginning and a hash
    path       text NOT NULL,                   -- relative to the workspace
    size       bigint NOT NULL,                 -- bytes; 0 once it is deleted
    "binary"   boolean NOT NULL,
    deleted    boolean NOT NULL,
    execution  text NOT NULL,                   -- during which it changed; '' for none
    changed_at timestamptz NOT NULL,
    last_seq   bigint NOT NULL,                 -- of the event that says so
    PRIMARY KEY (tenant, session, id)
);

-- Requests to models, as the egress proxy metered them.
CREATE TABLE usage (
    tenant             text NOT NULL,
    session            text NOT NULL,
    id                 text NOT NULL,           -- of execution, provider, model and day
    execution          text NOT NULL,           -- '' outside of one
    provider           text NOT NULL,           -- anthropic, openai, nvidia, or the name of a custom host
    model              text NOT NULL,
    day                text NOT NULL,           -- in UTC, such as 2026-01-31
    requests           bigint NOT NULL,
    failed             bigint NOT NULL,         -- that got no answer, or one with a status of 400 or more
    input_tokens       bigint NOT NULL,
    output_tokens      bigint NOT NULL,
    cache_read_tokens  bigint NOT NULL,
    cache_write_tokens bigint NOT NULL,
    cost_usd           double precision NOT NULL,
    prices             text NOT NULL,           -- version of the price table of the last request that had a price
    first_byte_ms      bigint NOT NULL,         -- sum over the requests
    duration_ms        bigint NOT NULL,         -- sum over the requests
    PRIMARY KEY (tenant, session, id)
);

CREATE INDEX usage_by_execution ON usage (tenant, session, execution);

-- +goose Down
DROP TABLE files, usage;
ALTER TABLE sandboxes DROP COLUMN image, DROP COLUMN health, DROP COLUMN health_why, DROP COLUMN memory_bytes, DROP COLUMN disk_bytes;
ALTER TABLE sessions DROP COLUMN snapshot, DROP COLUMN snapshot_at, DROP COLUMN workspace_files, DROP COLUMN workspace_bytes;
