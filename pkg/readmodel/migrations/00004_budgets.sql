-- +goose Up

-- What a tenant has taken on a day, over all of its sessions, those that were deleted too: one row for each partition group.
CREATE TABLE tenant_usage (
    tenant   text NOT NULL,
    id       text NOT NULL,                      -- of day and group
    grp      smallint NOT NULL,
    day      text COLLATE "C" NOT NULL,          -- in UTC, such as 2026-01-31
    turns    bigint NOT NULL,                    -- executions that were started
    tokens   bigint NOT NULL,                    -- in and out, those of caches too: as the egress proxy metered them, else as agents told
    cost_usd double precision NOT NULL,
    time_ms  bigint NOT NULL,                    -- that executions ran, on the day that they ended
    PRIMARY KEY (tenant, id)
);

-- A tenant's budgets.
CREATE TABLE tenant_budgets (
    tenant   text NOT NULL,
    period   text NOT NULL,                      -- day, month, total
    grp      smallint NOT NULL,
    turns    bigint NOT NULL,                    -- 0 is no bound, here and below
    tokens   bigint NOT NULL,
    cost_usd double precision NOT NULL,
    time_ms  bigint NOT NULL,
    set_at   timestamptz NOT NULL,
    removed  boolean NOT NULL,
    PRIMARY KEY (tenant, period)
);

ALTER TABLE executions
    ADD COLUMN metered boolean NOT NULL DEFAULT false;   -- the egress proxy told of a request to a model

-- +goose Down
ALTER TABLE executions DROP COLUMN metered;
DROP TABLE tenant_usage, tenant_budgets;
