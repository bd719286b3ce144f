-- name: Execution :one
-- Execution returns an execution, columns of its session, and the JSON of its rows of usage.
SELECT executions.id, session, executions.phase, code, message, reason, attempt, executor, model, executions.input_tokens, executions.output_tokens,
       executions.cache_read_tokens, executions.cache_write_tokens, executions.cost_usd, result, executions.metadata, queued_at, dispatched_at, started_at, ended_at, duration_ms, first_seq,
       resolved, query, executions.updated_at, owner.agent, owner.architecture, owner.agent_ref, owner.instance,
       executions.sandbox_ms, executions.sandbox_cost_usd, executions.recovered_from,
       (SELECT json_agg(u ORDER BY u.day, u.provider, u.model) FROM usage u
         WHERE u.tenant = executions.tenant AND u.session = executions.session AND u.execution = executions.id) AS metered
FROM executions
LEFT JOIN sessions owner ON owner.tenant = executions.tenant AND owner.id = executions.session
WHERE executions.tenant = @tenant AND executions.id = @execution;

-- name: SessionExecutions :many
SELECT executions.id, session, executions.phase, code, message, reason, attempt, executor, model, executions.input_tokens, executions.output_tokens,
       executions.cache_read_tokens, executions.cache_write_tokens, executions.cost_usd, result, executions.metadata, queued_at, dispatched_at, started_at, ended_at, duration_ms, first_seq,
       resolved, query, executions.updated_at, owner.agent, owner.architecture, owner.agent_ref, owner.instance,
       executions.sandbox_ms, executions.sandbox_cost_usd, executions.recovered_from,
       (SELECT json_agg(u ORDER BY u.day, u.provider, u.model) FROM usage u
         WHERE u.tenant = executions.tenant AND u.session = executions.session AND u.execution = executions.id) AS metered
FROM executions
LEFT JOIN sessions owner ON owner.tenant = executions.tenant AND owner.id = executions.session
WHERE executions.tenant = @tenant AND executions.session = @session AND (@after::text = '' OR
      ord > (SELECT x.ord FROM executions x WHERE x.tenant = @tenant AND x.session = @session AND x.id = @after))
ORDER BY ord LIMIT @size;

-- name: ExecutionsAt :many
SELECT executions.id, session, executions.phase, code, message, reason, attempt, executor, model, executions.input_tokens, executions.output_tokens,
       executions.cache_read_tokens, executions.cache_write_tokens, executions.cost_usd, result, executions.metadata, queued_at, dispatched_at, started_at, ended_at, duration_ms, first_seq,
       resolved, query, executions.updated_at, owner.agent, owner.architecture, owner.agent_ref, owner.instance,
       executions.sandbox_ms, executions.sandbox_cost_usd, executions.recovered_from,
       (SELECT json_agg(u ORDER BY u.day, u.provider, u.model) FROM usage u
         WHERE u.tenant = executions.tenant AND u.session = executions.session AND u.execution = executions.id) AS metered
FROM executions
LEFT JOIN sessions owner ON owner.tenant = executions.tenant AND owner.id = executions.session
WHERE executions.tenant = @tenant AND executions.session = @session AND first_seq <= @seq
  AND (first_seq > @since OR executions.id = ANY (@open::text[]))
ORDER BY ord DESC LIMIT @size;

-- name: ExecutionSession :one
SELECT session FROM executions WHERE tenant = @tenant AND id = @execution;

-- name: ExecutionSpan :one
-- ExecutionSpan returns the seq of an execution's first event, and of the event that ends it, or 0.
SELECT x.first_seq, coalesce((SELECT e.seq FROM events e WHERE e.tenant = x.tenant AND e.session = x.session AND e.seq >= x.first_seq
         AND e.type = ANY (@terminal::text[]) AND e.event::json ->> 'executionId' = x.id ORDER BY e.seq LIMIT 1), 0)::bigint AS last_seq
  FROM executions x WHERE x.tenant = @tenant AND x.session = @session AND x.id = @execution;

-- name: LastEnd :one
SELECT ended_at FROM executions WHERE tenant = @tenant AND session = @session AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT 1;

-- name: ExecutionWait :one
-- ExecutionWait returns what the read models contain about the wait of an execution that has not ended: the provider of its
-- session and the engine of the session's sandbox, the active execution of the session, the execution's oldest pending
-- approval request, and its last pause. Texts are empty for none.
SELECT s.provider, coalesce(sandbox.provider, '')::text AS sandbox_provider, coalesce(sandbox.engine, '')::text AS sandbox_engine,
       s.active_execution, coalesce(active.phase, '')::text AS active_phase,
       coalesce(approval.id, '')::text AS approval, coalesce(approval.requested_at, 'epoch')::timestamptz AS approval_requested_at,
       coalesce((SELECT e.event::json ->> 'time' FROM events e
                  WHERE x.phase = 'paused' AND e.tenant = x.tenant AND e.session = x.session AND e.seq >= x.first_seq AND e.type = 'execution_paused'
                  ORDER BY e.seq DESC LIMIT 1), '')::text AS paused_at
  FROM executions x
  JOIN sessions s ON s.tenant = x.tenant AND s.id = x.session
  LEFT JOIN executions active ON active.tenant = s.tenant AND active.session = s.id AND active.id = s.active_execution
  LEFT JOIN LATERAL (
      SELECT b.provider, b.engine FROM sandboxes b WHERE b.tenant = s.tenant AND b.session = s.id AND b.ended_at IS NULL
       ORDER BY b.created_at DESC, b.id DESC LIMIT 1) sandbox ON true
  LEFT JOIN LATERAL (
      SELECT a.id, a.requested_at FROM approvals a
       WHERE a.tenant = x.tenant AND a.session = x.session AND a.execution = x.id AND a.status = 'pending' AND a.ended_seq = 0
       ORDER BY a.requested_at, a.id LIMIT 1) approval ON true
 WHERE x.tenant = @tenant AND x.id = @execution;
