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

// picture is what is to be known of an image.
type picture struct {
	ref          string
	id           string // of its content
	architecture string
	platform     string   // the architecture with its variant
	path         string   // its PATH, "" for none
	volumes      []string // where it wants volumes
	user         string
	entrypoint   []string
	cmd          []string
}

// fieldImage is what tells a user where the image of a sandbox comes from.
const fieldImage = "sessionOptions.image, or the agent's image: "

// image looks up an image that a tenant may have named, in a field that begins the
// refusal of one that is not allowed. The engine is told of no other.
func (p *Provider) image(ctx context.Context, field, ref string) (picture, error) {
	if ref == p.cfg.Image {
		return p.lookUp(ctx, ref, true)
	}
	if err := p.cfg.Images.Check(ref); err != nil {
		p.cfg.Logger.Warn("refused an image that is not allowed", "image", ref)
		return picture{}, &sandbox.Error{Code: sandbox.CodeImageNotAllowed, Message: field + err.Error() + ": use another, or have the operator add it", Err: err}
	}
	return p.lookUp(ctx, ref, p.cfg.Pull)
}

// lookUp looks an image up, and pulls it, if it may, when it is not there.
func (p *Provider) lookUp(ctx context.Context, ref string, pull bool) (picture, error) {
	if ref == "" {
		return picture{}, guest.WithCode(sandbox.CodeImageNotFound, "no image is named: set the option image, or the provider's default image", nil)
	}
	look := func() (image.InspectResponse, error) {
		return call(ctx, p, "look up image "+ref, func(ctx context.Context) (image.InspectResponse, error) { return p.api.ImageInspect(ctx, ref) })
	}
	found, err := look()
	if errdefs.IsNotFound(err) && pull {
		if err = p.pull(ctx, ref); err == nil {
			found, err = look()
		}
	}
	switch {
	case err == nil:
	case errdefs.IsNotFound(err), errdefs.IsInvalidArgument(err):
		return picture{}, guest.WithCode(sandbox.CodeImageNotFound, fmt.Sprintf("image %q is not on the engine: check its name, or have the operator build or load it there", ref), nil)
	default:
		return picture{}, err
	}
	if found.Os != "linux" {
		return picture{}, guest.WithCode(sandbox.CodeImageUnsupported, fmt.Sprintf("image %q is for %s: use one for linux", ref, found.Os), nil)
	}
	pic := picture{ref: ref, id: found.ID, architecture: found.Architecture, platform: path.Join("linux", found.Architecture, found.Variant)}
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

// pull fetches an image. Those who want the same one at once share a pull, which
// goes on for the others when one of them gives up.
func (p *Provider) pull(ctx context.Context, ref string) error {
	done := p.pulls.DoChan(ref, func() (any, error) {
		pulling, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.pullWithin)
		defer cancel()
		p.cfg.Logger.Info("pull an image", "image", ref)
		return nil, p.pullNow(pulling, ref)
	})
	select {
	case r := <-done:
		return r.Err
	case <-ctx.Done():
		return fmt.Errorf("pull image %s: %w", ref, ctx.Err())
	}
}

// pullNow fetches an image. What the registry says of a failure is logged only: a
// registry is any host that the name has, or to which one of these refers.
func (p *Provider) pullNow(ctx context.Context, ref string) error {
	err := p.fetch(ctx, ref)
	if err == nil {
		return nil
	}
	p.cfg.Logger.Warn("an image could not be pulled", "image", ref, "error", err)
	// An engine that went away is told apart by asking it: its own errors and those of registries look alike.
	if ctx.Err() != nil {
		return guest.WithCode(sandbox.CodeImageNotFound, fmt.Sprintf("image %q was not pulled within %s: have the operator, whose log says why, load it there", ref, p.pullWithin), nil)
	}
	if _, gone := call(ctx, p, "pull image "+ref, p.api.Ping); gone != nil {
		return gone
	}
	return guest.WithCode(sandbox.CodeImageNotFound, fmt.Sprintf("image %q is not on the engine and cannot be pulled: check its name, or have the operator, whose log says why, build or load it there", ref), nil)
}

func (p *Provider) fetch(ctx context.Context, ref string) error {
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
