// Package local runs sandboxes as processes of this machine, for development.
//
// Each sandbox has a folder, a runner in a Unix session of its
// own, and an environment that inherits nothing but the search path. Sandboxes are
// NOT isolated: processes run as the executor's user, with its rights on
// the whole file system except Config.Hidden, its network, its other processes and the machine's
// memory, CPU and disk without a limit. Paths given to Files stay inside the
// workspace; only an agent's permission policy restricts its own
// commands. Use another provider for agents that you do not trust.
//
// Folders, under Config.Dir:
//
//	sandboxes/<sandbox>/   sandbox.json, runner.json, runner.log, home, tmp, the socket
//	workspaces/<session>/  the workspace, kept from one sandbox of the session to the next;
//	                       a session that works in a folder of its user has none, and that folder is never removed
//	states/<session>/      the agent's own records, kept likewise; labels.json names the session and its tenant
//	layers/<digest>/       packages that agents depend on, installed by this machine's npm and pip as anything else is: scripts of packages run with the executor's rights
package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/hostpath"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

// Config configures a Provider. Dir, Runner and Engine are required.
type Config struct {
	Dir    string // folder of all sandboxes; created if absent
	Runner string // path of the runner's binary
	Engine string
	Path   string // PATH in sandboxes; "" for that of this process
	Layers layer.Config
	Logger *slog.Logger

	// HostPaths allows folders of this machine in which sessions may work in place of a workspace under Dir.
	HostPaths hostpath.Policy
	// Hidden are folders whose files no process of a sandbox can open, except those of its own sandbox below Dir. They
	// need Landlock (landlock.Supported).
	Hidden []string
}

const (
	// sandboxRecordFile and stateRecord are the names of the files that describe a sandbox in its folder, and a session in the folder of the
	// agent's records.
	sandboxRecordFile, stateRecord = "sandbox.json", "labels.json"
	// abandonedAge is the age from which the folder of a sandbox without a sandboxRecordFile counts as abandoned. A younger folder may belong
	// to a sandbox that is being created.
	abandonedAge = time.Minute
)

// runnerReadyTimeout is the maximum time that a runner may take to listen.
const runnerReadyTimeout = 15 * time.Second

// Provider implements sandbox.Provider by local processes. Several providers may share a folder, also
// concurrently. It is safe for concurrent use.
type Provider struct {
	cfg    Config
	mu     sync.Mutex         // held while a sandbox is created or ended
	layers layer.SingleFlight // by digest
}

// savedSandbox is the content of the file sandbox.json in the folder of a sandbox.
type savedSandbox struct {
	ID      string         `json:"id"`
	Labels  sandbox.Labels `json:"labels"`
	Created time.Time      `json:"created"`
	Socket  string         `json:"socket"`
	Empty   bool           `json:"empty,omitempty"`  // its session had no workspace on this machine before
	Layer   string         `json:"layer,omitempty"`  // folder with the packages that its agent depends on
	Secret  string         `json:"secret,omitempty"` // with which executors prove themselves to the runner; "" in a sandbox of a release without secrets

	HostPath string `json:"hostPath,omitempty"` // folder that is the workspace; never removed
}

// runnerProcess identifies the process of a sandbox's runner, and is the content of the file runner.json. The start time distinguishes the
// process from a later one with the same pid.
type runnerProcess struct {
	PID   int    `json:"pid"`
	Start string `json:"start"`
}

// New returns a provider.
func New(cfg Config) (*Provider, error) {
	if cfg.Dir == "" || cfg.Runner == "" || cfg.Engine == "" {
		return nil, errors.New("local sandboxes: Dir, Runner and Engine are required")
	}
	if cfg.Path == "" {
		cfg.Path = os.Getenv("PATH")
	}
	if err := cfg.Layers.Check(); err != nil {
		return nil, fmt.Errorf("local sandboxes: Layers: %w", err)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	var err error
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, fmt.Errorf("local sandboxes: %w", err)
	}
	if cfg.Runner, err = filepath.Abs(cfg.Runner); err != nil {
		return nil, fmt.Errorf("local sandboxes: %w", err)
	}
	for _, d := range []string{"sandboxes", "workspaces", "states"} {
		if err := os.MkdirAll(filepath.Join(cfg.Dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("local sandboxes: make the folder: %w: choose another data folder, or make this one writable", err)
		}
	}
	return &Provider{cfg: cfg}, nil
}

// Create creates a sandbox and blocks until its runner answers. If there is one with the id, Create returns that one, and starts
// its runner if it has ended.
func (p *Provider) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if err := errors.Join(
		events.CheckID("sandbox id", events.KindSandbox, spec.ID),
		events.CheckID("session", events.KindSession, spec.Labels.Session),
		events.CheckTenant("tenant", spec.Labels.Tenant),
	); err != nil {
		return nil, fmt.Errorf("create sandbox: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if box, err := p.attachSandbox(spec.ID); err == nil || !errors.Is(err, sandbox.ErrNotFound) {
		return box, err
	}
	rec, err := p.prepareFolders(spec)
	if err != nil {
		return nil, fmt.Errorf("create sandbox %s: %w", spec.ID, err)
	}
	box := p.newBox(rec)
	if err := box.startRunner(ctx); err != nil {
		return nil, fmt.Errorf("create sandbox %s: %w", spec.ID, err)
	}
	return box, nil
}

// prepareFolders creates the folders and the sandboxRecordFile of a new sandbox.
func (p *Provider) prepareFolders(spec sandbox.Spec) (savedSandbox, error) {
	dir := p.sandboxDir(spec.ID)
	state := p.stateDir(spec.Labels.Session)
	folders := []string{filepath.Join(state, "agent"), filepath.Join(dir, "home"), filepath.Join(dir, "tmp")}
	empty := false
	if spec.HostPath == "" {
		_, err := os.Lstat(p.workspaceDir(spec.Labels.Session))
		empty = errors.Is(err, fs.ErrNotExist)
		folders = append(folders, p.workspaceDir(spec.Labels.Session))
	} else if err := p.checkHostPath(spec.HostPath); err != nil {
		return savedSandbox{}, err
	}
	if err := os.MkdirAll(state, 0o700); err != nil {
		return savedSandbox{}, err
	}
	// The record is written before the session's other folders, so that ListWorkspaces finds them.
	if err := writeJSON(filepath.Join(state, stateRecord), spec.Labels); err != nil {
		return savedSandbox{}, err
	}
	for _, d := range folders {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return savedSandbox{}, err
		}
	}
	rec, err := p.readRecord(spec.ID)
	if err == nil {
		if there, rerr := os.ReadDir(p.newBox(rec).workspaceDir()); rerr != nil || len(there) > 0 {
			rec.Empty = false // its runner has run before
		}
		if rec.Secret != "" {
			return rec, nil
		}
		rec.Secret = runner.NewSecret() // for the runner that is started now
		return rec, writeJSON(filepath.Join(dir, sandboxRecordFile), rec)
	}
	if !errors.Is(err, sandbox.ErrNotFound) {
		return savedSandbox{}, err
	}
	socket, err := p.socketPath(spec.ID)
	if err != nil {
		return savedSandbox{}, err
	}
	rec = savedSandbox{
		ID: spec.ID, Labels: spec.Labels, Created: time.Now().UTC(), Socket: socket, Empty: empty, Layer: spec.Layer, HostPath: spec.HostPath,
		Secret: runner.NewSecret(),
	}
	return rec, writeJSON(filepath.Join(dir, sandboxRecordFile), rec)
}

// checkHostPath returns a *sandbox.Error unless a session may still work in a folder of this machine. The folder may have been removed
// since the session was created, or replaced by a link to another folder.
func (p *Provider) checkHostPath(path string) error {
	resolved, err := p.cfg.HostPaths.CheckAndResolve(path)
	if err == nil && resolved != path {
		err = fmt.Errorf("%s has become a link to %s", path, resolved)
	}
	if err != nil {
		return &sandbox.Error{Code: sandbox.CodeHostPathRefused, Message: "the session's folder cannot be used: " + err.Error(), Err: err}
	}
	return nil
}

// Attach returns the sandbox with an id whose runner runs, or sandbox.ErrNotFound if there is none.
func (p *Provider) Attach(_ context.Context, id string) (sandbox.Sandbox, error) {
	return p.attachSandbox(id)
}

// attachSandbox implements Attach.
func (p *Provider) attachSandbox(id string) (sandbox.Sandbox, error) {
	rec, err := p.readRecord(id)
	if err != nil {
		return nil, err
	}
	box := p.newBox(rec)
	if _, alive := box.findRunner(); !alive {
		return nil, fmt.Errorf("sandbox %s: its runner is gone: %w", id, sandbox.ErrNotFound)
	}
	return box, nil
}

// List returns every sandbox that has a folder. It also removes abandoned folders, of sandboxes whose executor was killed while it created
// or removed them.
func (p *Provider) List(context.Context) ([]sandbox.Info, error) {
	entries, err := os.ReadDir(filepath.Join(p.cfg.Dir, "sandboxes"))
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	var out []sandbox.Info
	for _, e := range entries {
		rec, err := p.readRecord(e.Name())
		if errors.Is(err, sandbox.ErrNotFound) {
			if dir := p.sandboxDir(e.Name()); events.CheckID("sandbox id", events.KindSandbox, e.Name()) == nil && isAbandoned(dir) {
				p.cfg.Logger.Info("removing what was left of a sandbox", "sandbox", e.Name())
				if err := removeAll(dir); err != nil {
					return nil, fmt.Errorf("remove what was left of sandbox %s: %w", e.Name(), err)
				}
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		box := p.newBox(rec)
		_, alive := box.findRunner()
		out = append(out, sandbox.Info{ID: rec.ID, Labels: rec.Labels, Created: rec.Created, Running: alive, Paused: box.isPaused()})
	}
	return out, nil
}

// Terminate ends every process of a sandbox and removes its folder.
func (p *Provider) Terminate(ctx context.Context, id string, wipe bool) error {
	if err := events.CheckID("sandbox id", events.KindSandbox, id); err != nil {
		return fmt.Errorf("terminate sandbox: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	rec, err := p.readRecord(id)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	known := err == nil
	rec.ID = id
	box := p.newBox(rec)
	if err := box.endProcesses(ctx); err != nil {
		return fmt.Errorf("terminate sandbox %s: %w", id, err)
	}
	if known && rec.Socket != "" {
		if err := os.Remove(rec.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("terminate sandbox %s: %w", id, err)
		}
	}
	if known && wipe {
		if err := p.RemoveWorkspace(ctx, rec.Labels); err != nil {
			return err
		}
	}
	// Removed last, so that a sandbox whose removal failed is found again.
	if err := removeRecorded(p.sandboxDir(id), sandboxRecordFile); err != nil {
		return fmt.Errorf("terminate sandbox %s: %w", id, err)
	}
	return nil
}

// ListWorkspaces returns the labels of the sessions that have a workspace on this machine.
func (p *Provider) ListWorkspaces(context.Context) ([]sandbox.Labels, error) {
	entries, err := os.ReadDir(filepath.Join(p.cfg.Dir, "states"))
	if err != nil {
		return nil, fmt.Errorf("list workspaces: %w", err)
	}
	var out []sandbox.Labels
	for _, e := range entries {
		var l sandbox.Labels
		dir := p.stateDir(e.Name())
		err := readJSON(filepath.Join(dir, stateRecord), &l)
		if errors.Is(err, fs.ErrNotExist) {
			// The folder is being created, or an executor was killed while it created or removed it. Its content stays.
			if isAbandoned(dir) {
				_ = os.Remove(filepath.Join(dir, "agent")) // a folder that is not empty is not removed
				_ = os.Remove(dir)
			}
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list workspaces: %w", err)
		}
		out = append(out, l)
	}
	return out, nil
}

// RemoveWorkspace removes a session's workspace and its agent's records from this machine.
func (p *Provider) RemoveWorkspace(_ context.Context, l sandbox.Labels) error {
	if err := events.CheckID("session", events.KindSession, l.Session); err != nil {
		return fmt.Errorf("wipe workspace: %w", err)
	}
	// The record is in the state folder, which is removed last: ListWorkspaces lists the session while anything is left.
	err := removeAll(p.workspaceDir(l.Session))
	if err == nil {
		err = removeRecorded(p.stateDir(l.Session), stateRecord)
	}
	if err != nil {
		return fmt.Errorf("wipe workspace of %s: %w", l.Session, err)
	}
	return nil
}

// sandboxDir returns the folder of the sandbox with an id.
func (p *Provider) sandboxDir(id string) string { return filepath.Join(p.cfg.Dir, "sandboxes", id) }

// workspaceDir returns the folder of a session's workspace.
func (p *Provider) workspaceDir(session string) string {
	return filepath.Join(p.cfg.Dir, "workspaces", session)
}

// stateDir returns the folder of the records of a session's agent.
func (p *Provider) stateDir(session string) string {
	return filepath.Join(p.cfg.Dir, "states", session)
}

// newBox returns the sandbox that a record describes.
func (p *Provider) newBox(rec savedSandbox) *box {
	return &box{p: p, rec: rec, dir: p.sandboxDir(rec.ID)}
}

// readRecord reads the sandboxRecordFile of a sandbox. It returns sandbox.ErrNotFound if there is none.
func (p *Provider) readRecord(id string) (savedSandbox, error) {
	if err := events.CheckID("sandbox id", events.KindSandbox, id); err != nil {
		return savedSandbox{}, fmt.Errorf("%w: %w", sandbox.ErrNotFound, err)
	}
	var rec savedSandbox
	err := readJSON(filepath.Join(p.sandboxDir(id), sandboxRecordFile), &rec)
	if errors.Is(err, fs.ErrNotExist) {
		return rec, fmt.Errorf("sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	if err != nil {
		return rec, fmt.Errorf("sandbox %s: %w", id, err)
	}
	return rec, nil
}

func readJSON(path string, into any) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// writeJSON writes v as JSON to a file, which it replaces atomically.
func writeJSON(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", raw, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// isAbandoned reports whether the folder of a sandbox without a sandboxRecordFile has not changed for abandonedAge, so that no executor is
// creating the sandbox any more.
func isAbandoned(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && time.Since(info.ModTime()) > abandonedAge
}

// removeRecorded removes a folder, and the file record in it last. If the process is killed during that, the folder is still found by its
// record.
func removeRecorded(dir, record string) error {
	if err := os.Chmod(dir, 0o700); errors.Is(err, fs.ErrNotExist) { //nolint:gosec // about to be removed
		return nil
	} else if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // another executor was faster
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if e.Name() != record {
			errs = append(errs, removeAll(filepath.Join(dir, e.Name())))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return removeAll(dir)
}

// removeAll removes a folder with everything in it, including folders that an agent has made read-only.
func removeAll(dir string) error {
	if err := os.RemoveAll(dir); err == nil {
		return nil
	}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() {
			return os.Chmod(path, 0o700) //nolint:gosec // about to be removed
		}
		return err
	})
	return errors.Join(err, os.RemoveAll(dir))
}
