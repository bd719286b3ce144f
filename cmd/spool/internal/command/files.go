package command

import (
	"archive/tar"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

type filesCommand struct {
	Ls   filesLsCommand   `cmd:"" help:"List the files of the last snapshot, or of the running sandbox."`
	Get  filesGetCommand  `cmd:"" help:"Get a file of the last snapshot, or of the running sandbox."`
	Put  filesPutCommand  `cmd:"" help:"Put a file, or a folder with everything below it, into the workspace."`
	Rm   filesRmCommand   `cmd:"" help:"Remove files or folders from the workspace."`
	Pull filesPullCommand `cmd:"" help:"Copy a session's changes back into the uploaded folder, after you accept them as a diff."`
	Tar  filesTarCommand  `cmd:"" help:"Get all files of the last snapshot as a tar."`
}

// sessionFlags holds the flags of commands that talk to a server, and the argument that names a session.
type sessionFlags struct {
	serverFlags
	Session string `arg:"" help:"The session's id."`
}

// checkWorkspacePath returns a usage error if p cannot be a path in a workspace. If folder is true, "" is valid and
// means the workspace itself.
func checkWorkspacePath(field, p string, folder bool) error {
	var wrong *command.Error
	if err := command.CheckPath(field, p, folder); errors.As(err, &wrong) {
		return usageError("%s: %q: %s", field, truncate.Text(p, 64), wrong.Detail)
	}
	return nil
}

// withClientAndPath checks the session's id and the path p, which may be "", and then calls do with a client.
func (c sessionFlags) withClientAndPath(a *app, field, p string, do func(context.Context, *client.Client) error) error {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	if err := checkWorkspacePath(field, p, true); err != nil {
		return err
	}
	return c.withClient(a, do)
}

type filesLsCommand struct {
	sessionFlags
	Dir  string  `arg:"" optional:"" help:"A folder; by default the whole workspace."`
	Live bool    `xor:"as" help:"The files in the running sandbox, instead of the last snapshot."`
	At   *uint32 `xor:"as" placeholder:"N" help:"The files in the last snapshot before event N."`
}

// Run lists the files of a session's workspace.
func (c *filesLsCommand) Run(a *app) error {
	return c.withClientAndPath(a, "dir", c.Dir, func(ctx context.Context, cl *client.Client) error {
		l, err := cl.ListFiles(ctx, c.Session, c.Dir, client.WorkspaceVersion{Live: c.Live, At: c.At})
		if err != nil {
			return err
		}
		table := newTable(a)
		for i, d := range l.Files {
			if c.JSON {
				if err := a.printJSON(d); err != nil {
					return err
				}
				continue
			}
			if i == 0 {
				writeTableRow(table, []any{"MODE", "SIZE", "MODIFIED", "PATH"})
			}
			f := d.Value
			name, bytes := f.Path, formatSize(f.Size)
			switch f.Kind {
			case "dir":
				name, bytes = name+"/", ""
			case "symlink":
				name, bytes = name+" -> "+f.Target, ""
			}
			mode := fs.FileMode(f.Mode).Perm().String()
			if c.Live {
				mode = "" // the listing of a sandbox has no modes
			}
			modified := ""
			if f.ModTime != nil {
				modified = formatLocalTime(*f.ModTime)
			}
			writeTableRow(table, []any{mode, bytes, modified, name})
		}
		return table.Flush()
	})
}

type filesGetCommand struct {
	sessionFlags
	Path  string  `arg:"" help:"Path in the workspace."`
	To    string  `arg:"" optional:"" help:"Destination: a file, a folder, or - for standard output; by default a file of the same name in the current folder."`
	Force bool    `help:"Overwrite an existing file."`
	Live  bool    `xor:"as" help:"The file in the running sandbox, instead of the last snapshot."`
	At    *uint32 `xor:"as" placeholder:"N" help:"The file in the last snapshot before event N."`
}

// Run downloads a file of a session's workspace into a local file, or to standard output.
func (c *filesGetCommand) Run(a *app) error {
	return c.withClientAndPath(a, "path", c.Path, func(ctx context.Context, cl *client.Client) error {
		r, _, err := cl.GetFile(ctx, c.Session, c.Path, client.WorkspaceVersion{Live: c.Live, At: c.At})
		if err != nil {
			return err
		}
		defer r.Close() //nolint:errcheck // the body was read to its end, or its error is returned
		if c.To == "-" {
			_, err := io.Copy(a.Out, r)
			return err
		}
		to := c.To
		if info, err := os.Stat(to); to == "" || err == nil && info.IsDir() {
			to = filepath.Join(to, path.Base(c.Path))
		}
		n, err := saveFile(to, r, c.Force)
		return c.printDownloaded(a, to, n, err)
	})
}

// printDownloaded prints that n bytes were written to the file to. It returns err if err is not nil.
func (c sessionFlags) printDownloaded(a *app, to string, n int64, err error) error {
	switch {
	case err != nil:
		return err
	case c.JSON:
		return a.printJSON(map[string]any{"file": to, "size": n})
	}
	_, err = terminal.Fprintf(a.Out, "%s, %s\n", to, formatSize(n))
	return err
}

// saveFile writes the content of r to the file to, and returns the number of bytes. It replaces an existing file only
// if force is set. After an error the file is unchanged.
func saveFile(to string, r io.Reader, force bool) (n int64, err error) {
	if _, err := os.Lstat(to); err == nil && !force {
		return 0, usageError("to: %s already exists; overwrite it with --force, or name another file", to)
	}
	f, err := os.CreateTemp(filepath.Dir(to), ".spool-*")
	if err != nil {
		return 0, fmt.Errorf("to: %w", err)
	}
	n, err = io.Copy(f, r)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err == nil {
		err = os.Rename(f.Name(), to)
	}
	if err != nil {
		return 0, errors.Join(err, os.Remove(f.Name()))
	}
	return n, nil
}

type filesTarCommand struct {
	sessionFlags
	Dir    string  `arg:"" optional:"" help:"A folder; by default the whole workspace."`
	Output string  `short:"o" placeholder:"FILE" help:"Output file; by default standard output."`
	Force  bool    `help:"Overwrite an existing file."`
	At     *uint32 `placeholder:"N" help:"The files in the last snapshot before event N."`
}

// Run downloads a folder of a session's workspace as a tar archive, into a local file or to standard output.
func (c *filesTarCommand) Run(a *app) error {
	if (c.Output == "" || c.Output == "-") && a.OutTTY {
		return usageError("output: a tar cannot be shown on a terminal: name a file with -o, or use a pipe, as in `spool files tar SESSION | tar x`")
	}
	return c.withClientAndPath(a, "dir", c.Dir, func(ctx context.Context, cl *client.Client) error {
		r, err := cl.GetTar(ctx, c.Session, c.Dir, client.WorkspaceVersion{At: c.At})
		if err != nil {
			return err
		}
		defer r.Close() //nolint:errcheck // the body was read to its end, or its error is returned
		if c.Output == "" || c.Output == "-" {
			_, err := io.Copy(a.Out, r)
			return err
		}
		n, err := saveFile(c.Output, r, c.Force)
		return c.printDownloaded(a, c.Output, n, err)
	})
}

type filesPutCommand struct {
	sessionFlags
	From string `arg:"" help:"A file or a folder of this machine, or - for standard input."`
	Path string `arg:"" optional:"" help:"Path in the workspace; by default the same name. The content of a folder goes into this folder."`
	Tar  bool   `help:"The input is a tar, whose files go into the folder Path."`
}

// Run uploads a local file, a folder or a tar archive into a session's workspace.
func (c *filesPutCommand) Run(a *app) error {
	to := filepath.ToSlash(c.Path)
	if c.From == "-" {
		if to == "" && !c.Tar {
			return usageError("path: standard input needs a path in the workspace")
		}
		return c.uploadContent(a, to, "", a.In, -1)
	}
	info, err := os.Stat(c.From)
	if err != nil {
		return usageError("from: %v", err)
	}
	if info.IsDir() {
		if c.Tar {
			return usageError("tar: %s is a folder; leave --tar out", c.From)
		}
		if to == "" {
			to = path.Base(filepath.ToSlash(absolutePath(c.From)))
		}
		return c.uploadFolder(a, to)
	}
	f, err := os.Open(c.From)
	if err != nil {
		return usageError("from: %v", err)
	}
	defer f.Close() //nolint:errcheck // the file is only read
	if to == "" && !c.Tar {
		to = filepath.Base(c.From)
	}
	mode, length := fmt.Sprintf("%o", info.Mode().Perm()), info.Size()
	if !info.Mode().IsRegular() {
		length = -1
	}
	return c.uploadContent(a, to, mode, f, length)
}

// absolutePath returns the absolute path of name, so that "." and ".." get a base name. It returns name if the current
// folder is unknown.
func absolutePath(name string) string {
	if abs, err := filepath.Abs(name); err == nil {
		return abs
	}
	return name
}

// uploadContent uploads the content of r as the file to and prints the result.
func (c *filesPutCommand) uploadContent(a *app, to, mode string, r io.Reader, length int64) error {
	return c.withClientAndPath(a, "path", to, func(ctx context.Context, cl *client.Client) error {
		if c.Tar {
			d, err := cl.PutTar(ctx, c.Session, to, r)
			return c.printUploaded(a, to, d, err)
		}
		d, err := cl.PutFile(ctx, c.Session, to, mode, r, length)
		return c.printUploaded(a, to, d, err)
	})
}

// printUploaded prints the size and the path of the uploaded content. It returns err if err is not nil.
func (c *filesPutCommand) printUploaded(a *app, to string, d client.APIObject[client.UploadResult], err error) error {
	switch {
	case err != nil:
		return err
	case c.JSON:
		return a.printJSON(d)
	case to == "":
		to = "the workspace"
	}
	_, err = terminal.Fprintf(a.Out, "stored %s for %s\n", formatSize(int64(d.Value.Size)), to) //nolint:gosec // bounded by what a file has
	return err
}

// uploadFolder uploads a folder as a tar archive, which is created during the upload.
func (c *filesPutCommand) uploadFolder(a *app, to string) error {
	return c.withClientAndPath(a, "path", to, func(ctx context.Context, cl *client.Client) error {
		r, w := io.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			t := tar.NewWriter(w)
			err := t.AddFS(os.DirFS(c.From))
			w.CloseWithError(errors.Join(err, t.Close()))
		}()
		d, err := cl.PutTar(ctx, c.Session, to, r)
		_ = r.Close() // stops the tar if nobody reads it any more
		<-done
		return c.printUploaded(a, to, d, err)
	})
}

type filesRmCommand struct {
	sessionFlags
	Paths []string `arg:"" name:"path" help:"Paths in the workspace."`
}

// Run removes files and folders of a session's workspace.
func (c *filesRmCommand) Run(a *app) error {
	for _, p := range c.Paths {
		if err := checkWorkspacePath("path", p, false); err != nil {
			return err
		}
	}
	return c.withClientAndPath(a, "path", "", func(ctx context.Context, cl *client.Client) error {
		var failed []error
		for _, p := range c.Paths {
			d, err := cl.RemoveFile(ctx, c.Session, p)
			switch {
			case err != nil:
				err = fmt.Errorf("%s: %w", p, err)
			case c.JSON:
				err = a.printJSON(d)
			default:
				_, err = terminal.Fprintln(a.Out, "requested to remove", p)
			}
			failed = append(failed, err)
		}
		return errors.Join(failed...)
	})
}

// maxQueryFileBytes is the maximum total size of the files that are sent with a query. In base64 they must fit into one
// request.
const maxQueryFileBytes = 11 << 20

// readQueryFiles reads the files of the flag --file. A path outside of the current folder keeps only its last element.
func readQueryFiles(names []string) ([]*spoolv1.WorkspaceFile, error) {
	var out []*spoolv1.WorkspaceFile
	total := 0
	add := func(name, to string, mode fs.FileMode) error {
		f, err := os.Open(name)
		if err != nil {
			return usageError("file: %v", err)
		}
		content, err := io.ReadAll(io.LimitReader(f, maxQueryFileBytes+1))
		if err = errors.Join(err, f.Close()); err != nil {
			return usageError("file: %v", err)
		}
		if total += len(content); total > maxQueryFileBytes {
			return usageError("file: the files may have %s in total; put larger ones with `spool files put SESSION %s` and then continue with --session", formatSize(maxQueryFileBytes), name)
		}
		encoded := base64.StdEncoding.EncodeToString(content)
		out = append(out, &spoolv1.WorkspaceFile{Path: to, ContentBase64: &encoded, Mode: uint32(mode.Perm())})
		return nil
	}
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			return nil, usageError("file: %v", err)
		}
		to := path.Clean(filepath.ToSlash(name))
		if !filepath.IsLocal(name) || to == "." {
			to = path.Base(filepath.ToSlash(absolutePath(name)))
		}
		if !info.IsDir() {
			if err := add(name, to, info.Mode()); err != nil {
				return nil, err
			}
			continue
		}
		err = filepath.WalkDir(name, func(at string, d fs.DirEntry, err error) error {
			if err != nil {
				return usageError("file: %v", err)
			}
			if !d.Type().IsRegular() {
				return nil // folders are created as needed, links are not followed
			}
			below, err := filepath.Rel(name, at)
			if err != nil {
				return err
			}
			i, err := d.Info()
			if err != nil {
				return usageError("file: %v", err)
			}
			return add(at, path.Join(to, filepath.ToSlash(below)), i.Mode())
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// formatSize formats a number of bytes for people, such as "1.5 MiB".
func formatSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n)/1024, 0
	for ; f >= 1024 && i < len(units)-1; i++ {
		f /= 1024
	}
	return fmt.Sprintf("%.1f %ciB", f, units[i])
}
