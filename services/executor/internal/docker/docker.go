// Package docker runs sandboxes as containers of a Docker engine, local or
// remote.
//
// A sandbox is one container whose PID 1 is the runner. It has no network, no
// capability and no way to gain one, a read-only root, an unprivileged user that
// no other sandbox has, and limits on memory, processors and processes. What can be written is:
//
//	/workspace         volume of a fixed size; again at /mnt/workspace
//	/spool/state       volume of a fixed size, the agents' own records
//	/tmp, /home/spool  in memory, of a fixed size, gone when the container ends
//	/spool/run         in memory, the runner's socket
//
// All sandboxes of the engine share a read-only volume with the runner (/spool/bin), which is named by the
// runner's digest, and one with skills (/bin/skills). Each set of packages that agents depend on has a volume
// (/opt/spool/dependencies). Files are read and written by commands of the runner. The runner also starts commands that can be killed,
// because the engine has no call that ends an exec.
//
// MCP servers of type docker are containers that end with their sandbox. Each shares with the sandbox a small
// volume in memory (/spool/mcp), which holds the server's socket.
//
// Config.DiskLimit selects how the sizes of volumes are enforced; see disk.go.
//
// Labels of the container describe the sandbox. The engine cannot change labels, so the values that change when a
// pooled sandbox is adopted are in the container's name.
//
// Volumes are named after the sandbox for which they were created. When another sandbox takes them over, an empty volume,
// the note spool-<sandbox>-owner, names their first owner in a label, which outlives the container.
package docker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/docker/docker/client"
	"golang.org/x/sync/singleflight"

	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

// Config configures a Provider. Engine, Runner, Limits, TmpBytes, Users, DiskLimit, Files and the limits of Layers are
// required: the settings of the executor state their defaults.
type Config struct {
	// Host is the engine's address: unix://, tcp:// or ssh://. "" means DOCKER_HOST
	// (with DOCKER_TLS_VERIFY and DOCKER_CERT_PATH), or else the default socket.
	Host   string
	Engine string // name of the engine, in the labels of everything that is created
	// Runner is the path of the runner's binary for Linux, or of a folder with
	// runner-linux-amd64 and runner-linux-arm64.
	Runner  string
	Image   string             // for sandboxes whose Spec names none; always allowed, and pulled if it is absent
	Images  imagepolicy.Policy // of other images that tenants may name
	Pull    bool               // pull those images if they are absent
	Runtime string             // runtime of the engine, such as runsc; "" for its default
	Limits  sandbox.Limits     // for sandboxes whose Spec has none
	// TmpBytes is the size of /tmp, and of the home folder. Their content counts as memory.
	TmpBytes int64
	// Users is the range of users, one for each sandbox. Providers of an engine may have different ranges.
	Users UserRange
	// DiskLimit selects how disk limits are enforced, one of DiskLimits.
	DiskLimit string
	// Files is the largest number of files and folders in a volume, where DiskLimitLoop enforces that; a small volume may
	// hold fewer.
	Files int64
	// EgressSockets holds the egress proxy's socket: the name of a volume, or an
	// absolute path on the engine's machine. "" means no egress.
	EgressSockets string
	// Layers configures the volumes of packages that agents depend on.
	Layers layer.Config
	Logger *slog.Logger
}

// Limits of time.
const (
	// apiTimeout is the time limit of one call of the Docker API.
	apiTimeout = 30 * time.Second
	// pullTimeout is the time limit of the pull of an image.
	pullTimeout = 15 * time.Minute
	// runnerReadyTimeout is the maximum time that a runner may take to listen.
	runnerReadyTimeout = 20 * time.Second
	// shutdownTimeout is the maximum time that a runner may take to end its processes before they are killed.
	shutdownTimeout = 3 * time.Second
)

// Provider implements sandbox.Provider by containers. Several providers may use an engine concurrently. It is safe for
// concurrent use. While the engine does not answer, every method returns a *sandbox.Error with
// sandbox.CodeEngineUnavailable within a bounded time.
type Provider struct {
	cfg        Config
	api        *client.Client
	within     time.Duration // limit of one call
	pullWithin time.Duration // limit of a pull, whether or not the registry sends data
	stale      time.Duration // age at which a lock counts as abandoned

	negotiated atomic.Bool
	watch      enginePinger
	pulls      singleflight.Group
	cpus       atomic.Int64 // number of the engine's CPUs; 0 if unknown yet
	mu         sync.Mutex
	runners    map[string]*runnerBinary     // by architecture
	accounts   map[string]map[string][]byte // files of accounts, by the image's id and the file's name
	skills     skillStore
	layers     layer.SingleFlight // by digest
	disks      diskState
}

// New returns a provider. It makes no request to the engine.
func New(cfg Config) (*Provider, error) {
	if cfg.Engine == "" || cfg.Runner == "" {
		return nil, errors.New("docker sandboxes: Engine and Runner are required")
	}
	if l := cfg.Limits; l.MemoryBytes <= 0 || l.CPUs <= 0 || l.PIDs <= 0 || l.DiskBytes <= 0 || cfg.TmpBytes <= 0 || cfg.Files <= 0 {
		return nil, errors.New("docker sandboxes: Limits, TmpBytes and Files must be positive")
	}
	if strings.Contains(cfg.EgressSockets, "/") && !filepath.IsAbs(cfg.EgressSockets) {
		return nil, fmt.Errorf("docker sandboxes: EgressSockets %q is neither the name of a volume nor an absolute path", cfg.EgressSockets)
	}
	if !slices.Contains(DiskLimits(), cfg.DiskLimit) {
		return nil, fmt.Errorf("docker sandboxes: DiskLimit %q is none of %s", cfg.DiskLimit, strings.Join(DiskLimits(), ", "))
	}
	if err := cfg.Users.validate(); err != nil {
		return nil, fmt.Errorf("docker sandboxes: Users: %w", err)
	}
	if err := cfg.Layers.Check(); err != nil {
		return nil, fmt.Errorf("docker sandboxes: Layers: %w", err)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	api, err := newEngineClient(cfg.Host)
	if err != nil {
		return nil, fmt.Errorf("docker sandboxes: Host: %w", err)
	}
	p := &Provider{cfg: cfg, api: api, within: apiTimeout, pullWithin: pullTimeout, stale: abandonedAge, runners: map[string]*runnerBinary{}, accounts: map[string]map[string][]byte{}, skills: newSkillStore()}
	p.watch = enginePinger{p: p, every: pingInterval, open: map[*process]bool{}}
	return p, nil
}

// Close blocks until the loop devices of removed volumes are detached, and closes idle connections to the engine. It does not affect
// sandboxes.
func (p *Provider) Close() error {
	p.disks.sweepings.Wait()
	return p.api.Close()
}

// overlayLimits returns l, in which the limits that are set in by replace those of l.
func overlayLimits(l, by sandbox.Limits) sandbox.Limits {
	if by.MemoryBytes > 0 {
		l.MemoryBytes = by.MemoryBytes
	}
	if by.CPUs > 0 {
		l.CPUs = by.CPUs
	}
	if by.PIDs > 0 {
		l.PIDs = by.PIDs
	}
	if by.DiskBytes > 0 {
		l.DiskBytes = by.DiskBytes
	}
	return l
}

// callEngine calls f, which makes one request to the Docker API, with the time limit apiTimeout, and translates its error. what names
// the operation in the error.
func callEngine[T any](ctx context.Context, p *Provider, what string, f func(context.Context) (T, error)) (T, error) {
	bounded, cancel := context.WithTimeout(ctx, p.within)
	defer cancel()
	if err := p.negotiateAPIVersion(bounded); err != nil {
		var none T
		return none, p.translateError(ctx, what, err)
	}
	v, err := f(bounded)
	return v, p.translateError(ctx, what, err)
}

// negotiateAPIVersion sets the version of the Docker API before the first request. The Docker client could negotiate it by itself, but
// not safely with concurrent requests.
func (p *Provider) negotiateAPIVersion(ctx context.Context) error {
	if p.negotiated.Load() {
		return nil
	}
	ping, err := p.api.Ping(ctx)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.negotiated.Load() {
		p.api.NegotiateAPIVersionPing(ping)
		p.negotiated.Store(true)
	}
	return nil
}

// callEngineNoResult is like callEngine, for a function that returns only an error.
func (p *Provider) callEngineNoResult(ctx context.Context, what string, f func(context.Context) error) error {
	_, err := callEngine(ctx, p, what, func(ctx context.Context) (struct{}, error) { return struct{}{}, f(ctx) })
	return err
}
