-- +goose Up

-- Reads JSON although it may hold U+0000, which Postgres cannot have in a text; it becomes U+FFFD, as the projector makes it. For the updates below.
-- +goose StatementBegin
CREATE FUNCTION readable(value text) RETURNS json LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT regexp_replace(value, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g')::json
$$;
-- +goose StatementEnd

-- The terms by which the metadata of a row is found: one for each member of its object, and one for the member with its value: a
-- string as it is, anything else as its JSON. They are hashes, since an index refuses long ones, and hold the tenant, so
-- that one index keeps tenants apart. Metadata that Postgres cannot read has no terms: an error here would refuse the row.
-- Only functions of Postgres itself are called, since CREATE INDEX and ANALYZE run without this schema in their search path.
-- +goose StatementBegin
CREATE FUNCTION metadata_terms(tenant text, metadata text) RETURNS text[] LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE COST 1000 AS $$
BEGIN
    IF metadata IS NULL OR left(metadata, 1) <> '{' THEN
        RETURN '{}';
    END IF;
    BEGIN
        RETURN (SELECT coalesce(array_agg(DISTINCT md5(t.term)), '{}')
                  FROM json_each_text(regexp_replace(metadata, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g')::json) m,
                       LATERAL (VALUES (tenant || '/' || length(m.key) || '/' || m.key),
                                       (tenant || '/' || length(m.key) || '/' || m.key || '/' || coalesce(m.value, 'null'))) t(term));
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        RETURN '{}';
    END;
END $$;
-- +goose StatementEnd

ALTER TABLE executions
    ADD COLUMN query      text NOT NULL DEFAULT '',   -- the beginning of its message: up to 1000 characters of text
    ADD COLUMN updated_at timestamptz GENERATED ALWAYS AS (greatest(queued_at, dispatched_at, started_at, ended_at)) STORED;

ALTER TABLE sessions
    ADD COLUMN title text NOT NULL DEFAULT '',        -- query of its first execution
    -- An index on updated_at would be written with each batch of events. This changes once a minute; within one, rows are sorted.
    ADD COLUMN updated_minute timestamp GENERATED ALWAYS AS (date_trunc('minute', updated_at AT TIME ZONE 'UTC')) STORED;

UPDATE executions x SET query = left(coalesce(nullif(b.message ->> 'content', ''), (
        SELECT p ->> 'text' FROM json_array_elements(b.message -> 'parts') WITH ORDINALITY AS e(p, n)
         WHERE p ->> 'type' = 'text' AND p ->> 'text' <> '' ORDER BY n LIMIT 1), ''), 1000)
  FROM (SELECT DISTINCT ON (tenant, session, execution) tenant, session, execution, readable(block) AS message
          FROM blocks WHERE kind = 'user_message' AND execution <> '' ORDER BY tenant, session, execution, first_seq) b
 WHERE b.tenant = x.tenant AND b.session = x.session AND b.execution = x.id;

UPDATE sessions s SET title = x.query FROM executions x WHERE x.tenant = s.tenant AND x.session = s.id AND x.ord = 0;

DROP FUNCTION readable;

CREATE INDEX sessions_by_created      ON sessions (tenant, created_at, id);
CREATE INDEX sessions_by_updated      ON sessions (tenant, updated_minute);
CREATE INDEX sessions_by_status       ON sessions (tenant, status, created_at, id);
CREATE INDEX sessions_by_agent        ON sessions (tenant, agent, created_at, id);
CREATE INDEX sessions_by_architecture ON sessions (tenant, architecture, created_at, id);
CREATE INDEX sessions_by_metadata     ON sessions USING gin (metadata_terms(tenant, metadata));

CREATE INDEX executions_by_created  ON executions (tenant, queued_at, id);
CREATE INDEX executions_by_updated  ON executions (tenant, updated_at, id);
CREATE INDEX executions_by_phase    ON executions (tenant, phase, queued_at, id);
CREATE INDEX executions_by_metadata ON executions USING gin (metadata_terms(tenant, metadata));

-- +goose Down
DROP INDEX sessions_by_metadata, executions_by_metadata;
DROP INDEX sessions_by_created, sessions_by_updated, sessions_by_status, sessions_by_agent, sessions_by_architecture;
DROP INDEX executions_by_created, executions_by_updated, executions_by_phase;
ALTER TABLE sessions DROP COLUMN title, DROP COLUMN updated_minute;
ALTER TABLE executions DROP COLUMN query, DROP COLUMN updated_at;
DROP FUNCTION metadata_terms;
