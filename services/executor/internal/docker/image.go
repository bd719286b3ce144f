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

// image looks an image up, and pulls it when it is not there.
func (p *Provider) image(ctx context.Context, ref string) (picture, error) {
	if ref == "" {
		return picture{}, failed(sandbox.CodeImageNotFound, "no image is named: set the option image, or the provider's default image", nil)
	}
	look := func() (image.InspectResponse, error) {
		return call(ctx, p, "look up image "+ref, func(ctx context.Context) (image.InspectResponse, error) { return p.api.ImageInspect(ctx, ref) })
	}
	found, err := look()
	if errdefs.IsNotFound(err) {
		if err = p.pull(ctx, ref); err == nil {
			found, err = look()
		}
	}
	switch {
	case err == nil:
	case errdefs.IsNotFound(err), errdefs.IsInvalidArgument(err):
		return picture{}, failed(sandbox.CodeImageNotFound, fmt.Sprintf("image %q is not on the engine: check its name, or build it there", ref), err)
	default:
		return picture{}, err
	}
	if found.Os != "linux" {
		return picture{}, failed(sandbox.CodeImageUnsupported, fmt.Sprintf("image %q is for %s: use one for linux", ref, found.Os), nil)
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
		pulling, cancel := context.WithTimeout(context.WithoutCancel(ctx), pullWithin)
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

func (p *Provider) pullNow(ctx context.Context, ref string) error {
	refused := func(err error) error {
		return failed(sandbox.CodeImageNotFound, fmt.Sprintf("image %q is not on the engine and cannot be pulled: check its name, or build or load it there", ref), err)
	}
	stream, err := p.api.ImagePull(ctx, ref, image.PullOptions{})
	if err != nil {
		if unreachable(err) || full(err) {
			return p.meaning(ctx, "pull image "+ref, err)
		}
		return refused(err)
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
			return p.meaning(ctx, "pull image "+ref, err)
		case line.Error != "":
			err := errors.New(line.Error)
			if full(err) {
				return p.meaning(ctx, "pull image "+ref, err)
			}
			return refused(err)
		}
	}
}
