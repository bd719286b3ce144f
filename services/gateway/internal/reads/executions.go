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

// executionPhases are the phases of executions in the read models.
var executionPhases = []string{"queued", "starting", "running", "waiting_for_approval", "paused", "completed", "failed", "cancelled"}

// executionMessage converts a row with an execution to an API message.
func executionMessage(r queries.ExecutionRow) (*spoolv1.Execution, error) {
	e := &spoolv1.Execution{
		ExecutionId: r.ID, SessionId: r.Session, Phase: r.Phase, Code: nilIfEmpty(r.Code), Message: nilIfEmpty(r.Message), Reason: nilIfEmpty(r.Reason),
		Attempt: uint32(r.Attempt), Executor: nilIfEmpty(r.Executor), Model: nilIfEmpty(r.Model), CostUsd: r.CostUsd, Result: nilIfEmpty(r.Result),
		QueuedAt: wirejson.TimestampOf(r.QueuedAt), DispatchedAt: timestampMessage(r.DispatchedAt), StartedAt: timestampMessage(r.StartedAt), EndedAt: timestampMessage(r.EndedAt),
		UpdatedAt: timestampMessage(r.UpdatedAt), DurationMs: uint32(r.DurationMs), FirstSeq: uint32(r.FirstSeq), Query: r.Query,
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

// executionMessages converts rows with executions to API messages.
func executionMessages[R queries.ExecutionRow | queries.SessionExecutionsRow | queries.ExecutionsAtRow](rows []R) ([]*spoolv1.Execution, error) {
	var list []*spoolv1.Execution
	for _, r := range rows {
		e, err := executionMessage(queries.ExecutionRow(r))
		if err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	return list, nil
}

// addMeteredUsage adds the metered usage of an execution to its API message. rows is a JSON list of usage by model,
// or nil for none.
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

// clampUint32 returns n, or the largest 32-bit number if n is larger, because the API has 32 bits for such sums.
func clampUint32(n uint64) uint32 { return uint32(min(n, math.MaxUint32)) }

// Execution returns one execution of a tenant. It first waits until the read models have reached minPosition, a
// position of the execution's session, or "".
func (s *Store) Execution(ctx context.Context, tenant, id, minPosition string) (*spoolv1.Execution, error) {
	read := func() (out *spoolv1.Execution, err error) {
		err = s.awaitRead(ctx, s.executionSearch(tenant, id), func() error {
			r, err := s.queries.Execution(ctx, tenant, id)
			if errors.Is(err, pgx.ErrNoRows) {
				return errExecutionNotFound()
			}
			if err == nil {
				out, err = executionMessage(r)
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
	if err := s.AwaitMinPosition(ctx, e.SessionId, minPosition); err != nil {
		return nil, err
	}
	return read()
}

// ExecutionSpan returns the seq of the first event of a session's execution, and of the event that ends it, or 0 if it has not
// ended. It returns EXECUTION_NOT_FOUND if the session has no such execution.
func (s *Store) ExecutionSpan(ctx context.Context, tenant, session, execution string) (first, last uint32, err error) {
	ends := []string{}
	for _, e := range events.EventTypes() {
		if events.IsTerminal(e.Type) {
			ends = append(ends, string(e.Type))
		}
	}
	err = s.awaitRead(ctx, s.executionSearch(tenant, execution), func() error {
		r, err := s.queries.ExecutionSpan(ctx, queries.ExecutionSpanParams{Tenant: tenant, Session: session, Execution: execution, Terminal: ends})
		if errors.Is(err, pgx.ErrNoRows) {
			return errExecutionNotFound()
		}
		first, last = uint32(r.FirstSeq), uint32(r.LastSeq)
		return err
	})
	return first, last, err
}

// Executions returns a page of a tenant's executions that match the filter, and the token of the next page.
func (s *Store) Executions(ctx context.Context, tenant string, f Filter, token string, size uint32) ([]*spoolv1.Execution, string, error) {
	size, err := ParsePageSize(size)
	if err != nil {
		return nil, "", err
	}
	l := executionTable()
	rows, more, err := readListPage[queries.ExecutionRow](ctx, s, l, tenant, f, token, size)
	if err != nil {
		return nil, "", err
	}
	list, err := executionMessages(rows)
	if err != nil || !more {
		return list, "", err
	}
	last := list[len(list)-1]
	at := last.QueuedAt
	if f.Sort == "updated" {
		at = last.UpdatedAt
	}
	return list, l.encodeToken(f, pagePosition{at.AsTime(), last.ExecutionId}), nil
}

// SessionExecutions returns a page of the executions of a session in order, and the token of the next page.
func (s *Store) SessionExecutions(ctx context.Context, tenant, session, token string, size uint32) ([]*spoolv1.Execution, string, error) {
	after, err := decodeIDToken(events.KindExecution, token)
	if err != nil {
		return nil, "", err
	}
	if size, err = ParsePageSize(size); err != nil {
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
	list, err := executionMessages(rows)
	if err != nil || !more {
		return list, "", err
	}
	return list, encodeIDToken(list[len(list)-1].ExecutionId), nil
}

// LastExecutionEnd returns the time at which the last execution of a session that has ended did so, or the zero time
// if none has ended.
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
