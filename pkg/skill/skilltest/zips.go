// Package skilltest builds ZIPs byte by byte: ZIPs that no packer creates, and invalid ones. Tests of all readers
// of skills share it.
package skilltest

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
	"strings"
)

// ValidDocument is the content of a valid SKILL.md.
const ValidDocument = "---\nname: pdf-tools\ndescription: Reads and fills PDF forms.\n---\n# PDF\n\nDo this.\n"

// ZIPEntry is an entry of a ZIP whose headers may be false.
type ZIPEntry struct {
	Name    string
	Content []byte
	Mode    uint32 // Unix mode with type bits; 0 for a plain file
	Raw     bool   // stored, not deflated
	Flags   uint16
	Method  uint16 // 0 means the method that Raw implies
	Extra   []byte // in both headers
	DOS     uint32 // DOS attributes

	Size   *uint32 // stated instead of the actual value
	CRC    *uint32
	Local  string // the name in the local header, instead of Name
	At     *uint32
	Packed []byte // replaces the packed content
}

// falseNumber returns a number that a header states instead of the actual value.
func falseNumber(n uint32) *uint32 { return &n }

// FileEntry returns the entry of a plain file.
func FileEntry(name, content string) ZIPEntry { return ZIPEntry{Name: name, Content: []byte(content)} }

// DocumentEntry returns the entry of a valid SKILL.md.
func DocumentEntry() ZIPEntry { return FileEntry("SKILL.md", ValidDocument) }

func deflate(b []byte) []byte {
	var out bytes.Buffer
	w, err := flate.NewWriter(&out, flate.DefaultCompression)
	if err == nil {
		_, err = w.Write(b)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		panic(err)
	}
	return out.Bytes()
}

// BuildZIP returns a ZIP with the given entries.
func BuildZIP(items ...ZIPEntry) []byte {
	var out, dir []byte
	for _, it := range items {
		at := uint32(len(out)) //nolint:gosec // a small ZIP
		var entry []byte
		out, entry = it.AppendTo(out, at)
		dir = append(dir, entry...)
	}
	return AppendDirectory(out, dir, len(items))
}

// AppendDirectory appends to the entries in out the central directory dir, whose end record states count entries, and
// returns the complete ZIP.
func AppendDirectory(out, dir []byte, count int) []byte {
	le := binary.LittleEndian
	at := uint32(len(out)) //nolint:gosec // a small ZIP
	out = append(out, dir...)
	out = le.AppendUint32(out, 0x06054b50)
	out = le.AppendUint32(out, 0)
	out = le.AppendUint16(out, uint16(count)) //nolint:gosec // few entries
	out = le.AppendUint16(out, uint16(count)) //nolint:gosec // few entries
	out = le.AppendUint32(out, uint32(len(dir)))
	out = le.AppendUint32(out, at)
	return le.AppendUint16(out, 0)
}

// AppendTo appends the entry to the ZIP out at offset at. It returns the longer ZIP, and the entry's header for the
// central directory.
func (it ZIPEntry) AppendTo(out []byte, at uint32) (with, entry []byte) {
	le := binary.LittleEndian
	packed, method := it.Content, uint16(0)
	if !it.Raw && !strings.HasSuffix(it.Name, "/") {
		packed, method = deflate(it.Content), 8
	}
	if it.Packed != nil {
		packed = it.Packed
	}
	if it.Method != 0 {
		method = it.Method
	}
	crc, size, local := crc32.ChecksumIEEE(it.Content), uint32(len(it.Content)), it.Name //nolint:gosec // small content
	if it.CRC != nil {
		crc = *it.CRC
	}
	if it.Size != nil {
		size = *it.Size
	}
	if it.Local != "" {
		local = it.Local
	}
	if it.At != nil {
		at = *it.At
	}
	numbers := func(b []byte) []byte {
		b = le.AppendUint16(b, 20)
		b = le.AppendUint16(b, it.Flags)
		b = le.AppendUint16(b, method)
		b = le.AppendUint32(b, 0x00210000)
		b = le.AppendUint32(b, crc)
		b = le.AppendUint32(b, uint32(len(packed))) //nolint:gosec // small content
		return le.AppendUint32(b, size)
	}
	if it.At == nil {
		out = le.AppendUint32(out, 0x04034b50)
		out = numbers(out)
		out = le.AppendUint16(out, uint16(len(local)))    //nolint:gosec // a short name
		out = le.AppendUint16(out, uint16(len(it.Extra))) //nolint:gosec // a short field
		out = append(append(append(out, local...), it.Extra...), packed...)
	}
	entry = le.AppendUint32(entry, 0x02014b50)
	entry = le.AppendUint16(entry, 3<<8|20)
	entry = numbers(entry)
	entry = le.AppendUint16(entry, uint16(len(it.Name)))  //nolint:gosec // a short name
	entry = le.AppendUint16(entry, uint16(len(it.Extra))) //nolint:gosec // a short field
	entry = append(entry, 0, 0, 0, 0, 0, 0)               // comment, disk, internal attributes
	entry = le.AppendUint32(entry, it.Mode<<16|it.DOS)
	entry = le.AppendUint32(entry, at)
	return out, append(append(entry, it.Name...), it.Extra...)
}

// QuotedHeaderBomb returns Fifield's ZIP bomb, in which all entries unpack the same compressed data: the content of
// each entry is the next local header, quoted as a stored block, and everything that follows. kernel is the unpacked
// size of the shared data.
func QuotedHeaderBomb(entries, kernel int) []byte {
	core := ZIPEntry{Name: "z", Content: make([]byte, kernel)}
	body, entry := core.AppendTo(nil, 0)
	content := core.Content
	dir := [][]byte{entry}
	offsets := []int{0}
	for i := range entries {
		head := body[:30+1] // the next local header
		quote := append([]byte{0, byte(len(head)), 0, ^byte(len(head)), 0xff}, head...)
		content = append(bytes.Clone(head), content...)
		crcs, sizes := crc32.ChecksumIEEE(content), uint32(len(content)) //nolint:gosec // a small ZIP
		rest := body[30+1:]
		it := ZIPEntry{Name: string(rune('a' + i)), CRC: falseNumber(crcs), Size: falseNumber(sizes), Packed: append(quote, rest...)}
		own, e := it.AppendTo(nil, 0)
		// The data after the quoted header is not repeated: it is the content of the next entry.
		shared := append(own[:30+1:30+1], quote[:5]...)
		for j := range offsets {
			offsets[j] += len(shared)
		}
		body = append(shared, body...)
		dir, offsets = append(dir, e), append(offsets, 0)
	}
	skill, e := DocumentEntry().AppendTo(nil, 0)
	dir, offsets = append(dir, e), append(offsets, len(body))
	body = append(body, skill...)
	var all []byte
	for i, e := range dir {
		binary.LittleEndian.PutUint32(e[42:], uint32(offsets[i])) //nolint:gosec // a small ZIP
		all = append(all, e...)
	}
	return AppendDirectory(body, all, len(dir))
}
