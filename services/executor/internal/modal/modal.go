// Package modal runs sandboxes on Modal (https://modal.com) through its Go SDK.
//
// A sandbox is a Modal sandbox whose entrypoint is the runner. Its Modal name is its sbx_ id, so that
// a second Create returns the first one; its labels are tags. It ends with its runner, and after
// Config.Timeout at the latest. Modal starts every program as root: the runner becomes another user before
// it does anything else (see cmd/runner/internal/account), and starts every command.
//
// The image of a sandbox is prepared once for each base image and runner: a helper sandbox gets the
// runner and the folders that it needs, and the snapshot of its file system is published under a name
// that any executor finds. Layout inside, as with Docker:
//
//	/workspace         the workspace; again at /mnt/workspace
//	/spool/state       the agents' own records
//	/spool/bin/runner  the runner, owned by root
//	/spool/run         the runner's socket
//	/bin/skills        skills, owned by root
//
// The sandbox can connect to the egress proxy's address and to no other, see Config.Egress. The number of processes
// is not limited, and only the runner limits the disk.
//
// A sandbox that is terminated without wiping leaves a snapshot of its file system, under a name made
// from its id, for the sandbox whose Spec.Workspace names it.
package modal

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	sdk "github.com/modal-labs/modal-client/go"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// Config configures a Provider. TokenID, TokenSecret, App, Engine, Runner and Image are required.
type Config struct {
	TokenID     string
	TokenSecret string
	ServerURL   string // of Modal's API; "" for Modal itself
	Environment string // "" for the workspace's default
	App         string // created if it does not exist
	Region      string // where sandboxes run; "" for anywhere
	Engine      string // name of the engine, a tag of all sandboxes

	Runner string // path of the runner's binary for linux/amd64
	Image  string // registry reference of the image of sandboxes whose Spec names none; always allowed
	Images imagepolicy.Policy
	Limits sandbox.Limits // MemoryBytes, CPUs and DiskBytes of sandboxes whose Spec has none
	// Timeout is the time after which Modal ends a sandbox; required.
	Timeout time.Duration

	// Egress is the address of the egress proxy, the only one that sandboxes can connect to. Without it
	// sandboxes have no network.
	Egress struct {
		Server    string // host:port
		Authority string // PEM text of the authority that signed the proxy's certificate
	}
	Logger *slog.Logger
}

// MaxTimeout is the longest timeout of a sandbox that Modal accepts.
const MaxTimeout = 24 * time.Hour

const minTimeout = 10 * time.Minute

// How long Modal keeps images, counted from when they are made.
const (
	// imageTTL is the time for which Modal keeps a prepared image. Afterwards an executor prepares the image again.
	imageTTL = 30 * 24 * time.Hour
	// workspaceTTL is the time for which Modal keeps the snapshot of a workspace. Afterwards the session's next sandbox is filled from the
	// last snapshot in Spool's object store instead.
	workspaceTTL = 7 * 24 * time.Hour
)

// Limits of time.
const (
	// callTimeout is the time limit of one call of Modal's API.
	callTimeout = 30 * time.Second
	// createTimeout is the time limit for the start of a sandbox, which Modal may queue.
	createTimeout = 3 * time.Minute
	// prepareTimeout is the time limit for the preparation of an image, including the wait for other executors.
	prepareTimeout = 15 * time.Minute
	// helperTimeout is the time after which Modal ends a helper sandbox, in which an image is prepared. If the executor that prepares the
	// image dies, other executors wait until then.
	helperTimeout = 5 * time.Minute
	// runnerReadyTimeout is the maximum time that a runner may take to listen.
	runnerReadyTimeout = 30 * time.Second
	// snapshotTimeout is the time limit for a snapshot of a file system.
	snapshotTimeout = 2 * time.Minute
	// trialTimeout is the timeout of the sandbox that ProveSettings creates: Modal ends the sandbox after that time if ProveSettings
	// cannot.
	trialTimeout = time.Minute
)

// nameFormat matches the names of apps and environments that Modal accepts.
var nameFormat = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)

// regionFormat matches names that have the form of a region's: us-east, eu, uk, ap-northeast-1.
var regionFormat = regexp.MustCompile(`^[a-z]{2,}(-[a-z0-9]+){0,4}$`)

// Check returns an error that names the setting if the config is not valid. It sends no request.
func (c Config) Check() error {
	for _, s := range []struct{ name, value string }{
		{"modal-token-id", c.TokenID}, {"modal-token-secret", c.TokenSecret}, {"modal-image", c.Image}, {"modal-app", c.App},
	} {
		if s.value == "" {
			return fmt.Errorf("%s: sandboxes on Modal need it: set one", s.name)
		}
	}
	for _, s := range []struct{ name, value string }{{"modal-app", c.App}, {"modal-environment", c.Environment}} {
		if s.value != "" && !nameFormat.MatchString(s.value) {
			return fmt.Errorf("%s: %.80q is not a valid name: want 1 to 64 letters, digits, -, _ and ., a letter or digit first", s.name, s.value)
		}
	}
	if c.Region != "" && !regionFormat.MatchString(c.Region) {
		return fmt.Errorf("modal-region: %.80q is not a region: want one like us-east or eu-west-1", c.Region)
	}
	if c.Timeout < minTimeout || c.Timeout > MaxTimeout || c.Timeout%time.Second != 0 {
		return fmt.Errorf("modal-timeout: %s is not between %s and %s, in whole seconds", c.Timeout, minTimeout, MaxTimeout)
	}
	if err := c.checkEgress(); err != nil {
		return err
	}
	return checkURL(c.ServerURL)
}

// httpsPort is the only port at which Modal lets sandboxes connect to an allowed domain.
const httpsPort = "443"

// checkEgress returns an error if the settings for the egress proxy are not valid.
func (c Config) checkEgress() error {
	if c.Egress.Server == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(c.Egress.Server)
	if err != nil || host == "" {
		return fmt.Errorf("egress-server: %.200q is not host:port", c.Egress.Server)
	}
	if _, err := netip.ParseAddr(host); err != nil && port != httpsPort {
		return fmt.Errorf("egress-server: %.200q: Modal lets sandboxes connect to a host that is given by name at port %s alone: use that port, or the host's IP address", c.Egress.Server, httpsPort)
	}
	return nil
}

// Provider implements sandbox.Provider on Modal. Providers with the same workspace, environment and app are one engine. It is safe
// for concurrent use. While the API does not answer, every method returns a *sandbox.Error with sandbox.CodeEngineUnavailable within a
// bounded time.
type Provider struct {
	cfg    Config
	client *sdk.Client
	digest func() (string, error) // of the runner's binary, SHA-256 in hexadecimal
	owner  string                 // the value of tagOwner

	conn     atomic.Pointer[grpc.ClientConn] // the SDK's connection; nil before the first call
	app      onceValue[*sdk.App]
	images   imageCache
	prepares singleflight.Group
	mu       sync.Mutex
	handles  map[string]*sandboxHandle                          // by sandbox id
	skills   map[string]func(context.Context) (*os.File, error) // registered by StoreSkill, by digest
}

// New returns a provider. It makes no request to Modal.
func New(cfg Config) (*Provider, error) {
	if cfg.Engine == "" || cfg.Runner == "" {
		return nil, errors.New("modal sandboxes: Engine and Runner are required")
	}
	if err := cfg.Check(); err != nil {
		return nil, fmt.Errorf("modal sandboxes: %w", err)
	}
	if info, err := os.Stat(cfg.Runner); err != nil {
		return nil, fmt.Errorf("modal sandboxes: the runner's binary: %w", err)
	} else if info.IsDir() {
		cfg.Runner += "/runner-linux-amd64"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Provider{cfg: cfg, owner: rand.Text(), handles: map[string]*sandboxHandle{}, skills: map[string]func(context.Context) (*os.File, error){}, images: imageCache{ids: map[string]preparedImage{}}}
	p.digest = sync.OnceValues(func() (string, error) { return fileDigest(cfg.Runner) })
	var err error
	if p.client, err = p.newSDKClient(); err != nil {
		return nil, fmt.Errorf("modal sandboxes: %w", err)
	}
	return p, nil
}

// Close closes the connections to Modal. Sandboxes are not affected.
func (p *Provider) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var err error
	for _, h := range p.handles {
		err = errors.Join(err, h.close())
	}
	clear(p.handles)
	p.client.Close()
	return err
}

// ProveSettings checks the settings at Modal: the token, the environment and the app, as VerifySettings does, and the image. It also starts
// and ends a sandbox of the image, with the limits and the region of the settings and without a network. It returns one sentence for each
// step that succeeded.
func (p *Provider) ProveSettings(ctx context.Context) ([]string, error) {
	app, err := p.lookupApp(ctx)
	if err != nil {
		return nil, err
	}
	found := []string{fmt.Sprintf("Modal accepts the token; app %s is %s", p.cfg.App, app.AppID)}
	image, err := p.resolveImage(ctx, app, p.cfg.Image)
	if err != nil {
		return found, err
	}
	found = append(found, fmt.Sprintf("image %s is %s", p.cfg.Image, image.ImageID))
	params := p.createParams(sandbox.Spec{})
	params.Name, params.Command, params.Workdir, params.Env = "", []string{"sleep", strconv.Itoa(int(trialTimeout / time.Second))}, "", nil
	params.Timeout, params.Tags = trialTimeout, p.helperTags()
	trial, err := callModal(ctx, p, createTimeout, "create a sandbox", func(ctx context.Context) (*sdk.Sandbox, error) {
		return p.client.Sandboxes.Create(ctx, app, image, params)
	})
	if err != nil {
		return found, p.refusalError(err)
	}
	if err := errors.Join(p.endSandbox(context.WithoutCancel(ctx), trial), trial.Detach()); err != nil {
		return found, err
	}
	where := "any region"
	if p.cfg.Region != "" {
		where = "region " + p.cfg.Region
	}
	return append(found, "a sandbox was started in "+where+" and ended"), nil
}

// VerifySettings returns an error unless Modal accepts the token, the environment and the app of the config. The error is a *sandbox.Error
// if it has a code.
func (p *Provider) VerifySettings(ctx context.Context) error {
	_, err := p.lookupApp(ctx)
	return err
}

// lookupApp returns the Modal app of the config, which it creates if it does not exist.
func (p *Provider) lookupApp(ctx context.Context) (*sdk.App, error) {
	return p.app.getOrCreate(func() (*sdk.App, error) {
		app, err := callModal(ctx, p, callTimeout, "find app "+p.cfg.App, func(ctx context.Context) (*sdk.App, error) {
			return p.client.Apps.FromName(ctx, p.cfg.App, &sdk.AppFromNameParams{Environment: p.cfg.Environment, CreateIfMissing: true})
		})
		switch {
		case isNotFound(err):
			return nil, &sandbox.Error{Code: sandbox.CodeSandboxFailed, Err: err, Message: fmt.Sprintf(
				"Modal has no environment %q: set SPOOL_MODAL_ENVIRONMENT to one of the workspace (%v)", p.cfg.Environment, err)}
		case p.cfg.ServerURL != "" && hasCode(err, codes.Unimplemented): // gRPC's code for status 404 of any web server
			return nil, &sandbox.Error{Code: sandbox.CodeSandboxFailed, Err: err, Message: fmt.Sprintf(
				"%s is not Modal's API: correct SPOOL_MODAL_SERVER_URL, or leave it empty (%v)", p.cfg.ServerURL, err)}
		case p.cfg.ServerURL != "" && guest.IsUnavailable(err):
			return nil, &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Err: err, Message: fmt.Sprintf(
				"SPOOL_MODAL_SERVER_URL is %s: %v", p.cfg.ServerURL, err)}
		}
		return app, err
	})
}

// onceValue holds the first value that a function has returned without an error. It is safe for concurrent use.
type onceValue[T any] struct {
	mu    sync.Mutex
	value T
	done  bool
}

func (o *onceValue[T]) getOrCreate(f func() (T, error)) (T, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.done {
		return o.value, nil
	}
	v, err := f()
	if err == nil {
		o.value, o.done = v, true
	}
	return v, err
}
