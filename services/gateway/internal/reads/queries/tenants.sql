-- name: Budgets :many
SELECT b.period, b.turns, b.tokens, b.cost_usd, b.time_ms,
       coalesce(sum(u.turns), 0)::bigint AS used_turns, coalesce(sum(u.tokens), 0)::bigint AS used_tokens,
       coalesce(sum(u.cost_usd), 0)::float8 AS used_cost_usd, coalesce(sum(u.time_ms), 0)::bigint AS used_time_ms
  FROM tenant_budgets b LEFT JOIN tenant_usage u ON u.tenant = b.tenant
   AND u.day >= CASE b.period WHEN 'day' THEN @today::text WHEN 'month' THEN @month::text ELSE '' END
 WHERE b.tenant = @tenant AND NOT b.removed
 GROUP BY b.tenant, b.period ORDER BY b.period;

-- name: Limits :one
SELECT coalesce((SELECT l.limits FROM tenant_limits l WHERE l.tenant = @tenant AND NOT l.removed), '{}')::text AS own,
       (SELECT count(*) FROM executions x WHERE x.tenant = @tenant AND x.phase IN ('starting', 'running')) AS slots,
       (SELECT count(*) FROM sandboxes b WHERE b.tenant = @tenant AND b.status IN ('creating', 'ready')) AS sandboxes,
       (SELECT count(*) FROM sessions s WHERE s.tenant = @tenant) AS sessions,
       (SELECT count(*) FROM keys k WHERE k.tenant = @tenant AND k.revoked_at IS NULL) AS keys,
       (SELECT coalesce(sum(u.events), 0)::float8 FROM tenant_usage u WHERE u.tenant = @tenant AND u.day >= @today) AS events,
       (SELECT coalesce(sum(u.event_bytes), 0)::float8 FROM tenant_usage u WHERE u.tenant = @tenant AND u.day >= @today) AS event_bytes,
       (SELECT greatest(0, coalesce(sum(u.stored_bytes), 0))::float8 FROM tenant_usage u
         WHERE u.tenant = @tenant AND u.id = ANY (@stored_rows::text[])) AS stored_bytes;

-- name: CountSessions :one
SELECT (SELECT count(*) FROM (SELECT FROM sessions s WHERE s.tenant = @tenant LIMIT @most) AS counted) AS sessions,
       ARRAY(SELECT s.id FROM sessions s WHERE s.tenant = @tenant AND s.id = ANY (@ids::text[])
             UNION SELECT d.id FROM deleted_sessions d WHERE d.tenant = @tenant AND d.id = ANY (@ids::text[]))::text[] AS known;

-- name: Stored :one
SELECT (SELECT coalesce(sum(u.stored_bytes), 0)::bigint FROM tenant_usage u
         WHERE u.tenant = @tenant AND u.id = ANY (@stored_rows::text[])) AS bytes,
       ARRAY(SELECT grp::bigint FROM checkpoints ORDER BY grp)::bigint[] AS groups,
       ARRAY(SELECT position FROM checkpoints ORDER BY grp)::bigint[] AS positions;
