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

// Files implements sandbox.Files by file commands of the runner, which sees the workspace from inside the sandbox.
type Files struct {
	Start Start
}

// relative returns a slash-separated path, relative to the workspace, in its shortest form. It returns an error for an absolute path and
// for one that leads out of the workspace. It does not follow symbolic links: the runner does that inside the sandbox, and refuses links
// that point out of the workspace.
func relative(name string) (string, error) {
	clean := path.Clean(name)
	switch {
	case name == "" || strings.ContainsRune(name, 0):
		return "", fmt.Errorf("path %q: %w", name, fs.ErrInvalid)
	case path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../"):
		return "", fmt.Errorf("path %q: %w", name, sandbox.ErrOutsideWorkspace)
	}
	return clean, nil
}

// Chunk is the largest piece in which a file is sent, in bytes.
const Chunk = 64 << 10

// Put replaces a file atomically. The content is sent in chunks, with a chunk of length 0 at the end: without that the runner
// would mistake a stream that breaks off for a short file.
func (f Files) Put(ctx context.Context, name string, content io.Reader) error {
	rel, err := relative(name)
	if err != nil {
		return err
	}
	out, err := f.Start.Run(ctx, func(to io.Writer) error {
		buf := make([]byte, Chunk)
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
	return out.Outcome(name)
}

// Get opens a file for reading. ctx bounds the time until the first byte; the caller closes the reader.
func (f Files) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	rel, err := relative(name)
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
	d := &download{name: name, proc: proc, in: bufio.NewReader(proc.Stdout())}
	_, err = d.in.Peek(1) // blocks until the first byte or the end of the command
	if !stop() {
		return nil, fmt.Errorf("get %q: %w", name, ctx.Err())
	}
	if errors.Is(err, io.EOF) {
		err = d.finish()
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// download reads a file from the stdout of a command of the runner.
type download struct {
	name string
	proc Process
	in   *bufio.Reader
	done bool
}

// Read returns an error in place of io.EOF when the command failed.
func (d *download) Read(b []byte) (int, error) {
	n, err := d.in.Read(b)
	if errors.Is(err, io.EOF) && !d.done {
		if err := d.finish(); err != nil {
			return n, err
		}
	}
	return n, err
}

func (d *download) finish() error {
	errs, err := io.ReadAll(d.proc.Stderr())
	if err != nil {
		return err
	}
	code, err := d.proc.Wait()
	if err != nil {
		return err
	}
	d.done = true
	return Answer{Stderr: string(errs), Code: code}.Outcome(d.name)
}

// Close stops the transfer and releases the command's streams.
func (d *download) Close() error {
	d.proc.Abandon()
	return nil
}

// List returns the files and folders below a folder; "" is the workspace.
func (f Files) List(ctx context.Context, dir string) ([]sandbox.File, error) {
	args := []string{"list"}
	if dir != "" {
		rel, err := relative(dir)
		if err != nil {
			return nil, err
		}
		args = append(args, "--", rel)
	}
	listed, err := f.Start.Run(ctx, nil, args...)
	if err == nil {
		err = listed.Outcome(dir)
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

// Remove removes a file, or a folder with everything in it. The workspace itself cannot be removed.
func (f Files) Remove(ctx context.Context, name string) error {
	rel, err := relative(name)
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
	return out.Outcome(name)
}
