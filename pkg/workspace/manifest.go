package workspace

import (
	"bufio"
	"bytes"
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

const (
	// packSize is the maximum size of a pack in bytes. An object is read from its start, so a small pack makes
	// reading a file cheap.
	packSize = 8 << 20
	// maxManifestSize is the maximum size in bytes of a tree's canonical form and of the locations of its blocks in a
	// manifest.
	maxManifestSize = 256 << 20
	// packPrefix is the prefix of the names of the objects that are packs.
	packPrefix = "p-"
)

// Manifest is the list of the files, folders and links of a snapshot, with the location of their content.
type Manifest struct {
	ID        string
	prefix    string // tenant/session/
	entries   []Entry
	packs     []pack
	locations map[wire.Hash]blockLocation
	parts     *partsManifest // of version 2; nil for version 1
}

// pack is an object that contains blocks of files, one after the other.
type pack struct {
	hash wire.Hash
	size int64
}

func (p pack) name(prefix string) string { return prefix + packPrefix + p.hash.String() }

// blockLocation is the location of a block: a pack, the offset in it and the block's length in bytes.
type blockLocation struct {
	pack, offset, length int32
}

// Objects returns the names of the objects that contain the snapshot's content.
func (m *Manifest) Objects() []string {
	names := make([]string, len(m.packs))
	for i, p := range m.packs {
		names[i] = p.name(m.prefix)
	}
	return names
}

// packLine is the JSON line that describes a pack in a manifest, after the tree.
type packLine struct {
	Pack   wire.Hash `json:"pack"`
	Size   int64     `json:"size"`
	Blocks []int32   `json:"blocks"` // pairs of a block's number, in order of first mention, and its offset
}

// forEachBlock calls f once for each distinct block of the snapshot, in the order in which entries first refer to it.
func (m *Manifest) forEachBlock(f func(h wire.Hash, length int)) {
	seen := make(map[wire.Hash]struct{}, len(m.locations))
	for i := range m.entries {
		e := &m.entries[i]
		for n, h := range e.Blocks {
			if _, ok := seen[h]; !ok {
				seen[h] = struct{}{}
				f(h, e.BlockLength(n))
			}
		}
	}
}

// encode returns the content of the manifest's object: the canonical form of the tree and the packs, compressed.
func (m *Manifest) encode() ([]byte, error) {
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	w := bufio.NewWriter(z)
	lines := json.NewEncoder(w)
	if _, err := w.WriteString(wire.HeaderV1 + "\n"); err != nil {
		return nil, err
	}
	for i := range m.entries {
		line, err := m.entries[i].CanonicalLine()
		if err != nil {
			return nil, err
		}
		if _, err := w.Write(append(line, '\n')); err != nil {
			return nil, err
		}
	}
	packs := make([]packLine, len(m.packs))
	for i, p := range m.packs {
		packs[i] = packLine{Pack: p.hash, Size: p.size}
	}
	number := int32(0)
	m.forEachBlock(func(h wire.Hash, _ int) {
		at := m.locations[h]
		packs[at.pack].Blocks = append(packs[at.pack].Blocks, number, at.offset)
		number++
	})
	for _, p := range packs {
		if err := lines.Encode(p); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(w.Flush(), z.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Open reads the manifest of a snapshot. It returns ErrNotFound if the snapshot does not exist, and a *CorruptError if
// the manifest does not match its name.
func Open(ctx context.Context, store Store, tenant, session, id string) (*Manifest, error) {
	m, err := openManifest(ctx, store, tenant, session, id)
	if err == nil && m.parts != nil {
		if err = m.loadParts(ctx, store); err != nil {
			err = fmt.Errorf("open snapshot %s: %w", ManifestName(tenant, session, id), err)
		}
	}
	if err != nil {
		return nil, err
	}
	return m, nil
}

// openManifest is like Open, but does not read the parts of a manifest of version 2.
func openManifest(ctx context.Context, store Store, tenant, session, id string) (*Manifest, error) {
	if err := checkNameParts(tenant, session, id); err != nil {
		return nil, err
	}
	name := ManifestName(tenant, session, id)
	r, err := store.Get(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("open snapshot %s: %w", name, err)
	}
	from := &errorRecorder{r: r}
	m := &Manifest{ID: id, prefix: ManifestName(tenant, session, "")}
	err = errors.Join(m.decode(from), r.Close())
	switch {
	case from.err != nil:
		return nil, fmt.Errorf("open snapshot %s: %w", name, from.err)
	case err != nil:
		return nil, &CorruptError{Object: name, Err: err}
	}
	return m, nil
}

// decode reads a manifest that encode has written into m. It returns an error if the content does not have the id of m.
func (m *Manifest) decode(r io.Reader) error {
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
	if err != nil {
		return err
	}
	defer z.Close()
	plain := bufio.NewReader(io.LimitReader(z, 2*maxManifestSize))
	version, err := readHeader(plain)
	if err != nil {
		return err
	}
	if version == 2 {
		m.parts, err = decodeParts(plain, m.ID)
		return err
	}
	lines := bufio.NewScanner(plain)
	lines.Buffer(make([]byte, 64<<10), 64<<20) // the line of a pack with many small blocks is long
	tree := wire.NewTreeValidator()
	var packs []packLine
	for lines.Scan() {
		if bytes.HasPrefix(lines.Bytes(), []byte(`{"pack"`)) {
			var p packLine
			if err := json.Unmarshal(lines.Bytes(), &p); err != nil {
				return err
			}
			packs = append(packs, p)
			continue
		}
		e, err := wire.ParseEntry(lines.Bytes())
		if err != nil {
			return err
		}
		if _, err := tree.Add(&e); err != nil {
			return err
		}
		m.entries = append(m.entries, e)
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if got := tree.ID(); got != m.ID {
		return fmt.Errorf("the tree has the hash %s", got)
	}
	return m.setBlockLocations(packs)
}

// setBlockLocations sets m.packs and the locations of all blocks from the packs of the manifest's object.
func (m *Manifest) setBlockLocations(packs []packLine) error {
	type block struct {
		hash   wire.Hash
		length int
	}
	var list []block
	m.forEachBlock(func(h wire.Hash, length int) { list = append(list, block{h, length}) })
	m.locations = make(map[wire.Hash]blockLocation, len(list))
	for n, p := range packs {
		if p.Size < 0 || p.Size > packSize || len(p.Blocks)%2 != 0 {
			return fmt.Errorf("pack %s: invalid line", p.Pack)
		}
		m.packs = append(m.packs, pack{p.Pack, p.Size})
		for i := 0; i < len(p.Blocks); i += 2 {
			b, offset := p.Blocks[i], p.Blocks[i+1]
			if b < 0 || int(b) >= len(list) || offset < 0 || int64(offset)+int64(list[b].length) > p.Size {
				return fmt.Errorf("pack %s: does not contain block %d", p.Pack, b)
			}
			m.locations[list[b].hash] = blockLocation{int32(n), offset, int32(list[b].length)} //nolint:gosec // bounded by maxManifestSize and BlockSize
		}
	}
	if len(m.locations) != len(list) {
		return fmt.Errorf("%d blocks are in no pack", len(list)-len(m.locations))
	}
	return nil
}

// List returns the entries of the snapshot below a folder of the workspace ("" for all), in the order of a depth-first
// walk, with paths relative to the workspace. It returns ErrNotFound if the folder does not exist.
func (m *Manifest) List(dir string) ([]Entry, error) {
	at := 0
	prefix := wire.TreeWorkspace + "/"
	if dir != "" {
		e, i, err := m.findEntry(dir)
		if err != nil {
			return nil, err
		}
		if e.Kind != KindDir {
			return nil, fmt.Errorf("%s: is not a folder: %w", dir, ErrNotFound)
		}
		at, prefix = i+1, e.Path+"/"
	} else {
		at, _ = slices.BinarySearchFunc(m.entries, wire.TreeWorkspace, func(e Entry, path string) int { return wire.ComparePaths(e.Path, path) })
	}
	var out []Entry
	for ; at < len(m.entries) && strings.HasPrefix(m.entries[at].Path, prefix); at++ {
		out = append(out, relativeEntry(m.entries[at]))
	}
	return out, nil
}

// Lookup returns the entry of the snapshot at a path relative to the workspace, or ErrNotFound.
func (m *Manifest) Lookup(path string) (Entry, error) {
	e, _, err := m.findEntry(path)
	if err != nil {
		return Entry{}, err
	}
	return relativeEntry(*e), nil
}

// relativeEntry returns an entry with a path relative to the workspace.
func relativeEntry(e Entry) Entry {
	e.Path = strings.TrimPrefix(e.Path, wire.TreeWorkspace+"/")
	return e
}

// findEntry returns the entry at a path relative to the workspace and its index in m.entries, or ErrNotFound.
func (m *Manifest) findEntry(path string) (*Entry, int, error) {
	i, ok := slices.BinarySearchFunc(m.entries, wire.TreeWorkspace+"/"+path, func(e Entry, path string) int { return wire.ComparePaths(e.Path, path) })
	if !ok {
		return nil, 0, fmt.Errorf("%s: %w", path, ErrNotFound)
	}
	return &m.entries[i], i, nil
}
