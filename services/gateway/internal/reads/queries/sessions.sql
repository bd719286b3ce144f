-- name: Session :one
-- Session returns a session and its sandbox: the one that has not ended, or else the last one. sandbox_id is empty if there is none.
SELECT sessions.id, sessions.status, agent, agent_version, architecture, sessions.provider, options, metadata, sessions.created_at, updated_at,
       tip, tip_position, active_execution, queued, executions, idle, snapshot, snapshot_at, workspace_files, workspace_bytes,
       agent_ref, instance, environments, title, forked,
       (SELECT count(*) FROM sessions f WHERE f.tenant = sessions.tenant AND f.parent = sessions.id AND f.parent <> '') AS forks,
       sandbox_ms, sandbox_cost_usd, coalesce(sandbox.id, '')::text AS sandbox_id, coalesce(sandbox.status, '')::text AS sandbox_status,
       coalesce(sandbox.health, '')::text AS sandbox_health, coalesce(sandbox.reason, '')::text AS sandbox_reason,
       coalesce(sandbox.provider, '')::text AS sandbox_provider, coalesce(sandbox.engine, '')::text AS sandbox_engine,
       coalesce(sandbox.image, '')::text AS sandbox_image, coalesce(sandbox.created_at, 'epoch')::timestamptz AS sandbox_created_at,
       sandbox.ended_at AS sandbox_ended_at, coalesce(sandbox.memory_bytes, 0)::bigint AS sandbox_memory_bytes,
       coalesce(sandbox.disk_bytes, 0)::bigint AS sandbox_disk_bytes,
       sessions.phase, phase_since, failed_execution, coalesce(failed.code, '')::text AS failed_code, coalesce(failed.message, '')::text AS failed_message,
       failed.ended_at AS failed_at, open_approvals, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost_usd
FROM sessions
LEFT JOIN LATERAL (
    SELECT x.code, x.message, x.ended_at FROM executions x
     WHERE x.tenant = sessions.tenant AND x.session = sessions.id AND x.id = sessions.failed_execution) failed ON true
LEFT JOIN LATERAL (
    SELECT b.id, b.status, b.health, CASE WHEN b.ended_at IS NULL THEN b.health_why ELSE b.reason END AS reason, b.provider, b.engine, b.image,
           b.created_at, b.ended_at, b.memory_bytes, b.disk_bytes
      FROM sandboxes b WHERE b.tenant = sessions.tenant AND b.session = sessions.id
     ORDER BY b.ended_at IS NULL DESC, b.created_at DESC, b.id DESC LIMIT 1) sandbox ON true
WHERE sessions.tenant = @tenant AND sessions.id = @session;

-- name: SessionStatus :one
SELECT status FROM sessions WHERE tenant = @tenant AND id = @session;

-- name: SessionAgent :one
SELECT agent FROM sessions WHERE tenant = @tenant AND id = @session;

-- name: SessionExists :one
SELECT EXISTS (SELECT FROM sessions WHERE tenant = @tenant AND id = @session);

-- name: SessionExisted :one
SELECT (EXISTS (SELECT FROM sessions s WHERE s.tenant = @tenant AND s.id = @session)
     OR EXISTS (SELECT FROM deleted_sessions d WHERE d.tenant = @tenant AND d.id = @session))::boolean AS existed;

-- name: SavedState :one
-- SavedState returns what a fold up to an event begins with: the last saved state up to the event, or none. seq 0 means the last event.
SELECT s.tip, s.forked,
       coalesce((SELECT x.query FROM executions x
                  WHERE x.tenant = s.tenant AND x.session = s.id AND x.ord = 0 AND (@seq::bigint = 0 OR x.first_seq <= @seq)), '')::text AS title,
       coalesce((SELECT t.state FROM session_states t
                  WHERE t.tenant = s.tenant AND t.session = s.id AND t.version = @version AND (@seq::bigint = 0 OR t.seq <= @seq)
                  ORDER BY t.seq DESC LIMIT 1), '')::text AS state
  FROM sessions s WHERE s.tenant = @tenant AND s.id = @session;

-- name: Ancestors :many
-- Ancestors returns the parent of a session, of its parent, and so on. The parent of the last one is empty.
WITH RECURSIVE line (parent, forked, depth) AS (
    SELECT s.parent, s.forked, 0 FROM sessions s WHERE s.tenant = @tenant AND s.id = @session
    UNION ALL
    SELECT p.parent, p.forked, l.depth + 1 FROM line l CROSS JOIN LATERAL (
        SELECT s.parent, s.forked FROM sessions s WHERE s.tenant = @tenant AND s.id = l.parent
        UNION ALL SELECT d.parent, d.forked FROM deleted_sessions d WHERE d.tenant = @tenant AND d.id = l.parent) p
     WHERE l.parent <> ''
) SELECT parent, (CASE parent WHEN '' THEN 0 ELSE (forked::json ->> 'effective')::bigint END)::bigint AS effective FROM line ORDER BY depth;

-- name: Conversations :many
SELECT id, parent, execution, subagent, tool_use_id, name, status, started_at, ended_at, duration_ms
  FROM conversations WHERE tenant = @tenant AND session = @session ORDER BY first_seq, id;

-- name: ConversationsAt :many
SELECT id, parent, execution, subagent, tool_use_id, name, status, started_at, ended_at, duration_ms
  FROM conversations WHERE tenant = @tenant AND session = @session
   AND first_seq <= @seq AND (first_seq > @since OR id = ANY (@open::text[])) ORDER BY first_seq, id LIMIT @size;

-- name: FileChanges :many
SELECT path, execution FROM files WHERE tenant = @tenant AND session = @session AND NOT deleted AND execution <> '';
