package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/skill"
)

// skillsDir returns the folder of the skills of all sandboxes. Agents can read it, and with Landlock they cannot change it.
func (p *Provider) skillsDir() string { return filepath.Join(p.cfg.Dir, "skills") }

// StoreSkill unpacks a skill into skills/<digest> of the provider's folder, which every sandbox can read, and returns
// that folder.
func (p *Provider) StoreSkill(ctx context.Context, digest string, zip func(context.Context) (*os.File, error)) (string, error) {
	root := p.skillsDir()
	dir := filepath.Join(root, digest)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil // the folder has this name only when it is complete
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("look for skill %s: %w", digest, err)
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", fmt.Errorf("unpack skill %s: %w", digest, err)
	}
	f, err := zip(ctx)
	if err != nil {
		return "", err
	}
	defer f.Close() //nolint:errcheck // only read from
	info, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("unpack skill %s: %w", digest, err)
	}
	return skill.Extract(ctx, f, info.Size(), root, digest)
}
