package modal

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	sdk "github.com/modal-labs/modal-client/go"
	"google.golang.org/grpc/codes"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// Paths in a sandbox, and the user of its processes.
const (
	workspaceDir = "/workspace"
	homeDir      = "/home/spool"
	stateDir     = "/spool/state"
	runnerPath   = "/spool/bin/runner"
	socketPath   = "/spool/run/runner.sock"
	runnerUser   = "10001:10001" // as in prepare.sh
)

// maxCreateAttempts is the maximum number of attempts of Create. An attempt fails if a sandbox or an image that it
// found does not exist any more when it is used.
const maxCreateAttempts = 5

// errVanished is returned if a sandbox has ended, or an image has expired, between its look-up and its use. The caller
// may try again.
var errVanished = errors.New("it ended meanwhile")

// Create creates a sandbox and blocks until its runner answers. If a sandbox with the id runs, Create returns that one.
func (p *Provider) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if err := p.checkSpec(spec); err != nil {
		return nil, fmt.Errorf("create sandbox: %w", err)
	}
	var err error
	for range maxCreateAttempts {
		var b *box
		if b, err = p.createOnce(ctx, spec); err == nil {
			return b, nil
		}
		if !errors.Is(err, errVanished) {
			break
		}
	}
	return nil, guest.WithCode(sandbox.CodeSandboxFailed, "create sandbox "+spec.ID, err)
}

// checkSpec returns an error if a Spec is invalid or this provider cannot fulfil it.
func (p *Provider) checkSpec(spec sandbox.Spec) error {
	err := errors.Join(events.CheckID("sandbox id", events.KindSandbox, spec.ID), p.checkLabels(spec.Labels))
	if spec.Workspace != "" {
		err = errors.Join(err, events.CheckID("workspace", events.KindSandbox, spec.Workspace))
	}
	if l := spec.Limits; l.MemoryBytes < 0 || l.CPUs < 0 || l.PIDs < 0 || l.DiskBytes < 0 {
		err = errors.Join(err, errors.New("limits: they cannot be negative"))
	}
	if spec.HostPath != "" {
		err = errors.Join(err, errors.New("host path: a sandbox on Modal has its own workspace"))
	}
	if spec.Servers != 0 {
		err = errors.Join(err, errors.New("servers: a sandbox on Modal has no containers for MCP servers"))
	}
	if spec.Layer+spec.LayerTarget != "" {
		err = errors.Join(err, errors.New("layer: a sandbox on Modal cannot mount a layer"))
	}
	if spec.EgressToken != "" && p.cfg.Egress.Server == "" {
		err = errors.Join(err, errors.New("egress token: this provider has no egress proxy: set egress-server"))
	}
	return err
}

// createOnce makes one attempt of Create. It returns errVanished if another attempt may succeed.
func (p *Provider) createOnce(ctx context.Context, spec sandbox.Spec) (*box, error) {
	h, err := p.requestSandbox(ctx, spec)
	var exists sdk.AlreadyExistsError
	if errors.As(err, &exists) {
		if h, err = p.findSandbox(ctx, spec.ID); errors.Is(err, sandbox.ErrNotFound) {
			return nil, fmt.Errorf("sandbox %s: %w", spec.ID, errVanished)
		}
	}
	if err != nil {
		return nil, err
	}
	h = p.storeHandle(spec.ID, h)
	b := &box{p: p, id: spec.ID, secret: h.secret, kept: h.kept}
	if err := b.awaitReady(ctx); err != nil {
		if guest.IsUnavailable(err) || ctx.Err() != nil {
			return nil, err // the next call of Create finds the sandbox
		}
		err = errors.Join(err, p.endSandbox(context.WithoutCancel(ctx), h.sdkSandbox()))
		p.removeHandle(spec.ID)
		return nil, err
	}
	return b, nil
}

// requestSandbox requests a new sandbox from Modal.
func (p *Provider) requestSandbox(ctx context.Context, spec sandbox.Spec) (*sandboxHandle, error) {
	app, err := p.lookupApp(ctx)
	if err != nil {
		return nil, err
	}
	ref, err := p.imageRef(spec.Image)
	if err != nil {
		return nil, err
	}
	from, err := p.prepareImage(ctx, ref)
	if err != nil {
		return nil, err
	}
	image := from.image
	h := &sandboxHandle{skills: map[string]bool{}, secret: runner.NewSecret(), key: from.key}
	if spec.Workspace != "" {
		kept, err := p.imageByName(ctx, workspaceImageName(spec.Workspace)+":"+from.key)
		if err != nil {
			return nil, err
		}
		if kept != nil {
			image, h.kept, h.origin = kept, true, spec.Workspace
		}
	}
	params := p.createParams(spec)
	params.Tags = p.sandboxTags(spec.ID, spec.Labels, h)
	h.sb, err = callModal(ctx, p, createTimeout, "create sandbox "+spec.ID, func(ctx context.Context) (*sdk.Sandbox, error) {
		return p.client.Sandboxes.Create(ctx, app, image, params)
	})
	if isNotFound(err) && !h.kept { // the prepared image has expired
		p.images.forgetImage(ref)
		return nil, fmt.Errorf("image of sandbox %s: %w: %w", spec.ID, errVanished, err)
	}
	return h, p.refusalError(err)
}

// refusalError adds the code of Spool to an error with which Modal refused to create a sandbox. Modal has no list of
// its regions and no gRPC code for an unknown region, so refusalError looks for the region in the message.
func (p *Provider) refusalError(err error) error {
	if p.cfg.Region != "" && hasCode(err, codes.InvalidArgument, codes.NotFound) && strings.Contains(strings.ToLower(err.Error()), "region") {
		return &sandbox.Error{Code: sandbox.CodeRegionUnknown, Err: err, Message: fmt.Sprintf(
			"Modal has no region %q for this workspace: set SPOOL_MODAL_REGION to one that it has (%v)", p.cfg.Region, err)}
	}
	return err
}

// allowedRegions returns the regions in which Modal may run sandboxes, according to the settings; nil means all.
func (p *Provider) allowedRegions() []string {
	if p.cfg.Region == "" {
		return nil
	}
	return []string{p.cfg.Region}
}

// createParams returns the SDK's parameters for a new sandbox: its limits, network policy and environment.
func (p *Provider) createParams(spec sandbox.Spec) *sdk.SandboxCreateParams {
	limits := p.cfg.Limits
	if spec.Limits.MemoryBytes > 0 {
		limits.MemoryBytes = spec.Limits.MemoryBytes
	}
	if spec.Limits.CPUs > 0 {
		limits.CPUs = spec.Limits.CPUs
	}
	if spec.Limits.DiskBytes > 0 {
		limits.DiskBytes = spec.Limits.DiskBytes
	}
	memory := int(limits.MemoryBytes >> 20) //nolint:gosec // not negative
	out := &sdk.SandboxCreateParams{
		Name: spec.ID, Command: []string{runnerPath, "serve"}, Workdir: workspaceDir, Timeout: p.cfg.Timeout, Regions: p.allowedRegions(),
		CPU: limits.CPUs, CPULimit: limits.CPUs, MemoryMiB: memory, MemoryLimitMiB: memory,
		Env: map[string]string{
			"HOME": homeDir, "LANG": "C.UTF-8", "SPOOL_RUNNER_USER": runnerUser,
			"SPOOL_RUNNER_SOCKET": socketPath, "SPOOL_RUNNER_WORKSPACE": workspaceDir, "SPOOL_RUNNER_STATE": stateDir,
			"SPOOL_RUNNER_DISK_LIMIT": strconv.FormatInt(limits.DiskBytes, 10),
		},
	}
	if spec.EgressToken == "" {
		out.BlockNetwork = true
		return out
	}
	out.Env["SPOOL_RUNNER_EGRESS_SERVER"] = p.cfg.Egress.Server
	out.Env["SPOOL_RUNNER_EGRESS_AUTHORITY"] = p.cfg.Egress.Authority
	out.Env["SPOOL_RUNNER_EGRESS_TOKEN"] = spec.EgressToken
	host, _, err := net.SplitHostPort(p.cfg.Egress.Server)
	if err != nil { // not possible after Config.Check
		out.BlockNetwork = true
		return out
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		out.OutboundCIDRAllowlist = &sdk.Allowlist{Entries: []string{netip.PrefixFrom(ip.Unmap(), ip.Unmap().BitLen()).String()}}
	} else {
		out.OutboundDomainAllowlist = &sdk.Allowlist{Entries: []string{host}}
	}
	return out
}
