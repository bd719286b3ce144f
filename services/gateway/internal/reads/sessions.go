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

// session converts a session to an API message.
func session(r queries.SessionRow) (*spoolv1.Session, error) {
	s := &spoolv1.Session{
		SessionId: r.ID, Status: r.Status, Agent: r.Agent, AgentVersion: r.AgentVersion, Architecture: r.Architecture, Sandbox: r.Provider,
		CreatedAt: wirejson.TimestampOf(r.CreatedAt), UpdatedAt: wirejson.TimestampOf(r.UpdatedAt), Tip: uint32(r.Tip), Position: r.TipPosition,
		ActiveExecutionId: nilIfEmpty(r.ActiveExecution), Queued: uint32(r.Queued), Executions: uint32(r.Executions), Idle: r.Idle, Title: r.Title,
		AgentRef: nilIfEmpty(r.AgentRef), Instance: nilIfEmpty(r.Instance), Forks: uint32(r.Forks),
		SandboxMs: float64(r.SandboxMs), SandboxCostUsd: r.SandboxCostUsd,
		Snapshot: nilIfEmpty(r.Snapshot), SnapshotAt: timestamp(r.SnapshotAt), WorkspaceFiles: uint32(r.WorkspaceFiles), WorkspaceBytes: float64(r.WorkspaceBytes),
	}
	var o events.Options
	if err := json.Unmarshal([]byte(r.Options), &o); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's options in the read models are not valid").WithCause(err)
	}
	s.SessionOptions = sessionOptions(o)
	if r.Metadata != nil {
		s.Metadata = wirejson.JSONFromText(*r.Metadata)
	}
	if err := json.Unmarshal([]byte(r.Environments), &s.Environments); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's environments in the read models are not valid").WithCause(err)
	}
	if r.Forked != "" {
		f, err := readForked(r.Forked)
		if err != nil {
			return nil, err
		}
		s.Parent = Parent(f)
	}
	if r.SandboxID != "" {
		s.CurrentSandbox = &spoolv1.CurrentSandbox{
			SandboxId: r.SandboxID, State: r.SandboxStatus, Health: nilIfEmpty(r.SandboxHealth), Reason: nilIfEmpty(r.SandboxReason),
			Provider: r.SandboxProvider, Engine: r.SandboxEngine, Image: nilIfEmpty(r.SandboxImage),
			CreatedAt: wirejson.TimestampOf(r.SandboxCreatedAt), EndedAt: timestamp(r.SandboxEndedAt),
			MemoryBytes: float64(r.SandboxMemoryBytes), DiskBytes: float64(r.SandboxDiskBytes),
		}
	}
	return s, nil
}

// readForked decodes the column forked.
func readForked(text string) (*events.SessionForked, error) {
	var f events.SessionForked
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's parent in the read models is not valid").WithCause(err)
	}
	return &f, nil
}

// Parent converts the parent of a fork to an API message.
func Parent(f *events.SessionForked) *spoolv1.ParentSession {
	if f == nil {
		return nil
	}
	return &spoolv1.ParentSession{
		SessionId: f.Parent, Asked: f.Asked, Effective: f.Effective, Reason: nilIfEmpty(f.Reason), Snapshot: nilIfEmpty(f.Snapshot), SnapshotSeq: f.SnapshotSeq,
	}
}

// sessionOptions converts a session's options to an API message.
func sessionOptions(o events.Options) *spoolv1.SessionOptions {
	out := &spoolv1.SessionOptions{
		Model: o.Model, ModelProvider: o.ModelProvider, IdleTimeoutMs: o.IdleTimeoutMs, TurnLimitMs: o.TurnLimitMs, SessionLimitMs: o.SessionLimitMs,
		SyncIntervalMs: o.SyncIntervalMs, HealthIntervalMs: o.HealthIntervalMs, SandboxMaxAgeMs: o.SandboxMaxAgeMs,
		Image: o.Image, Command: o.Command, Egress: o.Egress,
	}
	if o.HostPath != "" {
		out.HostPath = &o.HostPath
	}
	if m := o.ModelSettings; m.Preset != "" || len(m.Env)+len(m.Args) > 0 {
		out.ModelSettings = &spoolv1.ModelSettings{Preset: m.Preset, Env: m.Env, Args: m.Args}
	}
	if o.Budget != (events.Budget{}) {
		out.Budget = Budget(o.Budget)
	}
	return out
}

// Session returns one session.
func (s *Store) Session(ctx context.Context, tenant, id string) (*spoolv1.Session, error) {
	var out *spoolv1.Session
	err := s.awaitRead(ctx, s.searchSession(tenant, id), func() error {
		r, err := s.queries.Session(ctx, tenant, id)
		if errors.Is(err, pgx.ErrNoRows) {
			return s.missingSessionError(ctx, tenant, id)
		}
		if err == nil {
			out, err = session(r)
		}
		return err
	})
	return out, err
}

// Sessions returns a page of a tenant's sessions that match the filter, and the token of the next page.
func (s *Store) Sessions(ctx context.Context, tenant string, f Filter, token string, size uint32) ([]*spoolv1.Session, string, error) {
	size, err := PageSize(size)
	if err != nil {
		return nil, "", err
	}
	l := sessionList()
	rows, more, err := readPage[queries.SessionRow](ctx, s, l, tenant, f, token, size)
	if err != nil {
		return nil, "", err
	}
	var list []*spoolv1.Session
	for _, r := range rows {
		one, err := session(r)
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
	return list, l.token(f, pagePosition{at.AsTime(), last.SessionId}), nil
}

// MaxPage and DefaultPage are page sizes.
const (
	MaxPage     = 200
	DefaultPage = 50
)

// PageSize validates a page size and replaces 0 by DefaultPage.
func PageSize(n uint32) (uint32, error) {
	if n > MaxPage {
		return 0, problem.Invalid("pageSize", "value is %d; the limit is %d", n, MaxPage)
	}
	if n == 0 {
		return DefaultPage, nil
	}
	return n, nil
}

// trimPage removes the additional row that shows whether there is another page, and reports whether there was one.
func trimPage[T any](list []T, size uint32) ([]T, bool) {
	if uint32(len(list)) <= size {
		return list, false
	}
	return list[:size], true
}

// makeToken returns the page token for a page that ended at an id. The token is opaque to clients, so that its form may change.
func makeToken(id string) string { return base64.RawURLEncoding.EncodeToString([]byte(id)) }

// readToken returns the id in a token from makeToken, or "" for "". It returns INVALID_REQUEST for other text, and for an id of another
// kind.
func readToken(kind events.Kind, token string) (string, error) {
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
