// Package snapshot is the sandbox's side of a workspace's snapshots: it sends the host what changed, restores what the
// host sends, and unpacks archives.
package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/record"
	"github.com/spoolhq/spool/cmd/runner/internal/watch"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

var (
	errFileUnreadable = errors.New("the file cannot be read")
	errFileTooLarge   = errors.New("the file is larger than the limit of a snapshot")
)

// maxReadAttempts is the maximum number of times that a snapshot reads a file that changes while it is read.
const maxReadAttempts = 3

// RootPaths holds the paths of the two folders that a snapshot contains.
type RootPaths struct {
	Workspace string
	State     string // also the folder of the index
}

// Snapshotter runs the runner's side of a snapshot over the protocol of package wire.
type Snapshotter struct {
	Roots   RootPaths
	MaxFile int64 // bytes; 0 for wire.MaxFileSize
	// Shared is set for a workspace that is a person's folder: the rules of .gitignore and .spoolignore, and
	// sharedFolderLimits, apply.
	Shared bool
	Log    *slog.Logger
}

// Run takes a snapshot: it reads the host's frames from in and writes the runner's to out, until the host has the snapshot. The end of ctx ends the
// walk; blocked reads of in and writes to out end only when the caller closes them.
func (t Snapshotter) Run(ctx context.Context, in io.Reader, out io.Writer) error {
	open, err := t.Roots.open()
	if err != nil {
		return err
	}
	defer open.close()
	if t.MaxFile == 0 {
		t.MaxFile = wire.MaxFileSize
	}
	s := &runningSnapshot{ctx: ctx, Snapshotter: t, roots: open, in: wire.NewReader(in), out: wire.NewWriter(out), host: map[wire.Hash]struct{}{}, buf: make([]byte, wire.BlockSize)}
	if s.before, err = loadIndex(open.state); err != nil {
		t.Log.Warn("the index of files is not used; all are read", "err", err)
	}
	defer func() { s.before.close(); s.after.close() }()
	hello, err := s.in.ReadHello()
	if err != nil {
		return fmt.Errorf("greet the host: %w", err)
	}
	if err := s.out.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion, Edits: true}); err != nil {
		return err
	}
	switch whole, err := record.AwaitComplete(ctx, open.state); {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil || !whole:
		t.Log.Warn("the agent's record may lack the end of its last turn", "err", err)
	}
	if !hello.Edits {
		return s.sendTree()
	}
	return s.sendEdits(hello)
}

// openRoots holds the two folders of RootPaths, opened so that no path outside of them can be reached.
type openRoots struct{ workspace, state *os.Root }

// open opens both folders. It creates the state folder if that does not exist.
func (r RootPaths) open() (openRoots, error) {
	ws, err := os.OpenRoot(r.Workspace)
	if err != nil {
		return openRoots{}, fmt.Errorf("workspace: %w", err)
	}
	if err := os.MkdirAll(r.State, 0o700); err != nil {
		return openRoots{}, errors.Join(fmt.Errorf("state: %w", err), ws.Close())
	}
	st, err := os.OpenRoot(r.State)
	if err != nil {
		return openRoots{}, errors.Join(fmt.Errorf("state: %w", err), ws.Close())
	}
	return openRoots{ws, st}, nil
}

// close closes both folders.
func (o openRoots) close() {
	_ = o.workspace.Close() // nothing is buffered
	_ = o.state.Close()
}

// runningSnapshot is the state of a snapshot that is being taken.
type runningSnapshot struct {
	Snapshotter
	ctx    context.Context
	roots  openRoots
	in     *wire.Reader
	out    *wire.Writer
	before *index                 // the index of the last snapshot
	after  *index                 // the index of this snapshot
	host   map[wire.Hash]struct{} // blocks that the host has
	buf    []byte
	read   uint64 // number of bytes that were read

	lastRead indexEntry          // the file whose content was read last
	version1 *wire.TreeValidator // of a snapshot of version 1; nil with edits
	end      wire.End            // the totals for the frame End
	query    *watch.ChangeQuery  // the watcher's answer; nil if there is none
	plan     walkPlan            // with edits
	lines    []entryHash         // of all entries, in a full walk with edits
	walked   map[string]int      // folders that were walked, with the number of changes in each
}

// walkRoots walks both folders of the snapshot with w, the state folder first.
func (s *runningSnapshot) walkRoots(w *treeWalk) error {
	w.ctx, w.maxFile = s.ctx, s.MaxFile
	if err := w.walkTree(s.roots.state, wire.TreeRecords, 0); err != nil {
		return err
	}
	if s.Shared {
		w.sharing = &sharedFolderFilter{}
	}
	return w.walkTree(s.roots.workspace, wire.TreeWorkspace, 0)
}

// newSkip returns the frame that reports that a file is not in the snapshot.
func newSkip(path string, why wire.SkipReason) wire.SkippedFile {
	return wire.SkippedFile{Path: path, Reason: why}
}

// readKnownBlocks reads the frames Known, with the hashes of the blocks that the host has, until the frame Go or Stop. more is false after Stop:
// the host has the snapshot already.
func (s *runningSnapshot) readKnownBlocks() (more bool, err error) {
	for {
		t, content, err := s.in.Next()
		if err != nil {
			return false, fmt.Errorf("read the hashes of the blocks that the host has: %w", err)
		}
		switch t {
		case wire.FrameStop:
			return false, nil
		case wire.FrameGo:
			return true, nil
		case wire.FrameKnownHashes:
			if len(content)%sha256.Size != 0 {
				return false, wire.UnexpectedFrameError(t)
			}
			for ; len(content) > 0; content = content[sha256.Size:] {
				s.host[wire.Hash(content)] = struct{}{}
			}
		default:
			return false, wire.UnexpectedFrameError(t)
		}
	}
}

// sendTree runs the runner's side of a snapshot without edits, for an older host: it sends every entry, and the content that the host does not
// have.
func (s *runningSnapshot) sendTree() error {
	if err := errors.Join(s.out.WriteJSON(wire.FrameFoundTree, wire.FoundTree{}), s.out.Flush()); err != nil {
		return err
	}
	more, err := s.readKnownBlocks()
	if err != nil || !more {
		return err
	}
	s.version1, s.after, s.walked = wire.NewTreeValidator(), newIndex(), map[string]int{}
	if err := s.walkRoots(s.newRecordingWalk()); err != nil {
		return err
	}
	s.saveIndex()
	s.end.ID, s.end.Read = s.version1.ID(), s.read
	return errors.Join(s.out.WriteJSON(wire.FrameEnd, s.end), s.out.Flush())
}

// saveIndex writes the new index to the state folder and reports whether that succeeded. A failure, for example on a full disk, is only logged: the
// next snapshot reads more files, and is still correct.
func (s *runningSnapshot) saveIndex() bool {
	if err := s.after.save(s.roots.state); err != nil {
		s.Log.Warn("the index of files was not saved", "err", err)
		return false
	}
	return true
}

// readFile sets the size and the blocks of a file's entry, and sends the content that the host does not have. It does not read a file that is
// unchanged since the index was written. A file that changes during every attempt is marked as unsettled.
func (s *runningSnapshot) readFile(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo) error {
	if k, ok := s.trustedEntry(e.Path); ok && k.stat == fileStatOf(info) && s.hostHasBlocks(k.blocks) {
		e.Size, e.Blocks, s.lastRead = info.Size(), k.blocks, k
		return nil
	}
	for try := 1; ; try++ {
		settled, err := s.readContent(dir, name, e, try == maxReadAttempts)
		switch {
		case errors.Is(err, errFileUnreadable) && s.useIndexEntry(e, info):
			return nil
		case err != nil:
			return err
		case settled:
			return nil
		case try == maxReadAttempts:
			e.Unsettled = true
			return nil
		}
	}
}

// trustedEntry returns the entry of a file in the index. The bool is false if the file must be read even if its fileStat has not changed, for
// example because a process has mapped the file.
func (s *runningSnapshot) trustedEntry(path string) (indexEntry, bool) {
	k, ok := s.before.entryAt(path)
	return k, ok && k.kind == wire.KindFile && k.trusted && !s.plan.mapped[path]
}

// useIndexEntry sets the entry of a file that has become unreadable to the entry in the index, if size and modification time are unchanged. It
// reports whether it did.
func (s *runningSnapshot) useIndexEntry(e *wire.Entry, info fs.FileInfo) bool {
	k, ok := s.trustedEntry(e.Path)
	now := fileStatOf(info)
	k.stat.ctime = now.ctime
	if !ok || k.stat != now || !s.hostHasBlocks(k.blocks) {
		return false
	}
	e.Size, e.Blocks, s.lastRead = info.Size(), k.blocks, k
	e.Mode, e.ModTime = uint32(info.Mode().Perm()), info.ModTime()
	return true
}

// hostHasBlocks reports whether the host has the blocks of a file in the index. If there is a base, the host has the blocks of all files in the
// index.
func (s *runningSnapshot) hostHasBlocks(blocks []wire.Hash) bool {
	if s.plan.base != "" {
		return true
	}
	for _, h := range blocks {
		if _, ok := s.host[h]; !ok {
			return false
		}
	}
	return true
}

// readContent reads a file once into its entry, and sends those of its blocks that the host does not have. settled is false if the file changed
// meanwhile; the block of a small file is not sent then, unless last is set, which means the last attempt. The error is errFileGone,
// errFileUnreadable, errFileTooLarge, or a failure of the stream.
func (s *runningSnapshot) readContent(dir *os.Root, name string, e *wire.Entry, last bool) (settled bool, err error) {
	f, err := dir.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, errFileGone
	}
	if err != nil {
		return false, errFileUnreadable
	}
	defer f.Close() //nolint:errcheck // only read
	began := time.Now()
	first, err := f.Stat()
	if err != nil {
		return false, errFileUnreadable
	}
	if !first.Mode().IsRegular() {
		return false, errFileGone
	}
	if first.Size() > s.MaxFile {
		return false, errFileTooLarge
	}
	var own map[wire.Hash]bool // blocks that the file had in the base
	if s.plan.base != "" {
		own = s.indexedBlocks(e.Path)
	}
	e.Mode, e.ModTime, e.Size = uint32(first.Mode().Perm()), first.ModTime(), 0
	e.Blocks = make([]wire.Hash, 0, wire.BlockCount(first.Size()))
	// Read no more than the size at the start: a file that grows as fast as it is read would have no end.
	for from := io.LimitReader(f, first.Size()); e.Size < first.Size(); {
		if err := s.ctx.Err(); err != nil {
			return false, err
		}
		n, err := io.ReadFull(from, s.buf)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return false, errFileUnreadable
		}
		if n == 0 {
			break
		}
		short := n < len(s.buf)
		s.read += uint64(n) //nolint:gosec // a count
		e.Size += int64(n)
		e.Blocks = append(e.Blocks, wire.HashOf(s.buf[:n]))
		if h := e.Blocks[len(e.Blocks)-1]; first.Size() > wire.BlockSize && !own[h] {
			if err := s.sendMissingBlock(h, s.buf[:n]); err != nil {
				return false, err
			}
		}
		if short { // the last block, or the file shrank
			break
		}
	}
	then, err := f.Stat()
	if err != nil {
		return false, errFileUnreadable
	}
	stat := fileStatOf(then)
	settled = stat == fileStatOf(first) && e.Size == first.Size()
	if first.Size() <= wire.BlockSize && e.Size > 0 && (settled || last) && !own[e.Blocks[0]] {
		if err := s.sendMissingBlock(e.Blocks[0], s.buf[:e.Size]); err != nil {
			return false, err
		}
	}
	stat.mtime = first.ModTime().UnixNano()
	s.lastRead = indexEntry{stat: stat, trusted: settled && stat.isSettled(began) && !s.plan.mapped[e.Path]}
	return settled, nil
}

// indexedBlocks returns the hashes of the blocks that a file has in the index.
func (s *runningSnapshot) indexedBlocks(path string) map[wire.Hash]bool {
	k, _ := s.before.entryAt(path)
	own := make(map[wire.Hash]bool, len(k.blocks))
	for _, h := range k.blocks {
		own[h] = true
	}
	return own
}

// sendMissingBlock sends a block unless the host has it.
func (s *runningSnapshot) sendMissingBlock(h wire.Hash, content []byte) error {
	if _, ok := s.host[h]; ok {
		return nil
	}
	s.host[h] = struct{}{}
	return s.out.WriteFrame(wire.FrameBlock, content)
}
