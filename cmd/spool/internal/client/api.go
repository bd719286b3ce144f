package client

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Session is a conversation as the read models have it.
type Session struct {
	ID           string    `json:"sessionId"`
	Status       string    `json:"status"` // open or closed
	Agent        string    `json:"agent"`
	AgentVersion string    `json:"agentVersion"`
	Instance     string    `json:"instance"` // with its version; "" for none
	Architecture string    `json:"architecture"`
	Sandbox      string    `json:"sandbox"`
	CreatedAt    time.Time `json:"createdAt"`
	UpdatedAt    time.Time `json:"updatedAt"`
	Title        string    `json:"title"` // the beginning of its first message
	Tip          uint32    `json:"tip"`   // seq of the last event
	Active       string    `json:"activeExecutionId"`
	Queued       uint32    `json:"queued"`
	Executions   uint32    `json:"executions"`
	Idle         bool      `json:"idle"`
	Options      struct {
		Model         string `json:"model"`
		ModelProvider string `json:"modelProvider"`
		HostPath      string `json:"hostPath"` // folder of the server's machine that the session works in
	} `json:"sessionOptions"`
	Box *struct {
		ID       string `json:"sandboxId"`
		State    string `json:"state"`
		Health   string `json:"health"`
		Reason   string `json:"reason"`
		Provider string `json:"provider"`
		Image    string `json:"image"`
	} `json:"currentSandbox"`
	Snapshot   string     `json:"snapshot"`
	SnapshotAt *time.Time `json:"snapshotAt"`
	Files      uint32     `json:"workspaceFiles"` // in the snapshot
	Bytes      float64    `json:"workspaceBytes"`
	Parent     *Parent    `json:"parent"` // of a fork
	Forks      uint32     `json:"forks"`  // sessions that were forked from this one
	SandboxMs  float64    `json:"sandboxMs"`
	SandboxUSD float64    `json:"sandboxCostUsd"`
}

// Parent is where a fork begins.
type Parent struct {
	SessionID   string `json:"sessionId"`
	Asked       uint32 `json:"asked"`     // seq that was asked for
	Effective   uint32 `json:"effective"` // seq of the last event that the fork has
	Reason      string `json:"reason"`    // why they differ
	Snapshot    string `json:"snapshot"`  // of its files; "" for none
	SnapshotSeq uint32 `json:"snapshotSeq"`
}

// Fork is how a session is forked.
type Fork struct {
	At       *uint32         `json:"at,omitempty"` // nil for the last event
	Agent    string          `json:"agent,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
}

// Forked is a new fork.
type Forked struct {
	SessionID string `json:"sessionId"`
	Parent    Parent `json:"parent"`
}

// Execution is one query.
type Execution struct {
	ID         string       `json:"executionId"`
	SessionID  string       `json:"sessionId"`
	Agent      string       `json:"agent"`
	Instance   string       `json:"instance"` // with its version; "" for none
	Query      string       `json:"query"`    // the beginning of its message
	Phase      string       `json:"phase"`
	Code       string       `json:"code"`
	Message    string       `json:"message"`
	Reason     string       `json:"reason"`
	Attempt    uint32       `json:"attempt"`
	Executor   string       `json:"executor"`
	Model      string       `json:"model"`
	Usage      events.Usage `json:"usage"`
	CostUSD    float64      `json:"costUsd"`
	Result     string       `json:"result"`
	QueuedAt   *time.Time   `json:"queuedAt"`
	EndedAt    *time.Time   `json:"endedAt"`
	DurationMs uint32       `json:"durationMs"`
	Metered    []Metered    `json:"metered"`
	MeteredUSD float64      `json:"meteredCostUsd"`
	SandboxMs  float64      `json:"sandboxMs"`
	SandboxUSD float64      `json:"sandboxCostUsd"`
}

// Metered is what requests to one model took on one day.
type Metered struct {
	Provider string       `json:"provider"`
	Model    string       `json:"model"`
	Requests uint32       `json:"requests"`
	Failed   uint32       `json:"failed"`
	Usage    events.Usage `json:"usage"`
	CostUSD  float64      `json:"costUsd"`
	Prices   string       `json:"prices"`
}

// Key is an API key, without the key itself.
type Key struct {
	ID        string     `json:"keyId"`
	Name      string     `json:"name"`
	Prefix    string     `json:"prefix"`
	CreatedAt time.Time  `json:"createdAt"`
	RevokedAt *time.Time `json:"revokedAt"`
	Role      string     `json:"role"`
	Agents    []string   `json:"agents"` // empty for all
	ExpiresAt *time.Time `json:"expiresAt"`
	CreatedBy string     `json:"createdBy"` // the key that made it; "" for none
}

// KeyRequest asks for an API key. What is empty is as the caller's key has it.
type KeyRequest struct {
	Name    string   `json:"name"`
	Tenant  string   `json:"tenant,omitempty"`
	Role    string   `json:"role,omitempty"`
	Agents  []string `json:"agents,omitempty"`
	Expires string   `json:"expires,omitempty"` // a duration, or a time in RFC 3339
}

// NewKey is a key that was just made; Key is shown this once.
type NewKey struct {
	ID     string `json:"keyId"`
	Key    string `json:"key"`
	Name   string `json:"name"`
	Prefix string `json:"prefix"`
	Tenant string `json:"tenant"`
}

// Accepted is the answer to what was stored: the ids that it concerns and where the log holds it.
type Accepted struct {
	SessionID   string `json:"sessionId"`
	ExecutionID string `json:"executionId"`
	Position    string `json:"position"`
}

// NewSession asks for a session; empty fields mean the server's defaults.
type NewSession struct {
	Agent        string          `json:"agent,omitempty"`        // a reference
	Instance     string          `json:"instance,omitempty"`     // a reference, in place of Agent
	Environments []string        `json:"environments,omitempty"` // references
	Architecture string          `json:"architecture,omitempty"`
	Sandbox      string          `json:"sandbox,omitempty"`
	Model        string          `json:"model,omitempty"`
	Options      *SessionOptions `json:"sessionOptions,omitempty"`
	Transcript   string          `json:"transcript,omitempty"` // of a Transcript
}

// Start asks for a session and its first message, as one.
type Start struct {
	NewSession
	Content string          `json:"content"`
	Files   []WorkspaceFile `json:"workspaceFiles,omitempty"`

	Environment map[string]Variable `json:"environment,omitempty"` // of the query alone
}

// Variable is one of a query's own.
type Variable struct {
	Value  string `json:"value"`
	Secret bool   `json:"secret,omitempty"`
}

// SessionOptions are what a new session sets for itself.
type SessionOptions struct {
	ModelSettings *ModelSettings `json:"modelSettings,omitempty"` // of architecture acp
	ModelProvider string         `json:"modelProvider,omitempty"`
	Image         string         `json:"image,omitempty"`
	Command       []string       `json:"command,omitempty"`
	Egress        []string       `json:"egress,omitempty"`
	Budget        *Budget        `json:"budget,omitempty"` // of the whole session

	HostPath         string `json:"hostPath,omitempty"`         // folder of the server's machine to work in, absolute
	HostPathIdentity string `json:"hostPathIdentity,omitempty"` // hostpath.Identity of it
}

// ModelSettings are how an ACP agent is given its model.
type ModelSettings struct {
	Preset string            `json:"preset,omitempty"`
	Env    map[string]string `json:"env,omitempty"`
	Args   []string          `json:"args,omitempty"`
}

// Budget bounds what may be taken, or is what was taken; 0 is no bound.
type Budget struct {
	Turns   uint32  `json:"turns,omitempty"` // executions that are started
	Tokens  uint64  `json:"tokens,omitempty"`
	CostUSD float64 `json:"costUsd,omitempty"`
	TimeMs  uint64  `json:"timeMs,omitempty"` // milliseconds that executions run
}

// TenantBudget is a tenant's for a period: day, month or total.
type TenantBudget struct {
	Tenant   string    `json:"tenant"`
	Period   string    `json:"period"`
	Budget   Budget    `json:"budget"`
	Spent    Budget    `json:"spent"`
	From     string    `json:"from"`
	Until    time.Time `json:"until"`
	Exceeded string    `json:"exceeded"` // what is used up, "" for nothing
}

// TenantLimits are limits of a tenant, or what it uses of them; 0 is the server's setting.
type TenantLimits struct {
	Slots             uint32  `json:"slots,omitempty"`
	Sandboxes         uint32  `json:"sandboxes,omitempty"`
	Sessions          uint32  `json:"sessions,omitempty"`
	Streams           uint32  `json:"streams,omitempty"`
	RequestsPerSecond float64 `json:"requestsPerSecond,omitempty"`
	RequestBurst      uint32  `json:"requestBurst,omitempty"`
	Keys              uint32  `json:"keys,omitempty"`
	EventsPerDay      uint64  `json:"eventsPerDay,omitempty"`
	EventBytesPerDay  uint64  `json:"eventBytesPerDay,omitempty"`
	StorageBytes      uint64  `json:"storageBytes,omitempty"`
}

// Limits are a tenant's own limits and what it uses.
type Limits struct {
	Tenant string       `json:"tenant"`
	Limits TenantLimits `json:"limits"`
	Used   TenantLimits `json:"used"`
}

// Query is one of a session that is there.
type Query struct {
	Content string          `json:"content"`
	Files   []WorkspaceFile `json:"workspaceFiles,omitempty"`

	Environment map[string]Variable `json:"environment,omitempty"`
}

// WorkspaceFile is a file that comes along with a query.
type WorkspaceFile struct {
	Path    string `json:"path"`
	Content []byte `json:"contentBase64"`
	Mode    uint32 `json:"mode,omitempty"`
}

// EventsPage is a page of kept events.
type EventsPage struct {
	Events []Doc[events.Wire] `json:"events"`
	Tip    uint32             `json:"tip"`
	Next   uint32             `json:"next"`
}

// Readiness is what /readyz says: each part and "ok" or what is wrong.
type Readiness struct {
	Ready  bool              `json:"ready"`
	Checks map[string]string `json:"checks"`
}

// StartExecution makes a session and posts its first message. It is sent again, with
// the same Idempotency-Key, when the outcome is not known.
func (c *Client) StartExecution(ctx context.Context, s Start) (Accepted, error) {
	var out Accepted
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "executions"}, body: s, key: rand.Text(), repeat: true}, &out)
	return out, err
}

// CreateSession makes a session without a message.
func (c *Client) CreateSession(ctx context.Context, s NewSession) (Accepted, error) {
	var out Accepted
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "sessions"}, body: s, key: rand.Text(), repeat: true}, &out)
	return out, err
}

// Fork makes a session that goes on from an event of another one, as safely as StartExecution.
func (c *Client) Fork(ctx context.Context, session string, f Fork) (Doc[Forked], error) {
	var out Doc[Forked]
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "sessions", session, "fork"}, body: f, key: rand.Text(), repeat: true}, &out)
	return out, err
}

// PostMessage posts a query to a session, as safely as StartExecution.
func (c *Client) PostMessage(ctx context.Context, session string, q Query) (Accepted, error) {
	var out Accepted
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "sessions", session, "messages"}, body: q, key: rand.Text(), repeat: true}, &out)
	return out, err
}

// Interrupt asks the session's running turn to stop. It is sent once: a repeat could hit the next turn.
func (c *Client) Interrupt(ctx context.Context, session string) (Doc[Accepted], error) {
	var out Doc[Accepted]
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "sessions", session, "interrupt"}, body: struct{}{}}, &out)
	return out, err
}

// CancelExecution ends an execution.
func (c *Client) CancelExecution(ctx context.Context, id string) (Doc[Accepted], error) {
	return c.Control(ctx, id, "cancel")
}

// Control does to an execution what it names: cancel, pause, resume or terminate.
func (c *Client) Control(ctx context.Context, id, what string) (Doc[Accepted], error) {
	var out Doc[Accepted]
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "executions", id, what}, body: struct{}{}, repeat: true}, &out)
	return out, err
}

// Sync asks for a snapshot of a session's workspace.
func (c *Client) Sync(ctx context.Context, session string) (Doc[Accepted], error) {
	var out Doc[Accepted]
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "sessions", session, "sync"}, body: struct{}{}, repeat: true}, &out)
	return out, err
}

// TerminateEnvironment ends a session's sandbox. It is sent once: a repeat could hit the next one.
func (c *Client) TerminateEnvironment(ctx context.Context, session string) (Doc[Accepted], error) {
	var out Doc[Accepted]
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "sessions", session, "environment", "terminate"}, body: struct{}{}}, &out)
	return out, err
}

// Session reads one.
func (c *Client) Session(ctx context.Context, id string) (Doc[Session], error) {
	var out Doc[Session]
	err := c.get(ctx, &out, nil, "api", "sessions", id)
	return out, err
}

// DeleteSession deletes one for good.
func (c *Client) DeleteSession(ctx context.Context, id string) (Doc[Accepted], error) {
	var out Doc[Accepted]
	err := c.do(ctx, call{method: http.MethodDelete, path: []string{"api", "sessions", id}, repeat: true}, &out)
	return out, err
}

// Execution reads one.
func (c *Client) Execution(ctx context.Context, id string) (Doc[Execution], error) {
	var out Doc[Execution]
	err := c.get(ctx, &out, nil, "api", "executions", id)
	return out, err
}

// Filter narrows and sorts a list of sessions or executions; what is empty does not.
type Filter struct {
	State                       string // status of sessions, phase of executions
	Agent                       string // reference
	Architecture                string
	Parent                      string // the session that sessions were forked from
	MetadataKey                 string
	MetadataValue               *string
	CreatedAfter, CreatedBefore string // RFC 3339
	UpdatedAfter, UpdatedBefore string
	Text                        string
	Sort, Order                 string
}

// query returns the parameters of a list; state is the name of Filter.State there.
func (f Filter) query(state string) url.Values {
	q := url.Values{}
	for name, value := range map[string]string{
		state: f.State, "agent": f.Agent, "architecture": f.Architecture, "parent": f.Parent, "metadataKey": f.MetadataKey, "createdAfter": f.CreatedAfter, "createdBefore": f.CreatedBefore,
		"updatedAfter": f.UpdatedAfter, "updatedBefore": f.UpdatedBefore, "text": f.Text, "sort": f.Sort, "order": f.Order,
	} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if f.MetadataValue != nil {
		q.Set("metadataValue", *f.MetadataValue)
	}
	return q
}

// Sessions yields sessions as the filter says, the newest first unless it says otherwise.
func (c *Client) Sessions(ctx context.Context, f Filter) iter.Seq2[Doc[Session], error] {
	return pages[Session](ctx, c, "sessions", f.query("status"), "api", "sessions")
}

// Executions yields executions as the filter says, the newest first unless it says otherwise.
func (c *Client) Executions(ctx context.Context, f Filter) iter.Seq2[Doc[Execution], error] {
	return pages[Execution](ctx, c, "executions", f.query("phase"), "api", "executions")
}

// SessionExecutions yields a session's executions in their order.
func (c *Client) SessionExecutions(ctx context.Context, session string) iter.Seq2[Doc[Execution], error] {
	return pages[Execution](ctx, c, "executions", url.Values{}, "api", "sessions", session, "executions")
}

// Events reads a page of a session's kept events with a greater seq than after; limit 0 means the server's.
func (c *Client) Events(ctx context.Context, session string, after, limit uint32) (EventsPage, error) {
	q := url.Values{"after": {strconv.FormatUint(uint64(after), 10)}}
	if limit > 0 {
		q.Set("limit", strconv.FormatUint(uint64(limit), 10))
	}
	var out EventsPage
	err := c.get(ctx, &out, q, "api", "sessions", session, "events")
	return out, err
}

// History reads a page of the events that a fork has from its ancestors.
func (c *Client) History(ctx context.Context, session string, after uint32) (EventsPage, error) {
	var out struct {
		Events []Doc[events.Wire] `json:"events"`
		Total  uint32             `json:"total"`
		Next   uint32             `json:"next"`
	}
	err := c.get(ctx, &out, url.Values{"after": {strconv.FormatUint(uint64(after), 10)}}, "api", "sessions", session, "history")
	return EventsPage{out.Events, out.Total, out.Next}, err
}

// CreateKey makes an API key. It is sent once: each call makes another key.
func (c *Client) CreateKey(ctx context.Context, r KeyRequest) (Doc[NewKey], error) {
	var out Doc[NewKey]
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "keys"}, body: r}, &out)
	return out, err
}

// Keys lists a tenant's keys, revoked ones too; "" is the caller's tenant.
func (c *Client) Keys(ctx context.Context, tenant string) ([]Doc[Key], error) {
	var out struct {
		Keys []Doc[Key] `json:"keys"`
	}
	err := c.get(ctx, &out, filter("tenant", tenant), "api", "keys")
	return out.Keys, err
}

// RevokeKey revokes a key of a tenant, and the keys that it made; "" is the caller's tenant.
func (c *Client) RevokeKey(ctx context.Context, tenant, id string) (json.RawMessage, error) {
	var out json.RawMessage
	err := c.do(ctx, call{method: http.MethodDelete, path: []string{"api", "keys", id}, query: filter("tenant", tenant), repeat: true}, &out)
	return out, err
}

// SetBudget gives a tenant a budget; "" is the caller's tenant.
func (c *Client) SetBudget(ctx context.Context, tenant, period string, b Budget) (json.RawMessage, error) {
	body := struct {
		Tenant string `json:"tenant,omitempty"`
		Budget Budget `json:"budget"`
	}{tenant, b}
	var out json.RawMessage
	err := c.do(ctx, call{method: http.MethodPut, path: []string{"api", "budgets", period}, body: body, repeat: true}, &out)
	return out, err
}

// Budgets lists a tenant's budgets with what was taken of them.
func (c *Client) Budgets(ctx context.Context, tenant string) ([]Doc[TenantBudget], error) {
	var out struct {
		Budgets []Doc[TenantBudget] `json:"budgets"`
	}
	err := c.get(ctx, &out, filter("tenant", tenant), "api", "budgets")
	return out.Budgets, err
}

// RemoveBudget ends a tenant's budget.
func (c *Client) RemoveBudget(ctx context.Context, tenant, period string) (json.RawMessage, error) {
	var out json.RawMessage
	err := c.do(ctx, call{method: http.MethodDelete, path: []string{"api", "budgets", period}, query: filter("tenant", tenant), repeat: true}, &out)
	return out, err
}

// SetLimits gives a tenant limits; "" is the caller's tenant.
func (c *Client) SetLimits(ctx context.Context, tenant string, l TenantLimits) (json.RawMessage, error) {
	body := struct {
		Tenant string       `json:"tenant,omitempty"`
		Limits TenantLimits `json:"limits"`
	}{tenant, l}
	var out json.RawMessage
	err := c.do(ctx, call{method: http.MethodPut, path: []string{"api", "limits"}, body: body, repeat: true}, &out)
	return out, err
}

// Limits returns a tenant's own limits and what it uses.
func (c *Client) Limits(ctx context.Context, tenant string) (Doc[Limits], error) {
	var out Doc[Limits]
	err := c.get(ctx, &out, filter("tenant", tenant), "api", "limits")
	return out, err
}

// RemoveLimits removes a tenant's own limits.
func (c *Client) RemoveLimits(ctx context.Context, tenant string) (json.RawMessage, error) {
	var out json.RawMessage
	err := c.do(ctx, call{method: http.MethodDelete, path: []string{"api", "limits"}, query: filter("tenant", tenant), repeat: true}, &out)
	return out, err
}

// Alive reports an error unless a gateway answers, whether it is ready or not.
func (c *Client) Alive(ctx context.Context) error {
	return c.do(ctx, call{method: http.MethodGet, path: []string{"health"}}, new(json.RawMessage))
}

func (c *Client) get(ctx context.Context, out any, q url.Values, path ...string) error {
	return c.do(ctx, call{method: http.MethodGet, path: path, query: q, repeat: true}, out)
}

func filter(name, value string) url.Values {
	if value == "" {
		return url.Values{}
	}
	return url.Values{name: {value}}
}

// pages yields the items of a list, page by page.
func pages[T any](ctx context.Context, c *Client, items string, q url.Values, path ...string) iter.Seq2[Doc[T], error] {
	return func(yield func(Doc[T], error) bool) {
		for {
			var page map[string]json.RawMessage
			var list []Doc[T]
			var next string
			err := c.get(ctx, &page, q, path...)
			if err == nil && page[items] != nil {
				err = json.Unmarshal(page[items], &list)
			}
			if err == nil && page["nextPageToken"] != nil {
				err = json.Unmarshal(page["nextPageToken"], &next)
			}
			if err != nil {
				yield(Doc[T]{}, err)
				return
			}
			for _, d := range list {
				if !yield(d, nil) {
					return
				}
			}
			if next == "" {
				return
			}
			q.Set("pageToken", next)
		}
	}
}

// Ready asks a gateway how its parts are. One that is not ready is no error.
func (c *Client) Ready(ctx context.Context) (Readiness, error) {
	var r Readiness
	resp, err := c.send(ctx, call{method: http.MethodGet, path: []string{"readyz"}}, nil)
	if err != nil {
		return r, err
	}
	if json.Unmarshal(resp.body, &r) != nil || r.Checks == nil {
		return r, c.problem(resp.Response, resp.body)
	}
	return r, nil
}
