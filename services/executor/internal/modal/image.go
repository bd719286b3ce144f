package modal

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"time"

	sdk "github.com/modal-labs/modal-client/go"

	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// layoutVersion is the version of the file layout that prepare.sh creates.
const layoutVersion = "1"

// prepareScript is the shell script that adds the runner to an image. It runs as root in a sandbox of the base image, with the runner on
// its stdin.
//
//go:embed prepare.sh
var prepareScript string

// imageFields is the beginning of errors about an image that a session or an agent names.
const imageFields = "sessionOptions.image, or the agent's image: "

// imagePollInterval is the interval at which an executor asks Modal whether another executor has finished preparing an image.
const imagePollInterval = time.Second

// preparedImage is an image at Modal to which Spool has added the runner.
type preparedImage struct {
	image *sdk.Image
	key   string // made from the base image and the runner
}

// imageCache holds the prepared images that this process has found, by the reference of their base image. It is safe for concurrent use.
type imageCache struct {
	mu  sync.Mutex
	ids map[string]preparedImage
}

func (c *imageCache) lookUp(ref string) (preparedImage, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, ok := c.ids[ref]
	return i, ok
}

func (c *imageCache) storeImage(ref string, i preparedImage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ids[ref] = i
}

func (c *imageCache) forgetImage(ref string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ids, ref)
}

// imageRef returns the reference of a sandbox's base image: ref, or the configured one if ref is "". It returns a *sandbox.Error if tenants
// may not use the image.
func (p *Provider) imageRef(ref string) (string, error) {
	if ref == "" || ref == p.cfg.Image {
		return p.cfg.Image, nil
	}
	if err := p.cfg.Images.Check(ref); err != nil {
		p.cfg.Logger.Warn("refused an image that is not allowed", "image", ref)
		return "", &sandbox.Error{Code: sandbox.CodeImageNotAllowed, Message: imageFields + err.Error() + ": use another image, or have the operator allow this one", Err: err}
	}
	return ref, nil
}

// prepareImage returns the image that consists of the base image ref and the runner, which it creates at Modal if there is none. Concurrent
// calls for the same reference share the work, which continues when the context of one of them ends.
func (p *Provider) prepareImage(ctx context.Context, ref string) (preparedImage, error) {
	if i, ok := p.images.lookUp(ref); ok {
		return i, nil
	}
	done := p.prepares.DoChan(ref, func() (any, error) {
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), prepareTimeout)
		defer cancel()
		i, err := p.prepareImageNow(bounded, ref)
		if err == nil {
			p.images.storeImage(ref, i)
		}
		return i, err
	})
	select {
	case r := <-done:
		i, _ := r.Val.(preparedImage) // the zero value if there is an error
		return i, r.Err
	case <-ctx.Done():
		return preparedImage{}, fmt.Errorf("prepare image %s: %w", ref, ctx.Err())
	}
}

// prepareImageNow does the work of prepareImage for all concurrent calls.
func (p *Provider) prepareImageNow(ctx context.Context, ref string) (preparedImage, error) {
	app, err := p.lookupApp(ctx)
	if err != nil {
		return preparedImage{}, err
	}
	runner, err := p.digest()
	if err != nil {
		return preparedImage{}, fmt.Errorf("the runner's binary: %w", err)
	}
	base, err := p.resolveImage(ctx, app, ref)
	if err != nil {
		return preparedImage{}, err
	}
	from := sha256.Sum256([]byte(layoutVersion + " " + base.ImageID))
	key := hex.EncodeToString(from[:6]) + "-" + runner[:12]
	name := "spool-image-" + key
	for {
		image, err := p.imageByName(ctx, name)
		if image != nil || err != nil {
			return preparedImage{image, key}, err
		}
		image, err = p.installRunner(ctx, app, base, name)
		if image != nil || err != nil {
			return preparedImage{image, key}, err
		}
		if retry.Pause(ctx, imagePollInterval) != nil { // another executor prepares the image
			return preparedImage{}, fmt.Errorf("image %s is prepared by another executor and does not get ready: %w", ref, ctx.Err())
		}
	}
}

// resolveImage returns Modal's image for a reference to a registry. Modal pulls the image if it has not done so before.
func (p *Provider) resolveImage(ctx context.Context, app *sdk.App, ref string) (*sdk.Image, error) {
	base, err := callModal(ctx, p, prepareTimeout, "resolve image "+ref, func(ctx context.Context) (*sdk.Image, error) {
		return p.client.Images.FromRegistry(ref, nil).Build(ctx, app, nil)
	})
	var refused sdk.RemoteError
	if errors.As(err, &refused) {
		source := imageFields
		if ref == p.cfg.Image {
			source = "SPOOL_MODAL_IMAGE: "
		}
		return nil, guest.WithCode(sandbox.CodeImageNotFound, fmt.Sprintf("%sModal cannot make an image of %q: check its name, and that its registry lets Modal pull it", source, ref), err)
	}
	return base, err
}

// imageByName returns the image that is published at Modal under a name, or nil if there is none.
func (p *Provider) imageByName(ctx context.Context, name string) (*sdk.Image, error) {
	image, err := callModal(ctx, p, callTimeout, "look up image "+name, func(ctx context.Context) (*sdk.Image, error) {
		return p.client.Images.FromName(ctx, name, &sdk.ImageFromNameParams{Environment: p.cfg.Environment})
	})
	if isNotFound(err) {
		return nil, nil //nolint:nilnil // no image has the name
	}
	return image, err
}

// installRunner adds the runner to a base image, and publishes the result under a name. The name of the helper sandbox is the lock among
// executors: installRunner returns nil if another executor holds the lock.
func (p *Provider) installRunner(ctx context.Context, app *sdk.App, base *sdk.Image, name string) (_ *sdk.Image, err error) {
	ctx, cancel := context.WithTimeout(ctx, helperTimeout)
	defer cancel()
	helper, err := callModal(ctx, p, createTimeout, "prepare an image", func(ctx context.Context) (*sdk.Sandbox, error) {
		return p.client.Sandboxes.Create(ctx, app, base, &sdk.SandboxCreateParams{
			Name: name, Command: []string{"sleep", strconv.Itoa(int(helperTimeout / time.Second))}, Timeout: helperTimeout,
			BlockNetwork: true, Regions: p.allowedRegions(), Tags: p.helperTags(),
		})
	})
	var exists sdk.AlreadyExistsError
	if errors.As(err, &exists) {
		helper, err = p.ownHelper(ctx, name)
	}
	if err != nil {
		return nil, p.refusalError(err)
	}
	if helper == nil {
		return nil, nil //nolint:nilnil // another executor prepares the image
	}
	p.cfg.Logger.Info("prepare an image with the runner", "image", name)
	defer func() {
		if terr := errors.Join(p.endSandbox(context.WithoutCancel(ctx), helper), helper.Detach()); terr != nil {
			p.cfg.Logger.Warn("the helper sandbox of an image stays until its time is over", "image", name, "error", terr)
		}
	}()
	if err := p.runPrepareScript(ctx, helper); err != nil {
		return nil, err
	}
	return p.takeSnapshot(ctx, helper, name, imageTTL)
}

// helperTags returns the tags of a helper sandbox, which belongs to no session and which the sweep does not remove.
func (p *Provider) helperTags() map[string]string {
	return map[string]string{tagEngine: p.cfg.Engine, tagRole: roleHelper, tagOwner: p.owner}
}

// ownHelper returns the helper sandbox with a name if this provider created it. This happens when Modal's answer was lost and the SDK
// repeated the request. It returns nil if another provider created the helper.
func (p *Provider) ownHelper(ctx context.Context, name string) (*sdk.Sandbox, error) {
	sb, tags, err := p.sandboxByName(ctx, name)
	if isNotFound(err) || err == nil && tags[tagOwner] != p.owner {
		return nil, nil //nolint:nilnil // see above
	}
	return sb, err
}

// runPrepareScript runs prepareScript in a helper sandbox.
func (p *Provider) runPrepareScript(ctx context.Context, helper *sdk.Sandbox) error {
	file, err := os.Open(p.cfg.Runner)
	if err != nil {
		return fmt.Errorf("the runner's binary: %w", err)
	}
	defer file.Close() //nolint:errcheck // only read from
	sum, err := p.digest()
	if err != nil {
		return err
	}
	_, err = p.runAsRoot(ctx, &sandboxHandle{sb: helper}, "put the runner into an image", prepareScript, []string{sum}, func(w io.Writer) error {
		_, err := io.Copy(w, file)
		return err
	})
	if err != nil && ctx.Err() == nil {
		err = guest.WithCode(sandbox.CodeImageUnsupported, "the runner cannot be put into the image, which needs sh, chown, grep and sha256sum", err)
	}
	return err
}

// fileDigest returns the SHA-256 of a file in hexadecimal.
func fileDigest(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close() //nolint:errcheck // only read from
	sum := sha256.New()
	_, err = io.Copy(sum, file)
	return hex.EncodeToString(sum.Sum(nil)), err
}
