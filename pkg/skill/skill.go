// Package skill checks, lays down and packs skills. A skill is a ZIP with a
// SKILL.md at its root; its version is the SHA-256 of the ZIP.
//
// A ZIP comes from whoever may push one, so nothing that it says is believed.
// Check, Extract and Tar read it with one strict reader: names, kinds and
// ranges are judged before any content is read, content is counted as it is
// unpacked, and no file but SKILL.md is ever held in memory. What the reader
// takes, archive/zip takes too and understands in the same way; a fuzz test
// holds it to that.
package skill

import (
	"fmt"
	"strconv"
	"unicode/utf8"
)

// DocumentName is the file at a skill's root that says what it is for.
const DocumentName = "SKILL.md"

// Limits bound a skill. A zero field takes its default.
type Limits struct {
	Files    int   // files, and as many folders again; 10,000
	Packed   int64 // bytes of the ZIP; 100 MiB
	Unpacked int64 // bytes of all files; 500 MiB
	Ratio    int64 // how many bytes one byte of the ZIP may become; 100
	Document int64 // bytes of SKILL.md; 1 MiB
}

// The defaults of Limits.
const (
	MaxFiles    = 10_000
	MaxPacked   = 100 << 20
	MaxUnpacked = 500 << 20
	MaxRatio    = 100
	MaxDocument = 1 << 20
)

// Bounds that are not for choosing.
const (
	maxName        = 1024     // bytes of an entry's path
	maxElement     = 255      // bytes of one element of it, as file systems have it
	maxDepth       = 32       // elements of a path
	ratioFloor     = 64 << 10 // bytes that a single file may unpack to at any ratio: a small blank file is no bomb
	maxFrontMatter = 64 << 10 // bytes
	maxSkillName   = 64       // characters
	maxDescription = 1024     // characters
)

func (l Limits) withDefaults() Limits {
	if l.Files == 0 {
		l.Files = MaxFiles
	}
	for _, f := range []struct {
		value *int64
		unset int64
	}{{&l.Packed, MaxPacked}, {&l.Unpacked, MaxUnpacked}, {&l.Ratio, MaxRatio}, {&l.Document, MaxDocument}} {
		if *f.value == 0 {
			*f.value = f.unset
		}
	}
	return l
}

// Found is what a good ZIP holds.
type Found struct {
	Name          string // of the front matter
	Description   string // of the front matter
	Document      string // SKILL.md as it is
	Files         uint32
	Bytes         uint64 // of the ZIP
	UnpackedBytes uint64 // of its files
	Digest        string // SHA-256 of the ZIP in hex
}

// The codes of Error.
const (
	CodeZIP      = "SKILL_ZIP_INVALID"      // no ZIP, a damaged one, or one that contradicts itself
	CodeEntry    = "SKILL_ENTRY_REFUSED"    // an entry's path or kind, or two that are one
	CodeTooLarge = "SKILL_TOO_LARGE"        // over one of Limits
	CodeDocument = "SKILL_DOCUMENT_INVALID" // SKILL.md
	CodeDigest   = "SKILL_DIGEST_MISMATCH"  // another ZIP than was said
)

// Error is a refused skill. Any other error of this package is one of reading or writing.
type Error struct {
	Code   string
	Field  string // zip; SKILL.md, or SKILL.md: name and such; sha256
	Entry  string // the entry at fault as the ZIP has it, which may be hostile; "" for none
	Detail string
}

func (e *Error) Error() string { return e.Field + ": " + e.Message() }

// Message is the error without its field. An entry is quoted in ASCII and cut.
func (e *Error) Message() string {
	if e.Entry == "" {
		return e.Detail
	}
	return "entry " + quote(e.Entry) + " " + e.Detail
}

// maxQuoted bounds what is quoted of an entry's name, in bytes.
const maxQuoted = 128

func quote(s string) string {
	if len(s) <= maxQuoted {
		return strconv.QuoteToASCII(s)
	}
	cut := maxQuoted
	for cut > maxQuoted-utf8.UTFMax && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return strconv.QuoteToASCII(s[:cut]) + "…"
}

func broken(format string, args ...any) error {
	return &Error{Code: CodeZIP, Field: "zip", Detail: fmt.Sprintf(format, args...)}
}

func brokenEntry(name, format string, args ...any) error {
	return &Error{Code: CodeZIP, Field: "zip", Entry: name, Detail: fmt.Sprintf(format, args...)}
}

func refused(name, format string, args ...any) error {
	return &Error{Code: CodeEntry, Field: "zip", Entry: name, Detail: fmt.Sprintf(format, args...)}
}

func tooLarge(format string, args ...any) error {
	return &Error{Code: CodeTooLarge, Field: "zip", Detail: fmt.Sprintf(format, args...)}
}

func badDocument(field, format string, args ...any) error {
	if field != "" {
		field = ": " + field
	}
	return &Error{Code: CodeDocument, Field: DocumentName + field, Detail: fmt.Sprintf(format, args...)}
}
