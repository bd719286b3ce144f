package modal

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// skillsDir is the folder of skills in a sandbox, each in a folder named by its digest. It belongs to root, so that agents
// cannot change it.
const skillsDir = "/bin/skills"

// loadSkillScript is the shell script that unpacks a skill in a sandbox, as root. Its argument is the skill's digest, its
// stdin a tar archive.
//
//go:embed stock.sh
var loadSkillScript string

// StoreSkill records how to open a skill's ZIP, for LoadSkills, and returns the skill's folder in sandboxes. Sandboxes at
// Modal share no folder, so LoadSkills copies the skill into each of them.
func (p *Provider) StoreSkill(ctx context.Context, digest string, zip func(context.Context) (*os.File, error)) (string, error) {
	dir := skillsDir + "/" + digest
	p.mu.Lock()
	there := p.skills[digest] != nil
	p.mu.Unlock()
	if there {
		return dir, nil
	}
	if err := writeSkillTar(ctx, zip, io.Discard); err != nil {
		return "", fmt.Errorf("skill %s: %w", digest, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.skills[digest] = zip
	return dir, nil
}

// writeSkillTar reads the ZIP of a skill, which zip opens, and writes the skill's files to a tar archive.
func writeSkillTar(ctx context.Context, zip func(context.Context) (*os.File, error), to io.Writer) error {
	f, err := zip(ctx)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read from
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return skill.Tar(ctx, f, info.Size(), to)
}

// LoadSkills copies the skills with the given digests into a running sandbox, unless the sandbox has them. StoreSkill must
// have been called for them before.
func (p *Provider) LoadSkills(ctx context.Context, id string, digests []string) error {
	h, err := p.currentHandle(ctx, id)
	if err != nil {
		return fmt.Errorf("skills of sandbox %s: %w", id, err)
	}
	h.mu.Lock()
	missing := slices.DeleteFunc(slices.Clone(digests), func(d string) bool { return h.skills[d] })
	h.mu.Unlock()
	if len(missing) == 0 {
		return nil
	}
	const list = `cd ` + skillsDir + ` && for d in "$@"; do [ -e "$d" ] || echo "$d"; done`
	out, err := p.runAsRoot(ctx, h, "look for skills in sandbox "+id, list, missing, nil)
	if err != nil {
		return err
	}
	for _, digest := range strings.Fields(out) {
		p.mu.Lock()
		zip := p.skills[digest]
		p.mu.Unlock()
		if zip == nil {
			return fmt.Errorf("skill %s: it was not shelved", digest)
		}
		feed := func(w io.Writer) error { return writeSkillTar(ctx, zip, w) }
		if _, err := p.runAsRoot(ctx, h, "bring skill "+digest+" into sandbox "+id, loadSkillScript, []string{digest}, feed); err != nil {
			return err
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range missing {
		h.skills[d] = true
	}
	return nil
}

// runAsRoot runs a shell script as root in a sandbox, and returns its output.
func (p *Provider) runAsRoot(ctx context.Context, h *sandboxHandle, what, script string, args []string, feed func(io.Writer) error) (string, error) {
	start := func(ctx context.Context, _ ...string) (guest.Process, error) {
		proc, err := p.startProgram(ctx, h, what, append([]string{"/bin/sh", "-c", script, "sh"}, args...), "/", nil)
		if err != nil {
			return nil, err
		}
		return proc, nil
	}
	out, err := guest.StartFunc(start).Run(ctx, feed)
	if err == nil && out.Code < 0 {
		err = fmt.Errorf("%s: %w", what, sandbox.ErrNotFound)
	}
	if err == nil && out.Code != 0 {
		err = fmt.Errorf("%s: exit code %d: %s", what, out.Code, strings.TrimSpace(out.Stderr))
	}
	return out.Stdout, err
}
