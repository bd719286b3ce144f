-- +goose Up

-- Gateways read text in flight from DELTAS (docs/adr/0074): the read models have none.
DROP TABLE text_in_flight;

-- +goose Down
CREATE TABLE text_in_flight (
    tenant       text NOT NULL,
    session      text NOT NULL,
    block        text NOT NULL,
    "offset"     bigint NOT NULL,
    grp          smallint NOT NULL,
    execution    text NOT NULL,
    conversation text NOT NULL,
    at           timestamptz NOT NULL,
    text         text NOT NULL,
    PRIMARY KEY (tenant, session, block, "offset")
);
