package workspace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// Snapshot stores the changes of a sandbox's workspace and agent records, and the name of the complete snapshot.
// The name exists only after Snapshot returns without an error: an interrupted Snapshot leaves objects that the
// next one reuses, and the previous snapshot. The same files give the same id, and then nothing is stored. Snapshot
// also works if the sandbox's disk is full.
func Snapshot(ctx context.Context, box sandbox.Sandbox, store Store, o Options) (Result, error) {
	began := time.Now()
	prefix := Name(o.Tenant, o.Session, "")
	if err := check(o.Tenant, o.Session, cmpID(o.Previous)); err != nil {
		return Result{}, err
	}
	c, err := start(ctx, box, "runner", "snapshot")
	if err != nil {
		return Result{}, err
	}
	s := &snapshot{store: store, prefix: prefix, o: o, in: wire.NewWriter(c.p.Stdin()), out: wire.NewReader(c.p.Stdout()), tree: wire.NewTree()}
	if err := c.finish(s.exchange(ctx)); err != nil {
		return Result{}, err
	}
	if s.r.ID == "" {
		if err := s.name(ctx); err != nil {
			return Result{}, err
		}
	}
	s.r.Duration = time.Since(began)
	return s.r, nil
}

// cmpID returns a valid id for an absent one, so that it passes validation.
func cmpID(id string) string {
	if id == "" {
		return wire.NewTree().ID()
	}
	return id
}

// snapshot is the state of one Snapshot.
type snapshot struct {
	store   Store
	prefix  string
	o       Options
	in      *wire.Writer
	out     *wire.Reader
	pack    *packer
	tree    *wire.Tree
	size    int // size in bytes of the canonical form of the tree
	entries []Entry
	r       Result
}

// exchange is the host's side of the snapshot protocol of package wire.
func (s *snapshot) exchange(ctx context.Context) error {
	if err := errors.Join(s.in.JSON(wire.FrameHello, wire.Hello{Protocol: wire.Protocol}), s.in.Flush()); err != nil {
		return err
	}
	if err := s.out.Greet(); err != nil {
		return err
	}
	found, err := s.found()
	if err != nil {
		return err
	}
	if found.ID != "" {
		if err := wire.CheckID(found.ID); err != nil {
			return err
		}
		kept, err := s.kept(ctx, found.ID)
		if err != nil {
			return err
		}
		if kept {
			s.r.ID, s.r.Files, s.r.Bytes = found.ID, found.Files, found.Bytes
			return errors.Join(s.in.Frame(wire.FrameStop, nil), s.in.Flush())
		}
	}
	if err := s.known(ctx); err != nil {
		return err
	}
	return s.receive(ctx)
}

// kept reports whether a snapshot is stored and will stay. Only the previous one will: the janitor may at any time
// remove others beyond the retention. A snapshot that equals an older one is therefore stored again.
func (s *snapshot) kept(ctx context.Context, id string) (bool, error) {
	if id != s.o.Previous || s.r.Lost != nil {
		return false, nil
	}
	has, err := s.store.Has(ctx, s.prefix+id)
	if err != nil {
		return false, fmt.Errorf("look for %s: %w", s.prefix+id, err)
	}
	return has, nil
}

// found reads what the runner reports without reading content.
func (s *snapshot) found() (found wire.Found, err error) {
	for {
		t, content, err := s.out.Next()
		switch {
		case err != nil:
			return found, err
		case t == wire.FrameSkip:
			err = s.skip(content)
		case t == wire.FrameFound:
			return found, wire.Decode(t, content, &found)
		default:
			err = wire.Unexpected(t)
		}
		if err != nil {
			return found, err
		}
	}
}

// known sends the hashes of stored blocks to the runner. If the previous snapshot is missing or corrupt, no block
// counts as stored, so that the workspace can still be stored.
func (s *snapshot) known(ctx context.Context) error {
	var previous *Manifest
	if s.o.Previous != "" {
		var err error
		previous, err = Open(ctx, s.store, s.o.Tenant, s.o.Session, s.o.Previous)
		var bad *CorruptError
		if errors.As(err, &bad) || errors.Is(err, ErrNotFound) {
			s.r.Lost, previous = err, nil
		} else if err != nil {
			return err
		}
	}
	s.pack = newPacker(s.store, s.prefix, previous)
	batch := make([]byte, 0, wire.BlockSize)
	for h := range s.pack.places {
		if batch = append(batch, h[:]...); len(batch) == cap(batch) {
			if err := s.in.Frame(wire.FrameKnown, batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
	}
	return errors.Join(s.in.Frame(wire.FrameKnown, batch), s.in.Frame(wire.FrameGo, nil), s.in.Flush())
}

// receive receives blocks and entries until the runner has sent all.
func (s *snapshot) receive(ctx context.Context) error {
	for {
		t, content, err := s.out.Next()
		if err != nil {
			return err
		}
		switch t {
		case wire.FrameBlock:
			err = s.block(ctx, content)
		case wire.FrameEntry:
			err = s.entry(content)
		case wire.FrameSkip:
			err = s.skip(content)
		case wire.FrameEnd:
			return s.end(content)
		default:
			err = wire.Unexpected(t)
		}
		if err != nil {
			return err
		}
	}
}

// block stores a block that the runner sent as new, under the hash of its actual content.
func (s *snapshot) block(ctx context.Context, content []byte) error {
	if len(content) == 0 || len(content) > wire.BlockSize {
		return fmt.Errorf("a block has %d bytes", len(content))
	}
	h := wire.Sum(content)
	if _, ok := s.pack.places[h]; ok {
		return nil
	}
	s.r.NewBytes += uint64(len(content))
	return s.pack.add(ctx, h, content)
}

func (s *snapshot) entry(content []byte) error {
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
	if s.size += len(line); s.size > maxManifest {
		return fmt.Errorf("%w: names and hashes of over %d MiB", ErrTooLarge, maxManifest>>20)
	}
	for i, h := range e.Blocks {
		if at, ok := s.pack.places[h]; !ok || int(at.length) != e.BlockLen(i) {
			return fmt.Errorf("entry %q: block %d was not sent", e.Path, i)
		}
	}
	if e.Kind == File {
		s.r.Files++
		s.r.Bytes += uint64(e.Size) //nolint:gosec // checked not to be negative
	}
	if e.Unsettled {
		s.r.Unsettled++
	}
	s.entries = append(s.entries, e)
	return nil
}

func (s *snapshot) skip(content []byte) error {
	var k Skip
	if err := wire.Decode(wire.FrameSkip, content, &k); err != nil {
		return err
	}
	if s.r.Skipped++; len(s.r.Skips) < MaxSkips {
		s.r.Skips = append(s.r.Skips, k)
	}
	return nil
}

func (s *snapshot) end(content []byte) error {
	var e wire.End
	if err := wire.Decode(wire.FrameEnd, content, &e); err != nil {
		return err
	}
	if e.ID != s.tree.ID() || e.Files != s.r.Files || e.Bytes != s.r.Bytes {
		return fmt.Errorf("the runner reports %d files of %d bytes as %s, but %d files of %d bytes were received as %s", e.Files, e.Bytes, e.ID, s.r.Files, s.r.Bytes, s.tree.ID())
	}
	s.r.ReadBytes = e.Read
	return nil
}

// name stores the manifest, which makes the snapshot exist.
func (s *snapshot) name(ctx context.Context) error {
	id := s.tree.ID()
	kept, err := s.kept(ctx, id)
	if err != nil {
		return err
	}
	if !kept {
		m, repacked, err := s.pack.manifest(ctx, id, s.entries)
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
		s.r.Repacked, s.r.Stored = repacked, s.pack.added+uint64(len(object))
	}
	s.r.ID = id
	return nil
}
