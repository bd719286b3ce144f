package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/truncate"
)

type skillsPushCommand struct {
	serverFlags
	From   string   `arg:"" help:"A folder, a ZIP, or a git repository: URL[#[REF][:FOLDER]], where REF is a branch, a tag or a commit, and FOLDER contains the skill."`
	Tag    []string `placeholder:"T" help:"A tag for the version, in addition to latest; may be repeated."`
	Ignore []string `placeholder:"PATTERN" help:"Files that the ZIP of a folder omits, in gitignore syntax, in addition to its .skillignore; may be repeated."`
	Scope  string   `enum:",platform,organization,identity_account" default:"" help:"Owner of the skill: platform, organization or identity_account; by default the organization."`
	Org    string   `placeholder:"O" help:"An organization of the tenant, or the account."`
	DryRun bool     `help:"Only validate, locally and on the server."`
}

// Run packs a skill as a ZIP, validates it and uploads it to the server.
func (c *skillsPushCommand) Run(a *app) error {
	for _, t := range c.Tag {
		if !events.IsTag(t) {
			return usageError("tag: %q must have 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores", truncate.Text(t, 64))
		}
	}
	ref := events.Reference{Scope: events.ReferenceScope(c.Scope), Org: c.Org, Slug: "x"}
	if err := ref.Check(); err != nil {
		return usageError("%v", err)
	}
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	zip, err := c.openZIP(ctx)
	if err == nil {
		defer zip.Close() //nolint:errcheck // it was only read
		err = c.validateAndPush(ctx, a, ref, zip)
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

// validateAndPush validates a ZIP locally, so that errors are reported before the upload, and uploads it.
func (c *skillsPushCommand) validateAndPush(ctx context.Context, a *app, ref events.Reference, zip *os.File) error {
	info, err := zip.Stat()
	if err != nil {
		return err
	}
	found, err := skill.Check(ctx, zip, info.Size(), skill.Limits{})
	if err != nil {
		return err
	}
	ref.Slug = found.Name
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	doc, err := cl.PushSkill(ctx, client.SkillPush{Ref: ref, Tags: c.Tag, SHA256: found.Digest, DryRun: c.DryRun}, io.NewSectionReader(zip, 0, info.Size()), info.Size())
	if err != nil {
		return err
	}
	if c.JSON {
		return a.printJSON(doc)
	}
	done := "pushed"
	switch {
	case c.DryRun && doc.Value.Same:
		done = "already pushed:"
	case c.DryRun:
		done = "valid, not pushed:"
	case doc.Value.Same:
		done = "already pushed:"
	}
	_, err = terminal.Fprintf(a.Out, "%s %s, %d files, %s packed\n", done, client.Reference(doc.Value.Ref).String(), found.Files, formatSize(info.Size()))
	return err
}

// openZIP returns the ZIP to push: the named file, or a new ZIP of the named folder or git repository.
func (c *skillsPushCommand) openZIP(ctx context.Context) (*os.File, error) {
	info, err := os.Stat(c.From)
	switch {
	case err == nil && info.IsDir():
		return c.packFolder(c.From)
	case err == nil && info.Mode().IsRegular():
		if len(c.Ignore) > 0 {
			return nil, usageError("ignore: %s is already a ZIP; leave --ignore out", c.From)
		}
		return os.Open(c.From)
	case err == nil:
		return nil, usageError("from: %s is neither a folder nor a ZIP", c.From)
	case !errors.Is(err, fs.ErrNotExist) || !isGitURL(c.From):
		return nil, usageError("from: %v", err)
	}
	return c.cloneAndPack(ctx)
}

// isGitURL reports whether from has the form of the URL of a git repository, and not of a path.
func isGitURL(from string) bool {
	url, _, _ := strings.Cut(from, "#")
	host, _, scp := strings.Cut(url, ":")
	return strings.Contains(url, "://") || strings.HasSuffix(url, ".git") || strings.Contains(url, ".git:") || scp && !strings.ContainsAny(host, `/\`)
}

// gitSource names a git repository, a version of it, and a folder in it.
type gitSource struct{ url, ref, folder string }

// parseGitSource parses a source of the form URL[#[REF][:FOLDER]] or URL.git:FOLDER.
func parseGitSource(from string) (gitSource, error) {
	url, rest, _ := strings.Cut(from, "#")
	s := gitSource{url: url}
	s.ref, s.folder, _ = strings.Cut(rest, ":")
	if i := strings.LastIndex(url, ".git:"); i >= 0 && s.folder == "" {
		s.url, s.folder = url[:i+4], url[i+5:]
	}
	switch {
	case strings.HasPrefix(s.url, "-"), strings.HasPrefix(s.ref, "-"):
		return s, usageError("from: %q: URL and REF must not start with a hyphen", truncate.Text(from, 64))
	case s.folder != "" && !filepath.IsLocal(filepath.FromSlash(s.folder)):
		return s, usageError("from: folder %q is outside the repository", truncate.Text(s.folder, 64))
	}
	if s.ref == "" {
		s.ref = "HEAD"
	}
	return s, nil
}

// cloneAndPack fetches a version of a git repository with the local git, without its history, and packs the skill in it
// as a ZIP.
func (c *skillsPushCommand) cloneAndPack(ctx context.Context) (_ *os.File, err error) {
	s, err := parseGitSource(c.From)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "spool-skill-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, args := range [][]string{
		{"init", "--quiet"},
		// Unlike clone, fetch accepts a commit as well.
		{"fetch", "--quiet", "--depth", "1", "--no-tags", "--", s.url, s.ref},
		{"-c", "core.autocrlf=false", "checkout", "--quiet", "FETCH_HEAD"},
	} {
		if err := runGit(ctx, dir, args...); err != nil {
			return nil, fmt.Errorf("from: %w", err)
		}
	}
	// The folder may be a link that leads out of the repository.
	root, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	folder, err := filepath.EvalSymlinks(filepath.Join(dir, filepath.FromSlash(s.folder)))
	if err != nil {
		return nil, usageError("from: %s has no folder %q", s.url, truncate.Text(s.folder, 64))
	}
	if rel, err := filepath.Rel(root, folder); err != nil || !filepath.IsLocal(rel) {
		return nil, usageError("from: folder %q is outside the repository", truncate.Text(s.folder, 64))
	}
	return c.packFolder(folder)
}

// runGit runs a git command in a folder. git cannot ask for a password.
func runGit(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "git", args...) //nolint:gosec // the arguments were checked
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_TERMINAL_PROMPT=0", "GIT_DIR="+filepath.Join(dir, ".git"), "GIT_WORK_TREE="+dir)
	cmd.WaitDelay = time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	err := cmd.Run()
	if errors.Is(err, exec.ErrNotFound) {
		return errors.New("git: not found on the PATH: install it, or push a folder")
	}
	if err != nil {
		return fmt.Errorf("git %s: %w: %s", args[0], err, terminal.SafeLine(strings.TrimSpace(stderr.String())))
	}
	return nil
}

// packFolder packs a folder as a ZIP in an unlinked temporary file, and returns the file.
func (c *skillsPushCommand) packFolder(dir string) (*os.File, error) {
	f, err := newUnlinkedFile()
	if err != nil {
		return nil, err
	}
	if err := skill.PackFolder(dir, f, strings.Join(c.Ignore, "\n")); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
