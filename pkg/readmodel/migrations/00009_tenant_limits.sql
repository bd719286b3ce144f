-- +goose Up

-- Limits of tenants that have limits of their own.
CREATE TABLE tenant_limits (
    tenant   text NOT NULL,
    grp      smallint NOT NULL,
    limits   text NOT NULL,                      -- JSON of events.TenantLimits
    set_at   timestamptz NOT NULL,
    removed  boolean NOT NULL,
    PRIMARY KEY (tenant)
);

-- +goose Down
DROP TABLE tenant_limits;
