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

// indexFileName is the name of the file in the state folder that stores the index. Snapshots do not contain it.
const indexFileName = ".spool-index"

const (
	// indexMagic is at the beginning of the index file. It changes with the format: a file of another version is
	// ignored.
	indexMagic = "spool-index-2\n"
	// indexHeadLength is the length in bytes of the part of the index file after indexMagic: the head as JSON, spaces, and a
	// checksum.
	indexHeadLength = 512
)

// castagnoliTable is the table of the checksums in the index file, CRC-32C.
var castagnoliTable = crc32.MakeTable(crc32.Castagnoli)

// errIndexDamaged is returned for an index file that cannot be decoded.
var errIndexDamaged = errors.New("the index is damaged")

// fileStat holds the metadata of a file of which a part changes whenever the content changes.
type fileStat struct {
	size, mtime, ctime int64 // bytes, nanoseconds
	inode              uint64
}

// fileStatOf returns the fileStat of a file.
func fileStatOf(info fs.FileInfo) fileStat {
	ctime, inode, _ := fileIdentity(info)
	return fileStat{info.Size(), info.ModTime().UnixNano(), ctime, inode}
}

// hasHardLinks reports whether a file has more than one name.
func hasHardLinks(info fs.FileInfo) bool {
	_, _, links := fileIdentity(info)
	return links > 1
}

// The windows in which a file may change without a change of its times: the kernel's clock ticks, and some file systems
// store whole seconds.
const (
	clockGranularity       = 100 * time.Millisecond
	wholeSecondGranularity = 2 * time.Second
)

// isSettled reports whether every change of the file after read, the time at which it was read, will change its fileStat. Otherwise the next
// snapshot has to read the file again.
func (s fileStat) isSettled(read time.Time) bool {
	window := clockGranularity
	if s.mtime%int64(time.Second) == 0 {
		window = wholeSecondGranularity
	}
	return read.Sub(time.Unix(0, s.mtime)).Abs() > window
}

// indexEntry is the state of a file, folder or link at the last snapshot.
type indexEntry struct {
	kind      wire.EntryKind
	mode      uint32
	size      int64 // of the content; for a file that changed while it was read, stat.size may differ
	stat      fileStat
	trusted   bool // a file with this stat has this content, so it need not be read
	links     bool // the file has several names
	unsettled bool // the file changed during every attempt to read it
	target    string
	blocks    []wire.Hash
}

// hasEqualEntry reports whether k and l have the same entry in a snapshot.
func (k indexEntry) hasEqualEntry(l indexEntry) bool {
	return k.kind == l.kind && k.mode == l.mode && k.size == l.size && k.unsettled == l.unsettled && k.target == l.target &&
		(k.kind == wire.KindSymlink || k.stat.mtime == l.stat.mtime) && slices.Equal(k.blocks, l.blocks)
}

// equals reports whether all fields of k and l are equal.
func (k indexEntry) equals(l indexEntry) bool {
	return k.hasEqualEntry(l) && k.stat == l.stat && k.trusted == l.trusted && k.links == l.links
}

// indexSection is the part of the index that lists the entries of one folder.
type indexSection struct {
	always  bool   // every snapshot has to walk the folder
	raw     []byte // as read from the file; nil if the section is new
	entries map[string]indexEntry
}

// indexHead holds the fields of the index that concern the whole index.
type indexHead struct {
	ID     string    `json:"id,omitempty"`    // the snapshot whose entries these are, "" if it was not stored
	Token  string    `json:"token,omitempty"` // of the watcher's answer that this index includes
	Since  int       `json:"since,omitempty"` // number of snapshots since the last full walk
	FullAt time.Time `json:"fullAt"`          // time of the last full walk
}

// index records the files, folders and links that the last snapshot found, by folder, so that the next snapshot reads only what has changed. The
// agent can write to the index file; a forged index damages only the agent's own snapshots.
type index struct {
	indexHead
	folders map[string]*indexSection
	file    *os.File // from which it was read, or to which it was saved; nil if there is none
}

// newIndex returns an empty index.
func newIndex() *index { return &index{folders: map[string]*indexSection{}} }

// entryAt returns the entry at a path. A section that cannot be parsed counts as absent.
func (x *index) entryAt(path string) (indexEntry, bool) {
	folder, name := wire.SplitPath(path)
	s := x.folders[folder]
	if s == nil {
		return indexEntry{}, false
	}
	k, ok := s.parsedEntries()[name]
	return k, ok
}

// addEntry adds an entry to the section of its folder, which must be a section that this process has created.
func (x *index) addEntry(path string, k indexEntry) {
	folder, name := wire.SplitPath(path)
	s := x.folders[folder]
	if s == nil {
		s = &indexSection{entries: map[string]indexEntry{}}
		x.folders[folder] = s
	}
	s.entries[name] = k
}

// parsedEntries returns the entries of a section, by name. The caller must not change them.
func (s *indexSection) parsedEntries() map[string]indexEntry {
	if s.entries == nil {
		s.entries = map[string]indexEntry{}
		for r := bytes.NewReader(s.raw); r.Len() > 0; {
			name, k, err := readIndexEntry(r)
			if err != nil {
				s.entries = map[string]indexEntry{}
				break
			}
			s.entries[name] = k
		}
	}
	return s.entries
}

// removeSectionsBelow removes the sections of a folder and of all folders below it.
func (x *index) removeSectionsBelow(folder string) {
	for path := range x.folders {
		if wire.IsBelow(path, folder) {
			delete(x.folders, path)
		}
	}
}

// loadIndex reads the index from the state folder. If there is no index file, it returns an empty index. After an error it returns an empty index
// too, which can be used: the snapshot then reads all files.
func loadIndex(state *os.Root) (*index, error) {
	f, err := state.OpenFile(indexFileName, os.O_RDWR|syscall.O_NONBLOCK, 0)
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
	if !ok || len(rest) < indexHeadLength+crc32.Size {
		return errors.New("not an index of this version")
	}
	if err := x.readHead(rest[:indexHeadLength]); err != nil {
		return err
	}
	body := rest[indexHeadLength : len(rest)-crc32.Size]
	if crc32.Checksum(body, castagnoliTable) != binary.BigEndian.Uint32(rest[len(rest)-crc32.Size:]) {
		return errIndexDamaged
	}
	for len(body) > 0 {
		var err error
		if body, err = x.readSection(body); err != nil {
			return err
		}
	}
	return nil
}

// close closes the index file.
func (x *index) close() {
	if x != nil && x.file != nil {
		_ = x.file.Close() // writeHead reports the errors of writing
	}
}

// readHead decodes the head of an index file, after indexMagic.
func (x *index) readHead(raw []byte) error {
	text := raw[:indexHeadLength-crc32.Size]
	if crc32.Checksum(text, castagnoliTable) != binary.BigEndian.Uint32(raw[len(text):]) {
		return errIndexDamaged
	}
	return json.Unmarshal(text, &x.indexHead)
}

// readSection decodes the first section of body into x and returns the rest of body.
func (x *index) readSection(body []byte) ([]byte, error) {
	path, body, ok := readBytes(body)
	if !ok || len(body) == 0 {
		return nil, errIndexDamaged
	}
	always := body[0] != 0
	raw, rest, ok := readBytes(body[1:])
	if !ok {
		return nil, errIndexDamaged
	}
	x.folders[string(path)] = &indexSection{always: always, raw: raw}
	return rest, nil
}

// readBytes returns the bytes that appendBytes has written to the beginning of b, and the rest of b after them. ok is false if b is too short.
func readBytes(b []byte) (content, rest []byte, ok bool) {
	n, k := binary.Uvarint(b)
	if k <= 0 || n > uint64(len(b)-k) {
		return nil, nil, false
	}
	return b[k : k+int(n)], b[k+int(n):], true //nolint:gosec // not more than len(b)
}

// appendBytes appends the length of b, and then b, to the slice to.
func appendBytes[T ~string | ~[]byte](to []byte, b T) []byte {
	return append(binary.AppendUvarint(to, uint64(len(b))), b...)
}

// The flags of an entry; the kind is in the lowest two bits.
const (
	entryFlagTrusted = 1 << (iota + 2)
	entryFlagLinks
	entryFlagUnsettled
)

// indexKinds are the kinds of entries, by their number in the index file.
var indexKinds = [...]wire.EntryKind{wire.KindFile, wire.KindDir, wire.KindSymlink}

// appendTo appends the binary form of an entry and its name to the slice to.
func (k indexEntry) appendTo(to []byte, name string) []byte {
	to = appendBytes(to, name)
	flags := byte(slices.Index(indexKinds[:], k.kind)) //nolint:gosec // 0 to 2
	if k.trusted {
		flags |= entryFlagTrusted
	}
	if k.links {
		flags |= entryFlagLinks
	}
	if k.unsettled {
		flags |= entryFlagUnsettled
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

// readIndexEntry decodes an entry of the index in the form in which indexEntry.appendTo writes it.
func readIndexEntry(r *bytes.Reader) (name string, k indexEntry, err error) {
	if name, err = readString(r); err != nil {
		return "", k, err
	}
	flags, err := r.ReadByte()
	if err != nil || int(flags&3) >= len(indexKinds) {
		return "", k, errIndexDamaged
	}
	k = indexEntry{kind: indexKinds[flags&3], trusted: flags&entryFlagTrusted != 0, links: flags&entryFlagLinks != 0, unsettled: flags&entryFlagUnsettled != 0}
	mode, err := binary.ReadUvarint(r)
	if err != nil || mode > 0o777 {
		return "", k, errIndexDamaged
	}
	k.mode = uint32(mode) //nolint:gosec // see above
	var fields [5]int64
	for i := range fields {
		if fields[i], err = binary.ReadVarint(r); err != nil {
			return "", k, err
		}
	}
	k.size, k.stat = fields[0], fileStat{fields[1], fields[2], fields[3], uint64(fields[4])} //nolint:gosec // bits
	if k.target, err = readString(r); err != nil {
		return "", k, err
	}
	if k.kind != wire.KindFile {
		return name, k, nil
	}
	if k.size < 0 || k.size > wire.MaxFileSize || wire.BlockCount(k.size)*len(wire.Hash{}) > r.Len() {
		return "", k, errIndexDamaged
	}
	k.blocks = make([]wire.Hash, wire.BlockCount(k.size))
	for i := range k.blocks {
		if _, err := io.ReadFull(r, k.blocks[i][:]); err != nil {
			return "", k, err
		}
	}
	return name, k, nil
}

// readString decodes a string of an index entry.
func readString(r *bytes.Reader) (string, error) {
	n, err := binary.ReadUvarint(r)
	if err != nil || n > uint64(r.Len()) { //nolint:gosec // a length
		return "", errIndexDamaged
	}
	b := make([]byte, n)
	_, err = io.ReadFull(r, b)
	return string(b), err
}

// save replaces the index file atomically. The caller may change the head later with writeHead, and must call close.
func (x *index) save(state *os.Root) (err error) {
	const tmp = indexFileName + ".new"
	if err := state.RemoveAll(tmp); err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	f, err := state.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	if _, err = f.Write(x.encode()); err == nil {
		err = state.Rename(tmp, indexFileName)
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
	out := make([]byte, 0, size+indexHeadLength+len(indexMagic))
	out = append(append(out, indexMagic...), x.encodeHead()...)
	start := len(out)
	var raw []byte
	for path, s := range x.folders {
		content := s.raw
		if content == nil {
			raw = raw[:0]
			for name, k := range s.entries {
				raw = k.appendTo(raw, name)
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
	return binary.BigEndian.AppendUint32(out, crc32.Checksum(out[start:], castagnoliTable))
}

// encodeHead returns the head with its checksum, indexHeadLength bytes. A head that is too long is replaced by an empty one.
func (x *index) encodeHead() []byte {
	text, err := json.Marshal(x.indexHead)
	if err != nil || len(text) > indexHeadLength-crc32.Size { // a forged token or id
		text = []byte("{}")
	}
	text = append(text, strings.Repeat(" ", indexHeadLength-crc32.Size-len(text))...)
	return binary.BigEndian.AppendUint32(text, crc32.Checksum(text, castagnoliTable))
}

// writeHead replaces the head of the index in its file. If another snapshot has replaced the file, that has no effect.
func (x *index) writeHead() error {
	if _, err := x.file.WriteAt(x.encodeHead(), int64(len(indexMagic))); err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	return nil
}
