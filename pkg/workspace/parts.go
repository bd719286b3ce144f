package workspace

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// maxPartSize is the maximum size in bytes of a part before compression.
const maxPartSize = 16 << 20

// partsManifest is a manifest of version 2: the list of the parts of a tree, and the packs in which the parts and the
// blocks of their files are stored.
type partsManifest struct {
	packs map[int32]pack // by number, which a pack keeps in later snapshots
	next  int32          // number of the next pack
	list  []partRef      // in the order of wire.ComparePartOrder
}

// partRef describes where a part of a snapshot's tree is stored.
type partRef struct {
	Digest    wire.Hash `json:"digest"`
	Pack      int32     `json:"pack"`
	Offset    int32     `json:"offset"`
	Length    int32     `json:"length"`
	First     []byte    `json:"first"` // path of the first entry
	Last      []byte    `json:"last"`  // path of the last entry
	Entries   uint32    `json:"entries"`
	Lines     uint32    `json:"lines"` // length of the canonical form in bytes
	Files     uint32    `json:"files,omitempty"`
	Bytes     uint64    `json:"bytes,omitempty"`
	Unsettled uint32    `json:"unsettled,omitempty"`
	Uses      []packUse `json:"uses,omitempty"`
}

// packUse is the number of bytes of a pack to which the files of a part refer. A block counts once for each reference.
type packUse struct {
	Pack  int32 `json:"pack"`
	Bytes int64 `json:"bytes"`
}

// partsJSON is the JSON form of a partsManifest, which follows the line wire.HeaderV2.
type partsJSON struct {
	Next  int32      `json:"next"`
	Packs []packJSON `json:"packs"`
	Parts []partRef  `json:"parts"`
}

// packJSON is the JSON form of a pack in a partsManifest.
type packJSON struct {
	N    int32     `json:"n"`
	Hash wire.Hash `json:"sha256"`
	Size int64     `json:"size"`
}

// partEntry is an entry of a part with the locations of its blocks. The pack of a location is a number in
// partsManifest.packs.
type partEntry struct {
	Entry
	locations []blockLocation
	hash      wire.Hash // of the entry's canonical line
	line      int       // length of that line in bytes
}

// id returns the id of the snapshot with these parts.
func (p *partsManifest) id() string {
	id := wire.NewTreeIDHash()
	for i := range p.list {
		id.Add(p.list[i].Digest)
	}
	return id.ID()
}

// packNumbers returns the numbers of all packs in ascending order.
func (p *partsManifest) packNumbers() []int32 {
	out := make([]int32, 0, len(p.packs))
	for n := range p.packs {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

// encode returns the compressed content of the manifest's object.
func (p *partsManifest) encode() ([]byte, error) {
	doc := partsJSON{Next: p.next, Parts: p.list}
	for _, n := range p.packNumbers() {
		doc.Packs = append(doc.Packs, packJSON{n, p.packs[n].hash, p.packs[n].size})
	}
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		return nil, err
	}
	_, err = io.WriteString(z, wire.HeaderV2+"\n")
	if err == nil {
		err = json.NewEncoder(z).Encode(doc)
	}
	if err = errors.Join(err, z.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// decodeParts reads the rest of a manifest of version 2 from r, which is after the first line. It returns an error if the parts are not
// those of the snapshot id, are out of order, or are in no pack of the manifest.
func decodeParts(r io.Reader, id string) (*partsManifest, error) {
	var doc partsJSON
	if err := json.NewDecoder(r).Decode(&doc); err != nil {
		return nil, err
	}
	p := &partsManifest{packs: make(map[int32]pack, len(doc.Packs)), next: doc.Next, list: doc.Parts}
	if got := p.id(); got != id {
		return nil, fmt.Errorf("the parts have the hash %s", got)
	}
	for _, k := range doc.Packs {
		if k.Size < 0 || k.Size > packSize || k.N < 0 || k.N >= p.next {
			return nil, fmt.Errorf("pack %s: invalid number or size", k.Hash)
		}
		p.packs[k.N] = pack{k.Hash, k.Size}
	}
	var entries, lines uint64
	for i := range p.list {
		ref := &p.list[i]
		in, ok := p.packs[ref.Pack]
		switch {
		case !ok || ref.Offset < 0 || ref.Length < 0 || int64(ref.Offset)+int64(ref.Length) > in.size:
			return nil, fmt.Errorf("part %s: is in no pack", ref.Digest)
		case i > 0 && wire.ComparePartOrder(string(p.list[i-1].Last), string(ref.First)) >= 0, wire.ComparePartOrder(string(ref.First), string(ref.Last)) > 0:
			return nil, fmt.Errorf("part %s: out of order", ref.Digest)
		}
		for _, u := range ref.Uses {
			if _, ok := p.packs[u.Pack]; !ok {
				return nil, fmt.Errorf("part %s: pack %d does not exist", ref.Digest, u.Pack)
			}
		}
		entries, lines = entries+uint64(ref.Entries), lines+uint64(ref.Lines)
	}
	if entries > wire.MaxEntries || lines > maxManifestSize {
		return nil, fmt.Errorf("%d entries of %d bytes exceed the limits of a snapshot", entries, lines)
	}
	return p, nil
}

// describePart returns the partRef of a part with these items, without the part's location: Pack, Offset and Length are
// 0.
func describePart(items []partEntry) partRef {
	ref := partRef{First: []byte(items[0].Path), Last: []byte(items[len(items)-1].Path), Entries: uint32(len(items))} //nolint:gosec // bounded by wire.MaxEntries
	digest := wire.NewPartHash()
	for i := range items {
		t := &items[i]
		digest.Add(t.hash)
		ref.Lines += uint32(t.line) //nolint:gosec // bounded by wire.MaxFrameSize and the entries of a part
		if t.Kind == KindFile {
			ref.Files++
			ref.Bytes += uint64(t.Size) //nolint:gosec // checked not to be negative
		}
		if t.Unsettled {
			ref.Unsettled++
		}
		for _, at := range t.locations {
			n, found := slices.BinarySearchFunc(ref.Uses, at.pack, func(u packUse, pack int32) int { return cmp.Compare(u.Pack, pack) })
			if !found {
				ref.Uses = slices.Insert(ref.Uses, n, packUse{Pack: at.pack})
			}
			ref.Uses[n].Bytes += int64(at.length)
		}
	}
	ref.Digest = digest.Sum()
	return ref
}

// encodePart returns the stored form of a part: the lines of its entries, then the locations of their blocks as pairs
// of pack and offset; compressed.
func encodePart(z *zstd.Encoder, items []partEntry) ([]byte, error) {
	var out bytes.Buffer
	var locations []int32
	for i := range items {
		line, err := items[i].CanonicalLine()
		if err != nil {
			return nil, err
		}
		out.Write(line)
		out.WriteByte('\n')
		for _, at := range items[i].locations {
			locations = append(locations, at.pack, at.offset)
		}
	}
	raw, err := json.Marshal(locations)
	if err != nil {
		return nil, err
	}
	out.Write(raw)
	return z.EncodeAll(out.Bytes(), nil), nil
}

// decodePart returns the items of a part from its stored form. It returns an error if they do not match ref, or if one
// of their blocks is in no pack of the manifest.
func (p *partsManifest) decodePart(z *zstd.Decoder, ref *partRef, stored []byte) ([]partEntry, error) {
	raw, err := z.DecodeAll(stored, nil)
	if err != nil {
		return nil, err
	}
	items := make([]partEntry, 0, min(ref.Entries, maxPartSize/32))
	for {
		line, rest, more := bytes.Cut(raw, []byte{'\n'})
		if !more {
			break
		}
		e, err := wire.ParseEntry(line)
		if err == nil {
			err = e.Check()
		}
		if err != nil {
			return nil, err
		}
		items = append(items, partEntry{Entry: e, hash: wire.HashOf(line), line: len(line)})
		raw = rest
	}
	var locations []int32
	if err := json.Unmarshal(raw, &locations); err != nil {
		return nil, err
	}
	for i := range items {
		t := &items[i]
		for b := range t.Blocks {
			if len(locations) < 2 {
				return nil, fmt.Errorf("entry %q: block %d has no location", t.Path, b)
			}
			at := blockLocation{locations[0], locations[1], int32(t.BlockLength(b))} //nolint:gosec // at most wire.BlockSize
			locations = locations[2:]
			in, ok := p.packs[at.pack]
			if !ok || at.offset < 0 || int64(at.offset)+int64(at.length) > in.size {
				return nil, fmt.Errorf("entry %q: block %d is in no pack", t.Path, b)
			}
			t.locations = append(t.locations, at)
		}
		if i > 0 && wire.ComparePartOrder(items[i-1].Path, t.Path) >= 0 {
			return nil, fmt.Errorf("entry %q: does not come after %q", t.Path, items[i-1].Path)
		}
	}
	if len(items) == 0 {
		return nil, errors.New("it has no entries")
	}
	if got := describePart(items); got.Digest != ref.Digest || !bytes.Equal(got.First, ref.First) || !bytes.Equal(got.Last, ref.Last) || got.Entries != ref.Entries {
		return nil, fmt.Errorf("it has the hash %s, from %q to %q", got.Digest, got.First, got.Last)
	} else if !slices.Equal(got.Uses, ref.Uses) { // the packs of the manifest are those of the descriptions
		return nil, errors.New("it uses other packs than the manifest says")
	}
	return items, nil
}

// partLoader reads packs, and the parts in packs, from the store and keeps the last maxCachedPacks packs in memory. It
// is not safe for concurrent use. The caller must call close.
type partLoader struct {
	store  Store
	prefix string
	z      *zstd.Decoder
	kept   []loadedPack // in the order of their last use
}

type loadedPack struct {
	pack    pack
	content []byte
}

func newPartLoader(store Store, prefix string) (*partLoader, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxPartSize))
	if err != nil {
		return nil, err
	}
	return &partLoader{store: store, prefix: prefix, z: z}, nil
}

func (l *partLoader) close() { l.z.Close() }

// loadPack returns the content of a pack, which the caller must not change.
func (l *partLoader) loadPack(ctx context.Context, p pack) ([]byte, error) {
	for i, k := range l.kept {
		if k.pack == p {
			l.kept = append(append(l.kept[:i:i], l.kept[i+1:]...), k)
			return k.content, nil
		}
	}
	content, err := p.readFrom(ctx, l.store, l.prefix, nil)
	if err != nil {
		return nil, err
	}
	if len(l.kept) == maxCachedPacks {
		l.kept = l.kept[1:]
	}
	l.kept = append(l.kept, loadedPack{p, content})
	return content, nil
}

// loadPart returns the items of the part of p that ref describes. The error is a *CorruptError if the stored part differs from ref.
func (l *partLoader) loadPart(ctx context.Context, p *partsManifest, ref *partRef) ([]partEntry, error) {
	in := p.packs[ref.Pack]
	content, err := l.loadPack(ctx, in)
	if err != nil {
		return nil, err
	}
	items, err := p.decodePart(l.z, ref, content[ref.Offset:ref.Offset+ref.Length])
	if err != nil {
		return nil, &CorruptError{Object: in.name(l.prefix), Err: fmt.Errorf("part %s: %w", ref.Digest, err)}
	}
	return items, nil
}

// loadParts reads all parts of a manifest of version 2, and sets the entries, packs and block locations of m. The error
// is a *CorruptError if the parts do not form a valid tree.
func (m *Manifest) loadParts(ctx context.Context, store Store) error {
	l, err := newPartLoader(store, m.prefix)
	if err != nil {
		return err
	}
	defer l.close()
	index := map[int32]int32{}
	for _, n := range m.parts.packNumbers() {
		index[n] = int32(len(m.packs)) //nolint:gosec // an index
		m.packs = append(m.packs, m.parts.packs[n])
	}
	order := make([]int, len(m.parts.list))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { // so that each pack is read once
		return cmp.Or(cmp.Compare(m.parts.list[a].Pack, m.parts.list[b].Pack), cmp.Compare(a, b))
	})
	m.locations = map[wire.Hash]blockLocation{}
	for _, i := range order {
		items, err := l.loadPart(ctx, m.parts, &m.parts.list[i])
		if err != nil {
			return err
		}
		for t := range items {
			for b, at := range items[t].locations {
				at.pack = index[at.pack]
				m.locations[items[t].Blocks[b]] = at
			}
			m.entries = append(m.entries, items[t].Entry)
		}
	}
	slices.SortFunc(m.entries, func(a, b Entry) int { return wire.ComparePaths(a.Path, b.Path) })
	tree := wire.NewTreeValidator()
	for i := range m.entries {
		if _, err := tree.Add(&m.entries[i]); err != nil {
			return &CorruptError{Object: m.prefix + m.ID, Err: err}
		}
	}
	return nil
}

// PackNames returns the names of the objects that a snapshot needs besides its manifest. It reads only the manifest.
// Its errors are those of Open.
func PackNames(ctx context.Context, store Store, tenant, session, id string) ([]string, error) {
	m, err := openManifest(ctx, store, tenant, session, id)
	if err != nil {
		return nil, err
	}
	if m.parts == nil {
		return m.Objects(), nil
	}
	var names []string
	for _, n := range m.parts.packNumbers() {
		names = append(names, m.parts.packs[n].name(m.prefix))
	}
	return names, nil
}

// readHeader reads the first line of a manifest and returns its version.
func readHeader(r *bufio.Reader) (version int, err error) {
	line, err := r.ReadSlice('\n')
	switch strings.TrimSuffix(string(line), "\n") {
	case wire.HeaderV1:
		return 1, nil
	case wire.HeaderV2:
		return 2, nil
	}
	var h struct {
		Version int `json:"spoolWorkspace"`
	}
	if json.Unmarshal(line, &h) == nil && h.Version > 0 {
		return 0, fmt.Errorf("it is a manifest of version %d, which this build does not read", h.Version)
	}
	return 0, errors.Join(errors.New("not a manifest"), err)
}
