package skill_test

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
	"strings"
	"testing"
)

// good is a SKILL.md that is taken.
const good = "---\nname: pdf-tools\ndescription: Reads and fills PDF forms.\n---\n# PDF\n\nDo this.\n"

// item is an entry of a ZIP that may say anything of itself.
type item struct {
	name    string
	content []byte
	mode    uint32 // Unix mode with its type; 0 for a plain file
	raw     bool   // stored, not deflated
	flags   uint16
	method  uint16 // 0 for what raw says
	extra   []byte // of both headers
	dos     uint32 // DOS attributes

	size   *uint32 // what is said in place of the truth
	crc    *uint32
	local  string // the name in the local header, in place of name
	at     *uint32
	packed []byte // in place of the packed content
}

func ptr(n uint32) *uint32 { return &n }

// file is a plain file.
func file(name, content string) item { return item{name: name, content: []byte(content)} }

// document is SKILL.md.
func document() item { return file("SKILL.md", good) }

func deflate(b []byte) []byte {
	var out bytes.Buffer
	w, err := flate.NewWriter(&out, flate.BestCompression)
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

// build writes a ZIP byte by byte.
func build(items ...item) []byte {
	var out, dir []byte
	for _, it := range items {
		at := uint32(len(out)) //nolint:gosec // a test's
		var entry []byte
		out, entry = it.write(out, at)
		dir = append(dir, entry...)
	}
	return finish(out, dir, len(items))
}

func finish(out, dir []byte, count int) []byte {
	le := binary.LittleEndian
	at := uint32(len(out)) //nolint:gosec // a test's
	out = append(out, dir...)
	out = le.AppendUint32(out, 0x06054b50)
	out = le.AppendUint32(out, 0)
	out = le.AppendUint16(out, uint16(count)) //nolint:gosec // a test's
	out = le.AppendUint16(out, uint16(count)) //nolint:gosec // a test's
	out = le.AppendUint32(out, uint32(len(dir)))
	out = le.AppendUint32(out, at)
	return le.AppendUint16(out, 0)
}

func (it item) write(out []byte, at uint32) (with, entry []byte) {
	le := binary.LittleEndian
	packed, method := it.content, uint16(0)
	if !it.raw && !strings.HasSuffix(it.name, "/") {
		packed, method = deflate(it.content), 8
	}
	if it.packed != nil {
		packed = it.packed
	}
	if it.method != 0 {
		method = it.method
	}
	crc, size, local := crc32.ChecksumIEEE(it.content), uint32(len(it.content)), it.name //nolint:gosec // a test's
	if it.crc != nil {
		crc = *it.crc
	}
	if it.size != nil {
		size = *it.size
	}
	if it.local != "" {
		local = it.local
	}
	if it.at != nil {
		at = *it.at
	}
	numbers := func(b []byte) []byte {
		b = le.AppendUint16(b, 20)
		b = le.AppendUint16(b, it.flags)
		b = le.AppendUint16(b, method)
		b = le.AppendUint32(b, 0x00210000)
		b = le.AppendUint32(b, crc)
		b = le.AppendUint32(b, uint32(len(packed))) //nolint:gosec // a test's
		return le.AppendUint32(b, size)
	}
	if it.at == nil {
		out = le.AppendUint32(out, 0x04034b50)
		out = numbers(out)
		out = le.AppendUint16(out, uint16(len(local)))    //nolint:gosec // a test's
		out = le.AppendUint16(out, uint16(len(it.extra))) //nolint:gosec // a test's
		out = append(append(append(out, local...), it.extra...), packed...)
	}
	entry = le.AppendUint32(entry, 0x02014b50)
	entry = le.AppendUint16(entry, 3<<8|20)
	entry = numbers(entry)
	entry = le.AppendUint16(entry, uint16(len(it.name)))  //nolint:gosec // a test's
	entry = le.AppendUint16(entry, uint16(len(it.extra))) //nolint:gosec // a test's
	entry = append(entry, 0, 0, 0, 0, 0, 0)               // comment, disk, internal attributes
	entry = le.AppendUint32(entry, it.mode<<16|it.dos)
	entry = le.AppendUint32(entry, at)
	return out, append(append(entry, it.name...), it.extra...)
}

// quoted is Fifield's bomb: each entry's content is the next local header, quoted
// as a stored block, and all that follows, so that one kernel is unpacked by all of them.
func quoted(entries, kernel int) []byte {
	core := item{name: "z", content: make([]byte, kernel)}
	body, entry := core.write(nil, 0)
	crcs, sizes := crc32.ChecksumIEEE(core.content), uint32(kernel) //nolint:gosec // a test's
	content := core.content
	dir := [][]byte{entry}
	offsets := []int{0}
	for i := range entries {
		head := body[:30+1] // the local header that comes next
		quote := append([]byte{0, byte(len(head)), 0, ^byte(len(head)), 0xff}, head...)
		content = append(bytes.Clone(head), content...)
		crcs, sizes = crc32.ChecksumIEEE(content), uint32(len(content)) //nolint:gosec // a test's
		rest := body[30+1:]
		it := item{name: string(rune('a' + i)), crc: ptr(crcs), size: ptr(sizes), packed: append(quote, rest...)}
		own, e := it.write(nil, 0)
		// What follows the quoted header is not repeated, but is the next entry's own content.
		shared := append(own[:30+1:30+1], quote[:5]...)
		for j := range offsets {
			offsets[j] += len(shared)
		}
		body = append(shared, body...)
		dir, offsets = append(dir, e), append(offsets, 0)
	}
	skill, e := document().write(nil, 0)
	dir, offsets = append(dir, e), append(offsets, len(body))
	body = append(body, skill...)
	var all []byte
	for i, e := range dir {
		binary.LittleEndian.PutUint32(e[42:], uint32(offsets[i])) //nolint:gosec // a test's
		all = append(all, e...)
	}
	return finish(body, all, len(dir))
}

// pack is a ZIP by the standard library, of pairs of name and content.
func pack(t testing.TB, pairs ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for i := 0; i < len(pairs); i += 2 {
		f, err := w.Create(pairs[i])
		if err == nil {
			_, err = f.Write([]byte(pairs[i+1]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
