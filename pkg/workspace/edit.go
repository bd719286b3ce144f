package workspace

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// manifestEditor creates a manifest of version 2: it applies the edits of a runner to the parts of an earlier snapshot,
// called the base. Its methods are called in this order: addKnownBlocks; addBlock, addEdit and addRemoval for each
// frame of the runner; applyEdits; sumParts; storeParts.
type manifestEditor struct {
	store  Store
	loader *partLoader
	base   *partsManifest // the tree that the edits change
	whole  bool           // the edits are the whole tree: the result has no entry of base, but refers to parts of base that are equal to its own

	locations map[wire.Hash]blockLocation // blocks that the runner sent or was told to be stored; edits may refer to them
	edits     []treeEdit
	lines     int                 // length in bytes of the edits' lines
	gone      map[string]bool     // paths whose entries are removed, with everything below them
	loaded    map[int][]partEntry // the parts of base that were read, by index

	packs  map[int32]pack // the packs of base and the new ones
	next   int32
	buf    []byte // the content of the next pack, which is not stored yet
	added  uint64 // size of new packs that the store did not have
	result []editedPart
	cut    wire.PartCutter
	open   []partEntry // the items of the last part of the result, which has not ended
}

// treeEdit is an entry of a tree that is new or has changed since the base.
type treeEdit struct {
	partEntry
	missing bool // some blocks are not in manifestEditor.locations: applyEdits takes them from the base's entry of the same path
}

// editedPart is a part of the tree that results from the edits. If the part is stored already, items is nil and ref has
// its location.
type editedPart struct {
	ref      partRef
	items    []partEntry
	repacked bool // the part has not changed, and is stored again because repack removes its pack or a pack that it uses
}

// newManifestEditor returns a manifestEditor that stores objects under prefix. base is nil for a session without a
// snapshot of version 2; whole is the field of the editor. The caller must call close.
func newManifestEditor(store Store, prefix string, base *partsManifest, whole bool) (*manifestEditor, error) {
	l, err := newPartLoader(store, prefix)
	if err != nil {
		return nil, err
	}
	if base == nil {
		base = &partsManifest{}
	}
	e := &manifestEditor{store: store, loader: l, base: base, whole: whole, locations: map[wire.Hash]blockLocation{}, gone: map[string]bool{}, loaded: map[int][]partEntry{}, packs: map[int32]pack{}, next: base.next}
	for n, p := range base.packs {
		e.packs[n] = p
	}
	return e, nil
}

func (e *manifestEditor) close() { e.loader.close() }

// dropBase removes the base from the editor, because the base cannot be read.
func (e *manifestEditor) dropBase() {
	e.base = &partsManifest{next: e.base.next}
	clear(e.packs)
}

// addKnownBlocks lets edits refer to the blocks of the previous snapshot m.
func (e *manifestEditor) addKnownBlocks(m *Manifest) {
	numbers := e.packNumbers(m)
	for h, at := range m.locations {
		at.pack = numbers[at.pack]
		e.locations[h] = at
	}
}

// packNumbers returns the numbers of the packs of m, in the order of m.packs. The packs of a manifest of version 1 have
// no numbers; packNumbers adds them to e.packs with new numbers.
func (e *manifestEditor) packNumbers(m *Manifest) []int32 {
	if m.parts != nil {
		return m.parts.packNumbers()
	}
	numbers := make([]int32, len(m.packs))
	for i, p := range m.packs {
		numbers[i], e.packs[e.next] = e.next, p
		e.next++
	}
	return numbers
}

// addBlock adds a block, which the runner sent, to the next pack. added is false if the block is known already.
func (e *manifestEditor) addBlock(ctx context.Context, h wire.Hash, content []byte) (added bool, err error) {
	if _, ok := e.locations[h]; ok {
		return false, nil
	}
	e.locations[h], err = e.appendToPack(ctx, content)
	return true, err
}

// appendToPack appends content to the next pack and returns its location. If the content does not fit, appendToPack
// stores the pack and begins another.
func (e *manifestEditor) appendToPack(ctx context.Context, content []byte) (blockLocation, error) {
	if len(e.buf)+len(content) > packSize {
		if err := e.storePack(ctx); err != nil {
			return blockLocation{}, err
		}
	}
	at := blockLocation{e.next, int32(len(e.buf)), int32(len(content))} //nolint:gosec // bounded by packSize
	e.buf = append(e.buf, content...)
	return at, nil
}

// storePack stores the next pack, unless it is empty, and begins another.
func (e *manifestEditor) storePack(ctx context.Context) error {
	if len(e.buf) == 0 {
		return nil
	}
	p := pack{wire.HashOf(e.buf), int64(len(e.buf))}
	name := p.name(e.loader.prefix)
	has, err := e.store.Has(ctx, name)
	if err != nil {
		return fmt.Errorf("look for %s: %w", name, err)
	}
	if err := putObject(ctx, e.store, name, e.buf); err != nil {
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

// addEdit adds an entry that is new or has changed. It returns an error if the entry is invalid, or if the edits exceed the limits of a
// snapshot, which wraps ErrTooLarge.
func (e *manifestEditor) addEdit(n Entry) error {
	if err := n.Check(); err != nil {
		return err
	}
	if len(e.edits) >= wire.MaxEntries {
		return fmt.Errorf("%w: over %d files and folders", ErrTooLarge, wire.MaxEntries)
	}
	line, err := n.CanonicalLine()
	if err != nil {
		return err
	}
	if e.lines += len(line); e.lines > maxManifestSize {
		return fmt.Errorf("%w: names and hashes of over %d MiB", ErrTooLarge, maxManifestSize>>20)
	}
	d := treeEdit{partEntry: partEntry{Entry: n, hash: wire.HashOf(line), line: len(line)}}
	for i, h := range n.Blocks {
		at, ok := e.locations[h]
		if ok && int(at.length) != n.BlockLength(i) {
			return fmt.Errorf("entry %q: block %d has another length", n.Path, i)
		}
		d.missing = d.missing || !ok
		d.locations = append(d.locations, at)
	}
	e.edits = append(e.edits, d)
	return nil
}

// addRemoval adds the removal of the entry at a path and of everything below it. The error for too many removals wraps ErrTooLarge.
func (e *manifestEditor) addRemoval(path string) error {
	if tree, rest, _ := strings.Cut(path, "/"); rest == "" || tree != wire.TreeWorkspace && tree != wire.TreeRecords {
		return fmt.Errorf("path %q cannot be removed", path)
	}
	if len(e.gone) >= wire.MaxEntries {
		return fmt.Errorf("%w: over %d paths are gone", ErrTooLarge, wire.MaxEntries)
	}
	e.gone[path] = true
	return nil
}

// removedAncestor returns the removed path that removes the entry at path: path itself or a folder above it. It returns "" if the entry
// is not removed.
func (e *manifestEditor) removedAncestor(path string) string {
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

// applyEdits applies the edits and removals to the base. Afterwards e.result has all parts of the new tree; those that
// have changed are not stored yet.
func (e *manifestEditor) applyEdits(ctx context.Context) error {
	slices.SortFunc(e.edits, func(a, b treeEdit) int { return wire.ComparePartOrder(a.Path, b.Path) })
	for i := range e.edits {
		if i > 0 && e.edits[i].Path == e.edits[i-1].Path {
			return fmt.Errorf("entry %q was sent twice", e.edits[i].Path)
		}
		if e.edits[i].Kind != KindDir { // nothing may stay below it
			e.gone[e.edits[i].Path] = true
		}
	}
	byPart, byWalk := e.sortRemovals()
	left := e.edits
	for i := range e.base.list {
		if e.whole {
			break
		}
		ref := &e.base.list[i]
		first, last := string(ref.First), string(ref.Last)
		if tree, _, _ := strings.Cut(first, "/"); len(e.open) > 0 && !strings.HasPrefix(e.open[0].Path, tree+"/") {
			e.endPart()
		}
		n := len(left) // edits that come before the next part
		if i+1 < len(e.base.list) {
			next := string(e.base.list[i+1].First)
			n, _ = slices.BinarySearchFunc(left, next, func(d treeEdit, path string) int { return wire.ComparePartOrder(d.Path, path) })
		}
		touched := n > 0 || len(e.open) > 0 || e.mayLoseEntries(first, last, byPart, byWalk)
		if !touched {
			e.result = append(e.result, editedPart{ref: *ref})
			continue
		}
		var items []partEntry
		folder, _ := wire.SplitPath(first)
		if g := e.removedAncestor(folder); g == "" || !wire.IsBelow(last, g) || last == g {
			var err error
			if items, err = e.loadBasePart(ctx, i); err != nil {
				return err
			}
		}
		if err := e.mergePart(items, left[:n]); err != nil {
			return err
		}
		left = left[n:]
	}
	for i := range left {
		if err := e.appendEdit(&left[i], nil); err != nil {
			return err
		}
	}
	e.endPart()
	return e.checkFolders(ctx)
}

// sortRemovals returns the removed paths twice: in the order of wire.ComparePartOrder and in the order of
// wire.ComparePaths.
func (e *manifestEditor) sortRemovals() (byPart, byWalk []string) {
	for path := range e.gone {
		byPart = append(byPart, path)
	}
	byWalk = slices.Clone(byPart)
	slices.SortFunc(byPart, wire.ComparePartOrder)
	slices.SortFunc(byWalk, wire.ComparePaths)
	return byPart, byWalk
}

// mayLoseEntries reports whether a removal may remove an entry of the part whose first and last paths are given. byPart
// and byWalk are the results of sortRemovals.
func (e *manifestEditor) mayLoseEntries(first, last string, byPart, byWalk []string) bool {
	if len(e.gone) == 0 {
		return false
	}
	if e.removedAncestor(first) != "" || e.removedAncestor(last) != "" {
		return true
	}
	if n, _ := slices.BinarySearchFunc(byPart, first, wire.ComparePartOrder); n < len(byPart) && wire.ComparePartOrder(byPart[n], last) <= 0 {
		return true // the entry itself is in the part
	}
	from, _ := wire.SplitPath(first)
	to, _ := wire.SplitPath(last)
	n, _ := slices.BinarySearchFunc(byWalk, from, wire.ComparePaths)
	return n < len(byWalk) && wire.ComparePaths(byWalk[n], to) <= 0 // a folder within the part is removed
}

// loadBasePart returns the items of the base's part with index i, and keeps them in memory.
func (e *manifestEditor) loadBasePart(ctx context.Context, i int) ([]partEntry, error) {
	if items, ok := e.loaded[i]; ok {
		return items, nil
	}
	items, err := e.loader.loadPart(ctx, e.base, &e.base.list[i])
	if err == nil {
		e.loaded[i] = items
	}
	return items, err
}

// mergePart appends to the result the items of one part that are neither removed nor replaced, and the edits. Both are
// in the order of wire.ComparePartOrder.
func (e *manifestEditor) mergePart(items []partEntry, edits []treeEdit) error {
	for len(items) > 0 || len(edits) > 0 {
		c := 0
		switch {
		case len(items) == 0:
			c = 1
		case len(edits) == 0:
			c = -1
		default:
			c = wire.ComparePartOrder(items[0].Path, edits[0].Path)
		}
		var before *partEntry
		if c <= 0 {
			if before, items = &items[0], items[1:]; c < 0 {
				if e.removedAncestor(before.Path) == "" {
					e.appendItem(*before)
				}
				continue
			}
		}
		if err := e.appendEdit(&edits[0], before); err != nil {
			return err
		}
		edits = edits[1:]
	}
	return nil
}

// appendEdit appends an edit to the result. before is the base's entry of the same path, or nil. The error means that a block of the
// edit is neither known nor in before.
func (e *manifestEditor) appendEdit(d *treeEdit, before *partEntry) error {
	if d.missing {
		for i, h := range d.Blocks {
			if _, ok := e.locations[h]; ok {
				d.locations[i] = e.locations[h] // the runner sent the block after the edit
				continue
			}
			n := -1
			if before != nil {
				n = slices.Index(before.Blocks, h)
			}
			if n < 0 || int(before.locations[n].length) != d.BlockLength(i) {
				return fmt.Errorf("entry %q: block %d was not sent", d.Path, i)
			}
			d.locations[i] = before.locations[n]
		}
	}
	e.appendItem(d.partEntry)
	return nil
}

// appendItem appends an item to the result, and ends the present part where wire.PartCutter requires it.
func (e *manifestEditor) appendItem(t partEntry) {
	begins, ends := e.cut.Next(t.Path, t.line)
	if begins {
		e.endPart()
		_, ends = e.cut.Next(t.Path, t.line)
	}
	e.open = append(e.open, t)
	if ends {
		e.endPart()
	}
}

// endPart ends the present part of the result, if there is one.
func (e *manifestEditor) endPart() {
	e.cut = wire.PartCutter{}
	if len(e.open) > 0 {
		e.result = append(e.result, editedPart{ref: describePart(e.open), items: e.open})
		e.open = nil
	}
}

// checkFolders returns an error for an edit whose parent is not a folder of the result.
func (e *manifestEditor) checkFolders(ctx context.Context) error {
	checked := ""
	for i := range e.edits {
		folder, _ := wire.SplitPath(e.edits[i].Path)
		if folder == checked || folder == wire.TreeWorkspace || folder == wire.TreeRecords {
			continue
		}
		t, err := e.findResult(ctx, folder)
		if err != nil {
			return err
		}
		if t == nil || t.Kind != KindDir {
			return fmt.Errorf("entry %q: parent is not a folder of the snapshot", e.edits[i].Path)
		}
		checked = folder
	}
	return nil
}

// findResult returns the item of the result with the given path, or nil.
func (e *manifestEditor) findResult(ctx context.Context, path string) (*partEntry, error) {
	i, found := slices.BinarySearchFunc(e.result, path, func(p editedPart, path string) int { return wire.ComparePartOrder(string(p.ref.First), path) })
	if !found {
		i--
	}
	if i < 0 || wire.ComparePartOrder(path, string(e.result[i].ref.Last)) > 0 {
		return nil, nil //nolint:nilnil // documented
	}
	items := e.result[i].items
	if items == nil {
		n, _ := slices.BinarySearchFunc(e.base.list, string(e.result[i].ref.First), func(p partRef, first string) int { return wire.ComparePartOrder(string(p.First), first) })
		var err error
		if items, err = e.loadBasePart(ctx, n); err != nil {
			return nil, err
		}
	}
	n, found := slices.BinarySearchFunc(items, path, func(t partEntry, path string) int { return wire.ComparePartOrder(t.Path, path) })
	if !found {
		return nil, nil //nolint:nilnil // documented
	}
	return &items[n], nil
}

// sumParts returns the id of the new snapshot, and the sums over all parts of the result: entries, files, bytes,
// unsettled files and lines.
func (e *manifestEditor) sumParts() (id string, sum partRef) {
	hash := wire.NewTreeIDHash()
	for i := range e.result {
		ref := &e.result[i].ref
		hash.Add(ref.Digest)
		sum.Entries, sum.Files, sum.Bytes, sum.Unsettled = sum.Entries+ref.Entries, sum.Files+ref.Files, sum.Bytes+ref.Bytes, sum.Unsettled+ref.Unsettled
		sum.Lines += ref.Lines
	}
	return hash.ID(), sum
}
