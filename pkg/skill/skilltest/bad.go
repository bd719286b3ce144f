package skilltest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"
)

// InvalidZIP is an invalid ZIP of a skill, and the error that is expected for it.
type InvalidZIP struct {
	Name  string
	ZIP   []byte
	Code  string
	Field string // "" for zip
	Says  string // part of the message
}

// The codes of package skill.
const (
	codeInvalidZIP      = "SKILL_ZIP_INVALID"
	codeEntryRefused    = "SKILL_ENTRY_REFUSED"
	codeTooLarge        = "SKILL_TOO_LARGE"
	codeInvalidDocument = "SKILL_DOCUMENT_INVALID"
)

func extraField(id uint16, field ...byte) []byte {
	b := binary.LittleEndian.AppendUint16(nil, id)
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(field))), field...) //nolint:gosec // a few bytes
}

// UnsafeEntryZIPs returns invalid ZIPs with paths that leave the folder, or with entries that are neither files nor
// folders.
func UnsafeEntryZIPs() []InvalidZIP {
	entry := func(name string, it ZIPEntry, says string) InvalidZIP {
		return InvalidZIP{name, BuildZIP(DocumentEntry(), it), codeEntryRefused, "", says}
	}
	var list []InvalidZIP
	for name, path := range map[string]string{
		"dot dot": "../x", "dot dot inside": "a/../../x", "dot dot at the end": "a/..", "dot": "./x", "two slashes": "a//b",
		"absolute": "/etc/passwd", "backslash": `a\..\x`, "drive": "C:/x", "drive without slash": "c:x", "UNC": `\\host\x`, "root": "/",
		"newline": "a\nb", "NUL": "a\x00b", "escape": "a\x1b[2Jb", "DEL": "a\x7f", "C1": "a\u0085b", "right to left": "a\u202egpj.exe",
		"not UTF-8": "a\xff", "empty": "", "long": strings.Repeat("a/", 20) + strings.Repeat("b", 1000), "long element": strings.Repeat("b", 256),
		"deep": strings.Repeat("a/", 40) + "b",
	} {
		list = append(list, entry(name, FileEntry(path, "x"), "entry "))
	}
	for name, mode := range map[string]uint32{"symlink": 0o120777, "character device": 0o020666, "block device": 0o060666, "pipe": 0o010666, "socket": 0o140666} {
		list = append(list, entry(name, ZIPEntry{Name: "x", Content: []byte("/etc/passwd"), Mode: mode}, `entry "x" is a link, a device`))
	}
	hard := extraField(0x000d, append(make([]byte, 12), "SKILL.md"...)...)
	asi := extraField(0x756e, append(make([]byte, 14), "/etc/passwd"...)...)
	asiMode := extraField(0x756e, 0, 0, 0, 0, 0xff, 0xa1, 0, 0, 0, 0, 0, 0, 0, 0)
	list = append(list,
		entry("hard link", ZIPEntry{Name: "x", Extra: hard}, "link"),
		entry("hard link behind another field", ZIPEntry{Name: "x", Extra: append(extraField(0x5455, 1, 2), hard...)}, "link"),
		entry("link of ASi", ZIPEntry{Name: "x", Extra: asi}, "link"),
		entry("link by the mode of ASi", ZIPEntry{Name: "x", Extra: asiMode}, "link"),
		entry("reparse point", ZIPEntry{Name: "x", DOS: 0x400}, "link"),
		entry("volume label", ZIPEntry{Name: "x", DOS: 0x08}, "device"),
		entry("folder by mode", ZIPEntry{Name: "x", Mode: 0o040755}, "folder"),
		entry("file by mode", ZIPEntry{Name: "x/", Mode: 0o100644}, "folder"),
		InvalidZIP{"link in the local header alone", localHeaderOnly(hard), codeEntryRefused, "", "link"},
		InvalidZIP{"another name in the local header", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Local: "../"}), codeInvalidZIP, "", `entry "x" has a local header that differs`},
	)
	return list
}

// localHeaderOnly returns a ZIP with an entry whose extra field is in the local header only, and not in the central
// directory.
func localHeaderOnly(field []byte) []byte {
	first, dir := DocumentEntry().AppendTo(nil, 0)
	second, _ := ZIPEntry{Name: "x", Extra: field}.AppendTo(nil, 0)
	_, plain := ZIPEntry{Name: "x"}.AppendTo(nil, uint32(len(first))) //nolint:gosec // a small ZIP
	return AppendDirectory(append(first, second...), append(dir, plain...), 2)
}

// ForgedArchives returns invalid ZIPs: ZIP bombs, ZIPs whose headers are false, and ZIPs that are too large.
func ForgedArchives() []InvalidZIP {
	same, dir := ZIPEntry{Name: "a", Content: []byte("twice")}.AppendTo(nil, 0)
	_, dir2 := ZIPEntry{Name: "b", Content: []byte("twice")}.AppendTo(nil, 0)
	doc, docDir := DocumentEntry().AppendTo(nil, uint32(len(same))) //nolint:gosec // a small ZIP
	overlap := AppendDirectory(append(bytes.Clone(same), doc...), append(append(bytes.Clone(dir), dir2...), docDir...), 3)
	many := func(n int, name string) []byte {
		items := make([]ZIPEntry, 0, n+1)
		for i := range n {
			items = append(items, ZIPEntry{Name: fmt.Sprintf(name, i), Raw: true})
		}
		return BuildZIP(append(items, DocumentEntry())...)
	}
	zip, large := codeInvalidZIP, codeTooLarge
	zeros := ZIPEntry{Name: "zeros", Content: make([]byte, 1<<20)}
	lies := deflate(make([]byte, 8<<20))
	whole := BuildZIP(DocumentEntry())
	return []InvalidZIP{
		{"one content under two names", overlap, zip, "", `entry "b" has a local header that differs`},
		{"quoted overlap", QuotedHeaderBomb(20, 60<<10), zip, "", "overlaps"},
		{"ratio", BuildZIP(DocumentEntry(), zeros), large, "", `entry "zeros" unpacks to more than 100 times`},
		{"ratio in sum", BuildZIP(filesTooLargeInSum()...), large, "", "unpacks to more than 100 times its size"},
		{"says too little", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Packed: lies, Size: falseNumber(10)}), zip, "", "unpacks to more than the stated 10 bytes"},
		{"says too much", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Content: IncompressibleBytes(100), Size: falseNumber(200)}), zip, "", "unpacks to 100 bytes instead of the stated 200"},
		{"stored with two sizes", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Content: IncompressibleBytes(100), Raw: true, Size: falseNumber(99)}), zip, "", "two sizes differ"},
		{"checksum", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Content: IncompressibleBytes(100), CRC: falseNumber(1)}), zip, "", "checksum"},
		{"not deflated", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Packed: []byte{0xff, 0xff, 0xff}}), zip, "", "unpacking failed"},
		{"cut off", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Content: IncompressibleBytes(1000), Packed: deflate(IncompressibleBytes(1000))[:500]}), zip, "", "unpacking failed"},
		{"600 MiB", BuildZIP(DocumentEntry(), ZIPEntry{Name: "a", Packed: IncompressibleBytes(6 << 20), Size: falseNumber(300 << 20)}, ZIPEntry{Name: "b", Packed: IncompressibleBytes(6 << 20), Size: falseNumber(300 << 20)}), large, "", "unpacks to more than 524288000 bytes"},
		{"10,001 files", many(10_000, "f%d"), large, "", "more than 10000 files"},
		{"10,001 folders", many(10_001, "d%d/"), large, "", "more than 10000 folders"},
		{"10,001 folders in paths", nestedFolders(), large, "", "more than 10000 folders"},
		{"encrypted", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Flags: 1}), zip, "", `entry "x" is encrypted`},
		{"strongly encrypted", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Flags: 1 << 6}), zip, "", "encrypted"},
		{"unknown method", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Method: 93}), zip, "", `entry "x" has compression method 93`},
		{"ZIP64 of an entry", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Size: falseNumber(1<<32 - 1)}), zip, "", "ZIP64"},
		{"folder with content", BuildZIP(DocumentEntry(), ZIPEntry{Name: "d/", Content: []byte("x")}), zip, "", "folder with content"},
		{"beyond the directory", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", Content: []byte("x"), At: falseNumber(1 << 20)}), zip, "", "is not at the offset"},
		{"no local header", BuildZIP(DocumentEntry(), ZIPEntry{Name: "x", At: falseNumber(3)}), zip, "", "is not at the offset"},
		{"empty", nil, zip, "", "not a ZIP"},
		{"text", []byte(strings.Repeat("no zip ", 100)), zip, "", "not a ZIP"},
		{"half", whole[:len(whole)/2], zip, "", "not a ZIP"},
		{"something behind", append(bytes.Clone(whole), "x"...), zip, "", "data after the end record"},
		{"something before", append([]byte("#!/bin/sh\n"), whole...), zip, "", "is not at the offset"},
		{"too few entries said", withEntryCount(BuildZIP(DocumentEntry(), FileEntry("x", "x")), 1), zip, "", "shorter than the end record states"},
		{"too many entries said", withEntryCount(whole, 2), zip, "", "is cut off"},
	}
}

// InvalidDocumentZIPs returns ZIPs without a valid SKILL.md, or with names that are equal on some file systems.
func InvalidDocumentZIPs() []InvalidZIP {
	doc := func(name, text, field, says string) InvalidZIP {
		return InvalidZIP{name, BuildZIP(ZIPEntry{Name: "SKILL.md", Content: []byte(text), Raw: true}), codeInvalidDocument, field, says}
	}
	two := func(name, a, b, says string) InvalidZIP {
		return InvalidZIP{name, BuildZIP(DocumentEntry(), FileEntry(a, "1"), FileEntry(b, "2")), codeEntryRefused, "", says}
	}
	front := func(lines string) string { return "---\n" + lines + "\n---\nbody" }
	long := strings.Repeat("é", 1025)
	return []InvalidZIP{
		{"no SKILL.md", BuildZIP(FileEntry("README.md", "x")), codeInvalidDocument, "SKILL.md", "not at the root"},
		{"only in a folder", BuildZIP(FileEntry("pdf/SKILL.md", ValidDocument)), codeInvalidDocument, "SKILL.md", `found "pdf/SKILL.md"`},
		{"in other case", BuildZIP(FileEntry("skill.md", ValidDocument)), codeInvalidDocument, "SKILL.md", `found "skill.md"`},
		{"a folder", BuildZIP(FileEntry("SKILL.md/", "")), codeInvalidDocument, "SKILL.md", "not at the root"},
		{"two", BuildZIP(DocumentEntry(), DocumentEntry()), codeEntryRefused, "", `entry "SKILL.md" is in the ZIP twice`},
		{"two by case", BuildZIP(DocumentEntry(), FileEntry("skill.md", ValidDocument)), codeEntryRefused, "", `entry "skill.md" and "SKILL.md" differ only in case`},
		{"over 1 MiB", BuildZIP(ZIPEntry{Name: "SKILL.md", Raw: true, Content: append([]byte(ValidDocument), IncompressibleBytes(1<<20)...)}), codeInvalidDocument, "SKILL.md", "limit is 1048576"},
		doc("no front matter", "# PDF\n", "SKILL.md", "no front matter"),
		doc("front matter without an end", "---\nname: x\n", "SKILL.md", "no front matter"),
		doc("front matter late", "\n"+ValidDocument, "SKILL.md", "no front matter"),
		doc("front matter too long", front("name: x\n# "+strings.Repeat("x", 70<<10)), "SKILL.md", "limit is 65536"),
		doc("not UTF-8", front("name: x\ndescription: \xff"), "SKILL.md", "UTF-8"),
		doc("NUL", ValidDocument+"\x00", "SKILL.md", "NUL"),
		doc("no YAML", front("name: [x"), "SKILL.md", "YAML"),
		doc("a list", front("- name"), "SKILL.md", "YAML"),
		doc("twice the same field", front("name: a\nname: b"), "SKILL.md", "YAML"),
		doc("an alias bomb", front(aliasBombYAML()), "SKILL.md: name", "is required"),
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
		{"the same folder", BuildZIP(DocumentEntry(), FileEntry("a/", ""), FileEntry("a/", "")), codeEntryRefused, "", "twice"},
	}
}

// withEntryCount returns a copy of the ZIP z whose end record states n entries.
func withEntryCount(z []byte, n uint16) []byte {
	z = bytes.Clone(z)
	binary.LittleEndian.PutUint16(z[len(z)-14:], n)
	binary.LittleEndian.PutUint16(z[len(z)-12:], n)
	return z
}

// IncompressibleBytes returns n bytes that cannot be compressed.
func IncompressibleBytes(n int) []byte {
	b := make([]byte, n)
	if _, err := rand.NewChaCha8([32]byte{}).Read(b); err != nil {
		panic(err)
	}
	return b
}

// filesTooLargeInSum returns files that are each within the limits of a skill and together exceed them when unpacked.
func filesTooLargeInSum() []ZIPEntry {
	list := []ZIPEntry{DocumentEntry()}
	for i := range 300 {
		list = append(list, ZIPEntry{Name: fmt.Sprint(i), Content: make([]byte, 60<<10)})
	}
	return list
}

// nestedFolders returns a ZIP with many nested folders that have no entries of their own.
func nestedFolders() []byte {
	items := []ZIPEntry{DocumentEntry()}
	for i := range 500 {
		items = append(items, ZIPEntry{Name: fmt.Sprint(i) + strings.Repeat("/d", 21) + "/f", Raw: true})
	}
	return BuildZIP(items...)
}

// aliasBombYAML returns YAML whose aliases would expand to a billion strings.
func aliasBombYAML() string {
	out := "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c < 'j'; c++ {
		p := string(c - 1)
		out += fmt.Sprintf("%c: &%c [*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s,*%s]\n", c, c, p, p, p, p, p, p, p, p, p, p)
	}
	return out
}
