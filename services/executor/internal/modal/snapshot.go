package modal

import (
	"context"
	"time"

	sdk "github.com/modal-labs/modal-client/go"
)

// workspaceName returns the name under which the snapshot of a sandbox is published.
func workspaceName(id string) string { return "spool-workspace-" + id }

// keepWorkspace takes a snapshot of a sandbox's file system for the next sandbox, and publishes it under two tags. One tag names the base
// image and the runner: the snapshot contains both, so only a sandbox with the same ones may start from it. dropWorkspace finds the
// snapshot by the other one, the default tag.
func (p *Provider) keepWorkspace(ctx context.Context, id string, h *handle) error {
	image, err := p.snapshot(ctx, h.sandbox(), workspaceName(id), workspaceTTL)
	if err != nil {
		return err
	}
	return p.publish(ctx, image, workspaceName(id)+":"+h.key)
}

// snapshot takes a snapshot of a sandbox's file system and publishes it.
func (p *Provider) snapshot(ctx context.Context, sb *sdk.Sandbox, name string, ttl time.Duration) (*sdk.Image, error) {
	image, err := call(ctx, p, snapshotWithin, "take a snapshot", func(ctx context.Context) (*sdk.Image, error) {
		return sb.SnapshotFilesystem(ctx, &sdk.SandboxSnapshotFilesystemParams{Timeout: snapshotWithin, TTL: ttl})
	})
	if err != nil {
		return nil, err
	}
	return image, p.publish(ctx, image, name)
}

func (p *Provider) publish(ctx context.Context, image *sdk.Image, name string) error {
	return p.do(ctx, "publish image "+name, func(ctx context.Context) error {
		return image.Publish(ctx, name, &sdk.ImagePublishParams{Environment: p.cfg.Environment})
	})
}

// dropWorkspace removes the snapshot of a sandbox, if there is one.
func (p *Provider) dropWorkspace(ctx context.Context, id string) error {
	image, err := p.imageByName(ctx, workspaceName(id))
	if image == nil || err != nil {
		return err
	}
	err = p.do(ctx, "remove the snapshot of sandbox "+id, func(ctx context.Context) error { return p.client.Images.Delete(ctx, image.ImageID, nil) })
	if isNotFound(err) {
		return nil
	}
	return err
}
