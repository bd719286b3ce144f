package snapshot

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// indexName is the index's file in the state folder. It is not part of snapshots.
const indexName = ".spool-index"

// indexMagic begins an index. An index of another version is not read.
const indexMagic = "spool-index-1\n"

// stat identifies a version of a file: if it is unchanged, so is the content.
type stat struct {
	size, mtime, ctime int64 // bytes, nanoseconds
	inode              uint64
}

func statOf(info fs.FileInfo) stat {
	ctime, inode := identity(info)
	return stat{info.Size(), info.ModTime().UnixNano(), ctime, inode}
}

// The windows in which a file may change without a change of its times: the kernel's clock ticks, and some file systems
// store whole seconds.
const (
	tick       = 100 * time.Millisecond
	tickSecond = 2 * time.Second
)

// isSettled reports whether a change after the given time of reading would show in the times.
func (s stat) isSettled(read time.Time) bool {
	window := tick
	if s.mtime%int64(time.Second) == 0 {
		window = tickSecond
	}
	return read.Sub(time.Unix(0, s.mtime)).Abs() > window
}

// known is the content of a file when it was last read.
type known struct {
	stat   stat
	blocks []wire.Hash
}

// index has the content of the files that were read before, by path. It lies where the agent can write: a forged index
// only damages the agent's own snapshots.
type index map[string]known

// loadIndex reads the index. If it is absent or damaged, the only cost is that all files are read.
func loadIndex(state *os.Root) (index, error) {
	raw, err := state.ReadFile(indexName)
	if errors.Is(err, fs.ErrNotExist) {
		return index{}, nil
	}
	if err != nil {
		return index{}, err
	}
	body, ok := bytes.CutPrefix(raw, []byte(indexMagic))
	if !ok || len(body) < sha256.Size {
		return index{}, errors.New("not an index of this version")
	}
	sum := sha256.Sum256(body[:len(body)-sha256.Size])
	if !bytes.Equal(sum[:], body[len(body)-sha256.Size:]) {
		return index{}, errors.New("it is damaged")
	}
	x := index{}
	for r := bytes.NewReader(body[:len(body)-sha256.Size]); r.Len() > 0; {
		if err := x.read(r); err != nil {
			return index{}, err
		}
	}
	return x, nil
}

func (x index) read(r *bytes.Reader) error {
	n, err := binary.ReadUvarint(r)
	if err != nil || n > uint64(r.Len()) { //nolint:gosec // a length
		return errors.New("it is damaged")
	}
	path := make([]byte, n)
	if _, err := io.ReadFull(r, path); err != nil {
		return err
	}
	var fields [4]int64
	for i := range fields {
		if fields[i], err = binary.ReadVarint(r); err != nil {
			return err
		}
	}
	k := known{stat: stat{fields[0], fields[1], fields[2], uint64(fields[3])}} //nolint:gosec // bits
	if k.stat.size < 0 || k.stat.size > wire.MaxFileSize || wire.Blocks(k.stat.size)*sha256.Size > r.Len() {
		return errors.New("it is damaged")
	}
	k.blocks = make([]wire.Hash, wire.Blocks(k.stat.size))
	for i := range k.blocks {
		if _, err := io.ReadFull(r, k.blocks[i][:]); err != nil {
			return err
		}
	}
	x[string(path)] = k
	return nil
}

// save replaces the index atomically.
func (x index) save(state *os.Root) (err error) {
	const tmp = indexName + ".new"
	if err := state.RemoveAll(tmp); err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	f, err := state.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	err = x.write(f)
	if err = errors.Join(err, f.Close()); err == nil {
		err = state.Rename(tmp, indexName)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write the index: %w", err), state.RemoveAll(tmp))
	}
	return nil
}

func (x index) write(to io.Writer) error {
	w := bufio.NewWriterSize(to, 64<<10)
	if _, err := w.WriteString(indexMagic); err != nil {
		return err
	}
	sum := sha256.New()
	both := io.MultiWriter(w, sum)
	var buf []byte
	for path, k := range x {
		buf = append(binary.AppendUvarint(buf[:0], uint64(len(path))), path...)
		for _, v := range [4]int64{k.stat.size, k.stat.mtime, k.stat.ctime, int64(k.stat.inode)} { //nolint:gosec // bits
			buf = binary.AppendVarint(buf, v)
		}
		for _, h := range k.blocks {
			buf = append(buf, h[:]...)
		}
		if _, err := both.Write(buf); err != nil {
			return err
		}
	}
	if _, err := w.Write(sum.Sum(nil)); err != nil {
		return err
	}
	return w.Flush()
}
