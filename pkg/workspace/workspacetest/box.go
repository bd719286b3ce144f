package workspacetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// FakeSandbox is a sandbox whose files are a map in memory. Its runner's snapshot and restore commands use the protocol
// of the real runner. It has no other commands.
type FakeSandbox struct {
	sandbox.Sandbox // nil, so that any method but Exec and ID panics

	// Tree holds the content of files by path. Paths begin with workspace/ or state/. Folders are created as needed.
	Tree map[string]string
	// Runner, if set, replaces the runner; its result is the exit code.
	Runner func(args []string, stdin io.Reader, stdout, stderr io.Writer) int
}

// fakeModTime is the modification time of all files in a FakeSandbox.
var fakeModTime = time.Unix(1_700_000_000, 123_456_789).UTC()

// StoreSnapshot stores a snapshot of files, whose keys are paths in the workspace, and returns its id.
func StoreSnapshot(t testing.TB, store workspace.Store, tenant, session string, files map[string]string) string {
	t.Helper()
	b := &FakeSandbox{Tree: map[string]string{}}
	for path, content := range files {
		b.Tree[wire.TreeWorkspace+"/"+path] = content
	}
	r, err := workspace.Snapshot(t.Context(), b, store, workspace.Options{Tenant: tenant, Session: session})
	if err != nil {
		t.Fatalf("fill the store: %v", err)
	}
	return r.ID
}

// ID returns the fixed id of the fake sandbox.
func (b *FakeSandbox) ID() string { return "sbx_map" }

// Exec runs the runner's snapshot or restore command.
func (b *FakeSandbox) Exec(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(c.Args) < 2 || c.Args[0] != "runner" {
		return nil, fmt.Errorf("%v: %w", c.Args, exec.ErrNotFound)
	}
	run := b.Runner
	if run == nil {
		run = b.runCommand
	}
	p := &fakeProcess{ended: make(chan struct{})}
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	errR, errW := io.Pipe()
	p.in, p.out, p.err = inW, outR, errR
	go func() {
		defer close(p.ended)
		p.code = run(c.Args[1:], inR, outW, errW)
		for _, closer := range []io.Closer{inR, outW, errW} {
			_ = closer.Close() // Close of a pipe never fails
		}
	}()
	return p, nil
}

func (b *FakeSandbox) runCommand(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	in, out := wire.NewReader(stdin), wire.NewWriter(stdout)
	var err error
	switch args[0] {
	case "snapshot":
		err = b.sendSnapshot(in, out)
	case "restore":
		err = b.receiveRestore(in, out)
	default:
		err = fmt.Errorf("%s is not supported by a Box", args[0])
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "runner: %v\n", err) // the reader may be closed
		return 1
	}
	return 0
}

// entries returns the tree entries of the files and their parent folders.
func (b *FakeSandbox) entries() (out []wire.Entry) {
	dirs := map[string]bool{wire.TreeWorkspace: true, wire.TreeRecords: true}
	for path, content := range b.Tree {
		for i := range len(path) {
			if dir := path[:i]; path[i] == '/' && !dirs[dir] {
				dirs[dir] = true
				out = append(out, wire.Entry{Path: dir, Kind: wire.KindDir, Mode: 0o755, ModTime: fakeModTime})
			}
		}
		e := wire.Entry{Path: path, Kind: wire.KindFile, Mode: 0o644, ModTime: fakeModTime, Size: int64(len(content))}
		for i := range wire.BlockCount(e.Size) {
			e.Blocks = append(e.Blocks, wire.HashOf([]byte(content[i*wire.BlockSize:][:e.BlockLength(i)])))
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(x, y wire.Entry) int { return wire.ComparePaths(x.Path, y.Path) })
	return out
}

// sendSnapshot sends the files to the host by the runner's side of the snapshot protocol.
func (b *FakeSandbox) sendSnapshot(in *wire.Reader, out *wire.Writer) error {
	if _, err := in.ReadHello(); err != nil {
		return err
	}
	if err := errors.Join(out.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion}), out.WriteJSON(wire.FrameFoundTree, wire.FoundTree{}), out.Flush()); err != nil {
		return err
	}
	known := map[wire.Hash]bool{}
	for t := wire.FrameKnownHashes; t != wire.FrameGo; {
		var content []byte
		var err error
		if t, content, err = in.Next(); err != nil {
			return err
		}
		for ; len(content) > 0; content = content[len(wire.Hash{}):] {
			known[wire.Hash(content)] = true
		}
	}
	tree, end := wire.NewTreeValidator(), wire.End{}
	for _, e := range b.entries() {
		for i, h := range e.Blocks {
			if known[h] {
				continue
			}
			known[h] = true
			if err := out.WriteFrame(wire.FrameBlock, []byte(b.Tree[e.Path][i*wire.BlockSize:][:e.BlockLength(i)])); err != nil {
				return err
			}
		}
		if e.Kind == wire.KindFile {
			end.Files++
			end.Bytes += uint64(e.Size) //nolint:gosec // a length is not negative
		}
		line, err := tree.Add(&e)
		if err == nil {
			err = out.WriteFrame(wire.FrameEntry, line)
		}
		if err != nil {
			return err
		}
	}
	end.ID = tree.ID()
	return errors.Join(out.WriteJSON(wire.FrameEnd, end), out.Flush())
}

// receiveRestore receives files from the host by the runner's side of the restore protocol.
func (b *FakeSandbox) receiveRestore(in *wire.Reader, out *wire.Writer) error {
	if _, err := in.ReadHello(); err != nil {
		return err
	}
	var list []wire.Entry
	blocks := map[wire.Hash]string{}
	for {
		t, content, err := in.Next()
		if err != nil {
			return err
		}
		switch t {
		case wire.FrameEntry:
			e, err := wire.ParseEntry(content)
			if err != nil {
				return err
			}
			list = append(list, e)
		case wire.FrameBlock:
			blocks[wire.HashOf(content)] = string(content)
		case wire.FrameEnd:
			return b.writeFiles(list, blocks, out)
		}
	}
}

func (b *FakeSandbox) writeFiles(list []wire.Entry, blocks map[wire.Hash]string, out *wire.Writer) error {
	files, end := maps.Clone(b.Tree), wire.End{}
	if files == nil {
		files = map[string]string{}
	}
	for _, e := range list {
		if e.Kind != wire.KindFile {
			continue
		}
		var content strings.Builder
		for _, h := range e.Blocks {
			content.WriteString(blocks[h])
		}
		files[e.Path] = content.String()
		end.Files++
		end.Bytes += uint64(e.Size) //nolint:gosec // the host has checked the size
	}
	b.Tree = files
	return errors.Join(out.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion}), out.WriteJSON(wire.FrameEnd, end), out.Flush())
}

// fakeProcess is a command of the fake runner that runs in a goroutine.
type fakeProcess struct {
	in    *io.PipeWriter
	out   *io.PipeReader
	err   *io.PipeReader
	ended chan struct{}
	code  int

	once   sync.Once
	killed bool
}

func (p *fakeProcess) Stdin() io.WriteCloser { return p.in }
func (p *fakeProcess) Stdout() io.Reader     { return p.out }
func (p *fakeProcess) Stderr() io.Reader     { return p.err }

func (p *fakeProcess) Wait() (int, error) {
	<-p.ended
	if p.killed {
		return -1, nil
	}
	return p.code, nil
}

// Kill closes the streams, which ends the command.
func (p *fakeProcess) Kill() error {
	p.once.Do(func() {
		select {
		case <-p.ended:
		default:
			p.killed = true
		}
		for _, closer := range []io.Closer{p.in, p.out, p.err} {
			_ = closer.Close() // Close of a pipe never fails
		}
	})
	return nil
}
