-- name: Definition :one
SELECT e.state, v.version, v.spec, v.document, v.created_at FROM catalogue_entries e
  JOIN catalogue_versions v ON v.tenant = e.tenant AND v.id = e.id
   AND v.version = coalesce(e.state::json -> 'tags' ->> @version::text, @version::text)
 WHERE e.tenant = @tenant AND e.id = @entry AND NOT v.removed AND (v.version = @version::text OR NOT e.removed);

-- name: Definitions :many
-- Definitions returns the latest versions of entries, up to and including the one that exceeds the number of bytes. found is their number
-- without the limit of bytes.
SELECT scope, org, slug, version, state, spec, created_at, found FROM (
  SELECT e.scope, e.org, e.slug, v.version, e.state, v.spec, v.created_at, count(*) OVER () AS found,
         sum(octet_length(v.spec)) OVER (ORDER BY e.scope, e.org, e.slug) - octet_length(v.spec) AS before
    FROM (SELECT c.tenant, c.id, c.scope, c.org, c.slug, c.latest, c.state FROM catalogue_entries c
           WHERE c.kind = @kind AND NOT c.removed AND (c.tenant = @tenant OR c.tenant = @platform AND c.scope = 'platform')
             AND (c.scope, c.org, c.slug) > (@after_scope, @after_org, @after_slug)
             AND (sqlc.narg('agents')::text[] IS NULL OR c.kind = 'agent' AND c.slug = ANY (sqlc.narg('agents')::text[])
                  OR c.kind NOT IN ('agent', 'instance') OR c.kind = 'instance' AND EXISTS (
                     SELECT FROM catalogue_versions i WHERE i.tenant = c.tenant AND i.id = c.id AND i.version = c.latest
                        AND i.spec::json #>> '{agent,slug}' = ANY (sqlc.narg('agents')::text[])))
           ORDER BY c.scope, c.org, c.slug LIMIT @size) e
    JOIN catalogue_versions v ON v.tenant = e.tenant AND v.id = e.id AND v.version = e.latest) page
 WHERE before < @bytes::bigint ORDER BY scope, org, slug;

-- name: HasSealed :one
SELECT EXISTS (SELECT FROM catalogue_versions
                WHERE tenant = @tenant AND id = @entry AND spec::json -> 'variables' -> @name::text ->> 'sealed' = @key::text);
