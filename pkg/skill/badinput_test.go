package skill_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/skill"
)

// bad is a ZIP that is refused.
type bad struct {
	name  string
	zip   []byte
	code  string
	field string // "" for zip
	says  string // a part of the message
}

// refuse sees that Check, Extract and Tar refuse a ZIP, and that nothing is written.
func refuse(t *testing.T, b bad) {
	t.Helper()
	r, size := bytes.NewReader(b.zip), int64(len(b.zip))
	parent := t.TempDir()
	_, checked := skill.Check(t.Context(), r, size, skill.Limits{})
	_, extracted := skill.Extract(t.Context(), r, size, parent, sum(b.zip))
	tarred := skill.Tar(t.Context(), r, size, io.Discard)
	if b.field == "" {
		b.field = "zip"
	}
	for by, err := range map[string]error{"Check": checked, "Extract": extracted, "Tar": tarred} {
		var refused *skill.Error
		if !errors.As(err, &refused) || refused.Code != b.code || refused.Field != b.field || !strings.Contains(err.Error(), b.says) {
			t.Errorf("%s: %v, want %s on %s: …%s…", by, err, b.code, b.field, b.says)
			continue
		}
		if m := refused.Error(); len(m) > 600 || strings.ContainsFunc(m, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Errorf("%s: not to be shown: %q", by, m)
		}
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
		t.Errorf("%d left behind, %v", len(left), err)
	}
}

func refuseAll(t *testing.T, list []bad) {
	t.Helper()
	for _, b := range list {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			refuse(t, b)
		})
	}
}

func extra(id uint16, field ...byte) []byte {
	b := binary.LittleEndian.AppendUint16(nil, id)
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(field))), field...) //nolint:gosec // a test's
}

// TestBadInput1: paths that lead out, and entries that are neither file nor folder.
func TestBadInput1(t *testing.T) {
	t.Parallel()
	entry := func(name string, it item, says string) bad {
		return bad{name, build(document(), it), skill.CodeEntry, "", says}
	}
	var list []bad
	for name, path := range map[string]string{
		"dot dot": "../x", "dot dot inside": "a/../../x", "dot dot at the end": "a/..", "dot": "./x", "two slashes": "a//b",
		"absolute": "/etc/passwd", "backslash": `a\..\x`, "drive": "C:/x", "drive without slash": "c:x", "UNC": `\\host\x`, "root": "/",
		"newline": "a\nb", "NUL": "a\x00b", "escape": "a\x1b[2Jb", "DEL": "a\x7f", "C1": "a\u0085b", "right to left": "a\u202egpj.exe",
		"not UTF-8": "a\xff", "empty": "", "long": strings.Repeat("a/", 20) + strings.Repeat("b", 1000), "long element": strings.Repeat("b", 256),
		"deep": strings.Repeat("a/", 40) + "b",
	} {
		list = append(list, entry(name, file(path, "x"), "entry "))
	}
	for name, mode := range map[string]uint32{"symlink": 0o120777, "character device": 0o020666, "block device": 0o060666, "pipe": 0o010666, "socket": 0o140666} {
		list = append(list, entry(name, item{name: "x", content: []byte("/etc/passwd"), mode: mode}, `entry "x" is a link, a device`))
	}
	hard := extra(0x000d, append(make([]byte, 12), "SKILL.md"...)...)
	asi := extra(0x756e, append(make([]byte, 14), "/etc/passwd"...)...)
	asiMode := extra(0x756e, 0, 0, 0, 0, 0xff, 0xa1, 0, 0, 0, 0, 0, 0, 0, 0)
	list = append(list,
		entry("hard link", item{name: "x", extra: hard}, "link"),
		entry("hard link behind another field", item{name: "x", extra: append(extra(0x5455, 1, 2), hard...)}, "link"),
		entry("link of ASi", item{name: "x", extra: asi}, "link"),
		entry("link by the mode of ASi", item{name: "x", extra: asiMode}, "link"),
		entry("reparse point", item{name: "x", dos: 0x400}, "link"),
		entry("volume label", item{name: "x", dos: 0x08}, "device"),
		entry("folder by mode", item{name: "x", mode: 0o040755}, "folder"),
		entry("file by mode", item{name: "x/", mode: 0o100644}, "folder"),
	)
	refuseAll(t, list)
}

// TestBadInput1LocalHeader: what only the header before the content says is no way around.
func TestBadInput1LocalHeader(t *testing.T) {
	t.Parallel()
	linked := item{name: "y", content: []byte("x")}
	z := build(document(), linked)
	refuse(t, bad{"", build(document(), item{name: "x", content: []byte("x"), local: "../"}), skill.CodeZIP, "", `entry "x" is something else`})
	// The field of a link stands in the local header alone.
	link := extra(0x000d, append(make([]byte, 12), "SKILL.md"...)...)
	first, dir1 := document().write(nil, 0)
	second, _ := item{name: "x", content: []byte("x"), extra: link}.write(nil, uint32(len(first)))
	_, dir2 := item{name: "x", content: []byte("x")}.write(nil, uint32(len(first)))
	refuse(t, bad{"", finish(append(first, second...), append(dir1, dir2...), 2), skill.CodeEntry, "", "link"})
	if _, err := skill.Check(t.Context(), bytes.NewReader(z), int64(len(z)), skill.Limits{}); err != nil {
		t.Errorf("without any of it: %v", err)
	}
}

// TestBadInput2: bombs, lies and what is too large.
func TestBadInput2(t *testing.T) {
	t.Parallel()
	same, dir := item{name: "a", content: []byte("twice")}.write(nil, 0)
	_, dir2 := item{name: "b", content: []byte("twice")}.write(nil, 0)
	doc, docDir := document().write(nil, uint32(len(same))) //nolint:gosec // a test's
	overlap := finish(append(bytes.Clone(same), doc...), append(append(bytes.Clone(dir), dir2...), docDir...), 3)
	many := func(n int, name string) []byte {
		items := make([]item, 0, n+1)
		for i := range n {
			items = append(items, file(fmt.Sprintf(name, i), ""))
		}
		return build(append(items, document())...)
	}
	zip, large := skill.CodeZIP, skill.CodeTooLarge
	zeros := item{name: "zeros", content: make([]byte, 1<<20)}
	lies := deflate(make([]byte, 90<<20))
	good := build(document())
	refuseAll(t, []bad{
		{"one content under two names", overlap, zip, "", `entry "b" is something else`},
		{"quoted overlap", quoted(20, 60<<10), zip, "", "overlaps"},
		{"ratio", build(document(), zeros), large, "", `entry "zeros" unpacks to more than 100 times`},
		{"ratio in sum", build(ratios()...), large, "", "unpacks to more than 100 times its size"},
		{"says too little", build(document(), item{name: "x", packed: lies, size: ptr(10)}), zip, "", "unpacks to more than the 10 bytes"},
		{"says too much", build(document(), item{name: "x", content: random(100), size: ptr(200)}), zip, "", "unpacks to 100 bytes, not to the 200"},
		{"stored with two sizes", build(document(), item{name: "x", content: random(100), raw: true, size: ptr(99)}), zip, "", "two sizes"},
		{"checksum", build(document(), item{name: "x", content: random(100), crc: ptr(1)}), zip, "", "checksum"},
		{"not deflated", build(document(), item{name: "x", packed: []byte{0xff, 0xff, 0xff}}), zip, "", "does not unpack"},
		{"cut off", build(document(), item{name: "x", content: random(1000), packed: deflate(random(1000))[:500]}), zip, "", "does not unpack"},
		{"10,001 files", many(10_000, "f%d"), large, "", "more than 10000 files"},
		{"10,001 folders", many(10_001, "d%d/"), large, "", "more than 10000 folders"},
		{"10,001 folders in paths", folders(), large, "", "more than 10000 folders"},
		{"encrypted", build(document(), item{name: "x", flags: 1}), zip, "", `entry "x" is encrypted`},
		{"strongly encrypted", build(document(), item{name: "x", flags: 1 << 6}), zip, "", "encrypted"},
		{"unknown method", build(document(), item{name: "x", method: 93}), zip, "", `entry "x" is packed by method 93`},
		{"ZIP64 of an entry", build(document(), item{name: "x", size: ptr(1<<32 - 1)}), zip, "", "ZIP64"},
		{"folder with content", build(document(), item{name: "d/", content: []byte("x")}), zip, "", "folder with content"},
		{"beyond the directory", build(document(), item{name: "x", content: []byte("x"), at: ptr(1 << 20)}), zip, "", "does not lie where"},
		{"no local header", build(document(), item{name: "x", at: ptr(3)}), zip, "", "does not lie where"},
		{"empty", nil, zip, "", "not a ZIP"},
		{"text", []byte(strings.Repeat("no zip ", 100)), zip, "", "not a ZIP"},
		{"half", good[:len(good)/2], zip, "", "not a ZIP"},
		{"something behind", append(bytes.Clone(good), "x"...), zip, "", "follows its end"},
		{"something before", append([]byte("#!/bin/sh\n"), good...), zip, "", "does not lie where"},
		{"too few entries said", counted(build(document(), file("x", "x")), 1), zip, "", "shorter than it says"},
		{"too many entries said", counted(good, 2), zip, "", "ends too early"},
	})
}

// counted says another number of entries.
func counted(z []byte, n uint16) []byte {
	z = bytes.Clone(z)
	binary.LittleEndian.PutUint16(z[len(z)-14:], n)
	binary.LittleEndian.PutUint16(z[len(z)-12:], n)
	return z
}

func random(n int) []byte {
	b := make([]byte, n)
	if _, err := rand.NewChaCha8([32]byte{}).Read(b); err != nil {
		panic(err)
	}
	return b
}

// ratios are small files that are no bombs by themselves, and are one together.
func ratios() []item {
	list := []item{document()}
	for i := range 300 {
		list = append(list, item{name: fmt.Sprint(i), content: make([]byte, 60<<10)})
	}
	return list
}

// folders is a ZIP whose folders have no entries of their own.
func folders() []byte {
	items := []item{document()}
	for i := range 500 {
		items = append(items, file(fmt.Sprintf("%d", i)+strings.Repeat("/d", 21)+"/f", ""))
	}
	return build(items...)
}

// TestBadInput2Large: over the limits of size, and exactly at them.
func TestBadInput2Large(t *testing.T) {
	t.Parallel()
	z := build(document(), item{name: "x", content: random(10_000), raw: true}, file("y", strings.Repeat("word ", 1000)))
	size := int64(len(z))
	unpacked := int64(len(good) + 10_000 + 5000)
	for _, c := range []struct {
		name string
		lim  skill.Limits
		says string // "" if it is taken
	}{
		{"all at the limit", skill.Limits{Files: 3, Packed: size, Unpacked: unpacked, Document: int64(len(good))}, ""},
		{"files", skill.Limits{Files: 2}, "more than 2 files"},
		{"packed", skill.Limits{Packed: size - 1}, fmt.Sprintf("has %d bytes", size)},
		{"unpacked", skill.Limits{Unpacked: unpacked - 1}, "unpacks to more than"},
		{"document", skill.Limits{Document: int64(len(good)) - 1}, "SKILL.md: has"},
	} {
		_, err := skill.Check(t.Context(), bytes.NewReader(z), size, c.lim)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// Never read: it is refused by its size alone.
	_, err := skill.Check(t.Context(), nil, skill.MaxPacked+1, skill.Limits{})
	var refused *skill.Error
	if !errors.As(err, &refused) || refused.Code != skill.CodeTooLarge {
		t.Errorf("over 100 MiB: %v", err)
	}
	// 600 MiB that say so, at a ratio that is allowed.
	half := item{name: "a", packed: random(6 << 20), size: ptr(300 << 20)}
	other := half
	other.name = "b"
	refuse(t, bad{"", build(document(), half, other), skill.CodeTooLarge, "", "unpacks to more than 524288000 bytes"})
}

// TestBadInput3: SKILL.md missing, twice, too large or without what it needs; names that are one.
func TestBadInput3(t *testing.T) {
	t.Parallel()
	doc := func(name, text, field, says string) bad {
		return bad{name, build(item{name: "SKILL.md", content: []byte(text), raw: true}), skill.CodeDocument, field, says}
	}
	two := func(name, a, b, says string) bad {
		return bad{name, build(document(), file(a, "1"), file(b, "2")), skill.CodeEntry, "", says}
	}
	front := func(lines string) string { return "---\n" + lines + "\n---\nbody" }
	long := strings.Repeat("é", 1025)
	refuseAll(t, []bad{
		{"no SKILL.md", build(file("README.md", "x")), skill.CodeDocument, "SKILL.md", "not at the root"},
		{"only in a folder", build(file("pdf/SKILL.md", good)), skill.CodeDocument, "SKILL.md", `there is "pdf/SKILL.md"`},
		{"in other case", build(file("skill.md", good)), skill.CodeDocument, "SKILL.md", `there is "skill.md"`},
		{"a folder", build(file("SKILL.md/", "")), skill.CodeDocument, "SKILL.md", "not at the root"},
		{"two", build(document(), document()), skill.CodeEntry, "", `entry "SKILL.md" is there twice`},
		{"two by case", build(document(), file("skill.md", good)), skill.CodeEntry, "", `entry "skill.md" and "SKILL.md" differ only in case`},
		{"over 1 MiB", build(item{name: "SKILL.md", raw: true, content: append([]byte(good), random(1<<20)...)}), skill.CodeDocument, "SKILL.md", "at most 1048576"},
		doc("no front matter", "# PDF\n", "SKILL.md", "no front matter"),
		doc("front matter without an end", "---\nname: x\n", "SKILL.md", "no front matter"),
		doc("front matter late", "\n"+good, "SKILL.md", "no front matter"),
		doc("front matter too long", front("name: x\n# "+strings.Repeat("x", 70<<10)), "SKILL.md", "at most 65536"),
		doc("not UTF-8", front("name: x\ndescription: \xff"), "SKILL.md", "UTF-8"),
		doc("NUL", good+"\x00", "SKILL.md", "NUL"),
		doc("no YAML", front("name: [x"), "SKILL.md", "YAML"),
		doc("a list", front("- name"), "SKILL.md", "YAML"),
		doc("twice the same field", front("name: a\nname: b"), "SKILL.md", "YAML"),
		doc("an alias bomb", front(aliases()), "SKILL.md: name", "missing"),
		doc("empty", front(""), "SKILL.md: name", "missing"),
		doc("no name", front("description: x"), "SKILL.md: name", "missing"),
		doc("a number for a name", front("name: 12\ndescription: x"), "SKILL.md: name", "not text"),
		doc("upper case", front("name: PDF\ndescription: x"), "SKILL.md: name", `"PDF" is not`),
		doc("two hyphens", front("name: a--b\ndescription: x"), "SKILL.md: name", "hyphens"),
		doc("65 characters", front("name: "+strings.Repeat("a", 65)+"\ndescription: x"), "SKILL.md: name", "64"),
		doc("no description", front("name: x"), "SKILL.md: description", "missing"),
		doc("an empty description", front("name: x\ndescription: '  '"), "SKILL.md: description", "empty"),
		doc("a list of descriptions", front("name: x\ndescription: [a]"), "SKILL.md: description", "not text"),
		doc("1,025 characters", front("name: x\ndescription: "+long), "SKILL.md: description", "has 1025 characters"),
		two("case", "a/Readme", "a/README", "differ only in case"),
		two("case of a folder", "Docs/a", "docs/b", "differ only in case"),
		two("case beyond ASCII", "ÄPFEL", "äpfel", "differ only in case"),
		two("sharp s", "straße", "STRASSE", "differ only in case"),
		two("encoding", "caf\u00e9", "cafe\u0301", "encoded"),
		two("case and encoding", "caf\u00e9", "CAFE\u0301", "encoded"),
		two("file and folder", "a", "a/b", "a file and a folder"),
		two("folder and file", "a/b", "a", "a file and a folder"),
		two("the same", "a", "a", "twice"),
		{"the same folder", build(document(), file("a/", ""), file("a/", "")), skill.CodeEntry, "", "twice"},
	})
}

// aliases would be a billion strings, were they ever made.
func aliases() string {
	out := "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c < 'j'; c++ {
		p := string(c - 1)
		out += fmt.Sprintf("%c: &%c [*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s]\n", c, c, p, p, p, p, p, p, p, p, p, p)
	}
	return out
}

// TestEndsWithContext: whoever gives up is not kept.
func TestEndsWithContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	z := build(document())
	parent := t.TempDir()
	_, checked := skill.Check(ctx, bytes.NewReader(z), int64(len(z)), skill.Limits{})
	_, extracted := skill.Extract(ctx, bytes.NewReader(z), int64(len(z)), parent, sum(z))
	for _, err := range []error{checked, extracted, skill.Tar(ctx, bytes.NewReader(z), int64(len(z)), io.Discard)} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
		t.Errorf("%d left behind, %v", len(left), err)
	}
}
