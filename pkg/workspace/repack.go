package workspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// maxSinglePackSize is the size in bytes up to which a snapshot stores file contents and parts of its tree together in a single
// pack. A larger snapshot stores the parts in packs of their own, so that reading a tree does not read its files.
const maxSinglePackSize = 1 << 20

// tinyPackSize is the size in bytes below which a pack counts as tiny. Most tiny packs belong to snapshots with few
// changes.
const tinyPackSize = smallPackSize / 8

// storeParts stores the blocks and the new parts that are not stored yet, and returns the manifest, which the caller
// has to store. It first copies the needed content of some packs to new packs, so that the snapshot refers to fewer
// objects and to fewer bytes that it does not need; see packsToRepack. repacked is the number of copied bytes.
func (e *manifestEditor) storeParts(ctx context.Context) (m *partsManifest, repacked uint64, err error) {
	e.useStoredParts()
	repacked, err = e.repack(ctx)
	if err != nil {
		return nil, 0, err
	}
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		return nil, 0, err
	}
	defer z.Close() //nolint:errcheck // nothing is buffered
	for i := range e.result {
		p := &e.result[i]
		if p.items == nil {
			continue
		}
		p.ref = describePart(p.items)
		stored, err := encodePart(z, p.items)
		if err != nil {
			return nil, 0, err
		}
		if p.repacked {
			repacked += uint64(len(stored))
		}
		if e.needOwnPack(len(stored), i) {
			if err := e.storePack(ctx); err != nil {
				return nil, 0, err
			}
		}
		at, err := e.appendToPack(ctx, stored)
		if err != nil {
			return nil, 0, err
		}
		p.ref.Pack, p.ref.Offset, p.ref.Length = at.pack, at.offset, at.length
	}
	if err := e.storePack(ctx); err != nil {
		return nil, 0, err
	}
	m = &partsManifest{packs: map[int32]pack{}, next: e.next}
	for i := range e.result {
		ref := e.result[i].ref
		m.list = append(m.list, ref)
		m.packs[ref.Pack] = e.packs[ref.Pack]
		for _, u := range ref.Uses {
			m.packs[u.Pack] = e.packs[u.Pack]
		}
	}
	return m, repacked, nil
}

// needOwnPack reports whether the part with index i, whose stored form has size bytes, must begin another pack: it is
// the first new part, and all new parts together with the content of the next pack exceed maxSinglePackSize.
func (e *manifestEditor) needOwnPack(size, i int) bool {
	if slices.ContainsFunc(e.result[:i], func(p editedPart) bool { return p.items != nil }) {
		return false
	}
	for _, p := range e.result[i+1:] {
		if p.items != nil {
			size += int(p.ref.Lines) / 2 // about what compression leaves of hashes
		}
	}
	return len(e.buf)+size > maxSinglePackSize
}

// useStoredParts replaces each new part that is equal to a part of the base by that stored part.
func (e *manifestEditor) useStoredParts() {
	stored := make(map[wire.Hash]*partRef, len(e.base.list))
	for i := range e.base.list {
		stored[e.base.list[i].Digest] = &e.base.list[i]
	}
	for i := range e.result {
		p := &e.result[i]
		if ref, ok := stored[p.ref.Digest]; ok && p.items != nil {
			p.ref, p.items = *ref, nil
		}
	}
}

// repack copies the needed content of the packs of packsToRepack to new packs, and updates the references of the result
// to them. It returns the number of copied bytes. A pack that is missing or corrupt stays in use.
func (e *manifestEditor) repack(ctx context.Context) (repacked uint64, err error) {
	var bad *CorruptError
	for _, n := range e.packsToRepack() {
		content, err := e.loader.loadPack(ctx, e.packs[n])
		if errors.As(err, &bad) || errors.Is(err, ErrNotFound) {
			continue // the snapshot is no worse than the previous one
		}
		if err != nil {
			return 0, fmt.Errorf("repack: %w", err)
		}
		moved := map[blockLocation]blockLocation{}
		for i := range e.result {
			p := &e.result[i]
			inPack := p.items == nil && p.ref.Pack == n
			used := slices.ContainsFunc(p.ref.Uses, func(u packUse) bool { return u.Pack == n })
			if !inPack && !used {
				continue
			}
			if p.items == nil {
				if p.items, err = e.loader.loadPart(ctx, e.base, &p.ref); err != nil {
					return 0, fmt.Errorf("repack: %w", err)
				}
				p.repacked = true
			}
			for t := range p.items {
				p.items[t].locations = slices.Clone(p.items[t].locations)
				for b, at := range p.items[t].locations {
					if at.pack != n {
						continue
					}
					to, ok := moved[at]
					if !ok {
						if to, err = e.appendToPack(ctx, content[at.offset:at.offset+at.length]); err != nil {
							return 0, err
						}
						moved[at] = to
						repacked += uint64(at.length) //nolint:gosec // not negative
					}
					p.items[t].locations[b] = to
				}
			}
			p.ref.Uses = describePart(p.items).Uses
		}
	}
	return repacked, nil
}

// packsToRepack returns the numbers of the packs to repack: packs of which less than half is needed, all tiny packs if there are more than
// maxSmallPacks of them, and all small packs if there are more than maxSmallPacks of those. In total they have at most maxRepackBytes needed bytes. Tiny
// packs are merged without the small ones, because repacking a pack stores all parts again that use it.
func (e *manifestEditor) packsToRepack() []int32 {
	live := map[int32]int64{}
	for i := range e.result {
		p := &e.result[i]
		if p.items == nil {
			live[p.ref.Pack] += int64(p.ref.Length)
		}
		for _, u := range p.ref.Uses {
			live[u.Pack] += u.Bytes
		}
	}
	var tiny, small int
	for n, l := range live {
		switch p, ok := e.packs[n]; {
		case !ok || l == 0:
		case p.size < tinyPackSize:
			tiny++
		case p.size < smallPackSize:
			small++
		}
	}
	var out []int32
	for n, l := range live {
		p, ok := e.packs[n]
		if ok && l > 0 && (l*2 < p.size || tiny > maxSmallPacks && p.size < tinyPackSize || small > maxSmallPacks && p.size < smallPackSize) {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b int32) int { return cmp.Compare(a, b) })
	var total int64
	return slices.DeleteFunc(out, func(n int32) bool {
		l := min(live[n], e.packs[n].size)
		if total+l > maxRepackBytes {
			return true
		}
		total += l
		return false
	})
}
