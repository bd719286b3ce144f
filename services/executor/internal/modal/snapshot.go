package modal

import (
	"context"
	"time"

	sdk "github.com/modal-labs/modal-client/go"
)

// workspaceImageName returns the name under which the snapshot of a sandbox is published.
func workspaceImageName(id string) string { return "spool-workspace-" + id }

// publishWorkspace takes a snapshot of a sandbox's file system for the next sandbox, and publishes it under two tags. One tag names the base
// image and the runner: the snapshot contains both, so only a sandbox with the same ones may start from it. removeWorkspaceImage finds the
// snapshot by the other one, the default tag.
func (p *Provider) publishWorkspace(ctx context.Context, id string, h *sandboxHandle) error {
	image, err := p.takeSnapshot(ctx, h.sandbox(), workspaceImageName(id), workspaceTTL)
	if err != nil {
		return err
	}
	return p.publishImage(ctx, image, workspaceImageName(id)+":"+h.key)
}

// takeSnapshot takes a snapshot of a sandbox's file system and publishes it.
func (p *Provider) takeSnapshot(ctx context.Context, sb *sdk.Sandbox, name string, ttl time.Duration) (*sdk.Image, error) {
	image, err := callModal(ctx, p, snapshotTimeout, "take a snapshot", func(ctx context.Context) (*sdk.Image, error) {
		return sb.SnapshotFilesystem(ctx, &sdk.SandboxSnapshotFilesystemParams{Timeout: snapshotTimeout, TTL: ttl})
	})
	if err != nil {
		return nil, err
	}
	return image, p.publishImage(ctx, image, name)
}

func (p *Provider) publishImage(ctx context.Context, image *sdk.Image, name string) error {
	return p.callModalNoResult(ctx, "publish image "+name, func(ctx context.Context) error {
		return image.Publish(ctx, name, &sdk.ImagePublishParams{Environment: p.cfg.Environment})
	})
}

// removeWorkspaceImage removes the snapshot of a sandbox, if there is one.
func (p *Provider) removeWorkspaceImage(ctx context.Context, id string) error {
	image, err := p.imageByName(ctx, workspaceImageName(id))
	if image == nil || err != nil {
		return err
	}
	err = p.callModalNoResult(ctx, "remove the snapshot of sandbox "+id, func(ctx context.Context) error { return p.client.Images.Delete(ctx, image.ImageID, nil) })
	if isNotFound(err) {
		return nil
	}
	return err
}
