package reads

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const sessionColumns = `id, status, agent, agent_version, architecture, provider, options, metadata, created_at, updated_at,
	tip, tip_position, active_execution, queued, executions, idle, snapshot, snapshot_at, workspace_files, workspace_bytes, agent_ref, instance, environments, title,
	forked, (SELECT count(*) FROM sessions f WHERE f.tenant = sessions.tenant AND f.parent = sessions.id AND f.parent <> '') AS forks, sandbox_ms, sandbox_cost_usd,
	box, box_state, box_health, box_why, box_provider, box_engine, box_image, box_created, box_ended, box_memory, box_disk`

// sessionSandbox joins a session's sandbox: the one that has not ended, or else the last one.
const sessionSandbox = ` LEFT JOIN LATERAL (
	SELECT b.id AS box, b.status AS box_state, b.health AS box_health, CASE WHEN b.ended_at IS NULL THEN b.health_why ELSE b.reason END AS box_why,
	       b.provider AS box_provider, b.engine AS box_engine, b.image AS box_image, b.created_at AS box_created, b.ended_at AS box_ended,
	       b.memory_bytes AS box_memory, b.disk_bytes AS box_disk
	  FROM sandboxes b WHERE b.tenant = sessions.tenant AND b.session = sessions.id
	 ORDER BY b.ended_at IS NULL DESC, b.created_at DESC, b.id DESC LIMIT 1) box ON true `

// scanner is a row that can be scanned.
type scanner interface{ Scan(dest ...any) error }

func scanSession(r scanner) (*spoolv1.Session, error) {
	var s spoolv1.Session
	var options, active, agentRef, instance, environments, forked string
	var forks, ran int64
	var metadata *string
	var created, updated time.Time
	var tip, queued, executions, files, bytes int64
	var snapshot string
	var taken *time.Time
	var b box
	err := r.Scan(&s.SessionId, &s.Status, &s.Agent, &s.AgentVersion, &s.Architecture, &s.Sandbox, &options, &metadata, &created, &updated,
		&tip, &s.Position, &active, &queued, &executions, &s.Idle, &snapshot, &taken, &files, &bytes, &agentRef, &instance, &environments, &s.Title,
		&forked, &forks, &ran, &s.SandboxCostUsd,
		&b.id, &b.state, &b.health, &b.why, &b.provider, &b.engine, &b.image, &b.created, &b.ended, &b.memory, &b.disk)
	if err != nil {
		return nil, err
	}
	var o events.Options
	if err := json.Unmarshal([]byte(options), &o); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's options in the read models are not valid").Because(err)
	}
	s.SessionOptions = sessionOptions(o)
	if metadata != nil {
		s.Metadata = wirejson.Raw(*metadata)
	}
	s.CreatedAt, s.UpdatedAt = wirejson.Time(created), wirejson.Time(updated)
	s.Tip, s.Queued, s.Executions = uint32(tip), uint32(queued), uint32(executions)
	s.ActiveExecutionId, s.AgentRef, s.Instance = optional(active), optional(agentRef), optional(instance)
	if err := json.Unmarshal([]byte(environments), &s.Environments); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's environments in the read models are not valid").Because(err)
	}
	if forked != "" {
		f, err := readForked(forked)
		if err != nil {
			return nil, err
		}
		s.Parent = Parent(f)
	}
	s.Forks, s.SandboxMs = uint32(forks), float64(ran)
	s.Snapshot, s.WorkspaceFiles, s.WorkspaceBytes, s.CurrentSandbox = optional(snapshot), uint32(files), float64(bytes), b.dress()
	if taken != nil {
		s.SnapshotAt = wirejson.Time(*taken)
	}
	return &s, nil
}

// readForked decodes the column forked.
func readForked(text string) (*events.SessionForked, error) {
	var f events.SessionForked
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		return nil, problem.New(problem.Internal, "", "the session's parent in the read models is not valid").Because(err)
	}
	return &f, nil
}

// Parent converts the parent of a fork to an API message.
func Parent(f *events.SessionForked) *spoolv1.ParentSession {
	if f == nil {
		return nil
	}
	return &spoolv1.ParentSession{
		SessionId: f.Parent, Asked: f.Asked, Effective: f.Effective, Reason: optional(f.Reason), Snapshot: optional(f.Snapshot), SnapshotSeq: f.SnapshotSeq,
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

// box has the sandbox columns of a joined row; they are nil if the session has no sandbox.
type box struct {
	id, state, health, why, provider, engine, image *string
	created, ended                                  *time.Time
	memory, disk                                    *int64
}

func (b box) dress() *spoolv1.CurrentSandbox {
	if b.id == nil {
		return nil
	}
	out := &spoolv1.CurrentSandbox{
		SandboxId: *b.id, State: *b.state, Health: optional(*b.health), Reason: optional(*b.why), Provider: *b.provider, Engine: *b.engine, Image: optional(*b.image),
		CreatedAt: wirejson.Time(*b.created), MemoryBytes: float64(*b.memory), DiskBytes: float64(*b.disk),
	}
	if b.ended != nil {
		out.EndedAt = wirejson.Time(*b.ended)
	}
	return out
}

// Session returns one session.
func (s *Store) Session(ctx context.Context, tenant, id string) (*spoolv1.Session, error) {
	var out *spoolv1.Session
	err := s.await(ctx, s.sessionIn(tenant, id), func() error {
		err := s.rows(ctx, func(r row) (err error) {
			out, err = scanSession(r)
			return err
		}, "SELECT "+sessionColumns+" FROM sessions"+sessionSandbox+"WHERE tenant = $1 AND id = $2", tenant, id)
		if err == nil && out == nil {
			return s.missing(ctx, tenant, id)
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
	p, err := l.page(tenant, f, token, size)
	if err != nil {
		return nil, "", err
	}
	var list []*spoolv1.Session
	err = s.rows(ctx, func(r row) error {
		one, err := scanSession(r)
		list = append(list, one)
		return err
	}, "SELECT "+sessionColumns+" FROM "+p.rows+sessionSandbox+p.order, p.args...)
	if err != nil {
		return nil, "", err
	}
	list, more := cut(list, size)
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
		return 0, problem.Invalid("pageSize", "%d is too much: at most %d", n, MaxPage)
	}
	if n == 0 {
		return DefaultPage, nil
	}
	return n, nil
}

// cut removes the additional row that shows whether there is another page, and reports whether there was one.
func cut[T any](list []T, size uint32) ([]T, bool) {
	if uint32(len(list)) <= size {
		return list, false
	}
	return list[:size], true
}

// makeToken returns the page token for the last id of a page. It is opaque to clients, so that it may change.
func makeToken(id string) string { return base64.RawURLEncoding.EncodeToString([]byte(id)) }

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

// optional returns a pointer to s, or nil if s is empty.
func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
