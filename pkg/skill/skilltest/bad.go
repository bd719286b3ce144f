package skilltest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"
)

// Bad is an invalid ZIP of a skill, and the error that is expected for it.
type Bad struct {
	Name  string
	ZIP   []byte
	Code  string
	Field string // "" for zip
	Says  string // part of the message
}

// The codes of package skill.
const (
	codeZIP      = "SKILL_ZIP_INVALID"
	codeEntry    = "SKILL_ENTRY_REFUSED"
	codeTooLarge = "SKILL_TOO_LARGE"
	codeDocument = "SKILL_DOCUMENT_INVALID"
)

func extra(id uint16, field ...byte) []byte {
	b := binary.LittleEndian.AppendUint16(nil, id)
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(field))), field...) //nolint:gosec // a few bytes
}

// UnsafeEntries returns ZIPs with paths that leave the folder, or with entries that are neither files nor folders.
func UnsafeEntries() []Bad {
	entry := func(name string, it Item, says string) Bad {
		return Bad{name, Build(Document(), it), codeEntry, "", says}
	}
	var list []Bad
	for name, path := range map[string]string{
		"dot dot": "../x", "dot dot inside": "a/../../x", "dot dot at the end": "a/..", "dot": "./x", "two slashes": "a//b",
		"absolute": "/etc/passwd", "backslash": `a\..\x`, "drive": "C:/x", "drive without slash": "c:x", "UNC": `\\host\x`, "root": "/",
		"newline": "a\nb", "NUL": "a\x00b", "escape": "a\x1b[2Jb", "DEL": "a\x7f", "C1": "a\u0085b", "right to left": "a\u202egpj.exe",
		"not UTF-8": "a\xff", "empty": "", "long": strings.Repeat("a/", 20) + strings.Repeat("b", 1000), "long element": strings.Repeat("b", 256),
		"deep": strings.Repeat("a/", 40) + "b",
	} {
		list = append(list, entry(name, File(path, "x"), "entry "))
	}
	for name, mode := range map[string]uint32{"symlink": 0o120777, "character device": 0o020666, "block device": 0o060666, "pipe": 0o010666, "socket": 0o140666} {
		list = append(list, entry(name, Item{Name: "x", Content: []byte("/etc/passwd"), Mode: mode}, `entry "x" is a link, a device`))
	}
	hard := extra(0x000d, append(make([]byte, 12), "SKILL.md"...)...)
	asi := extra(0x756e, append(make([]byte, 14), "/etc/passwd"...)...)
	asiMode := extra(0x756e, 0, 0, 0, 0, 0xff, 0xa1, 0, 0, 0, 0, 0, 0, 0, 0)
	list = append(list,
		entry("hard link", Item{Name: "x", Extra: hard}, "link"),
		entry("hard link behind another field", Item{Name: "x", Extra: append(extra(0x5455, 1, 2), hard...)}, "link"),
		entry("link of ASi", Item{Name: "x", Extra: asi}, "link"),
		entry("link by the mode of ASi", Item{Name: "x", Extra: asiMode}, "link"),
		entry("reparse point", Item{Name: "x", DOS: 0x400}, "link"),
		entry("volume label", Item{Name: "x", DOS: 0x08}, "device"),
		entry("folder by mode", Item{Name: "x", Mode: 0o040755}, "folder"),
		entry("file by mode", Item{Name: "x/", Mode: 0o100644}, "folder"),
		Bad{"link in the local header alone", localHeaderOnly(hard), codeEntry, "", "link"},
		Bad{"another name in the local header", Build(Document(), Item{Name: "x", Local: "../"}), codeZIP, "", `entry "x" has a local header that differs`},
	)
	return list
}

// localHeaderOnly returns a ZIP with an entry whose extra field is in the local header only, and not in the central
// directory.
func localHeaderOnly(field []byte) []byte {
	first, dir := Document().Write(nil, 0)
	second, _ := Item{Name: "x", Extra: field}.Write(nil, 0)
	_, plain := Item{Name: "x"}.Write(nil, uint32(len(first))) //nolint:gosec // a small ZIP
	return Finish(append(first, second...), append(dir, plain...), 2)
}

// ForgedArchives returns ZIP bombs, ZIPs whose headers are false, and ZIPs that are too large.
func ForgedArchives() []Bad {
	same, dir := Item{Name: "a", Content: []byte("twice")}.Write(nil, 0)
	_, dir2 := Item{Name: "b", Content: []byte("twice")}.Write(nil, 0)
	doc, docDir := Document().Write(nil, uint32(len(same))) //nolint:gosec // a small ZIP
	overlap := Finish(append(bytes.Clone(same), doc...), append(append(bytes.Clone(dir), dir2...), docDir...), 3)
	many := func(n int, name string) []byte {
		items := make([]Item, 0, n+1)
		for i := range n {
			items = append(items, Item{Name: fmt.Sprintf(name, i), Raw: true})
		}
		return Build(append(items, Document())...)
	}
	zip, large := codeZIP, codeTooLarge
	zeros := Item{Name: "zeros", Content: make([]byte, 1<<20)}
	lies := deflate(make([]byte, 8<<20))
	whole := Build(Document())
	return []Bad{
		{"one content under two names", overlap, zip, "", `entry "b" has a local header that differs`},
		{"quoted overlap", Quoted(20, 60<<10), zip, "", "overlaps"},
		{"ratio", Build(Document(), zeros), large, "", `entry "zeros" unpacks to more than 100 times`},
		{"ratio in sum", Build(ratioInSum()...), large, "", "unpacks to more than 100 times its size"},
		{"says too little", Build(Document(), Item{Name: "x", Packed: lies, Size: num(10)}), zip, "", "unpacks to more than the stated 10 bytes"},
		{"says too much", Build(Document(), Item{Name: "x", Content: Random(100), Size: num(200)}), zip, "", "unpacks to 100 bytes instead of the stated 200"},
		{"stored with two sizes", Build(Document(), Item{Name: "x", Content: Random(100), Raw: true, Size: num(99)}), zip, "", "two sizes differ"},
		{"checksum", Build(Document(), Item{Name: "x", Content: Random(100), CRC: num(1)}), zip, "", "checksum"},
		{"not deflated", Build(Document(), Item{Name: "x", Packed: []byte{0xff, 0xff, 0xff}}), zip, "", "unpacking failed"},
		{"cut off", Build(Document(), Item{Name: "x", Content: Random(1000), Packed: deflate(Random(1000))[:500]}), zip, "", "unpacking failed"},
		{"600 MiB", Build(Document(), Item{Name: "a", Packed: Random(6 << 20), Size: num(300 << 20)}, Item{Name: "b", Packed: Random(6 << 20), Size: num(300 << 20)}), large, "", "unpacks to more than 524288000 bytes"},
		{"10,001 files", many(10_000, "f%d"), large, "", "more than 10000 files"},
		{"10,001 folders", many(10_001, "d%d/"), large, "", "more than 10000 folders"},
		{"10,001 folders in paths", nestedFolders(), large, "", "more than 10000 folders"},
		{"encrypted", Build(Document(), Item{Name: "x", Flags: 1}), zip, "", `entry "x" is encrypted`},
		{"strongly encrypted", Build(Document(), Item{Name: "x", Flags: 1 << 6}), zip, "", "encrypted"},
		{"unknown method", Build(Document(), Item{Name: "x", Method: 93}), zip, "", `entry "x" has compression method 93`},
		{"ZIP64 of an entry", Build(Document(), Item{Name: "x", Size: num(1<<32 - 1)}), zip, "", "ZIP64"},
		{"folder with content", Build(Document(), Item{Name: "d/", Content: []byte("x")}), zip, "", "folder with content"},
		{"beyond the directory", Build(Document(), Item{Name: "x", Content: []byte("x"), At: num(1 << 20)}), zip, "", "is not at the offset"},
		{"no local header", Build(Document(), Item{Name: "x", At: num(3)}), zip, "", "is not at the offset"},
		{"empty", nil, zip, "", "not a ZIP"},
		{"text", []byte(strings.Repeat("no zip ", 100)), zip, "", "not a ZIP"},
		{"half", whole[:len(whole)/2], zip, "", "not a ZIP"},
		{"something behind", append(bytes.Clone(whole), "x"...), zip, "", "data after the end record"},
		{"something before", append([]byte("#!/bin/sh\n"), whole...), zip, "", "is not at the offset"},
		{"too few entries said", withEntryCount(Build(Document(), File("x", "x")), 1), zip, "", "shorter than the end record states"},
		{"too many entries said", withEntryCount(whole, 2), zip, "", "is cut off"},
	}
}

// InvalidDocuments returns ZIPs without a valid SKILL.md, or with names that are equal on some file systems.
func InvalidDocuments() []Bad {
	doc := func(name, text, field, says string) Bad {
		return Bad{name, Build(Item{Name: "SKILL.md", Content: []byte(text), Raw: true}), codeDocument, field, says}
	}
	two := func(name, a, b, says string) Bad {
		return Bad{name, Build(Document(), File(a, "1"), File(b, "2")), codeEntry, "", says}
	}
	front := func(lines string) string { return "---\n" + lines + "\n---\nbody" }
	long := strings.Repeat("é", 1025)
	return []Bad{
		{"no SKILL.md", Build(File("README.md", "x")), codeDocument, "SKILL.md", "not at the root"},
		{"only in a folder", Build(File("pdf/SKILL.md", Good)), codeDocument, "SKILL.md", `found "pdf/SKILL.md"`},
		{"in other case", Build(File("skill.md", Good)), codeDocument, "SKILL.md", `found "skill.md"`},
		{"a folder", Build(File("SKILL.md/", "")), codeDocument, "SKILL.md", "not at the root"},
		{"two", Build(Document(), Document()), codeEntry, "", `entry "SKILL.md" is in the ZIP twice`},
		{"two by case", Build(Document(), File("skill.md", Good)), codeEntry, "", `entry "skill.md" and "SKILL.md" differ only in case`},
		{"over 1 MiB", Build(Item{Name: "SKILL.md", Raw: true, Content: append([]byte(Good), Random(1<<20)...)}), codeDocument, "SKILL.md", "limit is 1048576"},
		doc("no front matter", "# PDF\n", "SKILL.md", "no front matter"),
		doc("front matter without an end", "---\nname: x\n", "SKILL.md", "no front matter"),
		doc("front matter late", "\n"+Good, "SKILL.md", "no front matter"),
		doc("front matter too long", front("name: x\n# "+strings.Repeat("x", 70<<10)), "SKILL.md", "limit is 65536"),
		doc("not UTF-8", front("name: x\ndescription: \xff"), "SKILL.md", "UTF-8"),
		doc("NUL", Good+"\x00", "SKILL.md", "NUL"),
		doc("no YAML", front("name: [x"), "SKILL.md", "YAML"),
		doc("a list", front("- name"), "SKILL.md", "YAML"),
		doc("twice the same field", front("name: a\nname: b"), "SKILL.md", "YAML"),
		doc("an alias bomb", front(aliases()), "SKILL.md: name", "is required"),
		doc("empty", front(""), "SKILL.md: name", "is required"),
		doc("no name", front("description: x"), "SKILL.md: name", "is required"),
		doc("a number for a name", front("name: 12\ndescription: x"), "SKILL.md: name", "not text"),
		doc("upper case", front("name: PDF\ndescription: x"), "SKILL.md: name", `"PDF" is not`),
		doc("two hyphens", front("name: a--b\ndescription: x"), "SKILL.md: name", "hyphens"),
		doc("65 characters", front("name: "+strings.Repeat("a", 65)+"\ndescription: x"), "SKILL.md: name", "64"),
		doc("no description", front("name: x"), "SKILL.md: description", "is required"),
		doc("an empty description", front("name: x\ndescription: '  '"), "SKILL.md: description", "empty"),
		doc("a list of descriptions", front("name: x\ndescription: [a]"), "SKILL.md: description", "not text"),
		doc("1,025 characters", front("name: x\ndescription: "+long), "SKILL.md: description", "has 1025 characters"),
		two("case", "a/Readme", "a/README", "differ only in case"),
		two("case of a folder", "Docs/a", "docs/b", "differ only in case"),
		two("case beyond ASCII", "ÄPFEL", "äpfel", "differ only in case"),
		two("sharp s", "straße", "STRASSE", "differ only in case"),
		two("encoding", "caf\u00e9", "cafe\u0301", "Unicode form"),
		two("case and encoding", "caf\u00e9", "CAFE\u0301", "Unicode form"),
		two("file and folder", "a", "a/b", "a file and a folder"),
		two("folder and file", "a/b", "a", "a file and a folder"),
		two("the same", "a", "a", "twice"),
		{"the same folder", Build(Document(), File("a/", ""), File("a/", "")), codeEntry, "", "twice"},
	}
}

// withEntryCount returns a ZIP that states another number of entries.
func withEntryCount(z []byte, n uint16) []byte {
	z = bytes.Clone(z)
	binary.LittleEndian.PutUint16(z[len(z)-14:], n)
	binary.LittleEndian.PutUint16(z[len(z)-12:], n)
	return z
}

// Random returns content that cannot be compressed.
func Random(n int) []byte {
	b := make([]byte, n)
	if _, err := rand.NewChaCha8([32]byte{}).Read(b); err != nil {
		panic(err)
	}
	return b
}

// ratioInSum returns files that are each within the limits of a skill and together exceed them when unpacked.
func ratioInSum() []Item {
	list := []Item{Document()}
	for i := range 300 {
		list = append(list, Item{Name: fmt.Sprint(i), Content: make([]byte, 60<<10)})
	}
	return list
}

// nestedFolders returns a ZIP with many nested folders that have no entries of their own.
func nestedFolders() []byte {
	items := []Item{Document()}
	for i := range 500 {
		items = append(items, Item{Name: fmt.Sprint(i) + strings.Repeat("/d", 21) + "/f", Raw: true})
	}
	return Build(items...)
}

// aliases returns YAML whose aliases would expand to a billion strings.
func aliases() string {
	out := "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c < 'j'; c++ {
		p := string(c - 1)
		out += fmt.Sprintf("%c: &%c [*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s]\n", c, c, p, p, p, p, p, p, p, p, p, p)
	}
	return out
}
