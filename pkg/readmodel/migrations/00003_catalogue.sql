-- +goose Up

-- One row for each agent, instance, environment and skill: what its tags name. What is the platform's lies under tenant platform.
CREATE TABLE catalogue_entries (
    tenant     text NOT NULL,
    id         text NOT NULL,                    -- events.CatalogueID
    grp        smallint NOT NULL,
    kind       text NOT NULL,                    -- agent, instance, environment, skill
    scope      text COLLATE "C" NOT NULL,        -- organization, identity_account, platform
    org        text COLLATE "C" NOT NULL,
    slug       text COLLATE "C" NOT NULL,
    latest     text NOT NULL,                    -- the version that tag latest names; '' for none
    state      text NOT NULL,                    -- JSON of versions.State, without commands and places: the tags, the last versions
    removed    boolean NOT NULL,                 -- hidden: only a digest finds its versions
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,             -- of the last event about it
    PRIMARY KEY (tenant, id)
);

CREATE INDEX catalogue_entries_by_slug ON catalogue_entries (tenant, kind, scope, org, slug);

-- One row for each version of them, which never changes but for being removed, and made again.
CREATE TABLE catalogue_versions (
    tenant     text NOT NULL,
    id         text NOT NULL,                    -- of the entry
    version    text NOT NULL,                    -- SHA-256 in hex, of the definition or of the skill's ZIP
    grp        smallint NOT NULL,
    spec       text NOT NULL,                    -- JSON of events.AgentSpec, InstanceSpec or EnvironmentSpec; of a skill its name, description, bytes, unpackedBytes, files
    document   text NOT NULL,                    -- SKILL.md of a skill
    created_at timestamptz NOT NULL,
    position   text NOT NULL,                    -- of the commit that made it
    removed    boolean NOT NULL,
    PRIMARY KEY (tenant, id, version)
);

ALTER TABLE sessions
    ADD COLUMN agent_ref    text NOT NULL DEFAULT '',     -- with the version; '' for the built-in agent
    ADD COLUMN instance     text NOT NULL DEFAULT '',     -- with the version; '' for none
    ADD COLUMN environments text NOT NULL DEFAULT '[]';   -- JSON: references of the layers above the instance's

ALTER TABLE executions
    ADD COLUMN resolved text;                             -- JSON of events.ExecutionResolved; null before

-- +goose Down
ALTER TABLE executions DROP COLUMN resolved;
ALTER TABLE sessions DROP COLUMN agent_ref, DROP COLUMN instance, DROP COLUMN environments;
DROP TABLE catalogue_entries, catalogue_versions;
