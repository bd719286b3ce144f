package workspace

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// errDiverged is returned if the edits of a runner make another tree than it found in a full walk: the previous
// snapshot is not what the runner's index says.
var errDiverged = errors.New("the previous snapshot and the runner's edits do not make the tree that the runner found")

// openPrevious opens the previous snapshot without its parts.
func (s *snapshot) openPrevious(ctx context.Context) (err error) {
	s.last, err = s.usable(func() (*Manifest, error) {
		return openManifest(ctx, s.store, s.o.Tenant, s.o.Session, s.o.Previous)
	})
	return err
}

// runEdits runs the host's side of a snapshot with edits, and stores the snapshot.
func (s *snapshot) runEdits(ctx context.Context, base string) error {
	found, err := s.readFound()
	if err != nil {
		return err
	}
	if found.Base != "" && found.Base != base {
		return fmt.Errorf("the runner sends edits of %.80q, the base is %q", found.Base, base)
	}
	var of *parts
	if s.last != nil {
		of = s.last.parts
	}
	e, err := newEditor(s.store, s.prefix, of, found.Base == "")
	if err != nil {
		return err
	}
	defer e.close()
	if found.Known {
		usable, err := s.know(ctx, e)
		if err != nil {
			return err
		}
		if !usable && found.Base != "" {
			return errDiverged // its parts cannot be read: the whole tree must be stored again
		}
	}
	if err := s.sendHashes(e.places); err != nil {
		return err
	}
	end, err := s.receiveEdits(ctx, e)
	if err != nil {
		return err
	}
	if err := e.merge(ctx); err != nil {
		var bad *CorruptError
		if errors.As(err, &bad) || errors.Is(err, ErrNotFound) {
			return fmt.Errorf("%w: %w", errDiverged, err)
		}
		return err
	}
	id, sum := e.totals()
	if sum.Entries > wire.MaxEntries || sum.Lines > maxManifest {
		return fmt.Errorf("%w: over %d files and folders, or names and hashes of over %d MiB", ErrTooLarge, wire.MaxEntries, maxManifest>>20)
	}
	s.r.Files, s.r.Bytes, s.r.Unsettled, s.r.ReadBytes, s.r.Full, s.r.Missed = sum.Files, sum.Bytes, sum.Unsettled, end.Read, end.Full, end.Missed
	if end.Full && (end.ID != id || end.Files != sum.Files || end.Bytes != sum.Bytes) {
		if found.Base != "" {
			return errDiverged
		}
		return fmt.Errorf("the runner reports %d files of %d bytes as %s, but %d files of %d bytes were received as %s", end.Files, end.Bytes, end.ID, sum.Files, sum.Bytes, id)
	}
	if err := s.nameEdits(ctx, e, id, found.Base); err != nil {
		return err
	}
	return errors.Join(s.in.JSON(wire.FrameNamed, wire.Named{ID: s.r.ID}), s.in.Flush())
}

// know makes the blocks of the previous snapshot known. usable is false if it exists and cannot be read: then nothing
// of it is used.
func (s *snapshot) know(ctx context.Context, e *editor) (usable bool, err error) {
	if s.last == nil {
		return true, nil
	}
	if s.last.parts != nil {
		m, err := s.usable(func() (*Manifest, error) { return s.last, s.last.load(ctx, s.store) })
		if err != nil {
			return false, err
		}
		if m == nil {
			e.forget()
			return false, nil
		}
	}
	e.know(s.last)
	return true, nil
}

// receiveEdits receives blocks and edits until the runner has sent all.
func (s *snapshot) receiveEdits(ctx context.Context, e *editor) (end wire.End, err error) {
	for {
		t, content, err := s.out.Next()
		if err != nil {
			return end, err
		}
		switch t {
		case wire.FrameBlock:
			err = s.editBlock(ctx, e, content)
		case wire.FrameEntry:
			var n Entry
			if n, err = wire.ParseEntry(content); err == nil {
				err = e.entry(n)
			}
		case wire.FrameGone:
			err = e.remove(string(content))
		case wire.FrameSkip:
			err = s.skip(content)
		case wire.FrameEnd:
			return end, wire.Decode(t, content, &end)
		default:
			err = wire.Unexpected(t)
		}
		if err != nil {
			return end, err
		}
	}
}

// editBlock stores a block that the runner sent as new, under the hash of its actual content.
func (s *snapshot) editBlock(ctx context.Context, e *editor, content []byte) error {
	if len(content) == 0 || len(content) > wire.BlockSize {
		return fmt.Errorf("a block has %d bytes", len(content))
	}
	added, err := e.block(ctx, wire.Sum(content), content)
	if added {
		s.r.NewBytes += uint64(len(content))
	}
	return err
}

// nameEdits stores the manifest, which makes the snapshot exist. If nothing has changed, nothing is stored.
func (s *snapshot) nameEdits(ctx context.Context, e *editor, id, base string) error {
	if kept, err := s.kept(ctx, id); err != nil || kept || id == base {
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
	if err := put(ctx, s.store, s.prefix+id, object); err != nil {
		return err
	}
	s.r.ID, s.r.Repacked, s.r.Stored = id, repacked, e.added+uint64(len(object))
	return nil
}
