// Package skills copies skills from the object store to an engine. It implements the interface Skills of package
// references.
package skills

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/singleflight"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

// Provider is a sandbox provider that can store skills for its sandboxes.
type Provider interface {
	// StoreSkill makes sure that a skill exists on the engine as a read-only folder, and returns the path of the folder in
	// sandboxes. It calls zip if the folder does not exist yet, and closes the file.
	StoreSkill(ctx context.Context, digest string, zip func(context.Context) (*os.File, error)) (dir string, err error)
}

// An Installer copies skills from the object store to an engine. It implements references.Skills.
type Installer struct {
	store    workspace.Store
	provider Provider
	once     singleflight.Group // one fetch of a skill at a time
}

var _ references.Skills = (*Installer)(nil)

// New returns an Installer. The caller must call Open before any other method.
func New(provider Provider) *Installer { return &Installer{provider: provider} }

// Open opens the object bucket with the ZIPs of skills.
func (s *Installer) Open(ctx context.Context, js jetstream.JetStream) error {
	store, err := natsstore.Open(ctx, js, topology.BucketSkills)
	if err != nil {
		return err
	}
	s.store = store
	return nil
}

// Provide stores a skill on the engine unless it is there, and returns the skill's folder in sandboxes.
func (s *Installer) Provide(ctx context.Context, digest string) (string, error) {
	if !events.IsDigest(digest) {
		return "", fmt.Errorf("skill %.80q: want a SHA-256", digest)
	}
	done := s.once.DoChan(digest, func() (any, error) {
		// Other callers wait for it too, so it does not end with the first caller's context.
		return s.provider.StoreSkill(context.WithoutCancel(ctx), digest, func(ctx context.Context) (*os.File, error) { return s.fetchZIP(ctx, digest) })
	})
	select {
	case r := <-done:
		dir, _ := r.Val.(string) // "" if there is an error
		return dir, r.Err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// fetchZIP copies the ZIP of a skill from the object store to a temporary file that has no name.
func (s *Installer) fetchZIP(ctx context.Context, digest string) (_ *os.File, err error) {
	content, err := s.store.Get(ctx, digest)
	if errors.Is(err, workspace.ErrNotFound) {
		return nil, fmt.Errorf("%w: %w", references.ErrNoArchive, err)
	}
	if err != nil {
		return nil, err
	}
	defer content.Close() //nolint:errcheck // read to its end, or abandoned
	f, err := os.CreateTemp("", "spool-skill-*.zip")
	if err != nil {
		return nil, fmt.Errorf("fetch skill %s: %w", digest, err)
	}
	if err = os.Remove(f.Name()); err == nil {
		_, err = io.Copy(f, content)
	}
	if err != nil {
		return nil, fmt.Errorf("fetch skill %s: %w", digest, errors.Join(err, f.Close()))
	}
	return f, nil
}
