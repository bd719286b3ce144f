package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/image"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// imageInfo has the properties of an image that the provider uses.
type imageInfo struct {
	ref          string
	id           string // digest of its content
	architecture string
	platform     string   // the architecture with its variant
	path         string   // its PATH, "" for none
	volumes      []string // paths at which it declares volumes
	user         string
	entrypoint   []string
	cmd          []string
}

// imageFields names the fields that can set the image of a sandbox. Errors about the image begin with it.
const imageFields = "sessionOptions.image, or the agent's image: "

// lookUpAllowedImage looks up an image that a tenant may have named, after it has checked that the operator allows the image. field
// is the beginning of the error if the image is not allowed. The engine gets no request about images that are not allowed.
func (p *Provider) lookUpAllowedImage(ctx context.Context, field, ref string) (imageInfo, error) {
	if ref == p.cfg.Image {
		return p.lookUpImage(ctx, ref, true)
	}
	if err := p.cfg.Images.Check(ref); err != nil {
		p.cfg.Logger.Warn("refused an image that is not allowed", "image", ref)
		return imageInfo{}, &sandbox.Error{Code: sandbox.CodeImageNotAllowed, Message: field + err.Error() + ": use another image, or have the operator allow this one", Err: err}
	}
	return p.lookUpImage(ctx, ref, p.cfg.Pull)
}

// lookUpImage returns the properties of an image. If the engine does not have the image and pull is true, it pulls the image first.
func (p *Provider) lookUpImage(ctx context.Context, ref string, pull bool) (imageInfo, error) {
	if ref == "" {
		return imageInfo{}, guest.WithCode(sandbox.CodeImageNotFound, "no image is named: set the option image, or the provider's default image", nil)
	}
	look := func() (image.InspectResponse, error) {
		return callEngine(ctx, p, "look up image "+ref, func(ctx context.Context) (image.InspectResponse, error) { return p.api.ImageInspect(ctx, ref) })
	}
	found, err := look()
	if errdefs.IsNotFound(err) && pull {
		if err = p.pullShared(ctx, ref); err == nil {
			found, err = look()
		}
	}
	switch {
	case err == nil:
	case errdefs.IsNotFound(err), errdefs.IsInvalidArgument(err):
		return imageInfo{}, guest.WithCode(sandbox.CodeImageNotFound, fmt.Sprintf("image %q is not on the engine: check its name, or have the operator build or load it there", ref), nil)
	default:
		return imageInfo{}, err
	}
	if found.Os != "linux" {
		return imageInfo{}, guest.WithCode(sandbox.CodeImageUnsupported, fmt.Sprintf("image %q is for %s: use one for linux", ref, found.Os), nil)
	}
	pic := imageInfo{ref: ref, id: found.ID, architecture: found.Architecture, platform: path.Join("linux", found.Architecture, found.Variant)}
	if found.Config != nil {
		pic.user, pic.entrypoint, pic.cmd = found.Config.User, found.Config.Entrypoint, found.Config.Cmd
		for _, v := range found.Config.Env {
			if search, ok := strings.CutPrefix(v, "PATH="); ok {
				pic.path = search
			}
		}
		for v := range found.Config.Volumes {
			pic.volumes = append(pic.volumes, v)
		}
	}
	return pic, nil
}

// pullShared pulls an image. Concurrent calls for the same image share one pull, which continues for the other calls when the
// context of one of them ends.
func (p *Provider) pullShared(ctx context.Context, ref string) error {
	done := p.pulls.DoChan(ref, func() (any, error) {
		pulling, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.pullWithin)
		defer cancel()
		p.cfg.Logger.Info("pull an image", "image", ref)
		return nil, p.pullImage(pulling, ref)
	})
	select {
	case r := <-done:
		return r.Err
	case <-ctx.Done():
		return fmt.Errorf("pull image %s: %w", ref, ctx.Err())
	}
}

// pullImage pulls an image. It only logs the registry's error, and does not return it: the registry may be any host that a tenant
// named in the image, or a host to which that one refers.
func (p *Provider) pullImage(ctx context.Context, ref string) error {
	err := p.callPull(ctx, ref)
	if err == nil {
		return nil
	}
	p.cfg.Logger.Warn("an image could not be pulled", "image", ref, "error", err)
	// Errors of the engine and of registries look alike, so the engine is pinged to find out whether it answers.
	if ctx.Err() != nil {
		return guest.WithCode(sandbox.CodeImageNotFound, fmt.Sprintf("image %q was not pulled within %s: have the operator, whose log says why, load it there", ref, p.pullWithin), nil)
	}
	if _, gone := callEngine(ctx, p, "pull image "+ref, p.api.Ping); gone != nil {
		return gone
	}
	return guest.WithCode(sandbox.CodeImageNotFound, fmt.Sprintf("image %q is not on the engine and cannot be pulled: check its name, or have the operator, whose log says why, build or load it there", ref), nil)
}

// callPull makes the engine pull an image, and blocks until the pull has ended. It returns the error of the engine or of the
// registry.
func (p *Provider) callPull(ctx context.Context, ref string) error {
	stream, err := p.api.ImagePull(ctx, ref, image.PullOptions{})
	if err != nil {
		return err
	}
	defer stream.Close() //nolint:errcheck // only read from
	for in := json.NewDecoder(stream); ; {
		var line struct {
			Error string `json:"error"`
		}
		switch err := in.Decode(&line); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case line.Error != "":
			return errors.New(line.Error)
		}
	}
}
