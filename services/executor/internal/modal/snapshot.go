package modal

import (
	"context"
	"time"

	sdk "github.com/modal-labs/modal-client/go"
)

// workspaceImageName returns the name under which Modal keeps the snapshot of a sandbox's file system.
func workspaceImageName(id string) string { return "spool-workspace-" + id }

// publishWorkspace takes a snapshot of a sandbox's file system for the session's next sandbox, and publishes it under two tags. One tag
// names the base image and the runner, which the snapshot contains: only a sandbox with the same ones may start from it. By the other one,
// the default tag, removeWorkspaceImage finds the snapshot.
func (p *Provider) publishWorkspace(ctx context.Context, id string, h *sandboxHandle) error {
	image, err := p.takeSnapshot(ctx, h.sdkSandbox(), workspaceImageName(id), workspaceTTL)
	if err != nil {
		return err
	}
	return p.publishImage(ctx, image, workspaceImageName(id)+":"+h.key)
}

// takeSnapshot takes a snapshot of a sandbox's file system, and publishes it under a name.
func (p *Provider) takeSnapshot(ctx context.Context, sb *sdk.Sandbox, name string, ttl time.Duration) (*sdk.Image, error) {
	image, err := callModal(ctx, p, snapshotTimeout, "take a snapshot", func(ctx context.Context) (*sdk.Image, error) {
		return sb.SnapshotFilesystem(ctx, &sdk.SandboxSnapshotFilesystemParams{Timeout: snapshotTimeout, TTL: ttl})
	})
	if err != nil {
		return nil, err
	}
	return image, p.publishImage(ctx, image, name)
}

// publishImage publishes an image at Modal under a name.
func (p *Provider) publishImage(ctx context.Context, image *sdk.Image, name string) error {
	return p.callModalNoResult(ctx, "publish image "+name, func(ctx context.Context) error {
		return image.Publish(ctx, name, &sdk.ImagePublishParams{Environment: p.cfg.Environment})
	})
}

// removeWorkspaceImage removes the snapshot of a sandbox's file system, if there is one.
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
