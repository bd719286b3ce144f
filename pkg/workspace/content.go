package workspace

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// maxCachedPacks is the number of packs that a packCache keeps in memory if its field keep is 0.
const maxCachedPacks = 4

// packCache reads the blocks of a snapshot and caches the packs that were used last.
type packCache struct {
	store Store
	m     *Manifest
	kept  []cachedPack // in the order of their last use
	keep  int          // maximum number of kept packs; 0 means maxCachedPacks
}

type cachedPack struct {
	pack    int32
	content []byte
}

// readBlock returns the content of a snapshot's block, which is valid until the next call.
func (l *packCache) readBlock(ctx context.Context, h wire.Hash) ([]byte, error) {
	at := l.m.locations[h]
	content, err := l.readPack(ctx, at.pack)
	if err != nil {
		return nil, err
	}
	b := content[at.offset : at.offset+at.length]
	if wire.HashOf(b) != h {
		return nil, &CorruptError{Object: l.m.prefix + l.m.ID, Err: fmt.Errorf("block %s is not at its recorded location", h)}
	}
	return b, nil
}

// readPack returns the content of the pack with index n, from memory or from the store. The content is valid until the
// next call.
func (l *packCache) readPack(ctx context.Context, n int32) ([]byte, error) {
	for i, s := range l.kept {
		if s.pack == n {
			l.kept = append(append(l.kept[:i:i], l.kept[i+1:]...), s)
			return s.content, nil
		}
	}
	var buf []byte
	if len(l.kept) == cmp.Or(l.keep, maxCachedPacks) {
		buf, l.kept = l.kept[0].content[:0], l.kept[1:]
	}
	content, err := l.m.packs[n].readFrom(ctx, l.store, l.m.prefix, buf)
	if err != nil {
		return nil, err
	}
	l.kept = append(l.kept, cachedPack{n, content})
	return content, nil
}

// readFrom returns the content of a pack from the store. The content is in the memory of buf if its capacity suffices.
// The error is a *CorruptError if the content does not have the pack's size and hash.
func (p pack) readFrom(ctx context.Context, store Store, prefix string, buf []byte) ([]byte, error) {
	name := p.name(prefix)
	r, err := store.Get(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("read pack %s: %w", name, err)
	}
	if int64(cap(buf)) < p.size {
		buf = make([]byte, p.size)
	}
	buf = buf[:p.size]
	_, err = io.ReadFull(r, buf)
	if err = errors.Join(err, r.Close()); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return nil, &CorruptError{Object: name, Err: fmt.Errorf("has fewer than %d bytes", p.size)}
		}
		return nil, fmt.Errorf("read pack %s: %w", name, err)
	}
	if got := wire.HashOf(buf); got != p.hash {
		return nil, &CorruptError{Object: name, Err: fmt.Errorf("SHA-256 is %s", got)}
	}
	return buf, nil
}

// Reader opens a file of the snapshot by its path relative to the workspace. It returns ErrNotFound if the path does
// not exist, and ErrNotFile for a folder or a symbolic link; links are not followed. Read of the returned reader
// verifies each block and returns a *CorruptError, which names the object, for one that is damaged.
func (m *Manifest) Reader(ctx context.Context, store Store, path string) (io.ReadCloser, error) {
	return (&ContentReader{packCache{store: store, m: m}}).Reader(ctx, path)
}

// ContentReader reads files of a snapshot one after the other. It keeps the last pack, up to 8 MiB, in memory, so that a
// next file in the same pack needs no request. It is not safe for concurrent use.
type ContentReader struct{ from packCache }

// ContentReader returns a ContentReader for the files of the snapshot, whose content is in store.
func (m *Manifest) ContentReader(store Store) *ContentReader {
	return &ContentReader{packCache{store: store, m: m, keep: 1}}
}

// Reader is like Manifest.Reader. The returned reader is valid until the next call.
func (c *ContentReader) Reader(ctx context.Context, path string) (io.ReadCloser, error) {
	e, _, err := c.from.m.findEntry(path)
	if err != nil {
		return nil, err
	}
	if e.Kind != KindFile {
		return nil, fmt.Errorf("%s: %w", path, ErrNotFile)
	}
	return &fileReader{ctx: ctx, from: &c.from, left: e.Blocks}, nil
}

// fileReader reads the content of a file of a snapshot block by block.
type fileReader struct {
	ctx  context.Context
	from *packCache
	left []wire.Hash
	have []byte
}

func (r *fileReader) Read(p []byte) (int, error) {
	if len(r.have) == 0 {
		if len(r.left) == 0 {
			return 0, io.EOF
		}
		var err error
		if r.have, err = r.from.readBlock(r.ctx, r.left[0]); err != nil {
			return 0, err
		}
		r.left = r.left[1:]
	}
	n := copy(p, r.have)
	r.have = r.have[n:]
	return n, nil
}

// Close makes further reads return io.EOF. It never fails.
func (r *fileReader) Close() error {
	r.left, r.have = nil, nil
	return nil
}

// Tar writes a folder of the snapshot's workspace ("" for the whole workspace) as a tar, with names relative to that
// folder. It returns ErrNotFound if the folder does not exist. The tar never contains the agent's records. Tar holds a
// few packs in memory, independent of the size.
func (m *Manifest) Tar(ctx context.Context, store Store, dir string, w io.Writer) error {
	list, err := m.List(dir)
	if err != nil {
		return err
	}
	from := &packCache{store: store, m: m}
	t := tar.NewWriter(w)
	for i := range list {
		e := &list[i]
		h := &tar.Header{Name: strings.TrimPrefix(e.Path, dir+"/"), Mode: int64(e.Mode), ModTime: e.ModTime, Size: e.Size, Linkname: e.Target, Format: tar.FormatPAX}
		switch e.Kind {
		case KindFile:
			h.Typeflag = tar.TypeReg
		case KindDir:
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		case KindSymlink:
			h.Typeflag, h.Mode = tar.TypeSymlink, 0o777
		}
		if err := t.WriteHeader(h); err != nil {
			return fmt.Errorf("tar %q: %w", e.Path, err)
		}
		for _, b := range e.Blocks {
			content, err := from.readBlock(ctx, b)
			if err != nil {
				return fmt.Errorf("tar %q: %w", e.Path, err)
			}
			if _, err := t.Write(content); err != nil {
				return fmt.Errorf("tar %q: %w", e.Path, err)
			}
		}
	}
	if err := t.Close(); err != nil {
		return fmt.Errorf("tar: %w", err)
	}
	return nil
}
