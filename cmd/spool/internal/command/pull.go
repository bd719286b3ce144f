package command

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/ignore"
)

type filesPull struct {
	of
	Dir    string `arg:"" optional:"" help:"The folder that the changes go into; without it the one that was uploaded by spool run --workspace."`
	DryRun bool   `help:"Show the changes alone."`
	Yes    bool   `short:"y" help:"Take the changes without a question, but for conflicts."`
	Force  bool   `help:"With --yes, or once you have agreed: take the session's side of conflicts, too, over what was changed here."`
}

// What a pull does with a path.
const (
	changeAdded    = "added"
	changeModified = "modified"
	changeDeleted  = "deleted"
	changeRefused  = "refused" // an entry that never goes into a folder of a person's
)

// change is what a pull would do with one path.
type change struct {
	Path     string `json:"path"`
	Change   string `json:"change"`
	Kind     string `json:"kind"`
	Size     int64  `json:"size,omitempty"` // bytes of the session's file
	Conflict bool   `json:"conflict,omitempty"`
	Reason   string `json:"reason,omitempty"` // of a conflict, or of what is refused
	Applied  bool   `json:"applied"`

	local, remote *entry
	staged        string // file with the session's content
}

// pulling is one spool files pull.
type pulling struct {
	app     *app
	cmd     *filesPull
	client  *client.Client
	root    *os.Root
	stage   string // folder of the session's content
	before  uploaded
	remote  map[string]*remoteEntry
	changes []*change
}

// remoteEntry is an entry of the session's workspace.
type remoteEntry struct {
	entry
	staged string
}

// Run brings changes back.
func (c *filesPull) Run(a *app) error {
	return c.with(a, "dir", "", func(ctx context.Context, cl *client.Client) (err error) {
		s, err := cl.Session(ctx, c.Session)
		if err != nil {
			return err
		}
		if p := s.Value.Options.HostPath; p != "" {
			return usage("session: it works in %s itself: there is nothing to bring back", p)
		}
		file, err := uploadFile(a, c.Data, c.Session)
		if err != nil {
			return err
		}
		p := &pulling{app: a, cmd: c, client: cl}
		if err := p.known(file); err != nil {
			return err
		}
		if p.root, err = os.OpenRoot(p.before.Folder); err != nil {
			return usage("dir: %v", err)
		}
		defer p.root.Close() //nolint:errcheck // each file was closed with its error
		if p.stage, err = os.MkdirTemp("", "spool-pull-"); err != nil {
			return fmt.Errorf("make a folder for what comes: %w", err)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(p.stage)) }()
		if err := p.fresh(ctx, s.Value); err != nil {
			return err
		}
		if err := p.fetch(ctx); err != nil {
			return err
		}
		if err := p.compare(ctx); err != nil {
			return err
		}
		return p.finish(file)
	})
}

// known reads what was uploaded, and settles the folder.
func (p *pulling) known(file string) error {
	raw, err := os.ReadFile(file)
	switch {
	case err == nil:
		if err := json.Unmarshal(raw, &p.before); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read what was uploaded: %w", err)
	case p.cmd.Dir == "":
		return usage("dir: it is not known here which folder the session's workspace came from: name the folder that the changes go into")
	}
	if p.before.Entries == nil {
		p.before = uploaded{Session: p.cmd.Session, Entries: map[string]entry{}}
	}
	dir := p.before.Folder
	if p.cmd.Dir != "" {
		dir = p.cmd.Dir
	}
	p.before.Folder, err = localFolder("dir", dir)
	return err
}

// freshWithin bounds the wait for a new snapshot.
const freshWithin = 2 * time.Minute

// fresh has a snapshot taken where a sandbox lives; without one the last snapshot is what there is.
func (p *pulling) fresh(ctx context.Context, s client.Session) error {
	if s.Box == nil || s.Box.State != "ready" {
		return nil
	}
	if _, err := p.client.Sync(ctx, p.cmd.Session); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, freshWithin)
	defer cancel()
	asked := uint32(0)
	for m, err := range p.client.Follow(wait, p.cmd.Session, s.Tip) {
		if err != nil {
			if ctx.Err() == nil && wait.Err() != nil {
				fmt.Fprintln(p.app.Err, "spool: no snapshot was taken in time; this is the last one")
				return nil
			}
			return err
		}
		if m.Event == nil {
			continue
		}
		switch d := m.Event.Event().Data.(type) {
		case events.SyncRequested:
			asked = d.Sync
		case events.WorkspaceSynced:
			if asked > 0 && d.Request >= asked {
				return nil
			}
		case events.SandboxTerminated, events.SessionDeleted:
			return nil // with a snapshot before, where there could be one
		}
	}
	return context.Cause(ctx)
}

// pullLimits bound what a session can bring onto this machine.
var pullLimits = folderLimits{entries: 200_000, bytes: 4 << 30}

// fetch downloads the session's workspace and keeps the content that is not what was uploaded.
func (p *pulling) fetch(ctx context.Context) error {
	r, err := p.client.Tar(ctx, p.cmd.Session, "")
	if err != nil {
		return err
	}
	defer r.Close() //nolint:errcheck // it was read to its end, or the error is told
	p.remote = map[string]*remoteEntry{}
	var bytes int64
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the session's files: %w", err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		if name == "" || name == "." {
			continue
		}
		if bytes += h.Size; bytes > pullLimits.bytes || len(p.remote) >= pullLimits.entries {
			return fmt.Errorf("the session's workspace has more than %s, or more than %d files: get what you need with `spool files get`, or with `spool files tar %s DIR`", size(pullLimits.bytes), pullLimits.entries, p.cmd.Session)
		}
		e := &remoteEntry{entry: entry{Path: name, Mode: uint32(h.Mode & 0o777)}} //nolint:gosec // masked
		switch h.Typeflag {
		case tar.TypeDir:
			e.Kind = kindDir
		case tar.TypeSymlink:
			e.Kind, e.Mode, e.Target = kindSymlink, 0, h.Linkname
		case tar.TypeReg:
			e.Kind = kindFile
			if err := p.keep(e, in, len(p.remote)); err != nil {
				return err
			}
		default:
			return fmt.Errorf("read the session's files: %q has type %q", clip(name), h.Typeflag)
		}
		p.remote[name] = e
	}
}

// keep writes a file's content aside, unless it is what was uploaded.
func (p *pulling) keep(e *remoteEntry, content io.Reader, n int) error {
	e.staged = filepath.Join(p.stage, fmt.Sprint(n))
	f, err := os.OpenFile(e.staged, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	sum := sha256.New()
	e.Size, err = io.Copy(io.MultiWriter(f, sum), content)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("read the session's files: %w", err)
	}
	e.SHA256 = hex.EncodeToString(sum.Sum(nil))
	if before, ok := p.before.Entries[e.Path]; ok && before.SHA256 == e.SHA256 && before.Mode == e.Mode {
		err, e.staged = os.Remove(e.staged), ""
	}
	return err
}

// rules are the folder's own ignore rules: what they name is not pulled.
type rules struct {
	root *os.Root
	tree ignore.Tree
}

// ignores reports whether a path, or a folder that it lies in, is ignored.
func (r rules) ignores(p string, dir bool) bool {
	tree := r.tree
	for i := range len(p) {
		if p[i] != '/' {
			continue
		}
		at := p[:i]
		if tree.Ignores(at, true) {
			return true
		}
		if sub, err := fs.Sub(r.root.FS(), at); err == nil {
			if below, err := tree.Enter(sub, at); err == nil {
				tree = below
			}
		}
	}
	return tree.Ignores(p, dir)
}

// compare finds what is to be done: what the session changed since the upload,
// and where that was changed here, too.
func (p *pulling) compare(ctx context.Context) error {
	tree, err := ignore.ReadTree(p.root.FS())
	if err != nil {
		return usage("dir: %v", err)
	}
	ignored := rules{p.root, tree}
	paths := make([]string, 0, len(p.remote))
	for name := range p.remote {
		paths = append(paths, name)
	}
	for name := range p.before.Entries {
		if p.remote[name] == nil {
			paths = append(paths, name)
		}
	}
	slices.Sort(paths)
	for _, name := range paths {
		if err := ctx.Err(); err != nil {
			return err
		}
		var base, remote *entry
		staged := ""
		if b, ok := p.before.Entries[name]; ok {
			base = &b
		}
		if r := p.remote[name]; r != nil {
			remote, staged = &r.entry, r.staged
		}
		if unchanged(base, remote) || base == nil && ignored.ignores(name, remote.Kind == kindDir) {
			continue
		}
		if why := refusal(name, remote); why != "" {
			p.changes = append(p.changes, &change{Path: name, Change: changeRefused, Kind: remote.Kind, Reason: why})
			continue
		}
		local, err := look(p.root, name)
		if err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		if unchanged(local, remote) {
			p.settle(name, remote)
			continue
		}
		p.changes = append(p.changes, decide(name, base, local, remote, staged))
	}
	return nil
}

// unchanged compares what a pull carries over; of folders only that they are there.
func unchanged(a, b *entry) bool {
	if a != nil && b != nil && a.Kind == kindDir && b.Kind == kindDir {
		return true
	}
	return a.same(b)
}

// refusal says why an entry never goes into a folder of a person's; "" if it does.
func refusal(name string, remote *entry) string {
	switch {
	case remote == nil:
		return ""
	case strings.ContainsFunc(name, unicode.IsControl):
		return "its name holds a control character"
	case checkPath("path", name, false) != nil:
		return "its name is no path of a workspace"
	case remote.Kind == kindSymlink && !staysInside(name, remote.Target):
		return fmt.Sprintf("it is a link to %q, out of the folder", clip(remote.Target))
	}
	return ""
}

func decide(name string, base, local, remote *entry, staged string) *change {
	c := &change{Path: name, local: local, remote: remote, staged: staged, Change: changeModified}
	switch {
	case remote == nil:
		c.Change, c.Kind = changeDeleted, base.Kind
	case local == nil:
		c.Change = changeAdded
	}
	if remote != nil {
		c.Kind, c.Size = remote.Kind, remote.Size
	}
	if !unchanged(local, base) {
		c.Conflict = true
		switch {
		case base == nil:
			c.Reason = "there is another one here, which was not uploaded"
		case local == nil:
			c.Reason = "it was changed in the session and deleted here"
		case remote == nil:
			c.Reason = "it was deleted in the session and changed here"
		default:
			c.Reason = "it was changed in the session and here"
		}
	}
	return c
}

// look describes what lies at a path here; nil for nothing.
func look(root *os.Root, name string) (*entry, error) {
	info, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	e := &entry{Path: name, Mode: uint32(info.Mode().Perm())}
	switch info.Mode().Type() {
	case fs.ModeDir:
		e.Kind = kindDir
	case fs.ModeSymlink:
		e.Kind, e.Mode = kindSymlink, 0
		e.Target, err = root.Readlink(name)
		return e, err
	case 0:
		f, _, err := openRegular(root, name)
		if err != nil {
			return nil, err
		}
		sum := sha256.New()
		e.Kind = kindFile
		e.Size, err = io.Copy(sum, f)
		e.SHA256 = hex.EncodeToString(sum.Sum(nil))
		return e, errors.Join(err, f.Close())
	default:
		e.Kind = special(info.Mode())
	}
	return e, nil
}

// settle makes the session's side of a path what the next pull compares with.
func (p *pulling) settle(name string, remote *entry) {
	if remote == nil {
		delete(p.before.Entries, name)
		return
	}
	p.before.Entries[name] = *remote
}

// finish shows the changes, asks, and applies them.
func (p *pulling) finish(file string) error {
	if len(p.changes) == 0 {
		if !p.cmd.JSON {
			fmt.Fprintf(p.app.Out, "nothing to bring back: %s has what the session has\n", terminal.Line(p.before.Folder))
		}
		return p.saved(file)
	}
	if !p.cmd.JSON {
		p.show()
	}
	agreed := p.cmd.Yes || !slices.ContainsFunc(p.changes, func(c *change) bool { return c.Change != changeRefused })
	if !agreed && !p.cmd.DryRun {
		var err error
		if agreed, err = p.app.confirmed(fmt.Sprintf("spool: bring these changes into %s?", terminal.Line(p.before.Folder))); err != nil {
			return err
		}
		if !agreed && !p.app.InTTY {
			return usage("yes: the changes were not applied: say --yes, or --dry-run to see them only")
		}
	}
	var failed error
	if agreed && !p.cmd.DryRun {
		failed = p.apply()
	}
	for _, c := range p.changes {
		if p.cmd.JSON {
			failed = errors.Join(failed, p.app.json(c))
		}
	}
	if !agreed || p.cmd.DryRun {
		return failed
	}
	return errors.Join(failed, p.saved(file), p.left())
}

// saved keeps what the next pull compares with, if this folder is the one that was uploaded.
func (p *pulling) saved(file string) error {
	if p.cmd.DryRun {
		return nil
	}
	return p.before.save(file)
}

// left reports the changes that were not applied.
func (p *pulling) left() error {
	n := 0
	for _, c := range p.changes {
		if !c.Applied && c.Change != changeRefused {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d changes were not brought back: for conflicts --force takes the session's side", n)
}

// letters mark changes as git does.
var letters = map[string]string{changeAdded: "A", changeModified: "M", changeDeleted: "D", changeRefused: "R"}

// maxDiff bounds the text files whose difference is shown, in bytes.
const maxDiff = 256 << 10

// show prints the list, and the differences of text files.
func (p *pulling) show() {
	for _, c := range p.changes {
		line := letters[c.Change] + " " + terminal.Line(c.Path)
		if c.Kind == kindDir {
			line += "/"
		}
		if c.Change != changeDeleted && c.Kind == kindFile {
			line += " (" + size(c.Size) + ")"
		}
		switch {
		case c.Conflict:
			line += "  CONFLICT: " + c.Reason
		case c.Reason != "":
			line += "  not taken: " + c.Reason
		}
		fmt.Fprintln(p.app.Out, line)
	}
	for _, c := range p.changes {
		if text := p.difference(c); text != "" {
			if p.app.OutTTY {
				text = terminal.Safe(text)
			}
			fmt.Fprintf(p.app.Out, "\n%s", text)
		}
	}
}

// difference is a unified diff of a text file that is changed; "" for others.
func (p *pulling) difference(c *change) string {
	if c.Change != changeModified || c.local == nil || c.local.Kind != kindFile || c.Kind != kindFile || c.staged == "" ||
		c.local.Size > maxDiff || c.Size > maxDiff {
		return ""
	}
	f, _, err := openRegular(p.root, c.Path)
	if err != nil {
		return "" // it says so when it is to be replaced
	}
	here, err := io.ReadAll(io.LimitReader(f, maxDiff))
	if err = errors.Join(err, f.Close()); err != nil {
		return ""
	}
	there, err := os.ReadFile(c.staged)
	if err != nil || !isText(here) || !isText(there) {
		return ""
	}
	return udiff.Unified("a/"+c.Path, "b/"+c.Path, string(here), string(there))
}

func isText(b []byte) bool { return utf8.Valid(b) && bytes.IndexByte(b, 0) < 0 }

// apply carries the changes out: deletions first, the deepest first, then the rest.
func (p *pulling) apply() error {
	var failed error
	todo := slices.Clone(p.changes)
	slices.SortStableFunc(todo, func(a, b *change) int {
		switch del := a.Change == changeDeleted; {
		case del != (b.Change == changeDeleted):
			if del {
				return -1
			}
			return 1
		case del:
			return strings.Compare(b.Path, a.Path)
		}
		return strings.Compare(a.Path, b.Path)
	})
	for _, c := range todo {
		if c.Change == changeRefused || c.Conflict && !p.cmd.Force {
			continue
		}
		if err := p.one(c); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", c.Path, err))
			continue
		}
		c.Applied = true
		p.settle(c.Path, c.remote)
		if c.Conflict {
			fmt.Fprintf(p.app.Err, "spool: %s: the session's side was taken over what was changed here\n", terminal.Line(c.Path))
		}
	}
	return failed
}

// errMoved is a file that was changed here while the changes were looked at.
var errMoved = errors.New("it was changed here just now: pull again")

func (p *pulling) one(c *change) error {
	now, err := look(p.root, c.Path)
	if err != nil {
		return err
	}
	if !unchanged(now, c.local) {
		return errMoved
	}
	if c.remote == nil {
		return p.root.Remove(c.Path)
	}
	if dir := path.Dir(c.Path); dir != "." {
		if err := p.root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if now != nil && now.Kind == kindDir && c.Kind != kindDir {
		if err := p.root.Remove(c.Path); err != nil { // an empty one gives way
			return err
		}
	}
	if c.Kind == kindDir {
		if now != nil {
			if err := p.root.Remove(c.Path); err != nil {
				return err
			}
		}
		return p.root.Mkdir(c.Path, fs.FileMode(c.remote.Mode)|0o700)
	}
	return p.replace(c)
}

// replace puts a file or a link in place in one step.
func (p *pulling) replace(c *change) error {
	tmp := path.Join(path.Dir(c.Path), ".spool-put-"+rand.Text())
	var err error
	switch {
	case c.Kind == kindSymlink:
		err = p.root.Symlink(c.remote.Target, tmp)
	case c.staged == "": // the content is what was uploaded
		return fmt.Errorf("its content was not fetched: %w", fs.ErrInvalid)
	default:
		err = p.copy(c, tmp)
	}
	if err == nil {
		err = p.root.Rename(tmp, c.Path)
	}
	if err != nil {
		if rerr := p.root.Remove(tmp); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

func (p *pulling) copy(c *change, tmp string) error {
	from, err := os.Open(c.staged)
	if err != nil {
		return err
	}
	defer from.Close() //nolint:errcheck // only read
	to, err := p.root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Chmod(fs.FileMode(c.remote.Mode)), to.Close())
}
