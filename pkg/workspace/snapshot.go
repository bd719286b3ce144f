package workspace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// Snapshot stores the changes of a sandbox's workspace and of the agent's records since the snapshot o.Previous. Last
// it stores the manifest of the new snapshot, whose id it returns. After an error the new snapshot does not exist and
// the previous one is unchanged; the next Snapshot uses the blocks that were stored. The same files have the same id:
// if nothing has changed, nothing is stored. Snapshot also works if the sandbox's disk is full.
func Snapshot(ctx context.Context, box sandbox.Sandbox, store Store, o Options) (Result, error) {
	began := time.Now()
	if err := checkNameParts(o.Tenant, o.Session, idOrEmptyTree(o.Previous)); err != nil {
		return Result{}, err
	}
	switch o.Version {
	case 0:
		o.Version = latestManifestVersion
	case 1, latestManifestVersion:
	default:
		return Result{}, fmt.Errorf("snapshot: version %d is not 1 or %d", o.Version, latestManifestVersion)
	}
	r, err := takeSnapshot(ctx, box, store, o, true)
	if errors.Is(err, errEditsUnusable) {
		if r, err = takeSnapshot(ctx, box, store, o, false); err == nil {
			r.Diverged = true
		}
	}
	if err != nil {
		return Result{}, err
	}
	r.Duration = time.Since(began)
	return r, nil
}

// takeSnapshot runs one snapshot. useBase permits the runner to send only edits to the previous snapshot; otherwise the
// runner sends the whole tree. The error wraps errEditsUnusable if the caller has to try again without useBase.
func takeSnapshot(ctx context.Context, box sandbox.Sandbox, store Store, o Options, useBase bool) (Result, error) {
	c, err := startCommand(ctx, box, "runner", "snapshot")
	if err != nil {
		return Result{}, err
	}
	s := &snapshotRun{store: store, prefix: ManifestName(o.Tenant, o.Session, ""), o: o, useBase: useBase, in: wire.NewWriter(c.p.Stdin()), out: wire.NewReader(c.p.Stdout()), tree: wire.NewTreeValidator()}
	if err := c.finish(s.run(ctx)); err != nil {
		return Result{}, err
	}
	if s.r.ID == "" {
		if err := s.storeVersion1(ctx); err != nil {
			return Result{}, err
		}
	}
	return s.r, nil
}

// idOrEmptyTree returns id, or the id of the empty tree if id is "", so that checkNameParts accepts an absent id.
func idOrEmptyTree(id string) string {
	if id == "" {
		return wire.NewTreeValidator().ID()
	}
	return id
}

// snapshotRun is the state of one call of Snapshot.
type snapshotRun struct {
	store   Store
	prefix  string
	o       Options
	useBase bool
	last    *Manifest // the previous snapshot, without the parts of version 2; nil if there is none or it cannot be used
	in      *wire.Writer
	out     *wire.Reader
	pack    *packWriter
	tree    *wire.TreeValidator
	size    int // size in bytes of the canonical form of the tree so far
	entries []Entry
	r       Result
}

// run communicates with the runner by the snapshot protocol of package wire. Afterwards s.r.ID is set if the snapshot
// is stored; otherwise the caller must store the manifest.
func (s *snapshotRun) run(ctx context.Context) error {
	hello := wire.Hello{Protocol: wire.ProtocolVersion}
	if s.o.Version == latestManifestVersion {
		if err := s.openPrevious(ctx); err != nil {
			return err
		}
		hello.Edits, hello.Full = true, s.o.Full
		if s.last != nil && s.last.parts != nil && s.useBase {
			hello.Base = s.o.Previous
		}
	}
	if err := errors.Join(s.in.WriteJSON(wire.FrameHello, hello), s.in.Flush()); err != nil {
		return err
	}
	theirs, err := s.out.ReadHello()
	if err != nil {
		return err
	}
	if hello.Edits && theirs.Edits {
		return s.runEdits(ctx, hello.Base)
	}
	found, err := s.readFound()
	if err != nil {
		return err
	}
	if found.ID != "" {
		if err := wire.CheckSnapshotID(found.ID); err != nil {
			return err
		}
		kept, err := s.isSafelyStored(ctx, found.ID)
		if err != nil {
			return err
		}
		if kept {
			s.r.ID, s.r.Files, s.r.Bytes = found.ID, found.Files, found.Bytes
			return errors.Join(s.in.WriteFrame(wire.FrameStop, nil), s.in.Flush())
		}
	}
	if err := s.sendKnownHashes(ctx); err != nil {
		return err
	}
	return s.receiveTree(ctx)
}

// isSafelyStored reports whether the snapshot id is stored and the janitor will not remove it. Only the previous
// snapshot is safe: the janitor may at any time remove older ones that exceed the retention. Therefore a snapshot that
// equals an older one is stored again.
func (s *snapshotRun) isSafelyStored(ctx context.Context, id string) (bool, error) {
	if id != s.o.Previous || s.r.Lost != nil {
		return false, nil
	}
	has, err := s.store.Has(ctx, s.prefix+id)
	if err != nil {
		return false, fmt.Errorf("look for %s: %w", s.prefix+id, err)
	}
	return has, nil
}

// readFound returns the frame FoundTree of the runner, and records the skipped files that the runner reports before it.
func (s *snapshotRun) readFound() (found wire.FoundTree, err error) {
	for {
		t, content, err := s.out.Next()
		switch {
		case err != nil:
			return found, err
		case t == wire.FrameSkippedFile:
			err = s.receiveSkip(content)
		case t == wire.FrameFoundTree:
			return found, wire.DecodeFrame(t, content, &found)
		default:
			err = wire.UnexpectedFrameError(t)
		}
		if err != nil {
			return found, err
		}
	}
}

// sendKnownHashes sends the hashes of the previous snapshot's blocks to the runner, which then does not send these
// blocks. If the previous snapshot is missing or corrupt, sendKnownHashes sends no hash, so that the runner sends all
// content.
func (s *snapshotRun) sendKnownHashes(ctx context.Context) error {
	previous, err := s.openUsable(func() (*Manifest, error) {
		return Open(ctx, s.store, s.o.Tenant, s.o.Session, s.o.Previous)
	})
	if err != nil {
		return err
	}
	s.pack = newPackWriter(s.store, s.prefix, previous)
	return s.sendHashes(s.pack.locations)
}

// openUsable opens the previous snapshot with the function open and returns it. It returns nil if there is no previous
// snapshot. If the previous snapshot is missing or corrupt, openUsable sets s.r.Lost and returns nil. Other errors of
// open are returned.
func (s *snapshotRun) openUsable(open func() (*Manifest, error)) (*Manifest, error) {
	if s.o.Previous == "" {
		return nil, nil //nolint:nilnil // documented
	}
	m, err := open()
	var bad *CorruptError
	if errors.As(err, &bad) || errors.Is(err, ErrNotFound) {
		s.r.Lost = err
		return nil, nil //nolint:nilnil // documented
	}
	return m, err
}

// sendHashes sends the hashes of blocks that the host has as Known frames, and then Go.
func (s *snapshotRun) sendHashes(locations map[wire.Hash]blockLocation) error {
	batch := make([]byte, 0, wire.BlockSize)
	for h := range locations {
		if batch = append(batch, h[:]...); len(batch) == cap(batch) {
			if err := s.in.WriteFrame(wire.FrameKnownHashes, batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
	}
	return errors.Join(s.in.WriteFrame(wire.FrameKnownHashes, batch), s.in.WriteFrame(wire.FrameGo, nil), s.in.Flush())
}

// receiveTree receives the blocks and entries of the whole tree until the runner sends End.
func (s *snapshotRun) receiveTree(ctx context.Context) error {
	for {
		t, content, err := s.out.Next()
		if err != nil {
			return err
		}
		switch t {
		case wire.FrameBlock:
			err = s.receiveBlock(ctx, content)
		case wire.FrameEntry:
			err = s.receiveEntry(content)
		case wire.FrameSkippedFile:
			err = s.receiveSkip(content)
		case wire.FrameEnd:
			return s.checkEnd(content)
		default:
			err = wire.UnexpectedFrameError(t)
		}
		if err != nil {
			return err
		}
	}
}

// receiveBlock adds a block that the runner sent to the next pack. The host computes the block's hash, so a runner cannot pass off other
// content under it.
func (s *snapshotRun) receiveBlock(ctx context.Context, content []byte) error {
	if len(content) == 0 || len(content) > wire.BlockSize {
		return fmt.Errorf("a block has %d bytes", len(content))
	}
	h := wire.HashOf(content)
	if _, ok := s.pack.locations[h]; ok {
		return nil
	}
	s.r.NewBytes += uint64(len(content))
	return s.pack.add(ctx, h, content)
}

// receiveEntry adds an entry to the tree. It returns an error if the entry is invalid or has a block that is not known, and one that
// wraps ErrTooLarge if the tree exceeds the limits of a snapshot.
func (s *snapshotRun) receiveEntry(content []byte) error {
	e, err := wire.ParseEntry(content)
	if err != nil {
		return err
	}
	if len(s.entries) >= wire.MaxEntries {
		return fmt.Errorf("%w: over %d files and folders", ErrTooLarge, wire.MaxEntries)
	}
	line, err := s.tree.Add(&e)
	if err != nil {
		return err
	}
	if s.size += len(line); s.size > maxManifestSize {
		return fmt.Errorf("%w: names and hashes of over %d MiB", ErrTooLarge, maxManifestSize>>20)
	}
	for i, h := range e.Blocks {
		if at, ok := s.pack.locations[h]; !ok || int(at.length) != e.BlockLength(i) {
			return fmt.Errorf("entry %q: block %d was not sent", e.Path, i)
		}
	}
	if e.Kind == KindFile {
		s.r.Files++
		s.r.Bytes += uint64(e.Size) //nolint:gosec // checked not to be negative
	}
	if e.Unsettled {
		s.r.Unsettled++
	}
	s.entries = append(s.entries, e)
	return nil
}

// receiveSkip adds a file that the runner skipped to the Result.
func (s *snapshotRun) receiveSkip(content []byte) error {
	var k SkippedFile
	if err := wire.DecodeFrame(wire.FrameSkippedFile, content, &k); err != nil {
		return err
	}
	if s.r.Skipped++; len(s.r.Skips) < MaxListedSkips {
		s.r.Skips = append(s.r.Skips, k)
	}
	return nil
}

// checkEnd returns an error unless the received tree has the id that the runner states in End.
func (s *snapshotRun) checkEnd(content []byte) error {
	var e wire.End
	if err := wire.DecodeFrame(wire.FrameEnd, content, &e); err != nil {
		return err
	}
	if e.ID != s.tree.ID() || e.Files != s.r.Files || e.Bytes != s.r.Bytes {
		return fmt.Errorf("the runner reports %d files of %d bytes as %s, but %d files of %d bytes were received as %s", e.Files, e.Bytes, e.ID, s.r.Files, s.r.Bytes, s.tree.ID())
	}
	s.r.ReadBytes = e.Read
	return nil
}

// storeVersion1 stores the manifest of a snapshot of version 1, unless the previous snapshot is equal; the snapshot exists from then on.
func (s *snapshotRun) storeVersion1(ctx context.Context) error {
	id := s.tree.ID()
	kept, err := s.isSafelyStored(ctx, id)
	if err != nil {
		return err
	}
	if !kept {
		m, repacked, err := s.pack.finishManifest(ctx, id, s.entries)
		if err != nil {
			return err
		}
		object, err := m.encode()
		if err != nil {
			return fmt.Errorf("write the manifest: %w", err)
		}
		if err := putObject(ctx, s.store, s.prefix+id, object); err != nil {
			return err
		}
		s.r.Repacked, s.r.Stored = repacked, s.pack.added+uint64(len(object))
	}
	s.r.ID = id
	return nil
}
