package workspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

const (
	// smallPackSize is the size in bytes below which a pack counts as small.
	smallPackSize = packSize / 4
	// maxSmallPacks is the number of small packs of a snapshot above which their content is copied to larger packs.
	maxSmallPacks = 16
	// maxRepackBytes is the maximum number of bytes of packs that one snapshot copies to new packs. Further packs are copied by the next
	// snapshot.
	maxRepackBytes = 4 * packSize
)

// packWriter stores the blocks of a snapshot of version 1 in packs. One pack at a time is in memory.
type packWriter struct {
	store     Store
	prefix    string
	packs     []pack // the packs of the previous snapshot, then new ones
	locations map[wire.Hash]blockLocation
	buf       []byte // the content of the next pack, which is not stored yet
	stored    uint64 // size of new packs
	added     uint64 // size of new packs that the store did not have
}

func newPackWriter(store Store, prefix string, previous *Manifest) *packWriter {
	p := &packWriter{store: store, prefix: prefix, locations: map[wire.Hash]blockLocation{}}
	if previous != nil {
		p.packs, p.locations = previous.packs, previous.locations
	}
	return p
}

// add appends a block to the next pack, even if another pack contains the block. If the block does not fit, add stores
// the pack and begins another.
func (p *packWriter) add(ctx context.Context, h wire.Hash, block []byte) error {
	if len(p.buf)+len(block) > packSize {
		if err := p.storePack(ctx); err != nil {
			return err
		}
	}
	p.locations[h] = blockLocation{int32(len(p.packs)), int32(len(p.buf)), int32(len(block))} //nolint:gosec // bounded by packSize and by the bytes of a session
	p.buf = append(p.buf, block...)
	return nil
}

// storePack stores the next pack, unless it is empty, and begins another.
func (p *packWriter) storePack(ctx context.Context) error {
	if len(p.buf) == 0 {
		return nil
	}
	next := pack{wire.HashOf(p.buf), int64(len(p.buf))}
	has, err := p.store.Has(ctx, next.name(p.prefix))
	if err != nil {
		return fmt.Errorf("look for %s: %w", next.name(p.prefix), err)
	}
	if err := putObject(ctx, p.store, next.name(p.prefix), p.buf); err != nil {
		return err
	}
	if !has {
		p.added += uint64(len(p.buf))
	}
	p.packs = append(p.packs, next)
	p.stored += uint64(len(p.buf))
	p.buf = p.buf[:0]
	return nil
}

// putObject stores an object even if one of that name exists: the janitor may remove an existing one at any time, see
// snapshotRun.isSafelyStored, unless it is a pack of the previous snapshot.
func putObject(ctx context.Context, store Store, name string, content []byte) error {
	if err := store.Put(ctx, name, bytes.NewReader(content)); err != nil {
		return fmt.Errorf("store %s: %w", name, err)
	}
	return nil
}

// finishManifest stores the last pack and returns the manifest of the snapshot id with the given entries, whose blocks
// must have been added. The manifest refers only to packs that the entries need. Before, finishManifest copies the
// needed blocks of packsToRepack to new packs; repacked is the number of these bytes. The old packs remain in the store
// for older snapshots. A pack that is missing or corrupt stays in use.
func (p *packWriter) finishManifest(ctx context.Context, id string, entries []Entry) (m *Manifest, repacked uint64, err error) {
	m = &Manifest{ID: id, prefix: p.prefix, entries: entries}
	before := p.stored
	for _, n := range p.packsToRepack(m) {
		if err := p.repack(ctx, m, n); err != nil {
			var bad *CorruptError
			if errors.As(err, &bad) || errors.Is(err, ErrNotFound) {
				continue // the snapshot is no worse than the previous one
			}
			return nil, 0, fmt.Errorf("repack: %w", err)
		}
	}
	if err := p.storePack(ctx); err != nil {
		return nil, 0, err
	}
	repacked = p.stored - before
	m.locations = map[wire.Hash]blockLocation{}
	numbers := map[int32]int32{}
	m.forEachBlock(func(h wire.Hash, _ int) {
		at := p.locations[h]
		n, ok := numbers[at.pack]
		if !ok {
			n = int32(len(m.packs)) //nolint:gosec // no more than in p
			numbers[at.pack] = n
			m.packs = append(m.packs, p.packs[at.pack])
		}
		at.pack = n
		m.locations[h] = at
	})
	return m, repacked, nil
}

// packsToRepack returns the indexes of the packs to repack: packs of which m needs less than half, and all small packs if m needs more than
// maxSmallPacks of them. In total they have at most maxRepackBytes needed bytes.
func (p *packWriter) packsToRepack(m *Manifest) []int32 {
	live := make([]int64, len(p.packs)+1) // including the next pack
	m.forEachBlock(func(h wire.Hash, length int) { live[p.locations[h].pack] += int64(length) })
	small := 0
	for n, l := range live[:len(p.packs)] {
		if l > 0 && p.packs[n].size < smallPackSize {
			small++
		}
	}
	var out []int32
	var total int64
	for n, l := range live[:len(p.packs)] {
		waste := l*2 < p.packs[n].size || small > maxSmallPacks && p.packs[n].size < smallPackSize
		if l > 0 && waste && total+l <= maxRepackBytes {
			total += l
			out = append(out, int32(n)) //nolint:gosec // an index
		}
	}
	return out
}

// repack adds those blocks of the pack with index n that m needs to the next pack.
func (p *packWriter) repack(ctx context.Context, m *Manifest, n int32) error {
	content, err := p.packs[n].readFrom(ctx, p.store, p.prefix, nil)
	if err != nil {
		return err
	}
	m.forEachBlock(func(h wire.Hash, _ int) {
		if at := p.locations[h]; at.pack == n && err == nil {
			err = p.add(ctx, h, content[at.offset:at.offset+at.length])
		}
	})
	return err
}
