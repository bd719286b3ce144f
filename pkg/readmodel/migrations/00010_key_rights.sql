-- +goose Up

-- Events of builds without roles leave all of these at their defaults, so rows that are there need no new fold.
ALTER TABLE keys
    ADD COLUMN role       text NOT NULL DEFAULT '',      -- use, operate, admin; '' of a key from before there were roles, which is an admin
    ADD COLUMN agents     text NOT NULL DEFAULT '',      -- slugs of the only agents that it may use, separated by commas; '' for all
    ADD COLUMN expires_at timestamptz,                   -- null for never
    ADD COLUMN created_by text NOT NULL DEFAULT '';      -- the key that made it, where the event says so

-- Why a key is not accepted: '' if it is, else revoked or expired. A key is accepted as long as all keys are that it descends from: the
-- rows of a revocation come one by one, each by its own projector group. A maker whose row is missing counts as revoked. Expiry goes by
-- the clock of this server. As in 00008, the bodies are bound to the table, and no search path of a caller leads to another one.
-- +goose StatementBegin
CREATE FUNCTION key_refusal(owner text, key text) RETURNS text LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    WITH RECURSIVE chain (created_by, revoked_at, expires_at) AS (
        SELECT k.created_by, k.revoked_at, k.expires_at FROM keys k WHERE k.tenant = owner AND k.id = key
        UNION
        SELECT k.created_by, k.revoked_at, k.expires_at FROM chain c JOIN keys k ON k.tenant = owner AND k.id = c.created_by
    )
    SELECT CASE WHEN bool_or(created_by = '') IS NOT TRUE OR bool_or(revoked_at IS NOT NULL) THEN 'revoked'
                WHEN bool_or(expires_at <= now()) THEN 'expired'
                ELSE '' END FROM chain;
END;
-- +goose StatementEnd

DROP FUNCTION accepted_key;

-- +goose StatementBegin
CREATE FUNCTION accepted_key(hash text) RETURNS TABLE (tenant text, id text, role text, agents text) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT k.tenant, k.id, k.role, k.agents FROM keys k WHERE k.sha256 = hash AND key_refusal(k.tenant, k.id) = '';
END;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION accepted_key FROM PUBLIC;
REVOKE ALL ON FUNCTION key_refusal FROM PUBLIC;

-- +goose Down
DROP FUNCTION accepted_key;
DROP FUNCTION key_refusal;
-- +goose StatementBegin
CREATE FUNCTION accepted_key(hash text) RETURNS TABLE (tenant text, id text) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT k.tenant, k.id FROM keys k WHERE k.sha256 = hash AND k.revoked_at IS NULL;
END;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION accepted_key FROM PUBLIC;
ALTER TABLE keys DROP COLUMN role, DROP COLUMN agents, DROP COLUMN expires_at, DROP COLUMN created_by;
