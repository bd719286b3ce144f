package reads

import (
	"context"
	"encoding/json"
	"math"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const executionColumns = `id, session, phase, code, message, reason, attempt, executor, model, input_tokens, output_tokens,
	cache_read_tokens, cache_write_tokens, cost_usd, result, metadata, queued_at, dispatched_at, started_at, ended_at, duration_ms, first_seq, resolved, query, updated_at, agent, architecture, agent_ref, instance, sandbox_ms, sandbox_cost_usd,
	(SELECT json_agg(u ORDER BY u.day, u.provider, u.model) FROM usage u
	  WHERE u.tenant = executions.tenant AND u.session = executions.session AND u.execution = executions.id)`

// executionOwner joins the columns of its session to an execution.
const executionOwner = ` LEFT JOIN LATERAL (
	SELECT s.agent, s.architecture, s.agent_ref, s.instance FROM sessions s WHERE s.tenant = executions.tenant AND s.id = executions.session) owner ON true `

// phases are the phases of executions in the read models.
var phases = []string{"queued", "starting", "running", "paused", "completed", "failed", "cancelled"}

func scanExecution(r scanner) (*spoolv1.Execution, error) {
	var e spoolv1.Execution
	var code, message, reason, executor, model, result string
	var metadata, resolved *string
	var agent, architecture, agentRef, instance *string
	var queued, updated time.Time
	var dispatched, started, ended *time.Time
	var attempt, in, out, read, write, duration, first, ran int64
	var usage *string
	err := r.Scan(&e.ExecutionId, &e.SessionId, &e.Phase, &code, &message, &reason, &attempt, &executor, &model, &in, &out, &read, &write,
		&e.CostUsd, &result, &metadata, &queued, &dispatched, &started, &ended, &duration, &first, &resolved, &e.Query, &updated, &agent, &architecture, &agentRef, &instance, &ran, &e.SandboxCostUsd, &usage)
	if err != nil {
		return nil, err
	}
	e.Code, e.Message, e.Reason, e.Executor, e.Model, e.Result = optional(code), optional(message), optional(reason), optional(executor), optional(model), optional(result)
	e.Attempt, e.DurationMs, e.FirstSeq, e.SandboxMs = uint32(attempt), uint32(duration), uint32(first), float64(ran)
	e.Usage = &spoolv1.Usage{InputTokens: uint32(in), OutputTokens: uint32(out), CacheReadTokens: uint32(read), CacheWriteTokens: uint32(write)}
	if agent != nil {
		e.Agent, e.Architecture, e.AgentRef, e.Instance = *agent, *architecture, optional(*agentRef), optional(*instance)
	}
	if metadata != nil {
		e.Metadata = wirejson.Raw(*metadata)
	}
	if resolved != nil {
		e.Resolved = wirejson.Raw(*resolved)
	}
	e.QueuedAt, e.UpdatedAt = wirejson.Time(queued), wirejson.Time(updated)
	for _, t := range []struct {
		at  *time.Time
		set func(time.Time)
	}{
		{dispatched, func(t time.Time) { e.DispatchedAt = wirejson.Time(t) }},
		{started, func(t time.Time) { e.StartedAt = wirejson.Time(t) }},
		{ended, func(t time.Time) { e.EndedAt = wirejson.Time(t) }},
	} {
		if t.at != nil {
			t.set(*t.at)
		}
	}
	return &e, metered(&e, usage)
}

// metered adds an execution's rows of usage; nil for none.
func metered(e *spoolv1.Execution, rows *string) error {
	if rows == nil {
		return nil
	}
	var list []struct {
		Provider    string  `json:"provider"`
		Model       string  `json:"model"`
		Day         string  `json:"day"`
		Requests    uint64  `json:"requests"`
		Failed      uint64  `json:"failed"`
		Input       uint64  `json:"input_tokens"`
		Output      uint64  `json:"output_tokens"`
		CacheRead   uint64  `json:"cache_read_tokens"`
		CacheWrite  uint64  `json:"cache_write_tokens"`
		CostUSD     float64 `json:"cost_usd"`
		Prices      string  `json:"prices"`
		FirstByteMs uint64  `json:"first_byte_ms"`
		DurationMs  uint64  `json:"duration_ms"`
	}
	if err := json.Unmarshal([]byte(*rows), &list); err != nil {
		return problem.New(problem.Internal, "", "the execution's usage in the read models is not valid").Because(err)
	}
	for _, u := range list {
		e.Metered = append(e.Metered, &spoolv1.MeteredUsage{
			Provider: u.Provider, Model: u.Model, Day: u.Day, Requests: clamp(u.Requests), Failed: clamp(u.Failed),
			Usage:   &spoolv1.Usage{InputTokens: clamp(u.Input), OutputTokens: clamp(u.Output), CacheReadTokens: clamp(u.CacheRead), CacheWriteTokens: clamp(u.CacheWrite)},
			CostUsd: u.CostUSD, Prices: u.Prices, FirstByteMs: clamp(u.FirstByteMs), DurationMs: clamp(u.DurationMs),
		})
		e.MeteredCostUsd += u.CostUSD
	}
	return nil
}

// clamp limits a sum to 32 bits, as the API requires.
func clamp(n uint64) uint32 { return uint32(min(n, math.MaxUint32)) } //nolint:gosec // bounded just here

// Execution returns one execution. minPosition is a position of its session, or "".
func (s *Store) Execution(ctx context.Context, tenant, id, minPosition string) (*spoolv1.Execution, error) {
	read := func() (out *spoolv1.Execution, err error) {
		err = s.await(ctx, s.executionIn(tenant, id), func() error {
			err := s.rows(ctx, func(r row) (err error) {
				out, err = scanExecution(r)
				return err
			}, "SELECT "+executionColumns+" FROM executions"+executionOwner+"WHERE tenant = $1 AND id = $2", tenant, id)
			if err == nil && out == nil {
				return noExecution()
			}
			return err
		})
		return out, err
	}
	e, err := read()
	if err != nil || minPosition == "" {
		return e, err
	}
	// The position belongs to the session's log, and only the execution determines the session.
	if err := s.WaitPosition(ctx, e.SessionId, minPosition); err != nil {
		return nil, err
	}
	return read()
}

// Span returns the seq of the first event of a session's execution, and of the event that ends it, or 0 if it has not
// ended. It returns EXECUTION_NOT_FOUND if the session has no such execution.
func (s *Store) Span(ctx context.Context, tenant, session, execution string) (first, last uint32, err error) {
	ends := []string{}
	for _, e := range events.Catalogue() {
		if events.Terminal(e.Type) {
			ends = append(ends, string(e.Type))
		}
	}
	err = s.await(ctx, s.executionIn(tenant, execution), func() error {
		var begin, end int64
		found, err := s.one(ctx, []any{&begin, &end}, `
			SELECT x.first_seq, coalesce((SELECT seq FROM events WHERE tenant = x.tenant AND session = x.session AND seq >= x.first_seq
			         AND type = ANY ($4) AND event::json->>'executionId' = x.id ORDER BY seq LIMIT 1), 0)
			  FROM executions x WHERE x.tenant = $1 AND x.session = $2 AND x.id = $3`, tenant, session, execution, ends)
		if err == nil && !found {
			return noExecution()
		}
		first, last = uint32(begin), uint32(end) //nolint:gosec // seqs
		return err
	})
	return first, last, err
}

// Executions returns a page of a tenant's executions that match the filter, and the token of the next page.
func (s *Store) Executions(ctx context.Context, tenant string, f Filter, token string, size uint32) ([]*spoolv1.Execution, string, error) {
	size, err := PageSize(size)
	if err != nil {
		return nil, "", err
	}
	l := executionList()
	p, err := l.page(tenant, f, token, size)
	if err != nil {
		return nil, "", err
	}
	list, more, err := s.executions(ctx, size, p.rows+executionOwner+p.order, p.args...)
	if err != nil || !more {
		return list, "", err
	}
	last := list[len(list)-1]
	at := last.QueuedAt
	if f.Sort == "updated" {
		at = last.UpdatedAt
	}
	return list, l.token(f, pagePosition{at.AsTime(), last.ExecutionId}), nil
}

// SessionExecutions returns the executions of a session in order.
func (s *Store) SessionExecutions(ctx context.Context, tenant, session, token string, size uint32) ([]*spoolv1.Execution, string, error) {
	after, err := readToken(events.KindExecution, token)
	if err != nil {
		return nil, "", err
	}
	if size, err = PageSize(size); err != nil {
		return nil, "", err
	}
	if _, err := s.Session(ctx, tenant, session); err != nil {
		return nil, "", err
	}
	list, more, err := s.executions(ctx, size, `executions`+executionOwner+`WHERE tenant = $1 AND session = $2 AND ($3 = '' OR
		ord > (SELECT ord FROM executions WHERE tenant = $1 AND session = $2 AND id = $3)) ORDER BY ord LIMIT $4`, tenant, session, after, size+1)
	if err != nil || !more {
		return list, "", err
	}
	return list, makeToken(list[len(list)-1].ExecutionId), nil
}

// executions returns a page of the rows that from selects; more reports whether there are more.
func (s *Store) executions(ctx context.Context, size uint32, from string, args ...any) (list []*spoolv1.Execution, more bool, err error) {
	err = s.rows(ctx, func(r row) error {
		one, err := scanExecution(r)
		list = append(list, one)
		return err
	}, "SELECT "+executionColumns+" FROM "+from, args...)
	if err != nil {
		return nil, false, err
	}
	list, more = cut(list, size)
	return list, more, nil
}

// LastEnd returns when an execution of the session ended last, or the zero time if none has ended.
func (s *Store) LastEnd(ctx context.Context, tenant, session string) (time.Time, error) {
	var at *time.Time
	_, err := s.one(ctx, []any{&at}, "SELECT max(ended_at) FROM executions WHERE tenant = $1 AND session = $2", tenant, session)
	if err != nil || at == nil {
		return time.Time{}, err
	}
	return *at, nil
}
