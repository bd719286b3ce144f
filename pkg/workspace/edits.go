package workspace

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// errEditsUnusable is returned if the runner's edits cannot be used: applied to the previous snapshot, they do not
// result in the tree that the runner found in a full walk, or the previous snapshot cannot be read. Snapshot then lets
// the runner send the whole tree.
var errEditsUnusable = errors.New("the previous snapshot and the runner's edits do not make the tree that the runner found")

// openPrevious opens the previous snapshot as s.last, without the parts of version 2. s.last is nil if no previous
// snapshot can be used.
func (s *snapshotRun) openPrevious(ctx context.Context) (err error) {
	s.last, err = s.openUsable(func() (*Manifest, error) {
		return openManifest(ctx, s.store, s.o.Tenant, s.o.Session, s.o.Previous)
	})
	return err
}

// runEdits receives a snapshot with edits from the runner, and stores the snapshot. base is the id of the snapshot to
// which the runner may send edits, "" for none. The error wraps errEditsUnusable if the whole tree must be sent
// instead.
func (s *snapshotRun) runEdits(ctx context.Context, base string) error {
	found, err := s.readFound()
	if err != nil {
		return err
	}
	if found.Base != "" && found.Base != base {
		return fmt.Errorf("the runner sends edits of %.80q, the base is %q", found.Base, base)
	}
	var of *partsManifest
	if s.last != nil {
		of = s.last.parts
	}
	e, err := newManifestEditor(s.store, s.prefix, of, found.Base == "")
	if err != nil {
		return err
	}
	defer e.close()
	if found.Known {
		usable, err := s.addKnownBlocks(ctx, e)
		if err != nil {
			return err
		}
		if !usable && found.Base != "" {
			return errEditsUnusable // its parts cannot be read: the whole tree must be stored again
		}
	}
	if err := s.sendHashes(e.locations); err != nil {
		return err
	}
	end, err := s.receiveEdits(ctx, e)
	if err != nil {
		return err
	}
	if err := e.applyEdits(ctx); err != nil {
		var bad *CorruptError
		if errors.As(err, &bad) || errors.Is(err, ErrNotFound) {
			return fmt.Errorf("%w: %w", errEditsUnusable, err)
		}
		return err
	}
	id, sum := e.sumParts()
	if sum.Entries > wire.MaxEntries || sum.Lines > maxManifestSize {
		return fmt.Errorf("%w: over %d files and folders, or names and hashes of over %d MiB", ErrTooLarge, wire.MaxEntries, maxManifestSize>>20)
	}
	s.r.Files, s.r.Bytes, s.r.Unsettled, s.r.ReadBytes, s.r.Full, s.r.Missed = sum.Files, sum.Bytes, sum.Unsettled, end.Read, end.Full, end.Missed
	if end.Full && (end.ID != id || end.Files != sum.Files || end.Bytes != sum.Bytes) {
		if found.Base != "" {
			return errEditsUnusable
		}
		return fmt.Errorf("the runner reports %d files of %d bytes as %s, but %d files of %d bytes were received as %s", end.Files, end.Bytes, end.ID, sum.Files, sum.Bytes, id)
	}
	if err := s.storeEdits(ctx, e, id, found.Base); err != nil {
		return err
	}
	return errors.Join(s.in.WriteJSON(wire.FrameStoredSnapshot, wire.StoredSnapshot{ID: s.r.ID}), s.in.Flush())
}

// addKnownBlocks adds the blocks of the previous snapshot to e. usable is false if the previous snapshot exists and cannot be read; e then
// uses nothing of it.
func (s *snapshotRun) addKnownBlocks(ctx context.Context, e *manifestEditor) (usable bool, err error) {
	if s.last == nil {
		return true, nil
	}
	if s.last.parts != nil {
		m, err := s.openUsable(func() (*Manifest, error) { return s.last, s.last.loadParts(ctx, s.store) })
		if err != nil {
			return false, err
		}
		if m == nil {
			e.dropBase()
			return false, nil
		}
	}
	e.addKnownBlocks(s.last)
	return true, nil
}

// receiveEdits passes the runner's blocks, edits and removals to e until the runner sends End, which it returns.
func (s *snapshotRun) receiveEdits(ctx context.Context, e *manifestEditor) (end wire.End, err error) {
	for {
		t, content, err := s.out.Next()
		if err != nil {
			return end, err
		}
		switch t {
		case wire.FrameBlock:
			err = s.receiveEditBlock(ctx, e, content)
		case wire.FrameEntry:
			var n Entry
			if n, err = wire.ParseEntry(content); err == nil {
				err = e.addEdit(n)
			}
		case wire.FrameRemoved:
			err = e.addRemoval(string(content))
		case wire.FrameSkippedFile:
			err = s.receiveSkip(content)
		case wire.FrameEnd:
			return end, wire.DecodeFrame(t, content, &end)
		default:
			err = wire.UnexpectedFrameError(t)
		}
		if err != nil {
			return end, err
		}
	}
}

// receiveEditBlock adds a block that the runner sent to e. The host computes the block's hash, so a runner cannot pass off other content
// under it.
func (s *snapshotRun) receiveEditBlock(ctx context.Context, e *manifestEditor, content []byte) error {
	if len(content) == 0 || len(content) > wire.BlockSize {
		return fmt.Errorf("a block has %d bytes", len(content))
	}
	added, err := e.addBlock(ctx, wire.HashOf(content), content)
	if added {
		s.r.NewBytes += uint64(len(content))
	}
	return err
}

// storeEdits stores the parts and then the manifest of the snapshot id; the snapshot exists from then on. It stores nothing if id is
// that of base or of the previous snapshot, because nothing has changed then.
func (s *snapshotRun) storeEdits(ctx context.Context, e *manifestEditor, id, base string) error {
	if kept, err := s.isSafelyStored(ctx, id); err != nil || kept || id == base {
		s.r.ID = id
		return err
	}
	m, repacked, err := e.storeParts(ctx)
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
	s.r.ID, s.r.Repacked, s.r.Stored = id, repacked, e.added+uint64(len(object))
	return nil
}
