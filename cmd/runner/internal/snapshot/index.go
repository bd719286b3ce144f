package snapshot

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// indexName is the name of the file in the state folder that stores the index. Snapshots do not contain it.
const indexName = ".spool-index"

const (
	// indexMagic is at the beginning of the index file. It changes with the format: a file of another version is
	// ignored.
	indexMagic = "spool-index-2\n"
	// headLen is the length in bytes of the part of the index file after indexMagic: the head as JSON, spaces, and a
	// checksum.
	headLen = 512
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var errDamaged = errors.New("it is damaged")

// stat has the metadata of a file that changes when the content changes.
type stat struct {
	size, mtime, ctime int64 // bytes, nanoseconds
	inode              uint64
}

// statOf returns the stat of a file.
func statOf(info fs.FileInfo) stat {
	ctime, inode, _ := identity(info)
	return stat{info.Size(), info.ModTime().UnixNano(), ctime, inode}
}

// hasLinks reports whether a file has several names.
func hasLinks(info fs.FileInfo) bool {
	_, _, links := identity(info)
	return links > 1
}

// The windows in which a file may change without a change of its times: the kernel's clock ticks, and some file systems
// store whole seconds.
const (
	tick       = 100 * time.Millisecond
	tickSecond = 2 * time.Second
)

// isSettled reports whether any change of a file after read, the time at which it was read, will change its stat.
// Otherwise the next snapshot has to read the file again.
func (s stat) isSettled(read time.Time) bool {
	window := tick
	if s.mtime%int64(time.Second) == 0 {
		window = tickSecond
	}
	return read.Sub(time.Unix(0, s.mtime)).Abs() > window
}

// known is the state of a file, folder or link when the last snapshot looked at it.
type known struct {
	kind      wire.EntryKind
	mode      uint32
	size      int64 // of the content; for a file that changed while it was read, stat.size may differ
	stat      stat
	trusted   bool // a file with this stat has this content, so it need not be read
	links     bool // the file has several names
	unsettled bool // the file changed during every attempt to read it
	target    string
	blocks    []wire.Hash
}

// hasEqualEntry reports whether k and l are the same entry in a snapshot.
func (k known) hasEqualEntry(l known) bool {
	return k.kind == l.kind && k.mode == l.mode && k.size == l.size && k.unsettled == l.unsettled && k.target == l.target &&
		(k.kind == wire.KindSymlink || k.stat.mtime == l.stat.mtime) && slices.Equal(k.blocks, l.blocks)
}

// equals reports whether all fields of k and l are equal.
func (k known) equals(l known) bool {
	return k.hasEqualEntry(l) && k.stat == l.stat && k.trusted == l.trusted && k.links == l.links
}

// section is the part of the index that lists the entries of one folder.
type section struct {
	always  bool   // every snapshot has to walk the folder
	raw     []byte // as read from the file; nil if the section is new
	entries map[string]known
}

// indexHead holds the fields of the index that concern all of it.
type indexHead struct {
	ID     string    `json:"id,omitempty"`    // the snapshot whose entries these are, "" if it was not stored
	Token  string    `json:"token,omitempty"` // of the watcher's answer that this index includes
	Since  int       `json:"since,omitempty"` // number of snapshots since the last full walk
	FullAt time.Time `json:"fullAt"`          // time of the last full walk
}

// index records the files, folders and links that the last snapshot found, by folder, so that the next one reads only
// what has changed. The agent can write to its file; a forged index damages only the agent's own snapshots.
type index struct {
	indexHead
	folders map[string]*section
	file    *os.File // from which it was read, or to which it was saved; nil if there is none
}

func newIndex() *index { return &index{folders: map[string]*section{}} }

// get returns an entry by its path. A section that cannot be parsed counts as absent.
func (x *index) get(path string) (known, bool) {
	folder, name := wire.SplitPath(path)
	s := x.folders[folder]
	if s == nil {
		return known{}, false
	}
	k, ok := s.list()[name]
	return k, ok
}

// put adds an entry to the section of its folder, which must be a section that this process created.
func (x *index) put(path string, k known) {
	folder, name := wire.SplitPath(path)
	s := x.folders[folder]
	if s == nil {
		s = &section{entries: map[string]known{}}
		x.folders[folder] = s
	}
	s.entries[name] = k
}

// list returns the entries of a section, which the caller must not change.
func (s *section) list() map[string]known {
	if s.entries == nil {
		s.entries = map[string]known{}
		for r := bytes.NewReader(s.raw); r.Len() > 0; {
			name, k, err := readKnown(r)
			if err != nil {
				s.entries = map[string]known{}
				break
			}
			s.entries[name] = k
		}
	}
	return s.entries
}

// removeBelow removes the sections of a folder and of all folders below it.
func (x *index) removeBelow(folder string) {
	for path := range x.folders {
		if wire.IsBelow(path, folder) {
			delete(x.folders, path)
		}
	}
}

// loadIndex reads the index from the state folder. If the index does not exist, it returns an empty one; after an error it returns an empty one
// too, which can be used: all files are read then.
func loadIndex(state *os.Root) (*index, error) {
	f, err := state.OpenFile(indexName, os.O_RDWR|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return newIndex(), nil
	}
	if err != nil {
		return newIndex(), err
	}
	x := newIndex()
	x.file = f
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() { // the agent can put a pipe there
		err = errors.New("not a regular file")
	}
	var raw []byte
	if err == nil {
		raw, err = io.ReadAll(f)
	}
	if err == nil {
		err = x.decode(raw)
	}
	if err != nil {
		x.close()
		return newIndex(), err
	}
	return x, nil
}

// decode reads the content of an index file. It returns an error if the file is damaged or of another version.
func (x *index) decode(raw []byte) error {
	rest, ok := bytes.CutPrefix(raw, []byte(indexMagic))
	if !ok || len(rest) < headLen+crc32.Size {
		return errors.New("not an index of this version")
	}
	if err := x.readHead(rest[:headLen]); err != nil {
		return err
	}
	body := rest[headLen : len(rest)-crc32.Size]
	if crc32.Checksum(body, castagnoli) != binary.BigEndian.Uint32(rest[len(rest)-crc32.Size:]) {
		return errDamaged
	}
	for len(body) > 0 {
		var err error
		if body, err = x.readSection(body); err != nil {
			return err
		}
	}
	return nil
}

func (x *index) close() {
	if x != nil && x.file != nil {
		_ = x.file.Close() // setHead reports the errors of writing
	}
}

func (x *index) readHead(raw []byte) error {
	text := raw[:headLen-crc32.Size]
	if crc32.Checksum(text, castagnoli) != binary.BigEndian.Uint32(raw[len(text):]) {
		return errDamaged
	}
	return json.Unmarshal(text, &x.indexHead)
}

// readSection reads the first section of body into x and returns the rest of body.
func (x *index) readSection(body []byte) ([]byte, error) {
	path, body, ok := readBytes(body)
	if !ok || len(body) == 0 {
		return nil, errDamaged
	}
	always := body[0] != 0
	raw, rest, ok := readBytes(body[1:])
	if !ok {
		return nil, errDamaged
	}
	x.folders[string(path)] = &section{always: always, raw: raw}
	return rest, nil
}

// readBytes reads bytes that appendBytes has written to b. It returns them, and the rest of b after them. ok is false
// if b is too short.
func readBytes(b []byte) (content, rest []byte, ok bool) {
	n, k := binary.Uvarint(b)
	if k <= 0 || n > uint64(len(b)-k) {
		return nil, nil, false
	}
	return b[k : k+int(n)], b[k+int(n):], true //nolint:gosec // not more than len(b)
}

// appendBytes appends the length of b, and b, to to.
func appendBytes[T ~string | ~[]byte](to []byte, b T) []byte {
	return append(binary.AppendUvarint(to, uint64(len(b))), b...)
}

// The flags of an entry; the kind is in the lowest two bits.
const (
	flagTrusted = 1 << (iota + 2)
	flagLinks
	flagUnsettled
)

var indexKinds = [...]wire.EntryKind{wire.KindFile, wire.KindDir, wire.KindSymlink}

// append appends the binary form of an entry and its name to to.
func (k known) append(to []byte, name string) []byte {
	to = appendBytes(to, name)
	flags := byte(slices.Index(indexKinds[:], k.kind)) //nolint:gosec // 0 to 2
	if k.trusted {
		flags |= flagTrusted
	}
	if k.links {
		flags |= flagLinks
	}
	if k.unsettled {
		flags |= flagUnsettled
	}
	to = append(to, flags)
	to = binary.AppendUvarint(to, uint64(k.mode))
	for _, v := range [5]int64{k.size, k.stat.size, k.stat.mtime, k.stat.ctime, int64(k.stat.inode)} { //nolint:gosec // bits
		to = binary.AppendVarint(to, v)
	}
	to = appendBytes(to, k.target)
	for _, h := range k.blocks {
		to = append(to, h[:]...)
	}
	return to
}

// readKnown reads an entry of the index in the form in which known.append writes it.
func readKnown(r *bytes.Reader) (name string, k known, err error) {
	if name, err = readString(r); err != nil {
		return "", k, err
	}
	flags, err := r.ReadByte()
	if err != nil || int(flags&3) >= len(indexKinds) {
		return "", k, errDamaged
	}
	k = known{kind: indexKinds[flags&3], trusted: flags&flagTrusted != 0, links: flags&flagLinks != 0, unsettled: flags&flagUnsettled != 0}
	mode, err := binary.ReadUvarint(r)
	if err != nil || mode > 0o777 {
		return "", k, errDamaged
	}
	k.mode = uint32(mode) //nolint:gosec // see above
	var fields [5]int64
	for i := range fields {
		if fields[i], err = binary.ReadVarint(r); err != nil {
			return "", k, err
		}
	}
	k.size, k.stat = fields[0], stat{fields[1], fields[2], fields[3], uint64(fields[4])} //nolint:gosec // bits
	if k.target, err = readString(r); err != nil {
		return "", k, err
	}
	if k.kind != wire.KindFile {
		return name, k, nil
	}
	if k.size < 0 || k.size > wire.MaxFileSize || wire.BlockCount(k.size)*len(wire.Hash{}) > r.Len() {
		return "", k, errDamaged
	}
	k.blocks = make([]wire.Hash, wire.BlockCount(k.size))
	for i := range k.blocks {
		if _, err := io.ReadFull(r, k.blocks[i][:]); err != nil {
			return "", k, err
		}
	}
	return name, k, nil
}

func readString(r *bytes.Reader) (string, error) {
	n, err := binary.ReadUvarint(r)
	if err != nil || n > uint64(r.Len()) { //nolint:gosec // a length
		return "", errDamaged
	}
	b := make([]byte, n)
	_, err = io.ReadFull(r, b)
	return string(b), err
}

// save replaces the index atomically. The caller may change the head later with setHead, and calls close.
func (x *index) save(state *os.Root) (err error) {
	const tmp = indexName + ".new"
	if err := state.RemoveAll(tmp); err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	f, err := state.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	if _, err = f.Write(x.encode()); err == nil {
		err = state.Rename(tmp, indexName)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write the index: %w", err), f.Close(), state.RemoveAll(tmp))
	}
	x.file = f
	return nil
}

// encode returns the content of the index file.
func (x *index) encode() []byte {
	size := 0
	for path, s := range x.folders {
		size += len(path) + len(s.raw) + 16
		if s.raw == nil {
			size += 128 * len(s.entries)
		}
	}
	out := make([]byte, 0, size+headLen+len(indexMagic))
	out = append(append(out, indexMagic...), x.encodeHead()...)
	start := len(out)
	var raw []byte
	for path, s := range x.folders {
		content := s.raw
		if content == nil {
			raw = raw[:0]
			for name, k := range s.entries {
				raw = k.append(raw, name)
			}
			content = raw
		}
		out = appendBytes(out, path)
		always := byte(0)
		if s.always {
			always = 1
		}
		out = appendBytes(append(out, always), content)
	}
	return binary.BigEndian.AppendUint32(out, crc32.Checksum(out[start:], castagnoli))
}

// encodeHead returns the head with its checksum, headLen bytes. A head that is too long is replaced by an empty one.
func (x *index) encodeHead() []byte {
	text, err := json.Marshal(x.indexHead)
	if err != nil || len(text) > headLen-crc32.Size { // a forged token or id
		text = []byte("{}")
	}
	text = append(text, strings.Repeat(" ", headLen-crc32.Size-len(text))...)
	return binary.BigEndian.AppendUint32(text, crc32.Checksum(text, castagnoli))
}

// writeHead replaces the head of the index in its file. If another snapshot has replaced the file, that has no effect.
func (x *index) writeHead() error {
	if _, err := x.file.WriteAt(x.encodeHead(), int64(len(indexMagic))); err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	return nil
}
