package reads

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// sessionMessage converts a row with a session to an API message.
func sessionMessage(r queries.SessionRow) (*spoolv1.Session, error) {
	s := &spoolv1.Session{
		SessionId: r.ID, Status: r.Status, Agent: r.Agent, AgentVersion: r.AgentVersion, Architecture: r.Architecture, Sandbox: r.Provider,
		CreatedAt: wirejson.TimestampOf(r.CreatedAt), UpdatedAt: wirejson.TimestampOf(r.UpdatedAt), Tip: uint32(r.Tip), Position: r.TipPosition,
		ActiveExecutionId: nilIfEmpty(r.ActiveExecution), Queued: uint32(r.Queued), Executions: uint32(r.Executions), Idle: r.Idle, Title: r.Title,
		AgentRef: nilIfEmpty(r.AgentRef), Instance: nilIfEmpty(r.Instance), Forks: uint32(r.Forks),
		SandboxMs: float64(r.SandboxMs), SandboxCostUsd: r.SandboxCostUsd,
		Phase: r.Phase, PhaseSince: wirejson.TimestampOf(r.PhaseSince), OpenApprovals: uint32(r.OpenApprovals), CostUsd: r.CostUsd,
		Usage: &spoolv1.Usage{
			InputTokens: clampUint32(uint64(r.InputTokens)), OutputTokens: clampUint32(uint64(r.OutputTokens)),
			CacheReadTokens: clampUint32(uint64(r.CacheReadTokens)), CacheWriteTokens: clampUint32(uint64(r.CacheWriteTokens)),
		},
		Snapshot: nilIfEmpty(r.Snapshot), SnapshotAt: timestampMessage(r.SnapshotAt), WorkspaceFiles: uint32(r.WorkspaceFiles), WorkspaceBytes: float64(r.WorkspaceBytes),
	}
	var o events.Options
	if err := json.Unmarshal([]byte(r.Options), &o); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's options in the read models are not valid").WithCause(err)
	}
	s.SessionOptions = sessionOptionsMessage(o)
	if r.Metadata != nil {
		s.Metadata = wirejson.JSONFromText(*r.Metadata)
	}
	if err := json.Unmarshal([]byte(r.Environments), &s.Environments); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's environments in the read models are not valid").WithCause(err)
	}
	if r.Forked != "" {
		f, err := decodeForked(r.Forked)
		if err != nil {
			return nil, err
		}
		s.Parent = ParentMessage(f)
	}
	if r.FailedExecution != "" {
		s.LastError = &spoolv1.SessionError{Code: r.FailedCode, Message: r.FailedMessage, ExecutionId: r.FailedExecution, Time: timestampMessage(r.FailedAt)}
	}
	if r.SandboxID != "" {
		s.CurrentSandbox = &spoolv1.CurrentSandbox{
			SandboxId: r.SandboxID, State: r.SandboxStatus, Health: nilIfEmpty(r.SandboxHealth), Reason: nilIfEmpty(r.SandboxReason),
			Provider: r.SandboxProvider, Engine: r.SandboxEngine, Image: nilIfEmpty(r.SandboxImage),
			CreatedAt: wirejson.TimestampOf(r.SandboxCreatedAt), EndedAt: timestampMessage(r.SandboxEndedAt),
			MemoryBytes: float64(r.SandboxMemoryBytes), DiskBytes: float64(r.SandboxDiskBytes),
		}
	}
	return s, nil
}

// decodeForked decodes the column forked of a session: the event session_forked, or nil if the session is not a fork.
func decodeForked(text string) (*events.SessionForked, error) {
	var f events.SessionForked
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's parent in the read models is not valid").WithCause(err)
	}
	return &f, nil
}

// ParentMessage converts the parent of a fork to an API message.
func ParentMessage(f *events.SessionForked) *spoolv1.ParentSession {
	if f == nil {
		return nil
	}
	return &spoolv1.ParentSession{
		SessionId: f.Parent, Asked: f.Asked, Effective: f.Effective, Reason: nilIfEmpty(f.Reason), Snapshot: nilIfEmpty(f.Snapshot), SnapshotSeq: f.SnapshotSeq, Conversation: f.Conversation,
	}
}

// sessionOptionsMessage converts a session's options to an API message.
func sessionOptionsMessage(o events.Options) *spoolv1.SessionOptions {
	out := &spoolv1.SessionOptions{
		Model: o.Model, ModelProvider: o.ModelProvider, IdleTimeoutMs: o.IdleTimeoutMs, TurnLimitMs: o.TurnLimitMs, SessionLimitMs: o.SessionLimitMs,
		SyncIntervalMs: o.SyncIntervalMs, HealthIntervalMs: o.HealthIntervalMs, SandboxMaxAgeMs: o.SandboxMaxAgeMs,
		Image: o.Image, Command: o.Command, Egress: o.Egress, OnConversationLoss: o.OnConversationLoss,
	}
	if o.HostPath != "" {
		out.HostPath = &o.HostPath
	}
	if m := o.ModelSettings; m.Preset != "" || len(m.Env)+len(m.Args) > 0 {
		out.ModelSettings = &spoolv1.ModelSettings{Preset: m.Preset, Env: m.Env, Args: m.Args}
	}
	if o.Budget != (events.Budget{}) {
		out.Budget = BudgetMessage(o.Budget)
	}
	return out
}

// Session returns one session of a tenant.
func (s *Store) Session(ctx context.Context, tenant, id string) (*spoolv1.Session, error) {
	var out *spoolv1.Session
	err := s.awaitRead(ctx, s.sessionSearch(tenant, id), func() error {
		r, err := s.queries.Session(ctx, tenant, id)
		if errors.Is(err, pgx.ErrNoRows) {
			return s.missingSessionError(ctx, tenant, id)
		}
		if err == nil {
			out, err = sessionMessage(r)
		}
		return err
	})
	return out, err
}

// Sessions returns a page of a tenant's sessions that match the filter, and the token of the next page.
func (s *Store) Sessions(ctx context.Context, tenant string, f Filter, token string, size uint32) ([]*spoolv1.Session, string, error) {
	size, err := ParsePageSize(size)
	if err != nil {
		return nil, "", err
	}
	l := sessionTable()
	rows, more, err := readListPage[queries.SessionRow](ctx, s, l, tenant, f, token, size)
	if err != nil {
		return nil, "", err
	}
	var list []*spoolv1.Session
	for _, r := range rows {
		one, err := sessionMessage(r)
		if err != nil {
			return nil, "", err
		}
		list = append(list, one)
	}
	if !more {
		return list, "", nil
	}
	last := list[len(list)-1]
	at := last.CreatedAt
	if f.Sort == "updated" {
		at = last.UpdatedAt
	}
	return list, l.encodeToken(f, pagePosition{at.AsTime(), last.SessionId}), nil
}

// MaxPageSize and DefaultPageSize are page sizes.
const (
	MaxPageSize     = 200
	DefaultPageSize = 50
)

// ParsePageSize validates a page size and replaces 0 by DefaultPageSize.
func ParsePageSize(n uint32) (uint32, error) {
	if n > MaxPageSize {
		return 0, problem.Invalid("pageSize", "value is %d; the limit is %d", n, MaxPageSize)
	}
	if n == 0 {
		return DefaultPageSize, nil
	}
	return n, nil
}

// trimPage removes the row beyond the page size that was read to find out whether there is another page, and reports
// whether there was such a row.
func trimPage[T any](list []T, size uint32) ([]T, bool) {
	if uint32(len(list)) <= size {
		return list, false
	}
	return list[:size], true
}

// encodeIDToken returns the token of the page that follows the row with an id. The token is opaque to clients, so
// that its form may change.
func encodeIDToken(id string) string { return base64.RawURLEncoding.EncodeToString([]byte(id)) }

// decodeIDToken returns the id in a token from encodeIDToken, or "" for "". It returns INVALID_REQUEST for other
// text, and for an id of another kind.
func decodeIDToken(kind events.IDKind, token string) (string, error) {
	if token == "" {
		return "", nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		err = events.CheckID("pageToken", kind, string(b))
	}
	if err != nil {
		return "", problem.Invalid("pageToken", "%s is not the nextPageToken of a page of this list", fmt.Sprintf("%+q", truncate.Text(token, 64)))
	}
	return string(b), nil
}

// nilIfEmpty returns a pointer to s, or nil if s is empty.
func nilIfEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
