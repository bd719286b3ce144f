-- name: AcceptedKey :one
SELECT k.tenant::text AS tenant, k.id::text AS id, k.role::text AS role, k.agents::text AS agents FROM accepted_key(@sha256) k;

-- name: Now :one
SELECT now()::timestamptz AS now;

-- name: KeyRefusals :many
SELECT id, key_refusal(tenant, id) AS reason FROM keys WHERE id = ANY (@ids::text[]);

-- name: KeysNamed :many
SELECT id FROM keys WHERE tenant = @tenant AND name = @name;

-- name: Keys :many
SELECT id, name, prefix, created_at, revoked_at, role, agents, expires_at, created_by FROM keys
 WHERE tenant = @tenant
   AND (sqlc.narg('agents')::text[] IS NULL OR agents <> '' AND string_to_array(agents, ',') <@ sqlc.narg('agents')::text[])
 ORDER BY id DESC;
