package guest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// Files reads and writes the workspace of a sandbox by file commands of the runner, which run inside the sandbox. It implements
// sandbox.Files.
type Files struct {
	Start StartFunc
}

// cleanRelativePath returns the shortest form of a slash-separated path relative to the workspace. It returns an error for an absolute
// path, and for a path that leads out of the workspace. It does not follow symbolic links; the runner does that, and refuses links out of
// the workspace.
func cleanRelativePath(name string) (string, error) {
	clean := path.Clean(name)
	switch {
	case name == "" || strings.ContainsRune(name, 0):
		return "", fmt.Errorf("path %q: %w", name, fs.ErrInvalid)
	case path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../"):
		return "", fmt.Errorf("path %q: %w", name, sandbox.ErrOutsideWorkspace)
	}
	return clean, nil
}

// ChunkBytes is the maximum size in bytes of a piece in which a file's content is sent to the runner.
const ChunkBytes = 64 << 10

// Put writes a file of the workspace, which it replaces atomically. It sends the content in chunks, with a chunk of length 0 at the end, by
// which the runner knows that the content is complete.
func (f Files) Put(ctx context.Context, name string, content io.Reader) error {
	rel, err := cleanRelativePath(name)
	if err != nil {
		return err
	}
	out, err := f.Start.Run(ctx, func(to io.Writer) error {
		buf := make([]byte, ChunkBytes)
		for {
			n, err := content.Read(buf)
			if n > 0 {
				if _, err := fmt.Fprintf(to, "%d\n%s", n, buf[:n]); err != nil {
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				_, err = io.WriteString(to, "0\n")
				return err
			}
			if err != nil {
				return err
			}
		}
	}, "put", "--chunked", "--", rel)
	if err != nil {
		return fmt.Errorf("put %q: %w", name, err)
	}
	return out.FileError(name)
}

// Get opens a file of the workspace for reading. ctx limits the time until the first byte. The caller must close the reader.
func (f Files) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	rel, err := cleanRelativePath(name)
	if err != nil {
		return nil, err
	}
	proc, err := f.Start(ctx, "get", "--", rel)
	if err != nil {
		return nil, fmt.Errorf("get %q: %w", name, err)
	}
	if err := proc.Stdin().Close(); err != nil {
		proc.Abandon()
		return nil, fmt.Errorf("get %q: %w", name, err)
	}
	stop := context.AfterFunc(ctx, proc.Abandon)
	d := &fileDownload{name: name, proc: proc, in: bufio.NewReader(proc.Stdout())}
	_, err = d.in.Peek(1) // blocks until the first byte or the end of the command
	if !stop() {
		return nil, fmt.Errorf("get %q: %w", name, ctx.Err())
	}
	if errors.Is(err, io.EOF) {
		err = d.exitError()
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// fileDownload is a reader of a file's content, which a file command of the runner writes to its stdout.
type fileDownload struct {
	name string
	proc Process
	in   *bufio.Reader
	done bool
}

// Read returns an error in place of io.EOF when the command failed.
func (d *fileDownload) Read(b []byte) (int, error) {
	n, err := d.in.Read(b)
	if errors.Is(err, io.EOF) && !d.done {
		if err := d.exitError(); err != nil {
			return n, err
		}
	}
	return n, err
}

// exitError waits for the end of the runner's file command, and returns the error that its exit code stands for.
func (d *fileDownload) exitError() error {
	errs, err := io.ReadAll(d.proc.Stderr())
	if err != nil {
		return err
	}
	code, err := d.proc.Wait()
	if err != nil {
		return err
	}
	d.done = true
	return RunResult{Stderr: string(errs), Code: code}.FileError(d.name)
}

// Close stops the transfer and releases the command's streams.
func (d *fileDownload) Close() error {
	d.proc.Abandon()
	return nil
}

// List returns the files and folders below a folder of the workspace; "" is the workspace itself.
func (f Files) List(ctx context.Context, dir string) ([]sandbox.File, error) {
	args := []string{"list"}
	if dir != "" {
		rel, err := cleanRelativePath(dir)
		if err != nil {
			return nil, err
		}
		args = append(args, "--", rel)
	}
	listed, err := f.Start.Run(ctx, nil, args...)
	if err == nil {
		err = listed.FileError(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("list %q: %w", dir, err)
	}
	var out []sandbox.File
	for line := range strings.Lines(listed.Stdout) {
		var e struct {
			Path    string    `json:"path"`
			Size    int64     `json:"size"`
			ModTime time.Time `json:"modTime"`
			Dir     bool      `json:"dir"`
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			return nil, fmt.Errorf("list %q: the runner printed %.100q: %w", dir, line, err)
		}
		out = append(out, sandbox.File{Path: e.Path, Size: e.Size, ModTime: e.ModTime, Dir: e.Dir})
	}
	return out, nil
}

// Remove removes a file of the workspace, or a folder with everything in it. It does not remove the workspace itself.
func (f Files) Remove(ctx context.Context, name string) error {
	rel, err := cleanRelativePath(name)
	if err != nil {
		return err
	}
	if rel == "." {
		return fmt.Errorf("path %q: %w", name, fs.ErrInvalid)
	}
	out, err := f.Start.Run(ctx, nil, "remove", "--", rel)
	if err != nil {
		return fmt.Errorf("remove %q: %w", name, err)
	}
	return out.FileError(name)
}
