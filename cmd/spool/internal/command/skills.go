package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/truncate"
)

type skillsCommand struct {
	Push skillsPushCommand `cmd:"" help:"Create a version of a skill from a folder with a SKILL.md, a ZIP of one, or a git repository."`
	Ls   skillsLsCommand   `cmd:"" help:"List skills, each in its latest version."`
	Show skillsShowCommand `cmd:"" help:"Print a skill's SKILL.md."`
	Pull skillsPullCommand `cmd:"" help:"Get a skill's files."`
	Tag  skillsTagCommand  `cmd:"" help:"Move a tag to another version."`
	Rm   skillsRmCommand   `cmd:"" help:"Remove skills, or versions of them: new executions cannot use them, running executions continue."`
}

// skillFlags holds the flags of commands that send requests to a server, and the argument with the reference of a
// skill.
type skillFlags struct {
	serverFlags
	Ref string `arg:"" help:"[platform/|identity_account/][org/]slug[@version]"`
}

// withClientAndSkill parses the reference of the skill, and calls do with a client and the reference.
func (c skillFlags) withClientAndSkill(a *app, do func(context.Context, *client.Client, events.Reference) error) error {
	ref, err := parseReference("ref", c.Ref)
	if err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error { return do(ctx, cl, ref) })
}

type skillsLsCommand struct {
	serverFlags
	Limit int `default:"50" help:"Maximum number of entries; 0 means all."`
}

// Run lists skills.
func (c *skillsLsCommand) Run(a *app) error {
	if c.Limit < 0 {
		return usageError("limit: %d is negative; 0 means all", c.Limit)
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		head := []any{"SKILL", "VERSION", "FILES", "SIZE", "TAGS", "CREATED", "DESCRIPTION"}
		return printList(a, c.JSON, c.Limit, client.List[*spoolv1.Skill](ctx, cl.Skills.ListSkills, &spoolv1.ListSkillsRequest{}), head, func(s *spoolv1.Skill) []any {
			ref := client.Reference(s.Ref)
			return []any{ref.WithoutVersion(), shortDigest(ref.Version), s.Files, formatSize(int64(s.UnpackedBytes)), strings.Join(s.Tags, " "), formatTime(s.CreatedAt), s.Description}
		})
	})
}

type skillsShowCommand struct{ skillFlags }

// Run prints the SKILL.md of a skill, after a summary on standard error.
func (c *skillsShowCommand) Run(a *app) error {
	return c.withClientAndSkill(a, func(ctx context.Context, cl *client.Client, ref events.Reference) error {
		doc, err := getSkill(ctx, cl, ref)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		s := doc.Value
		terminal.Fprintf(a.Err, "%s, %d files, %s, tags %s\n", client.Reference(s.Ref).String(), s.Files, formatSize(int64(s.UnpackedBytes)), strings.Join(s.Tags, " "))
		text := s.GetDocument()
		if a.OutTTY {
			text = terminal.SafeText(text)
		}
		_, err = io.WriteString(a.Out, text)
		return err
	})
}

// getSkill returns the version of a skill that a reference names.
func getSkill(ctx context.Context, cl *client.Client, ref events.Reference) (client.APIObject[*spoolv1.Skill], error) {
	return client.Call(ctx, cl.Skills.GetSkill, &spoolv1.GetSkillRequest{Slug: ref.Slug, Scope: string(ref.Scope), Org: ref.Org, Version: ref.Version})
}

type skillsTagCommand struct {
	skillFlags
	Tag string `arg:"" help:"The tag: a-z, 0-9, dots, hyphens and underscores."`
}

// Run sets a tag on a version of a skill. If another version has the tag, that version loses it.
func (c *skillsTagCommand) Run(a *app) error {
	if !events.IsTag(c.Tag) {
		return usageError("tag: %q must have 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores", truncate.Text(c.Tag, 64))
	}
	return c.withClientAndSkill(a, func(ctx context.Context, cl *client.Client, ref events.Reference) error {
		request := &spoolv1.TagSkillRequest{Slug: ref.Slug, Scope: string(ref.Scope), Org: ref.Org, Version: ref.Version, Tag: c.Tag}
		doc, err := client.Call(ctx, cl.Skills.TagSkill, request)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		_, err = terminal.Fprintf(a.Out, "%s names %s\n", c.Tag, client.Reference(doc.Value.Ref).String())
		return err
	})
}

type skillsRmCommand struct {
	serverFlags
	Refs []string `arg:"" name:"ref" help:"[platform/|identity_account/][org/]slug[@digest]; without a digest, all versions are removed."`
}

// Run hides skills, so that new sessions cannot use them. It checks all references before the first removal, and
// continues after a failure.
func (c *skillsRmCommand) Run(a *app) error {
	var refs []events.Reference
	for _, s := range c.Refs {
		ref, err := parseReference("ref", s)
		if err != nil {
			return err
		}
		refs = append(refs, ref)
	}
	return forEachName(c.serverFlags, a, refs, "removed", func(ctx context.Context, cl *client.Client, ref events.Reference) (any, error) {
		return client.Call(ctx, cl.Skills.RemoveSkill, &spoolv1.RemoveSkillRequest{Slug: ref.Slug, Scope: string(ref.Scope), Org: ref.Org, Version: ref.Version})
	})
}

type skillsPullCommand struct {
	skillFlags
	Output string `short:"o" placeholder:"DIR" help:"A new folder for the files; by default a folder with the skill's name in the current one."`
}

// Run downloads the files of a skill into a folder. After an error no file is left.
func (c *skillsPullCommand) Run(a *app) error {
	return c.withClientAndSkill(a, func(ctx context.Context, cl *client.Client, ref events.Reference) error {
		to := c.Output
		if to == "" {
			to = ref.Slug
		}
		if _, err := os.Lstat(to); err == nil {
			return usageError("output: %s already exists; name another folder with -o", to)
		}
		// A tag may move meanwhile; a digest does not.
		doc, err := getSkill(ctx, cl, ref)
		if err != nil {
			return err
		}
		version := doc.Value.GetRef().GetVersion()
		if !events.IsDigest(version) {
			return fmt.Errorf("%s: the server returned version %q, which is not a digest", ref, truncate.Text(version, 64))
		}
		ref.Version = version
		if err := downloadSkill(ctx, cl, ref, to); err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(map[string]any{"dir": to, "ref": ref})
		}
		_, err = terminal.Fprintf(a.Out, "%s: %s, %d files\n", to, ref, doc.Value.Files)
		return err
	})
}

// downloadSkill downloads a version of a skill into a folder that must not exist.
func downloadSkill(ctx context.Context, cl *client.Client, ref events.Reference, to string) (err error) {
	zip, err := newUnlinkedFile()
	if err != nil {
		return err
	}
	defer zip.Close() //nolint:errcheck // the file is already unlinked
	from, err := cl.GetSkillZIP(ctx, ref)
	if err != nil {
		return err
	}
	n, err := io.Copy(zip, io.LimitReader(from, skill.MaxPackedSize+1))
	if err = errors.Join(err, from.Close()); err != nil {
		return err
	}
	work, err := os.MkdirTemp(filepath.Dir(filepath.Clean(to)), ".spool-")
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	dir, err := skill.Extract(ctx, zip, n, work, ref.Version)
	if err != nil {
		return err
	}
	if err := makeFilesWritable(dir); err != nil {
		return err
	}
	if err := os.Rename(dir, to); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// makeFilesWritable makes the files below dir writable for their owner.
func makeFilesWritable(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return os.Chmod(path, info.Mode().Perm()|0o200)
	})
}

// newUnlinkedFile returns an open temporary file that has no name any more.
func newUnlinkedFile() (*os.File, error) {
	f, err := os.CreateTemp("", "spool-*.zip")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
