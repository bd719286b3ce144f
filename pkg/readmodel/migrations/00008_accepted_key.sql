-- +goose Up

-- The key with a hash, unless it was revoked. The role of gateways may call this, and may not read the hashes. The body is bound to
-- the table when the function is created, so no search path of a caller leads to another one, and a rebuild may rename the schema.
-- +goose StatementBegin
CREATE FUNCTION accepted_key(hash text) RETURNS TABLE (tenant text, id text) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT k.tenant, k.id FROM keys k WHERE k.sha256 = hash AND k.revoked_at IS NULL;
END;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION accepted_key FROM PUBLIC;

-- +goose Down
DROP FUNCTION accepted_key;
