-- +goose Up

-- One row for each commit that a client caused: who did what. Rows of deleted sessions stay.
CREATE TABLE audit (
    tenant       text NOT NULL,
    shard        smallint NOT NULL,            -- of the log
    seq          bigint NOT NULL,              -- of the commit in the shard's stream
    grp          smallint NOT NULL,
    at           timestamptz NOT NULL,         -- when the log stored the commit
    aspect       text NOT NULL,                -- of the commit's subject: life, key, agent, …
    subject      text NOT NULL,                -- id of the session, or of the entry of the catalogue
    about        text NOT NULL,                -- the API key, or the entry's reference; '' for a session
    execution    text NOT NULL,                -- '' for none
    types        text NOT NULL,                -- of the commit's events, each once, separated by commas
    actor_kind   text NOT NULL,
    actor        text NOT NULL,
    key          text NOT NULL,                -- id of the API key; '' for none
    end_user     text NOT NULL,                -- whom the key's holder named
    service      text NOT NULL,                -- that wrote the commit
    address      text NOT NULL,                -- of the client
    PRIMARY KEY (tenant, shard, seq)
);

CREATE INDEX audit_by_time    ON audit (tenant, at, shard, seq);
CREATE INDEX audit_by_subject ON audit (tenant, subject, at, shard, seq);
CREATE INDEX audit_by_actor   ON audit (tenant, actor, at, shard, seq);
CREATE INDEX audit_by_user    ON audit (tenant, end_user, at, shard, seq) WHERE end_user <> '';
CREATE INDEX audit_by_key     ON audit (tenant, key, at, shard, seq) WHERE key <> actor;

-- The log knows who did what so far: each group is folded again from zero when its projector starts.
UPDATE checkpoints SET commit_id = 'folded before audit', caught_up = false WHERE position > 0;

-- +goose Down
DROP TABLE audit;
