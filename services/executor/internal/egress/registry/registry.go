// Package registry knows the sandboxes of an engine: the token that each names
// itself by, what it may reach, whose it is, and its journal. All of it survives
// a restart of the proxy; of a token only the hash is kept.
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

// Config of a Registry.
type Config struct {
	Dir         string // made if it is not there
	Journals    *journal.Store
	Connections int           // at most, of each sandbox; 0 means 64
	KeepFor     time.Duration // a released sandbox with lines that nobody acknowledges; 0 means 24 h
	Logger      *slog.Logger
}

// Registry is safe for concurrent use.
type Registry struct {
	cfg Config

	mu      sync.Mutex // taken before a sandbox's
	byID    map[string]*Sandbox
	byToken map[[sha256.Size]byte]*Sandbox

	accounts map[string]*account
}

// registrationFile is in the sandbox's folder, beside its journal.
const registrationFile = "registration.json"

// stored is the form of the file.
type stored struct {
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

// Open reads what is registered. A folder that cannot be read is an error that
// names it: what a sandbox may reach is not to be guessed.
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
	r := &Registry{cfg: cfg, byID: map[string]*Sandbox{}, byToken: map[[sha256.Size]byte]*Sandbox{}, accounts: map[string]*account{}}
	list, err := os.ReadDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		if err := r.load(e.Name()); err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(cfg.Dir, e.Name()), err)
		}
	}
	return r, nil
}

func (r *Registry) load(id string) error {
	if err := events.CheckID("sandbox", events.KindSandbox, id); err != nil {
		return err
	}
	dir := filepath.Join(r.cfg.Dir, id)
	raw, err := os.ReadFile(filepath.Join(dir, registrationFile))
	if errors.Is(err, fs.ErrNotExist) { // it died before the registration was written, or while it was forgotten
		return os.RemoveAll(dir)
	}
	if err != nil {
		return err
	}
	var reg stored
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
	sb.bill = Bill{r.charges(reg.Budgets), &unpriced{}}
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

// Bounds of a token in bytes.
const (
	minToken = 16
	maxToken = 256
)

func hashOf(g api.Registration) (h [sha256.Size]byte, given bool, err error) {
	switch {
	case g.Token == "":
		return h, false, nil
	case len(g.Token) < minToken || len(g.Token) > maxToken:
		return h, false, api.Invalid("token", "token: its length is not between %d and %d", minToken, maxToken)
	}
	for i := range len(g.Token) {
		if c := g.Token[i]; c <= ' ' || c > '~' {
			return h, false, api.Invalid("token", "token: it has a character that is not printable ASCII")
		}
	}
	return sha256.Sum256([]byte(g.Token)), true, nil
}

func check(g api.Registration) (egress.Allowlist, error) {
	for _, f := range []struct {
		field string
		kind  events.Kind
		value string
	}{{"session", events.KindSession, g.Session}, {"execution", events.KindExecution, g.Execution}} {
		if f.value == "" {
			continue
		}
		if err := events.CheckID(f.field, f.kind, f.value); err != nil {
			return egress.Allowlist{}, api.Invalid(f.field, "%s", err)
		}
	}
	const maxTenant = 128
	if len(g.Tenant) > maxTenant {
		return egress.Allowlist{}, api.Invalid("tenant", "tenant: it is longer than %d bytes", maxTenant)
	}
	allow, err := egress.ParseAllowlist(g.Allow)
	if err != nil {
		return egress.Allowlist{}, api.Invalid("allow", "%s", err)
	}
	return allow, checkBudgets(g.Budgets)
}

// maxUpstreams bounds the MCP servers of a sandbox.
const maxUpstreams = 64

// upstreams checks and parses the MCP servers. Its errors show no header's value.
func servers(g api.Registration) (map[string]*Server, error) {
	if len(g.Upstreams) > maxUpstreams {
		return nil, api.Invalid("upstreams", "upstreams: there are %d; at most %d are taken", len(g.Upstreams), maxUpstreams)
	}
	out := map[string]*Server{}
	for i, u := range g.Upstreams {
		field := fmt.Sprintf("upstreams[%d]", i)
		if topology.CheckToken("name", u.Name) != nil || out[u.Name] != nil {
			return nil, api.Invalid(field+".name", "%s.name: it is not 1 to 64 characters of A-Z, a-z, 0-9, - and _, or stands twice", field)
		}
		at, err := url.Parse(u.URL)
		if err != nil || at.Scheme != "http" && at.Scheme != "https" || at.User != nil {
			return nil, api.Invalid(field+".url", "%s.url: it is no http or https address without a user", field)
		}
		assume := uint16(80)
		if at.Scheme == "https" {
			assume = 443
		}
		s := &Server{Name: u.Name, URL: at, Header: http.Header{}}
		if s.Target, err = egress.ParseTarget(at.Host, assume); err != nil {
			return nil, api.Invalid(field+".url", "%s.url: %s", field, err)
		}
		for name, value := range u.Headers {
			if !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
				return nil, api.Invalid(field+".headers", "%s.headers: %s is no header, or its value is none", field, egress.Printable(name))
			}
			s.Header.Set(name, value)
		}
		s.Secrets = slices.SortedFunc(slices.Values(u.Secrets), func(a, b string) int { return len(b) - len(a) })
		out[u.Name] = s
	}
	return out, nil
}

// Server is an MCP server that a sandbox reaches.
type Server struct {
	Name   string
	URL    *url.URL
	Target egress.Target
	Header http.Header // put into every request
	// Secrets are what no answer may tell, the longest first.
	Secrets []string
}

// Put registers a sandbox, or changes what is registered of it. It is on disk
// when Put returns. A refusal is an *api.Error.
func (r *Registry) Put(id string, g api.Registration) (api.State, error) {
	if err := events.CheckID("sandbox", events.KindSandbox, id); err != nil {
		return api.State{}, api.Invalid("sandbox", "%s", err)
	}
	allow, err := check(g)
	if err != nil {
		return api.State{}, err
	}
	hash, given, err := hashOf(g)
	if err != nil {
		return api.State{}, err
	}
	mcp, err := servers(g)
	if err != nil {
		return api.State{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	sb := r.byID[id]
	if sb == nil && !given {
		return api.State{}, &api.Error{Code: api.CodeNotFound, Field: "token", Detail: "token: no sandbox " + id + " is registered here, so it needs a token"}
	}
	if sb != nil {
		if err := sb.fence(g.Epoch); err != nil {
			return api.State{}, err
		}
		if !given {
			hash = sb.hash
		}
	}
	if other := r.byToken[hash]; other != nil && other.id != id {
		return api.State{}, &api.Error{Code: api.CodeTokenTaken, Field: "token", Detail: "token: it is another sandbox's: make a random one for each"}
	}
	reg := stored{TokenSHA256: hex.EncodeToString(hash[:]), Tenant: g.Tenant, Session: g.Session, Execution: g.Execution, Epoch: g.Epoch, Allow: g.Allow, Budgets: g.Budgets, Routes: g.Routes}
	if err := r.write(id, reg); err != nil {
		return api.State{}, fmt.Errorf("register %s: %w", id, err)
	}
	if sb == nil {
		j, err := r.cfg.Journals.Open(r.dir(id))
		if err != nil {
			return api.State{}, fmt.Errorf("register %s: %w", id, err)
		}
		sb = newSandbox(id, r.cfg.Connections, j)
		r.byID[id] = sb
	} else if sb.hash != hash {
		delete(r.byToken, sb.hash)
		sb.cut() // they came in with a token that is void now
	}
	r.byToken[hash] = sb
	r.settled(sb.set(reg, allow, hash, mcp, r.charges(g.Budgets)))
	return sb.State(), nil
}

func (r *Registry) dir(id string) string { return filepath.Join(r.cfg.Dir, id) }

func (r *Registry) write(id string, reg stored) error {
	raw, err := json.Marshal(reg)
	if err != nil {
		return err
	}
	dir := r.dir(id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := journal.WriteFile(filepath.Join(dir, registrationFile), raw); err != nil {
		return err
	}
	return journal.SyncDir(r.cfg.Dir)
}

// Get gives a sandbox, an *api.Error if it is not registered.
func (r *Registry) Get(id string) (*Sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if sb := r.byID[id]; sb != nil {
		return sb, nil
	}
	return nil, &api.Error{Code: api.CodeNotFound, Detail: "no sandbox " + egress.Printable(id) + " is registered here"}
}

// Count gives the number of sandboxes whose tokens are good.
func (r *Registry) Count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.byToken)
}

// ByToken gives the sandbox that a token names. The look-up is by the token's
// hash, so its time tells nothing of other tokens.
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

// settleWithin bounds how long a release waits for requests that it cut.
const settleWithin = 5 * time.Second

// Release voids a sandbox's token, cuts its connections, and waits until the
// lines of what was cut are on disk. The state's Last is then the journal's
// last line; when it is acknowledged, the sandbox is forgotten. A refusal is an *api.Error.
func (r *Registry) Release(ctx context.Context, id string) (api.State, error) {
	sb, err := r.release(id)
	if err != nil {
		return api.State{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	sb.cut()
	if err := sb.settle(ctx); err != nil {
		return api.State{}, fmt.Errorf("release %s: %w", id, err)
	}
	state := sb.State()
	return state, r.Tidy(sb)
}

func (r *Registry) release(id string) (*Sandbox, error) {
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
	reg.Epoch = math.MaxInt64 // fences off every later registration
	if err := r.write(id, reg); err != nil {
		return nil, fmt.Errorf("release %s: %w", id, err)
	}
	if r.byToken[sb.hash] == sb {
		delete(r.byToken, sb.hash)
	}
	r.settled(sb.release(reg))
	return sb, nil
}

// Tidy forgets a sandbox that is released and whose lines are all acknowledged, or too old.
func (r *Registry) Tidy(sb *Sandbox) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	reg := sb.registration()
	first, last := sb.Journal.Span()
	if reg.Released.IsZero() || r.byID[sb.id] != sb || !sb.quiet() || first <= last && time.Since(reg.Released) < r.cfg.KeepFor {
		return nil
	}
	if first <= last {
		r.cfg.Logger.Warn("journal lines of a released sandbox are forgotten: nobody asked for them", "sandbox", sb.id, "session", reg.Session, "lines", last-first+1)
	}
	r.cfg.Journals.Forget(sb.Journal)
	delete(r.byID, sb.id)
	// The registration goes first: a folder without one is removed at the next start.
	if err := os.Remove(filepath.Join(r.dir(sb.id), registrationFile)); err != nil {
		return fmt.Errorf("forget %s: %w", sb.id, err)
	}
	if err := os.RemoveAll(r.dir(sb.id)); err != nil {
		return fmt.Errorf("forget %s: %w", sb.id, err)
	}
	return nil
}

// tidyEvery is how often old journals are looked for.
const tidyEvery = time.Minute

// Run forgets journals that nobody asks for, until ctx ends.
func (r *Registry) Run(ctx context.Context) error {
	tick := time.NewTicker(tidyEvery)
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
			if err := r.Tidy(sb); err != nil {
				r.cfg.Logger.Error("tidy", "error", err)
			}
		}
	}
}
