// Package registry holds the registered sandboxes of an engine: each one's token, allowlist, owner, budgets and journal.
// Registrations survive a restart of the proxy, except MCP servers. Of a token only the hash is stored.
package registry

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
)

// Config configures a Registry of the egress proxy's sandboxes.
type Config struct {
	Dir         string // created if it does not exist
	Journals    *journal.Store
	Connections int           // limit of open connections of each sandbox; 0 means 64
	KeepFor     time.Duration // time for which a released sandbox with unacknowledged lines is kept; 0 means 24 h
	Logger      *slog.Logger
}

// Registry holds the sandboxes that are registered with the egress proxy. It is safe for concurrent use.
type Registry struct {
	cfg Config

	mu      sync.Mutex // locked before a sandbox's mutex
	byID    map[string]*Sandbox
	byToken map[[sha256.Size]byte]*Sandbox

	accounts map[string]*budgetAccount // by Budget.Account
}

// registrationFile is the name of the file with the registration, in the folder of the sandbox, which also has the
// sandbox's journal.
const registrationFile = "registration.json"

// storedRegistration is the JSON content of registrationFile, by which a registration survives a restart of the proxy.
type storedRegistration struct {
	TokenSHA256 string       `json:"tokenSha256"`
	Tenant      string       `json:"tenant,omitempty"`
	Session     string       `json:"session,omitempty"`
	Execution   string       `json:"execution,omitempty"`
	Epoch       uint64       `json:"epoch"`
	Allow       []string     `json:"allow,omitempty"`
	Released    time.Time    `json:"released,omitzero"`
	Budgets     []api.Budget `json:"budgets,omitempty"`
	Routes      *[]string    `json:"routes,omitempty"`
}

// Open reads the registrations that are stored in a folder. If one cannot be read, Open returns an error that names the
// sandbox's folder, because the proxy must not guess what a sandbox may reach.
func Open(cfg Config) (*Registry, error) {
	if cfg.Connections == 0 {
		cfg.Connections = 64
	}
	if cfg.KeepFor == 0 {
		cfg.KeepFor = 24 * time.Hour
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	r := &Registry{cfg: cfg, byID: map[string]*Sandbox{}, byToken: map[[sha256.Size]byte]*Sandbox{}, accounts: map[string]*budgetAccount{}}
	list, err := os.ReadDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		if err := r.loadSandbox(e.Name()); err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(cfg.Dir, e.Name()), err)
		}
	}
	return r, nil
}

// loadSandbox reads the stored registration and the journal of a sandbox.
func (r *Registry) loadSandbox(id string) error {
	if err := events.CheckID("sandbox", events.KindSandbox, id); err != nil {
		return err
	}
	dir := filepath.Join(r.cfg.Dir, id)
	raw, err := os.ReadFile(filepath.Join(dir, registrationFile))
	if errors.Is(err, fs.ErrNotExist) { // the proxy ended before it wrote the registration, or while it forgot the sandbox
		return os.RemoveAll(dir)
	}
	if err != nil {
		return err
	}
	var reg storedRegistration
	if err := json.Unmarshal(raw, &reg); err != nil {
		return fmt.Errorf("%s: %w", registrationFile, err)
	}
	allow, err := egress.ParseAllowlist(reg.Allow)
	if err != nil {
		return err
	}
	hash, err := parseHash(reg.TokenSHA256)
	if err != nil {
		return err
	}
	j, err := r.cfg.Journals.Open(dir)
	if err != nil {
		return err
	}
	sb := newSandbox(id, r.cfg.Connections, j)
	sb.reg, sb.allow, sb.hash = reg, allow, hash
	sb.charges = ChargedBudgets{r.openAccounts(reg.Budgets), &unpricedModel{}}
	r.byID[id] = sb
	if reg.Released.IsZero() {
		r.byToken[hash] = sb
	}
	return nil
}

func parseHash(s string) (h [sha256.Size]byte, err error) {
	raw, err := hex.DecodeString(s)
	if err != nil || len(raw) != sha256.Size {
		return h, errors.New("tokenSha256: it is not 64 hexadecimal digits")
	}
	return [sha256.Size]byte(raw), nil
}

// Limits of a token in bytes.
const (
	minTokenBytes = 16
	maxTokenBytes = 256
)

// hashToken returns the hash of a token, or an error if the token is too short or too long.
func hashToken(token string) (h [sha256.Size]byte, err error) {
	if len(token) < minTokenBytes || len(token) > maxTokenBytes {
		return h, api.InvalidFieldError("token", "token: its length is not between %d and %d", minTokenBytes, maxTokenBytes)
	}
	for i := range len(token) {
		if c := token[i]; c <= ' ' || c > '~' {
			return h, api.InvalidFieldError("token", "token: it has a character that is not printable ASCII")
		}
	}
	return sha256.Sum256([]byte(token)), nil
}

// checkRegistration validates a registration, except its token and its MCP servers, and returns the parsed allowlist.
func checkRegistration(g api.Registration) (egress.Allowlist, error) {
	for _, f := range []struct {
		field string
		kind  events.IDKind
		value string
	}{{"session", events.KindSession, g.Session}, {"execution", events.KindExecution, g.Execution}} {
		if f.value == "" {
			continue
		}
		if err := events.CheckID(f.field, f.kind, f.value); err != nil {
			return egress.Allowlist{}, api.InvalidFieldError(f.field, "%s", err)
		}
	}
	const maxTenant = 128
	if len(g.Tenant) > maxTenant {
		return egress.Allowlist{}, api.InvalidFieldError("tenant", "tenant: it is longer than %d bytes", maxTenant)
	}
	allow, err := egress.ParseAllowlist(g.Allow)
	if err != nil {
		return egress.Allowlist{}, api.InvalidFieldError("allow", "%s", err)
	}
	return allow, checkBudgets(g.Budgets)
}

// maxMCPServers is the maximum number of MCP servers of a sandbox.
const maxMCPServers = 64

// parseMCPServers validates the MCP servers of a registration and returns them by name. Its errors contain no values of
// headers.
func parseMCPServers(g api.Registration) (map[string]*MCPServer, error) {
	if len(g.Upstreams) > maxMCPServers {
		return nil, api.InvalidFieldError("upstreams", "upstreams: there are %d, the limit is %d", len(g.Upstreams), maxMCPServers)
	}
	out := map[string]*MCPServer{}
	for i, u := range g.Upstreams {
		field := fmt.Sprintf("upstreams[%d]", i)
		if topology.CheckToken("name", u.Name) != nil || out[u.Name] != nil {
			return nil, api.InvalidFieldError(field+".name", "%s.name: it is not 1 to 64 characters of A-Z, a-z, 0-9, - and _, or is there twice", field)
		}
		at, err := url.Parse(u.URL)
		if err != nil || at.Scheme != "http" && at.Scheme != "https" || at.User != nil {
			return nil, api.InvalidFieldError(field+".url", "%s.url: it is not an http or https URL without a user", field)
		}
		assume := uint16(80)
		if at.Scheme == "https" {
			assume = 443
		}
		s := &MCPServer{Name: u.Name, URL: at, Header: http.Header{}}
		if s.Target, err = egress.ParseTarget(at.Host, assume); err != nil {
			return nil, api.InvalidFieldError(field+".url", "%s.url: %s", field, err)
		}
		for name, value := range u.Headers {
			if !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
				return nil, api.InvalidFieldError(field+".headers", "%s.headers: %s is not a valid header name, or its value is not valid", field, egress.QuotePrefix(name))
			}
			s.Header.Set(name, value)
		}
		s.Secrets = slices.SortedFunc(slices.Values(u.Secrets), func(a, b string) int { return len(b) - len(a) })
		out[u.Name] = s
	}
	return out, nil
}

// MCPServer is an MCP server that a sandbox reaches through the egress proxy.
type MCPServer struct {
	Name   string
	URL    *url.URL
	Target egress.Target
	Header http.Header // set in every request
	// Secrets are removed from answers, the longest first.
	Secrets []string
}

// Register registers a sandbox, or replaces its registration. The registration is on disk when Register returns. A refusal
// is an *api.Error.
func (r *Registry) Register(id string, g api.Registration) (api.SandboxState, error) {
	if err := events.CheckID("sandbox", events.KindSandbox, id); err != nil {
		return api.SandboxState{}, api.InvalidFieldError("sandbox", "%s", err)
	}
	allow, err := checkRegistration(g)
	if err != nil {
		return api.SandboxState{}, err
	}
	var hash [sha256.Size]byte
	if g.Token != "" {
		if hash, err = hashToken(g.Token); err != nil {
			return api.SandboxState{}, err
		}
	}
	servers, err := parseMCPServers(g)
	if err != nil {
		return api.SandboxState{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	sb := r.byID[id]
	if sb == nil && g.Token == "" {
		return api.SandboxState{}, &api.Error{Code: api.CodeNotFound, Field: "token", Detail: "token: no sandbox " + id + " is registered here, so it needs a token"}
	}
	if sb != nil {
		if err := sb.checkEpoch(g.Epoch); err != nil {
			return api.SandboxState{}, err
		}
		if g.Token == "" {
			hash = sb.hash
		}
	}
	if other := r.byToken[hash]; other != nil && other.id != id {
		return api.SandboxState{}, &api.Error{Code: api.CodeTokenTaken, Field: "token", Detail: "token: another sandbox has it: use a random token for each"}
	}
	reg := storedRegistration{TokenSHA256: hex.EncodeToString(hash[:]), Tenant: g.Tenant, Session: g.Session, Execution: g.Execution, Epoch: g.Epoch, Allow: g.Allow, Budgets: g.Budgets, Routes: g.Routes}
	if err := r.writeRegistration(id, reg); err != nil {
		return api.SandboxState{}, fmt.Errorf("register %s: %w", id, err)
	}
	if sb == nil {
		j, err := r.cfg.Journals.Open(r.sandboxDir(id))
		if err != nil {
			return api.SandboxState{}, fmt.Errorf("register %s: %w", id, err)
		}
		sb = newSandbox(id, r.cfg.Connections, j)
		r.byID[id] = sb
	} else if sb.hash != hash {
		delete(r.byToken, sb.hash)
		sb.closeConns() // they were opened with a token that is void now
	}
	r.byToken[hash] = sb
	r.closeAccounts(sb.setRegistration(reg, allow, hash, servers, r.openAccounts(g.Budgets)))
	return sb.State(), nil
}

// sandboxDir returns the folder with the registration and the journal of a sandbox.
func (r *Registry) sandboxDir(id string) string { return filepath.Join(r.cfg.Dir, id) }

// writeRegistration writes the registration of a sandbox to disk.
func (r *Registry) writeRegistration(id string, reg storedRegistration) error {
	raw, err := json.Marshal(reg)
	if err != nil {
		return err
	}
	dir := r.sandboxDir(id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := journal.WriteFile(filepath.Join(dir, registrationFile), raw); err != nil {
		return err
	}
	return journal.SyncDir(r.cfg.Dir)
}

// Get returns a sandbox, or an *api.Error if it is not registered.
func (r *Registry) Get(id string) (*Sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if sb := r.byID[id]; sb != nil {
		return sb, nil
	}
	return nil, &api.Error{Code: api.CodeNotFound, Detail: "no sandbox " + egress.QuotePrefix(id) + " is registered here"}
}

// Count returns the number of registered sandboxes that were not released.
func (r *Registry) Count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.byToken)
}

// ByToken returns the sandbox whose token is given. It looks up the hash of the token, so that the duration of the look-up
// reveals nothing about other tokens.
func (r *Registry) ByToken(token string) (*Sandbox, bool) {
	hash := sha256.Sum256([]byte(token))
	r.mu.Lock()
	defer r.mu.Unlock()
	sb := r.byToken[hash]
	if sb == nil || subtle.ConstantTimeCompare(sb.hash[:], hash[:]) != 1 {
		return nil, false
	}
	return sb, true
}

// settleTimeout is the maximum time for which Release waits for the end of requests whose connections it has closed.
const settleTimeout = 5 * time.Second

// Release voids a sandbox's token, closes the sandbox's connections, and blocks until the journal lines of its requests are
// on disk. The Last of the returned state is then the number of the journal's last line. When that line is acknowledged,
// the registry forgets the sandbox. A refusal is an *api.Error.
func (r *Registry) Release(ctx context.Context, id string) (api.SandboxState, error) {
	sb, err := r.markReleased(id)
	if err != nil {
		return api.SandboxState{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	sb.closeConns()
	if err := sb.awaitAllRequests(ctx); err != nil {
		return api.SandboxState{}, fmt.Errorf("release %s: %w", id, err)
	}
	state := sb.State()
	return state, r.ForgetIfDone(sb)
}

// markReleased records on disk that a sandbox is released, and voids the sandbox's token.
func (r *Registry) markReleased(id string) (*Sandbox, error) {
	sb, err := r.Get(id)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	reg := sb.registration()
	if reg.Released.IsZero() {
		reg.Released = time.Now().UTC()
	}
	reg.Epoch = math.MaxInt64 // fences every later registration
	if err := r.writeRegistration(id, reg); err != nil {
		return nil, fmt.Errorf("release %s: %w", id, err)
	}
	if r.byToken[sb.hash] == sb {
		delete(r.byToken, sb.hash)
	}
	r.closeAccounts(sb.setReleased(reg))
	return sb, nil
}

// ForgetIfDone removes a sandbox from the registry if it was released, has no open request, and has no unacknowledged
// journal lines. After Config.KeepFor it removes a released sandbox even with unacknowledged lines.
func (r *Registry) ForgetIfDone(sb *Sandbox) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	reg := sb.registration()
	first, last := sb.Journal.LineSpan()
	if reg.Released.IsZero() || r.byID[sb.id] != sb || sb.hasOpenRequests() || first <= last && time.Since(reg.Released) < r.cfg.KeepFor {
		return nil
	}
	if first <= last {
		r.cfg.Logger.Warn("journal lines of a released sandbox are deleted: no executor acknowledged them", "sandbox", sb.id, "session", reg.Session, "lines", last-first+1)
	}
	r.cfg.Journals.Forget(sb.Journal)
	delete(r.byID, sb.id)
	// The registration is removed first: Open removes a folder without one.
	if err := os.Remove(filepath.Join(r.sandboxDir(sb.id), registrationFile)); err != nil {
		return fmt.Errorf("forget %s: %w", sb.id, err)
	}
	if err := os.RemoveAll(r.sandboxDir(sb.id)); err != nil {
		return fmt.Errorf("forget %s: %w", sb.id, err)
	}
	return nil
}

// forgetInterval is the interval at which Run looks for released sandboxes to remove from the registry.
const forgetInterval = time.Minute

// Run removes released sandboxes from the registry after Config.KeepFor. It blocks until ctx ends, then returns nil.
func (r *Registry) Run(ctx context.Context) error {
	tick := time.NewTicker(forgetInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		r.mu.Lock()
		list := make([]*Sandbox, 0, len(r.byID))
		for _, sb := range r.byID {
			list = append(list, sb)
		}
		r.mu.Unlock()
		for _, sb := range list {
			if err := r.ForgetIfDone(sb); err != nil {
				r.cfg.Logger.Error("forget a released sandbox", "sandbox", sb.id, "error", err)
			}
		}
	}
}
