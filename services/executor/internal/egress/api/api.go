// Package api is the admin API of the egress proxy: the types of its requests and answers, and its client. The API is HTTP
// and JSON on a Unix socket that no sandbox can reach. Executors and proxies of different releases use it together, so JSON
// names, paths and codes are fixed.
package api

import (
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Registration is the body of a request that registers a sandbox: the hosts and MCP servers that the sandbox may reach, and
// the budgets to which the proxy charges its model calls.
type Registration struct {
	Token     string   `json:"token,omitempty"` // names the sandbox at the proxy; 16 to 256 printable ASCII characters without a space; "" keeps the registered one
	Tenant    string   `json:"tenant,omitempty"`
	Session   string   `json:"session,omitempty"`   // "" for a sandbox of the warm pool
	Execution string   `json:"execution,omitempty"` // of the journal lines from now on; "" refuses requests to models
	Epoch     uint64   `json:"epoch"`               // lower than the registered one: refused with CodeFenced
	Allow     []string `json:"allow"`               // allowlist entries, see egress.ParseRule; empty allows nothing

	// Upstreams are MCP servers that the sandbox reaches at /mcp/<name>. The proxy keeps them in memory only: after its
	// restart the executor registers the sandbox again.
	Upstreams []MCPServer `json:"upstreams,omitempty"`

	Budgets []Budget  `json:"budgets,omitempty"` // that the sandbox's model calls are charged to
	Routes  *[]string `json:"routes,omitempty"`  // names of the only routes that the sandbox reaches; nil means all
}

// MCPServer is an MCP server that a sandbox reaches through the proxy, with the headers that the proxy adds to requests and
// the sandbox does not see.
type MCPServer struct {
	Name    string            `json:"name"` // 1 to 64 characters of A-Z, a-z, 0-9, - and _
	URL     string            `json:"url"`  // http or https; its host needs no entry in Allow
	Headers map[string]string `json:"headers,omitempty"`
	Secrets []string          `json:"secrets,omitempty"` // parts of URL and Headers that are removed from answers to the sandbox
}

// Budget is a limit on the usage of models that is charged to an account. An execution, a session, and a tenant in a period
// each have an account.
type Budget struct {
	Account string             `json:"account"` // calls of all sandboxes with the account are charged to it
	Whose   string             `json:"whose"`   // the account's owner in messages: "the execution"
	Limit   events.Budget      `json:"limit"`   // the proxy enforces tokens, dollars and turns (answered requests), not time
	Spent   events.BudgetUsage `json:"spent,omitzero"`
}

// SandboxState is the state of a registered sandbox at the egress proxy.
type SandboxState struct {
	Sandbox           string   `json:"sandbox"`
	Tenant            string   `json:"tenant,omitempty"`
	Session           string   `json:"session,omitempty"`
	Execution         string   `json:"execution,omitempty"`
	Epoch             uint64   `json:"epoch"`
	Allow             []string `json:"allow"`
	Journal           string   `json:"journal"` // its name, jnl_…
	First             uint64   `json:"first"`   // number of the first line that is kept, Last+1 if none is
	Last              uint64   `json:"last"`    // number of the last line
	OpenModelRequests int      `json:"openModelRequests"`
	OpenConnections   int      `json:"openConnections"`
	Upstreams         []string `json:"upstreams,omitempty"` // names of MCP servers
	Released          bool     `json:"released,omitempty"`  // the token is void; the sandbox is forgotten when all lines are acknowledged
	Authority         string   `json:"authority,omitempty"` // PEM: the certificate for the sandbox to trust, valid for hosts with methods in Allow; "" without such hosts
}

// JournalLine is a line of the egress proxy's journal of a sandbox, as it is on disk and in answers of the API.
type JournalLine struct {
	N         uint64          `json:"n"` // 1, 2, 3, … without a gap
	Type      events.Type     `json:"type"`
	Time      time.Time       `json:"time"`
	Execution string          `json:"execution,omitempty"`
	Data      json.RawMessage `json:"data"` // an events.EgressDenied or events.ModelCalled
}

// AckRequest is the body of a request that allows the proxy to remove journal lines.
type AckRequest struct {
	Journal string `json:"journal"` // of another journal than the sandbox's: nothing is forgotten
	Line    uint64 `json:"line"`    // the last line to forget
	Epoch   uint64 `json:"epoch"`   // AnyEpoch
}

// AnyEpoch is the epoch that clients send with every request except a registration, which contains its own epoch. The proxy
// ignores it. Clients send it for proxies of earlier releases, which refuse a request without an epoch.
const AnyEpoch = math.MaxInt64

// Codes of an Error.
const (
	CodeInvalid    = "INVALID_REQUEST"   // Error.Field names the field of the request
	CodeNotFound   = "SANDBOX_NOT_FOUND" // the sandbox is not registered, or forgotten
	CodeFenced     = "FENCED"            // the sandbox is registered with a higher epoch, or released
	CodeTokenTaken = "TOKEN_TAKEN"       // another sandbox has the token
)

// Error is returned for a request that the proxy has refused.
type Error struct {
	Code   string
	Detail string
	Field  string // "" if no field is at fault
}

func (e *Error) Error() string { return e.Code + ": " + e.Detail }

// InvalidFieldError returns an *Error with CodeInvalid for a field of a request. format and args are the detail.
func InvalidFieldError(field, format string, args ...any) error {
	return &Error{Code: CodeInvalid, Field: field, Detail: fmt.Sprintf(format, args...)}
}

// Problem is the body of an answer with status 400 or above, application/problem+json.
type Problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Code   string `json:"code"` // of an Error, or INTERNAL, UNHEALTHY
	Field  string `json:"field,omitempty"`
}
