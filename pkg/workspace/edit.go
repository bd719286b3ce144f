package workspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// onePack is the maximum size in bytes of content and parts that are stored in one pack. Beyond it parts have packs of
// their own, so that reading a tree does not read its files.
const onePack = 1 << 20

// tinyPack is the size in bytes below which a pack counts as tiny: most are of snapshots of few changes.
const tinyPack = smallPack / 8

// editor makes a manifest of version 2 from the parts of a base and the edits of a runner.
type editor struct {
	store  Store
	loader *partLoader
	base   *parts // the tree that the edits change
	whole  bool   // the edits are the whole tree: the parts of base are not kept, but stored parts are used again

	places map[wire.Hash]place // blocks that edits may refer to
	edits  []edit
	lines  int             // length in bytes of the edits' lines
	gone   map[string]bool // paths that are removed, with everything below them
	loaded map[int][]item  // parts of base, by index

	packs  map[int32]pack // the packs of base and the new ones
	next   int32
	buf    []byte // the next pack
	added  uint64 // size of new packs that the store did not have
	result []editedPart
	cut    wire.Cutter
	open   []item // of the part that has not ended
}

// edit is an entry that is new or has changed.
type edit struct {
	item
	missing bool // some blocks are not in places: the base's entry of the same path must have them
}

// editedPart is a part of the result. Its items are nil if it is stored already.
type editedPart struct {
	ref      partRef
	items    []item
	repacked bool // it is stored again because of its pack, or of the packs that it uses
}

// newEditor returns an editor. base is nil for a session without a snapshot of version 2.
func newEditor(store Store, prefix string, base *parts, whole bool) (*editor, error) {
	l, err := newPartLoader(store, prefix)
	if err != nil {
		return nil, err
	}
	if base == nil {
		base = &parts{}
	}
	e := &editor{store: store, loader: l, base: base, whole: whole, places: map[wire.Hash]place{}, gone: map[string]bool{}, loaded: map[int][]item{}, packs: map[int32]pack{}, next: base.next}
	for n, p := range base.packs {
		e.packs[n] = p
	}
	return e, nil
}

func (e *editor) close() { e.loader.close() }

// forget drops the base.
func (e *editor) forget() {
	e.base = &parts{next: e.base.next}
	clear(e.packs)
}

// know makes the blocks of the previous snapshot available to the edits.
func (e *editor) know(m *Manifest) {
	numbers := m.base(e)
	for h, at := range m.places {
		at.pack = numbers[at.pack]
		e.places[h] = at
	}
}

// base returns the numbers of the manifest's packs. For a manifest of version 1 it gives them numbers.
func (m *Manifest) base(e *editor) []int32 {
	if m.parts != nil {
		return m.parts.numbers()
	}
	numbers := make([]int32, len(m.packs))
	for i, p := range m.packs {
		numbers[i], e.packs[e.next] = e.next, p
		e.next++
	}
	return numbers
}

// block adds the content of a block that the runner sent.
func (e *editor) block(ctx context.Context, h wire.Hash, content []byte) (added bool, err error) {
	if _, ok := e.places[h]; ok {
		return false, nil
	}
	e.places[h], err = e.add(ctx, content)
	return true, err
}

// add appends content to the next pack and returns its location.
func (e *editor) add(ctx context.Context, content []byte) (place, error) {
	if len(e.buf)+len(content) > packSize {
		if err := e.flush(ctx); err != nil {
			return place{}, err
		}
	}
	at := place{e.next, int32(len(e.buf)), int32(len(content))} //nolint:gosec // bounded by packSize
	e.buf = append(e.buf, content...)
	return at, nil
}

// flush stores the next pack.
func (e *editor) flush(ctx context.Context) error {
	if len(e.buf) == 0 {
		return nil
	}
	p := pack{wire.Sum(e.buf), int64(len(e.buf))}
	name := p.name(e.loader.prefix)
	has, err := e.store.Has(ctx, name)
	if err != nil {
		return fmt.Errorf("look for %s: %w", name, err)
	}
	if err := put(ctx, e.store, name, e.buf); err != nil {
		return err
	}
	if !has {
		e.added += uint64(len(e.buf))
	}
	e.packs[e.next] = p
	e.next++
	e.buf = e.buf[:0]
	return nil
}

// entry adds an edit.
func (e *editor) entry(n Entry) error {
	if err := n.Check(); err != nil {
		return err
	}
	if len(e.edits) >= wire.MaxEntries {
		return fmt.Errorf("%w: over %d files and folders", ErrTooLarge, wire.MaxEntries)
	}
	line, err := n.Line()
	if err != nil {
		return err
	}
	if e.lines += len(line); e.lines > maxManifest {
		return fmt.Errorf("%w: names and hashes of over %d MiB", ErrTooLarge, maxManifest>>20)
	}
	d := edit{item: item{Entry: n, hash: wire.Sum(line), line: len(line)}}
	for i, h := range n.Blocks {
		at, ok := e.places[h]
		if ok && int(at.length) != n.BlockLen(i) {
			return fmt.Errorf("entry %q: block %d has another length", n.Path, i)
		}
		d.missing = d.missing || !ok
		d.places = append(d.places, at)
	}
	e.edits = append(e.edits, d)
	return nil
}

// remove adds the removal of a path.
func (e *editor) remove(path string) error {
	if tree, rest, _ := strings.Cut(path, "/"); rest == "" || tree != wire.Workspace && tree != wire.State {
		return fmt.Errorf("path %q cannot be removed", path)
	}
	if len(e.gone) >= wire.MaxEntries {
		return fmt.Errorf("%w: over %d paths are gone", ErrTooLarge, wire.MaxEntries)
	}
	e.gone[path] = true
	return nil
}

// covering returns the path that is removed and has path below it or equal to it; "" if there is none.
func (e *editor) covering(path string) string {
	if len(e.gone) == 0 {
		return ""
	}
	for i := range len(path) {
		if path[i] == '/' && e.gone[path[:i]] {
			return path[:i]
		}
	}
	if e.gone[path] {
		return path
	}
	return ""
}

// merge applies the edits to the base. The result has all parts, of which the new ones are not stored.
func (e *editor) merge(ctx context.Context) error {
	slices.SortFunc(e.edits, func(a, b edit) int { return wire.ComparePart(a.Path, b.Path) })
	for i := range e.edits {
		if i > 0 && e.edits[i].Path == e.edits[i-1].Path {
			return fmt.Errorf("entry %q was sent twice", e.edits[i].Path)
		}
		if e.edits[i].Kind != Dir { // nothing may stay below it
			e.gone[e.edits[i].Path] = true
		}
	}
	byPart, byWalk := e.sortGone()
	left := e.edits
	for i := range e.base.list {
		if e.whole {
			break
		}
		ref := &e.base.list[i]
		first, last := string(ref.First), string(ref.Last)
		if tree, _, _ := strings.Cut(first, "/"); len(e.open) > 0 && !strings.HasPrefix(e.open[0].Path, tree+"/") {
			e.end()
		}
		n := len(left) // edits that come before the next part
		if i+1 < len(e.base.list) {
			next := string(e.base.list[i+1].First)
			n, _ = slices.BinarySearchFunc(left, next, func(d edit, path string) int { return wire.ComparePart(d.Path, path) })
		}
		touched := n > 0 || len(e.open) > 0 || e.isTouched(first, last, byPart, byWalk)
		if !touched {
			e.result = append(e.result, editedPart{ref: *ref})
			continue
		}
		var items []item
		folder, _ := wire.Split(first)
		if g := e.covering(folder); g == "" || !wire.IsBelow(last, g) || last == g {
			var err error
			if items, err = e.part(ctx, i); err != nil {
				return err
			}
		}
		if err := e.mergePart(items, left[:n]); err != nil {
			return err
		}
		left = left[n:]
	}
	for i := range left {
		if err := e.append(&left[i], nil); err != nil {
			return err
		}
	}
	e.end()
	return e.checkFolders(ctx)
}

// sortGone returns the removed paths in the orders of wire.ComparePart and wire.Compare.
func (e *editor) sortGone() (byPart, byWalk []string) {
	for path := range e.gone {
		byPart = append(byPart, path)
	}
	byWalk = slices.Clone(byPart)
	slices.SortFunc(byPart, wire.ComparePart)
	slices.SortFunc(byWalk, wire.Compare)
	return byPart, byWalk
}

// isTouched reports whether a removal concerns a part.
func (e *editor) isTouched(first, last string, byPart, byWalk []string) bool {
	if len(e.gone) == 0 {
		return false
	}
	if e.covering(first) != "" || e.covering(last) != "" {
		return true
	}
	if n, _ := slices.BinarySearchFunc(byPart, first, wire.ComparePart); n < len(byPart) && wire.ComparePart(byPart[n], last) <= 0 {
		return true // the entry itself is in the part
	}
	from, _ := wire.Split(first)
	to, _ := wire.Split(last)
	n, _ := slices.BinarySearchFunc(byWalk, from, wire.Compare)
	return n < len(byWalk) && wire.Compare(byWalk[n], to) <= 0 // a folder within the part is removed
}

// part returns the items of a part of the base.
func (e *editor) part(ctx context.Context, i int) ([]item, error) {
	if items, ok := e.loaded[i]; ok {
		return items, nil
	}
	items, err := e.loader.part(ctx, e.base, &e.base.list[i])
	if err == nil {
		e.loaded[i] = items
	}
	return items, err
}

// mergePart appends the items of a part that stay, and edits.
func (e *editor) mergePart(items []item, edits []edit) error {
	for len(items) > 0 || len(edits) > 0 {
		c := 0
		switch {
		case len(items) == 0:
			c = 1
		case len(edits) == 0:
			c = -1
		default:
			c = wire.ComparePart(items[0].Path, edits[0].Path)
		}
		var before *item
		if c <= 0 {
			if before, items = &items[0], items[1:]; c < 0 {
				if e.covering(before.Path) == "" {
					e.push(*before)
				}
				continue
			}
		}
		if err := e.append(&edits[0], before); err != nil {
			return err
		}
		edits = edits[1:]
	}
	return nil
}

// append appends an edit. before is the base's entry of the same path, or nil.
func (e *editor) append(d *edit, before *item) error {
	if d.missing {
		for i, h := range d.Blocks {
			if _, ok := e.places[h]; ok {
				d.places[i] = e.places[h] // sent after it
				continue
			}
			n := -1
			if before != nil {
				n = slices.Index(before.Blocks, h)
			}
			if n < 0 || int(before.places[n].length) != d.BlockLen(i) {
				return fmt.Errorf("entry %q: block %d was not sent", d.Path, i)
			}
			d.places[i] = before.places[n]
		}
	}
	e.push(d.item)
	return nil
}

// push appends an item to the result.
func (e *editor) push(t item) {
	begins, ends := e.cut.Next(t.Path, t.line)
	if begins {
		e.end()
		_, ends = e.cut.Next(t.Path, t.line)
	}
	e.open = append(e.open, t)
	if ends {
		e.end()
	}
}

// end ends the open part.
func (e *editor) end() {
	e.cut = wire.Cutter{}
	if len(e.open) > 0 {
		e.result = append(e.result, editedPart{ref: describe(e.open), items: e.open})
		e.open = nil
	}
}

// checkFolders returns an error for an edit whose parent is not a folder of the result.
func (e *editor) checkFolders(ctx context.Context) error {
	checked := ""
	for i := range e.edits {
		folder, _ := wire.Split(e.edits[i].Path)
		if folder == checked || folder == wire.Workspace || folder == wire.State {
			continue
		}
		t, err := e.find(ctx, folder)
		if err != nil {
			return err
		}
		if t == nil || t.Kind != Dir {
			return fmt.Errorf("entry %q: parent is not a folder of the snapshot", e.edits[i].Path)
		}
		checked = folder
	}
	return nil
}

// find returns an item of the result by its path, or nil.
func (e *editor) find(ctx context.Context, path string) (*item, error) {
	i, found := slices.BinarySearchFunc(e.result, path, func(p editedPart, path string) int { return wire.ComparePart(string(p.ref.First), path) })
	if !found {
		i--
	}
	if i < 0 || wire.ComparePart(path, string(e.result[i].ref.Last)) > 0 {
		return nil, nil //nolint:nilnil // documented
	}
	items := e.result[i].items
	if items == nil {
		n, _ := slices.BinarySearchFunc(e.base.list, string(e.result[i].ref.First), func(p partRef, first string) int { return wire.ComparePart(string(p.First), first) })
		var err error
		if items, err = e.part(ctx, n); err != nil {
			return nil, err
		}
	}
	n, found := slices.BinarySearchFunc(items, path, func(t item, path string) int { return wire.ComparePart(t.Path, path) })
	if !found {
		return nil, nil //nolint:nilnil // documented
	}
	return &items[n], nil
}

// totals returns the id, the number of files and of entries, and the sizes of the result.
func (e *editor) totals() (id string, sum partRef) {
	hash := wire.NewPartsID()
	for i := range e.result {
		ref := &e.result[i].ref
		hash.Add(ref.Digest)
		sum.Entries, sum.Files, sum.Bytes, sum.Unsettled = sum.Entries+ref.Entries, sum.Files+ref.Files, sum.Bytes+ref.Bytes, sum.Unsettled+ref.Unsettled
		sum.Lines += ref.Lines
	}
	return hash.ID(), sum
}

// storeParts stores the content and the new parts, and returns the manifest. Packs of which less than half is needed, and
// small packs if there are many, are stored again.
func (e *editor) storeParts(ctx context.Context) (m *parts, repacked uint64, err error) {
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
		p.ref = describe(p.items)
		stored, err := encodePart(z, p.items)
		if err != nil {
			return nil, 0, err
		}
		if p.repacked {
			repacked += uint64(len(stored))
		}
		if e.partsAlone(len(stored), i) {
			if err := e.flush(ctx); err != nil {
				return nil, 0, err
			}
		}
		at, err := e.add(ctx, stored)
		if err != nil {
			return nil, 0, err
		}
		p.ref.Pack, p.ref.Offset, p.ref.Length = at.pack, at.offset, at.length
	}
	if err := e.flush(ctx); err != nil {
		return nil, 0, err
	}
	m = &parts{packs: map[int32]pack{}, next: e.next}
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

// partsAlone reports whether the first new part, at index i, must begin a pack of its own.
func (e *editor) partsAlone(size, i int) bool {
	if slices.ContainsFunc(e.result[:i], func(p editedPart) bool { return p.items != nil }) {
		return false
	}
	for _, p := range e.result[i+1:] {
		if p.items != nil {
			size += int(p.ref.Lines) / 2 // about what compression leaves of hashes
		}
	}
	return len(e.buf)+size > onePack
}

// useStoredParts replaces new parts that the previous snapshot has stored.
func (e *editor) useStoredParts() {
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

// repack makes the parts use as few packs as the limits of packer demand. A pack that cannot be read is not repacked.
func (e *editor) repack(ctx context.Context) (repacked uint64, err error) {
	var bad *CorruptError
	for _, n := range e.wasteful() {
		content, err := e.loader.pack(ctx, e.packs[n])
		if errors.As(err, &bad) || errors.Is(err, ErrNotFound) {
			continue // the snapshot is no worse than the previous one
		}
		if err != nil {
			return 0, fmt.Errorf("repack: %w", err)
		}
		moved := map[place]place{}
		for i := range e.result {
			p := &e.result[i]
			inPack := p.items == nil && p.ref.Pack == n
			used := slices.ContainsFunc(p.ref.Uses, func(u use) bool { return u.Pack == n })
			if !inPack && !used {
				continue
			}
			if p.items == nil {
				if p.items, err = e.loader.part(ctx, e.base, &p.ref); err != nil {
					return 0, fmt.Errorf("repack: %w", err)
				}
				p.repacked = true
			}
			for t := range p.items {
				p.items[t].places = slices.Clone(p.items[t].places)
				for b, at := range p.items[t].places {
					if at.pack != n {
						continue
					}
					to, ok := moved[at]
					if !ok {
						if to, err = e.add(ctx, content[at.offset:at.offset+at.length]); err != nil {
							return 0, err
						}
						moved[at] = to
						repacked += uint64(at.length) //nolint:gosec // not negative
					}
					p.items[t].places[b] = to
				}
			}
			p.ref.Uses = describe(p.items).Uses
		}
	}
	return repacked, nil
}

// wasteful returns the packs to repack, up to maxRepack: packs of which less than half is needed, and tiny or small packs
// if there are many. Tiny ones are merged alone, so that most snapshots do not store the parts of the whole tree again.
func (e *editor) wasteful() []int32 {
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
		case p.size < tinyPack:
			tiny++
		case p.size < smallPack:
			small++
		}
	}
	var out []int32
	for n, l := range live {
		p, ok := e.packs[n]
		if ok && l > 0 && (l*2 < p.size || tiny > maxSmall && p.size < tinyPack || small > maxSmall && p.size < smallPack) {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b int32) int { return cmp.Compare(a, b) })
	var total int64
	return slices.DeleteFunc(out, func(n int32) bool {
		l := min(live[n], e.packs[n].size)
		if total+l > maxRepack {
			return true
		}
		total += l
		return false
	})
}
