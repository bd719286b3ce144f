package modal

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	sdk "github.com/modal-labs/modal-client/go"
	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// The tags of sandboxes. A value is never empty: the value absent stands for an empty one.
const (
	tagEngine   = "spool-engine"
	tagRole     = "spool-role" // roleSandbox or roleHelper
	tagSandbox  = "spool-sandbox"
	tagTenant   = "spool-tenant"
	tagSession  = "spool-session"
	tagEpoch    = "spool-epoch"
	tagExecutor = "spool-executor"
	tagSecret   = "spool-secret" // the secret that executors prove to the runner; processes in the sandbox cannot read it
	tagOrigin   = "spool-origin" // the sandbox from whose snapshot this one started
	tagImage    = "spool-image"  // the key of the prepared image from which it started, directly or through snapshots
	tagOwner    = "spool-owner"  // of a helper: the provider that created it

	roleSandbox = "sandbox"
	roleHelper  = "helper" // prepares an image

	noTagValue = "none"
)

// sandboxHandle holds the SDK's object of a running sandbox, and what this process knows about the sandbox.
type sandboxHandle struct {
	mu     sync.Mutex // guards sb, stale and skills
	sb     *sdk.Sandbox
	stale  []*sdk.Sandbox  // replaced by sb; commands that were started through them may still run
	skills map[string]bool // digests of the skills that the sandbox is known to have
	secret string
	kept   bool
	origin string // the sandbox from whose snapshot it started, "" for none
	key    string // key of its prepared image, see tagImage
}

// sdkSandbox returns the SDK's object of the sandbox, which holds a connection to the sandbox.
func (h *sandboxHandle) sdkSandbox() *sdk.Sandbox {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sb
}

// reconnect replaces the SDK's object old by a new one, with a new connection. After failures, the old connection would wait longer and
// longer before it dials again.
func (h *sandboxHandle) reconnect(ctx context.Context, p *Provider, old *sdk.Sandbox) error {
	fresh, err := p.client.Sandboxes.FromID(ctx, old.SandboxID, nil) // makes no request
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sb == old {
		h.sb, h.stale = fresh, append(h.stale, old)
	}
	return nil
}

// close closes the connections to the sandbox.
func (h *sandboxHandle) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.sb.Detach()
	for _, sb := range h.stale {
		err = errors.Join(err, sb.Detach())
	}
	return err
}

// storeHandle stores the handle of the sandbox id. If there already is a handle of the same sandbox, it returns that one, else h.
func (p *Provider) storeHandle(id string, h *sandboxHandle) *sandboxHandle {
	p.mu.Lock()
	defer p.mu.Unlock()
	if first := p.handles[id]; first != nil && first.sdkSandbox().SandboxID == h.sb.SandboxID {
		return first
	}
	p.handles[id] = h
	return h
}

// removeHandle removes the handle of a sandbox that has ended, and closes the handle's connections.
func (p *Provider) removeHandle(id string) {
	p.mu.Lock()
	h := p.handles[id]
	delete(p.handles, id)
	p.mu.Unlock()
	if h == nil {
		return
	}
	if err := h.close(); err != nil {
		p.cfg.Logger.Debug("close the connection to a sandbox that is gone", "sandbox", id, "error", err)
	}
}

// knownHandle returns the stored handle of the sandbox id, or nil if there is none.
func (p *Provider) knownHandle(id string) *sandboxHandle {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.handles[id]
}

// checkLabels returns an error if the values of labels could not be stored in Modal's tags.
func (p *Provider) checkLabels(l sandbox.Labels) error {
	var err error
	if l.Tenant != "" || l.Session != "" {
		err = errors.Join(events.CheckTenant("tenant", l.Tenant), events.CheckID("session", events.KindSession, l.Session))
	}
	if l.Executor != "" {
		err = errors.Join(err, events.CheckID("executor", events.KindExecutor, l.Executor))
	}
	if l.Engine != p.cfg.Engine {
		err = errors.Join(err, fmt.Errorf("engine: %q, want the engine of this provider, %q", l.Engine, p.cfg.Engine))
	}
	return err
}

// sandboxTags returns all tags of a sandbox at Modal. Adopt sets all of them again, so it does not matter whether Modal replaces or merges
// the tags.
func (p *Provider) sandboxTags(id string, l sandbox.Labels, h *sandboxHandle) map[string]string {
	tags := map[string]string{
		tagEngine: l.Engine, tagRole: roleSandbox, tagSandbox: id, tagTenant: l.Tenant, tagSession: l.Session,
		tagEpoch: strconv.FormatUint(l.Epoch, 10), tagExecutor: l.Executor, tagSecret: h.secret, tagOrigin: h.origin, tagImage: h.key,
	}
	for name, value := range tags {
		if value == "" {
			tags[name] = noTagValue
		}
	}
	return tags
}

// tagValue returns the value of a tag, or "" if the tag says that there is no value.
func tagValue(tags map[string]string, name string) string {
	if v := tags[name]; v != noTagValue {
		return v
	}
	return ""
}

// labelsOfTags returns the labels of a sandbox that has the given tags.
func labelsOfTags(tags map[string]string) (sandbox.Labels, error) {
	epoch, err := strconv.ParseUint(tags[tagEpoch], 10, 64)
	if err != nil {
		return sandbox.Labels{}, fmt.Errorf("tag %s: %w", tagEpoch, err)
	}
	l := sandbox.Labels{
		Engine: tagValue(tags, tagEngine), Session: tagValue(tags, tagSession), Epoch: epoch, Executor: tagValue(tags, tagExecutor),
	}
	if l.Session != "" { // a tenant may be called "none"
		l.Tenant = tags[tagTenant]
	}
	return l, nil
}

// findSandbox asks Modal for the running sandbox of this engine with an id, and returns a handle of it, or sandbox.ErrNotFound if there is
// none.
func (p *Provider) findSandbox(ctx context.Context, id string) (*sandboxHandle, error) {
	if err := events.CheckID("sandbox id", events.KindSandbox, id); err != nil {
		return nil, fmt.Errorf("%w: %w", sandbox.ErrNotFound, err)
	}
	if _, err := p.lookupApp(ctx); err != nil {
		return nil, err
	}
	sb, tags, err := p.sandboxByName(ctx, id)
	if isNotFound(err) || err == nil && (tags[tagEngine] != p.cfg.Engine || tags[tagSandbox] != id) {
		return nil, fmt.Errorf("sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	origin := tagValue(tags, tagOrigin)
	return &sandboxHandle{sb: sb, skills: map[string]bool{}, secret: tags[tagSecret], kept: origin != "", origin: origin, key: tags[tagImage]}, nil
}

// sandboxByName returns the running sandbox with a name in the Modal app, and its tags. If there is none, isNotFound reports true for the
// error.
func (p *Provider) sandboxByName(ctx context.Context, name string) (sb *sdk.Sandbox, tags map[string]string, err error) {
	sb, err = callModal(ctx, p, callTimeout, "find sandbox "+name, func(ctx context.Context) (*sdk.Sandbox, error) {
		sb, err := p.client.Sandboxes.FromName(ctx, p.cfg.App, name, &sdk.SandboxFromNameParams{Environment: p.cfg.Environment})
		if err == nil {
			tags, err = sb.GetTags(ctx, nil)
		}
		return sb, err
	})
	return sb, tags, err
}

// currentHandle returns the handle of a running sandbox, or sandbox.ErrNotFound if the sandbox does not run.
func (p *Provider) currentHandle(ctx context.Context, id string) (*sandboxHandle, error) {
	h := p.knownHandle(id)
	if h == nil {
		h, err := p.findSandbox(ctx, id)
		if err != nil {
			return nil, err
		}
		return p.storeHandle(id, h), nil
	}
	ended, err := p.hasEnded(ctx, h.sdkSandbox())
	if err == nil && ended {
		p.removeHandle(id)
		return nil, fmt.Errorf("sandbox %s has ended: %w", id, sandbox.ErrNotFound)
	}
	return h, err
}

// hasEnded asks Modal whether a sandbox has ended.
func (p *Provider) hasEnded(ctx context.Context, sb *sdk.Sandbox) (bool, error) {
	code, err := callModal(ctx, p, callTimeout, "look at a sandbox", func(ctx context.Context) (*int, error) {
		fresh, err := p.client.Sandboxes.FromID(ctx, sb.SandboxID, nil) // sb may be detached
		if err != nil {
			return nil, err
		}
		return fresh.Poll(ctx, nil)
	})
	if isNotFound(err) {
		return true, nil
	}
	return code != nil, err
}

// Attach returns the running sandbox with an id; sandbox.ErrNotFound if there is none. A sandbox whose runner has ended does not run.
func (p *Provider) Attach(ctx context.Context, id string) (sandbox.Sandbox, error) {
	h, err := p.currentHandle(ctx, id)
	if err != nil {
		return nil, err
	}
	return &box{p: p, id: id, secret: h.secret, kept: true}, nil
}

// List returns the engine's running sandboxes. A sandbox that has ended leaves nothing at Modal that would have to be removed.
func (p *Provider) List(ctx context.Context) ([]sandbox.Info, error) {
	app, err := p.lookupApp(ctx)
	if err != nil {
		return nil, err
	}
	filter := []*pb.SandboxTag{
		pb.SandboxTag_builder{TagName: tagEngine, TagValue: p.cfg.Engine}.Build(),
		pb.SandboxTag_builder{TagName: tagRole, TagValue: roleSandbox}.Build(),
	}
	var out []sandbox.Info
	for before := 0.0; ; {
		page, err := callModal(ctx, p, callTimeout, "list sandboxes", func(ctx context.Context) (*pb.SandboxListResponse, error) {
			return p.apiClient().SandboxListV2(ctx, pb.SandboxListRequest_builder{AppId: app.AppID, BeforeTimestamp: before, Tags: filter}.Build())
		})
		if err != nil {
			return nil, err
		}
		for _, s := range page.GetSandboxes() {
			before = s.GetCreatedAt()
			info, err := infoOf(s)
			if err != nil {
				p.cfg.Logger.Warn("a sandbox cannot be read by its tags", "sandbox", s.GetId(), "error", err)
				continue
			}
			out = append(out, info)
		}
		if len(page.GetSandboxes()) == 0 {
			return out, nil
		}
	}
}

// infoOf converts Modal's description of a sandbox.
func infoOf(s *pb.SandboxInfo) (sandbox.Info, error) {
	tags := map[string]string{}
	for _, t := range s.GetTags() {
		tags[t.GetTagName()] = t.GetTagValue()
	}
	l, err := labelsOfTags(tags)
	if err != nil {
		return sandbox.Info{}, err
	}
	id := tags[tagSandbox]
	if err := events.CheckID("tag "+tagSandbox, events.KindSandbox, id); err != nil {
		return sandbox.Info{}, err
	}
	return sandbox.Info{ID: id, Labels: l, Created: time.UnixMicro(int64(s.GetCreatedAt() * 1e6)), Running: true}, nil
}

// Adopt replaces the labels of a sandbox of the warm pool by those of the session that takes it.
func (p *Provider) Adopt(ctx context.Context, id string, l sandbox.Labels) error {
	if err := p.checkLabels(l); err != nil {
		return fmt.Errorf("adopt sandbox %s: %w", id, err)
	}
	h, err := p.currentHandle(ctx, id)
	if err != nil {
		return fmt.Errorf("adopt: %w", err)
	}
	return p.callModalNoResult(ctx, "adopt sandbox "+id, func(ctx context.Context) error { return h.sdkSandbox().SetTags(ctx, p.sandboxTags(id, l, h), nil) })
}

// Terminate ends a sandbox. If wipe is false, it keeps a snapshot of the file system for the sandbox whose Spec.Workspace names this one.
// If wipe is true, it removes that snapshot. It returns nil for a sandbox that has already ended.
func (p *Provider) Terminate(ctx context.Context, id string, wipe bool) error {
	if err := events.CheckID("sandbox id", events.KindSandbox, id); err != nil {
		return fmt.Errorf("terminate sandbox: %w", err)
	}
	h, err := p.currentHandle(ctx, id)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("terminate sandbox %s: %w", id, err)
	}
	if err == nil {
		if err := p.terminateRunning(ctx, id, h, wipe); err != nil {
			return fmt.Errorf("terminate sandbox %s: %w", id, err)
		}
	}
	if !wipe {
		return nil
	}
	if err := p.removeWorkspaceImage(ctx, id); err != nil {
		return fmt.Errorf("terminate sandbox %s: %w", id, err)
	}
	return nil
}

// terminateRunning ends a running sandbox, and removes the snapshot from which the sandbox started when that is no longer needed.
func (p *Provider) terminateRunning(ctx context.Context, id string, h *sandboxHandle, wipe bool) error {
	stored := wipe
	if !wipe {
		err := p.publishWorkspace(ctx, id, h)
		switch {
		case err == nil:
			stored = true
		case guest.IsUnavailable(err) || ctx.Err() != nil:
			return err
		default: // the next sandbox starts from the last snapshot in Spool's store
			p.cfg.Logger.Warn("no snapshot of a sandbox could be taken before it ended", "sandbox", id, "error", err)
		}
	}
	if err := p.endSandbox(ctx, h.sdkSandbox()); err != nil {
		return err
	}
	p.removeHandle(id)
	if stored && h.origin != "" {
		return p.removeWorkspaceImage(ctx, h.origin)
	}
	return nil
}

// endSandbox ends a sandbox and blocks until the sandbox has ended.
func (p *Provider) endSandbox(ctx context.Context, sb *sdk.Sandbox) error {
	err := p.callModalNoResult(ctx, "end a sandbox", func(ctx context.Context) error {
		_, err := sb.Terminate(ctx, &sdk.SandboxTerminateParams{Wait: true})
		return err
	})
	if isNotFound(err) {
		err = nil
	}
	return err
}
