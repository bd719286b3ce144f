package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// The exit codes of the file commands, other than 0 and exitFailed.
const (
	exitNotFound         = 3
	exitOutsideWorkspace = 4
	exitPermissionDenied = 5
	exitNotRegularFile   = 6 // not a regular file, or an invalid path
)

// exitCodeError is an error with the exit code that the runner returns for it.
type exitCodeError struct {
	error
	code int
}

func (c exitCodeError) Unwrap() error { return c.error }

// workspaceFlag is the flag with the path of the workspace, for commands that read or change files.
type workspaceFlag struct {
	Workspace string `required:"" help:"The workspace, an existing folder." env:"SPOOL_RUNNER_WORKSPACE"`
}

// withWorkspace opens the workspace, calls f, and wraps the error of f with its exit code.
func (a workspaceFlag) withWorkspace(f func(*workspace.Workspace) error) error {
	w, err := workspace.Open(a.Workspace)
	if err != nil {
		return err
	}
	defer w.Close() //nolint:errcheck // nothing is buffered
	err = f(w)
	switch {
	case errors.Is(err, sandbox.ErrNotFound):
		return exitCodeError{err, exitNotFound}
	case errors.Is(err, sandbox.ErrOutsideWorkspace):
		return exitCodeError{err, exitOutsideWorkspace}
	case errors.Is(err, fs.ErrPermission):
		return exitCodeError{err, exitPermissionDenied}
	case errors.Is(err, fs.ErrInvalid):
		return exitCodeError{err, exitNotRegularFile}
	}
	return err
}

// putFileCommand is the command put, which writes stdin to a file of the workspace.
type putFileCommand struct {
	Path    string        `arg:"" help:"Path in the workspace."`
	At      workspaceFlag `embed:""`
	Mode    uint32        `help:"Permission bits, in decimal or 0o octal." default:"0o644"`
	Chunked bool          `help:"Read the content as chunks: a line with the number of bytes, then the bytes, and a line with 0 at the end. Without that end nothing is written."`
}

func (c *putFileCommand) Run(sys *System) error {
	if c.Mode&^0o777 != 0 {
		return fmt.Errorf("mode: %#o has more than permission bits", c.Mode)
	}
	content := sys.Stdin
	if c.Chunked {
		content = &chunkReader{in: bufio.NewReader(sys.Stdin)}
	}
	return c.At.withWorkspace(func(w *workspace.Workspace) error {
		path, n, err := w.PutRelative(c.Path, content, fs.FileMode(c.Mode))
		if err != nil {
			return err
		}
		return sys.printJSON(map[string]any{"type": "file_put", "path": path, "bytes": n})
	})
}

// getFileCommand is the command get, which prints a file of the workspace.
type getFileCommand struct {
	Path string        `arg:"" help:"Path in the workspace."`
	At   workspaceFlag `embed:""`
}

func (c *getFileCommand) Run(sys *System) error {
	return c.At.withWorkspace(func(w *workspace.Workspace) error {
		f, err := w.OpenFile(c.Path)
		if err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // only read from
		if _, err := io.Copy(sys.Stdout, f); err != nil {
			return fmt.Errorf("read %q: %w", c.Path, err)
		}
		return nil
	})
}

// listFolderCommand is the command list, which prints what is below a folder of the workspace.
type listFolderCommand struct {
	Dir string        `arg:"" optional:"" help:"Folder in the workspace; by default the whole workspace."`
	At  workspaceFlag `embed:""`
}

func (c *listFolderCommand) Run(sys *System) error {
	return c.At.withWorkspace(func(w *workspace.Workspace) error {
		all, err := w.List(c.Dir)
		if err != nil {
			return err
		}
		out := bufio.NewWriter(sys.Stdout)
		enc := json.NewEncoder(out)
		enc.SetEscapeHTML(false)
		for _, e := range all {
			if err := enc.Encode(e); err != nil {
				return fmt.Errorf("print: %w", err)
			}
		}
		return out.Flush()
	})
}

// removePathCommand is the command remove, which removes a file or a folder of the workspace.
type removePathCommand struct {
	Path string        `arg:"" help:"Path in the workspace, of a file or of a folder, which goes with all below it."`
	At   workspaceFlag `embed:""`
}

func (c *removePathCommand) Run() error {
	return c.At.withWorkspace(func(w *workspace.Workspace) error { return w.Remove(c.Path) })
}

// chunkReader reads content that is sent in chunks, each preceded by its length, and that ends with a chunk of length
// 0. If the stream ends before that chunk, Read returns an error, so that an incomplete file is not stored.
type chunkReader struct {
	in   *bufio.Reader
	left int64
	done bool
}

func (c *chunkReader) Read(p []byte) (int, error) {
	if c.done {
		return 0, io.EOF
	}
	if c.left == 0 {
		var n int64
		if _, err := fmt.Fscanf(c.in, "%d\n", &n); err != nil || n < 0 {
			return 0, errors.New("the content broke off: want a line with the size of the next chunk, or with 0 at the end")
		}
		if c.done = n == 0; c.done {
			return 0, io.EOF
		}
		c.left = n
	}
	n, err := c.in.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("the content broke off in a chunk that has %d bytes more", c.left)
	}
	return n, err
}
