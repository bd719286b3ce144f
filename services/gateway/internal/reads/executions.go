package reads

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// phases are the phases of executions in the read models.
var phases = []string{"queued", "starting", "running", "waiting_for_approval", "paused", "completed", "failed", "cancelled"}

// execution converts an execution to an API message.
func execution(r queries.ExecutionRow) (*spoolv1.Execution, error) {
	e := &spoolv1.Execution{
		ExecutionId: r.ID, SessionId: r.Session, Phase: r.Phase, Code: nilIfEmpty(r.Code), Message: nilIfEmpty(r.Message), Reason: nilIfEmpty(r.Reason),
		Attempt: uint32(r.Attempt), Executor: nilIfEmpty(r.Executor), Model: nilIfEmpty(r.Model), CostUsd: r.CostUsd, Result: nilIfEmpty(r.Result),
		QueuedAt: wirejson.TimestampOf(r.QueuedAt), DispatchedAt: timestamp(r.DispatchedAt), StartedAt: timestamp(r.StartedAt), EndedAt: timestamp(r.EndedAt),
		UpdatedAt: timestamp(r.UpdatedAt), DurationMs: uint32(r.DurationMs), FirstSeq: uint32(r.FirstSeq), Query: r.Query,
		SandboxMs: float64(r.SandboxMs), SandboxCostUsd: r.SandboxCostUsd, RecoveredFrom: nilIfEmpty(r.RecoveredFrom),
		Usage: &spoolv1.Usage{
			InputTokens: uint32(r.InputTokens), OutputTokens: uint32(r.OutputTokens),
			CacheReadTokens: uint32(r.CacheReadTokens), CacheWriteTokens: uint32(r.CacheWriteTokens),
		},
	}
	if r.Agent != nil {
		e.Agent, e.Architecture, e.AgentRef, e.Instance = *r.Agent, *r.Architecture, nilIfEmpty(*r.AgentRef), nilIfEmpty(*r.Instance)
	}
	if r.Metadata != nil {
		e.Metadata = wirejson.JSONFromText(*r.Metadata)
	}
	if r.Resolved != nil {
		e.Resolved = wirejson.JSONFromText(*r.Resolved)
	}
	return e, addMeteredUsage(e, r.Metered)
}

// executions converts executions to API messages.
func executions[R queries.ExecutionRow | queries.SessionExecutionsRow | queries.ExecutionsAtRow](rows []R) ([]*spoolv1.Execution, error) {
	var list []*spoolv1.Execution
	for _, r := range rows {
		e, err := execution(queries.ExecutionRow(r))
		if err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	return list, nil
}

// addMeteredUsage adds an execution's rows of usage; nil for none.
func addMeteredUsage(e *spoolv1.Execution, rows []byte) error {
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
	if err := json.Unmarshal(rows, &list); err != nil {
		return problem.New(problem.Internal, "", "the execution's usage in the read models is not valid").WithCause(err)
	}
	for _, u := range list {
		e.Metered = append(e.Metered, &spoolv1.MeteredUsage{
			Provider: u.Provider, Model: u.Model, Day: u.Day, Requests: clampUint32(u.Requests), Failed: clampUint32(u.Failed),
			Usage:   &spoolv1.Usage{InputTokens: clampUint32(u.Input), OutputTokens: clampUint32(u.Output), CacheReadTokens: clampUint32(u.CacheRead), CacheWriteTokens: clampUint32(u.CacheWrite)},
			CostUsd: u.CostUSD, Prices: u.Prices, FirstByteMs: clampUint32(u.FirstByteMs), DurationMs: clampUint32(u.DurationMs),
		})
		e.MeteredCostUsd += u.CostUSD
	}
	return nil
}

// clampUint32 limits a sum to 32 bits, as the API requires.
func clampUint32(n uint64) uint32 { return uint32(min(n, math.MaxUint32)) }

// Execution returns one execution. minPosition is a position of its session, or "".
func (s *Store) Execution(ctx context.Context, tenant, id, minPosition string) (*spoolv1.Execution, error) {
	read := func() (out *spoolv1.Execution, err error) {
		err = s.awaitRead(ctx, s.searchExecution(tenant, id), func() error {
			r, err := s.queries.Execution(ctx, tenant, id)
			if errors.Is(err, pgx.ErrNoRows) {
				return errNoExecution()
			}
			if err == nil {
				out, err = execution(r)
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

// ExecutionSpan returns the seq of the first event of a session's execution, and of the event that ends it, or 0 if it has not
// ended. It returns EXECUTION_NOT_FOUND if the session has no such execution.
func (s *Store) ExecutionSpan(ctx context.Context, tenant, session, execution string) (first, last uint32, err error) {
	ends := []string{}
	for _, e := range events.Catalogue() {
		if events.Terminal(e.Type) {
			ends = append(ends, string(e.Type))
		}
	}
	err = s.awaitRead(ctx, s.searchExecution(tenant, execution), func() error {
		r, err := s.queries.ExecutionSpan(ctx, queries.ExecutionSpanParams{Tenant: tenant, Session: session, Execution: execution, Terminal: ends})
		if errors.Is(err, pgx.ErrNoRows) {
			return errNoExecution()
		}
		first, last = uint32(r.FirstSeq), uint32(r.LastSeq)
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
	rows, more, err := readPage[queries.ExecutionRow](ctx, s, l, tenant, f, token, size)
	if err != nil {
		return nil, "", err
	}
	list, err := executions(rows)
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
	rows, err := s.queries.SessionExecutions(ctx, queries.SessionExecutionsParams{
		Tenant: tenant, Session: session, After: after, Size: int32(size) + 1,
	})
	if err != nil {
		return nil, "", err
	}
	rows, more := trimPage(rows, size)
	list, err := executions(rows)
	if err != nil || !more {
		return list, "", err
	}
	return list, makeToken(list[len(list)-1].ExecutionId), nil
}

// LastExecutionEnd returns when an execution of the session ended last, or the zero time if none has ended.
func (s *Store) LastExecutionEnd(ctx context.Context, tenant, session string) (time.Time, error) {
	at, err := s.queries.LastEnd(ctx, tenant, session)
	if errors.Is(err, pgx.ErrNoRows) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, err
	}
	return *at, nil
}
