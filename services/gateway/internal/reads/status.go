package reads

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/progress"
)

// statusQuery is the SQL statement for an execution's status. Each row has the name of a part of the status, and the
// JSON of that part. The first row is the execution; the rows of each other part are in the order of their first
// event.
const statusQuery = `
WITH x AS MATERIALIZED (
  SELECT e.tenant, e.session, e.id, e.ord, e.phase, e.attempt, e.queued_at, e.dispatched_at, e.started_at, e.ended_at, e.duration_ms, e.model,
         e.input_tokens, e.output_tokens, e.cache_read_tokens, e.cache_write_tokens, e.cost_usd, e.sandbox_ms, e.sandbox_cost_usd,
         e.code, e.message, e.reason, left(e.result, $3) AS result, s.tip,
         CASE WHEN e.dispatched_at IS NOT NULL AND e.ended_at IS NULL THEN s.updated_at ELSE e.updated_at END AS updated_at
    FROM executions e JOIN sessions s ON s.tenant = e.tenant AND s.id = e.session
   WHERE e.tenant = $1 AND e.id = $2)
SELECT 'execution' AS part, row_to_json(r)::text AS value, 0 AS first_seq
  FROM (SELECT x.*, m.*, c.*, a.*, u.* FROM x,
         LATERAL (SELECT count(*) FILTER (WHERE kind = 'user_message') AS user_messages, count(*) FILTER (WHERE kind = 'assistant_text') AS assistant_messages
                    FROM blocks b WHERE b.tenant = x.tenant AND b.session = x.session AND b.execution_ord = x.ord AND b.execution = x.id) m,
         LATERAL (SELECT count(*) FILTER (WHERE status = 'pending') AS calls_pending, count(*) FILTER (WHERE status = 'complete') AS calls_complete,
                         count(*) FILTER (WHERE status = 'error') AS calls_error
                    FROM tool_calls c WHERE c.tenant = x.tenant AND c.session = x.session AND c.execution = x.id) c,
         LATERAL (SELECT count(*) FILTER (WHERE status = 'running') AS subagents_running, count(*) FILTER (WHERE status = 'completed') AS subagents_completed,
                         count(*) FILTER (WHERE status = 'failed') AS subagents_failed
                    FROM conversations c WHERE c.tenant = x.tenant AND c.session = x.session AND c.execution = x.id) a,
         LATERAL (SELECT coalesce(sum(requests), 0) AS metered_requests, coalesce(sum(failed), 0) AS metered_failed,
                         coalesce(sum(u.input_tokens), 0) AS metered_input_tokens, coalesce(sum(u.output_tokens), 0) AS metered_output_tokens,
                         coalesce(sum(u.cache_read_tokens), 0) AS metered_cache_read_tokens, coalesce(sum(u.cache_write_tokens), 0) AS metered_cache_write_tokens,
                         coalesce(sum(u.cost_usd), 0) AS metered_cost_usd
                    FROM usage u WHERE u.tenant = x.tenant AND u.session = x.session AND u.execution = x.id) u) r
UNION ALL
SELECT 'message', b.block, b.first_seq FROM x, (VALUES (true, $8::int), (false, $4)) AS l(open, size),
       LATERAL (SELECT block, first_seq FROM blocks b WHERE b.tenant = x.tenant AND b.session = x.session AND b.execution_ord = x.ord AND b.execution = x.id
                   AND kind IN ('user_message', 'assistant_text') AND (status = 'pending') = l.open ORDER BY first_seq DESC LIMIT l.size) b
UNION ALL
SELECT 'todos', b.block, b.last_seq FROM x,
       LATERAL (SELECT block, last_seq FROM blocks b WHERE b.tenant = x.tenant AND b.session = x.session AND b.execution_ord = x.ord AND b.execution = x.id
                   AND kind IN ('todo', 'plan') AND conversation = $7 AND strpos(block, CASE kind WHEN 'todo' THEN '"todos":' ELSE '"plan":' END) > 0 ORDER BY last_seq DESC LIMIT 1) b
UNION ALL
SELECT 'call', row_to_json(c)::text, c.first_seq FROM x, (VALUES (true, $8), (false, $5::int)) AS l(open, size),
       LATERAL (SELECT tool_use_id AS id, tool_name AS name, status, conversation, started_at, ended_at, duration_ms, first_seq
                  FROM tool_calls c WHERE c.tenant = x.tenant AND c.session = x.session AND c.execution = x.id AND (status = 'pending') = l.open
                 ORDER BY first_seq DESC LIMIT l.size) c
UNION ALL
SELECT 'subagent', row_to_json(c)::text, c.first_seq FROM x, (VALUES (true, $8), (false, $6::int)) AS l(open, size),
       LATERAL (SELECT subagent AS id, name, status, c.id AS conversation, started_at, ended_at, duration_ms, first_seq
                  FROM conversations c WHERE c.tenant = x.tenant AND c.session = x.session AND c.execution = x.id AND (status = 'running') = l.open
                 ORDER BY first_seq DESC LIMIT l.size) c
UNION ALL
SELECT 'approval', row_to_json(a)::text, a.first_seq FROM x,
       LATERAL (SELECT id, request, requested_at, status = 'decided' AS decided, requested_seq AS first_seq
                  FROM approvals a WHERE a.tenant = x.tenant AND a.session = x.session AND a.execution = x.id AND a.ended_seq = 0
                 ORDER BY requested_seq LIMIT $8) a
ORDER BY first_seq`

// ExecutionStatus returns the status of an execution, which progress.Apply can continue with later events. It first
// waits until the read models have reached minPosition, a position of the execution's session, or "".
func (s *Store) ExecutionStatus(ctx context.Context, tenant, id, minPosition string) (*spoolv1.ExecutionStatus, error) {
	var out *spoolv1.ExecutionStatus
	read := func() error {
		return s.awaitRead(ctx, s.executionSearch(tenant, id), func() error {
			out = nil
			err := s.queryRows(ctx, func(r pgx.Rows) error {
				var part string
				var value []byte
				var firstSeq int64
				if err := r.Scan(&part, &value, &firstSeq); err != nil {
					return err
				}
				if part == "execution" {
					out = progress.New("", id)
				}
				if err := addStatusPart(out, part, value); err != nil {
					return problem.New(problem.Internal, "", "the execution's status in the read models is not valid").WithCause(err)
				}
				return nil
			}, statusQuery, tenant, id, progress.MaxResultBytes+1, progress.MaxMessages, progress.MaxCalls, progress.MaxSubagents, events.MainConversation, progress.MaxOpenElements)
			if err == nil && out == nil {
				return errExecutionNotFound()
			}
			return err
		})
	}
	if err := read(); err != nil || minPosition == "" {
		return out, err
	}
	// The position belongs to the session's log, and only the execution determines the session.
	if err := s.AwaitMinPosition(ctx, out.SessionId, minPosition); err != nil {
		return nil, err
	}
	return out, read()
}

// addStatusPart adds a row of statusQuery, the name of a part and its JSON, to a status.
func addStatusPart(s *spoolv1.ExecutionStatus, part string, value []byte) error {
	switch part {
	case "execution":
		return setStatusRow(s, value)
	case "approval":
		var row struct {
			ID, Request string
			RequestedAt time.Time `json:"requested_at"`
			Decided     bool
		}
		var d events.ApprovalRequested
		if err := json.Unmarshal(value, &row); err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(row.Request), &d); err != nil {
			return err
		}
		d.ApprovalID = row.ID
		a := progress.NewApproval(d, row.RequestedAt)
		a.Decided = row.Decided
		s.PendingApprovals = append(s.PendingApprovals, a)
		s.PendingApprovalCount++
		return nil
	case "message", "todos":
		var b events.Block
		if err := json.Unmarshal(value, &b); err != nil {
			return err
		}
		if part == "todos" {
			progress.SetTodos(s, b.TodoList())
		} else {
			s.Messages = append(s.Messages, progress.NewMessage(b))
		}
		return nil
	}
	var row struct {
		ID, Name, Status, Conversation string
		StartedAt                      *time.Time `json:"started_at"`
		EndedAt                        *time.Time `json:"ended_at"`
		DurationMs                     uint64     `json:"duration_ms"`
	}
	if err := json.Unmarshal(value, &row); err != nil {
		return err
	}
	if part == "call" {
		s.ToolCalls = append(s.ToolCalls, &spoolv1.ToolCallStatus{
			ToolUseId: row.ID, ToolName: progress.TruncateName(row.Name), Status: row.Status, ConversationId: row.Conversation,
			StartedAt: timestampMessage(row.StartedAt), EndedAt: timestampMessage(row.EndedAt), DurationMs: clampUint32(row.DurationMs),
		})
	} else {
		s.Subagents = append(s.Subagents, &spoolv1.SubagentStatus{
			SubagentId: row.ID, ConversationId: row.Conversation, Name: progress.TruncateName(row.Name), Status: row.Status,
			StartedAt: timestampMessage(row.StartedAt), EndedAt: timestampMessage(row.EndedAt), DurationMs: clampUint32(row.DurationMs),
		})
	}
	return nil
}

// setStatusRow sets the fields of a status from the first row of statusQuery, the execution; value is the row's JSON.
func setStatusRow(s *spoolv1.ExecutionStatus, value []byte) error {
	var r struct {
		Session, Phase, Model, Code, Message, Reason, Result string
		Tip, Attempt                                         uint32
		QueuedAt                                             *time.Time `json:"queued_at"`
		DispatchedAt                                         *time.Time `json:"dispatched_at"`
		StartedAt                                            *time.Time `json:"started_at"`
		UpdatedAt                                            *time.Time `json:"updated_at"`
		EndedAt                                              *time.Time `json:"ended_at"`
		DurationMs                                           uint64     `json:"duration_ms"`
		InputTokens                                          uint32     `json:"input_tokens"`
		OutputTokens                                         uint32     `json:"output_tokens"`
		CacheReadTokens                                      uint32     `json:"cache_read_tokens"`
		CacheWriteTokens                                     uint32     `json:"cache_write_tokens"`
		CostUSD                                              float64    `json:"cost_usd"`
		SandboxMs                                            float64    `json:"sandbox_ms"`
		SandboxCostUSD                                       float64    `json:"sandbox_cost_usd"`
		UserMessages                                         uint32     `json:"user_messages"`
		AssistantMessages                                    uint32     `json:"assistant_messages"`
		CallsPending                                         uint32     `json:"calls_pending"`
		CallsComplete                                        uint32     `json:"calls_complete"`
		CallsError                                           uint32     `json:"calls_error"`
		SubagentsRunning                                     uint32     `json:"subagents_running"`
		SubagentsCompleted                                   uint32     `json:"subagents_completed"`
		SubagentsFailed                                      uint32     `json:"subagents_failed"`
		MeteredRequests                                      float64    `json:"metered_requests"`
		MeteredFailed                                        float64    `json:"metered_failed"`
		MeteredInputTokens                                   float64    `json:"metered_input_tokens"`
		MeteredOutputTokens                                  float64    `json:"metered_output_tokens"`
		MeteredCacheReadTokens                               float64    `json:"metered_cache_read_tokens"`
		MeteredCacheWriteTokens                              float64    `json:"metered_cache_write_tokens"`
		MeteredCostUSD                                       float64    `json:"metered_cost_usd"`
	}
	if err := json.Unmarshal(value, &r); err != nil {
		return err
	}
	s.SessionId, s.Seq, s.Phase, s.Final, s.Attempt = r.Session, r.Tip, r.Phase, progress.IsFinalPhase(r.Phase), r.Attempt
	s.QueuedAt, s.DispatchedAt, s.StartedAt = timestampMessage(r.QueuedAt), timestampMessage(r.DispatchedAt), timestampMessage(r.StartedAt)
	s.UpdatedAt, s.EndedAt, s.DurationMs = timestampMessage(r.UpdatedAt), timestampMessage(r.EndedAt), clampUint32(r.DurationMs)
	s.MessageCounts = &spoolv1.MessageCounts{User: r.UserMessages, Assistant: r.AssistantMessages}
	s.ToolCallCounts = &spoolv1.ToolCallCounts{Pending: r.CallsPending, Complete: r.CallsComplete, Error: r.CallsError}
	s.SubagentCounts = &spoolv1.SubagentCounts{Running: r.SubagentsRunning, Completed: r.SubagentsCompleted, Failed: r.SubagentsFailed}
	s.Usage = &spoolv1.Usage{InputTokens: r.InputTokens, OutputTokens: r.OutputTokens, CacheReadTokens: r.CacheReadTokens, CacheWriteTokens: r.CacheWriteTokens}
	s.CostUsd, s.SandboxMs, s.SandboxCostUsd = r.CostUSD, r.SandboxMs, r.SandboxCostUSD
	s.Metered = &spoolv1.UsageTotal{
		InputTokens: r.MeteredInputTokens, OutputTokens: r.MeteredOutputTokens, CacheReadTokens: r.MeteredCacheReadTokens, CacheWriteTokens: r.MeteredCacheWriteTokens,
		CostUsd: r.MeteredCostUSD, Requests: r.MeteredRequests, Failed: r.MeteredFailed,
	}
	s.Model, s.Code, s.Message, s.Reason = nilIfEmpty(progress.TruncateName(r.Model)), nilIfEmpty(progress.TruncateName(r.Code)), nilIfEmpty(progress.TruncateText(r.Message)), nilIfEmpty(progress.TruncateName(r.Reason))
	progress.SetResult(s, r.Result)
	return nil
}
