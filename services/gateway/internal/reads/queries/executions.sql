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
