// Package skill validates, extracts and packs skills. A skill is a ZIP with a SKILL.md at its root; its version is
// the SHA-256 of the ZIP.
//
// A ZIP may come from an attacker, so nothing that it states is trusted. Check, Extract and Tar share one strict
// reader: it validates names, kinds and ranges before it reads any content, counts content while it unpacks it, and
// holds no file but SKILL.md in memory. Every ZIP that the reader accepts is read identically by archive/zip; a
// fuzz test checks that.
package skill

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/truncate"
)

// DocumentName is the file at a skill's root that describes the skill.
const DocumentName = "SKILL.md"

// Limits are the maximum sizes of a skill. A field of 0 means its default.
type Limits struct {
	Files    int   // number of files, and as many folders; 10,000
	Packed   int64 // size of the ZIP in bytes; 100 MiB
	Unpacked int64 // total size of all files in bytes; 500 MiB
	Ratio    int64 // maximum ratio of unpacked to packed size; 100
	Document int64 // size of SKILL.md in bytes; 1 MiB
}

// The defaults of Limits.
const (
	MaxFiles        = 10_000
	MaxPackedSize   = 100 << 20
	MaxUnpackedSize = 500 << 20
	MaxUnpackRatio  = 100
	MaxDocumentSize = 1 << 20
)

// Limits that cannot be configured.
const (
	maxPathLength        = 1024     // bytes of an entry's path
	maxPathElementLength = 255      // bytes of one element of a path, the limit of file systems
	maxPathDepth         = 32       // elements of a path
	ratioExemptSize      = 64 << 10 // bytes to which a file may unpack at any ratio: a small blank file is harmless
	maxFrontMatterSize   = 64 << 10 // bytes
	maxSkillNameLength   = 64       // characters
	maxDescriptionLength = 1024     // characters
)

func (l Limits) withDefaults() Limits {
	if l.Files == 0 {
		l.Files = MaxFiles
	}
	for _, f := range []struct {
		value *int64
		unset int64
	}{{&l.Packed, MaxPackedSize}, {&l.Unpacked, MaxUnpackedSize}, {&l.Ratio, MaxUnpackRatio}, {&l.Document, MaxDocumentSize}} {
		if *f.value == 0 {
			*f.value = f.unset
		}
	}
	return l
}

// Metadata describes the skill in a valid ZIP: names, sizes and digest.
type Metadata struct {
	Name          string // from the front matter
	Description   string // from the front matter
	Document      string // complete text of SKILL.md
	Files         uint32
	Bytes         uint64 // size of the ZIP
	UnpackedBytes uint64 // total size of its files
	Digest        string // SHA-256 of the ZIP in hex
}

// The codes of Error.
const (
	CodeInvalidZIP      = "SKILL_ZIP_INVALID"      // not a ZIP, a damaged one, or one that contradicts itself
	CodeEntryRefused    = "SKILL_ENTRY_REFUSED"    // invalid path or kind of an entry, or two entries with the same path
	CodeTooLarge        = "SKILL_TOO_LARGE"        // exceeds one of Limits
	CodeInvalidDocument = "SKILL_DOCUMENT_INVALID" // invalid SKILL.md
	CodeDigestMismatch  = "SKILL_DIGEST_MISMATCH"  // the ZIP does not have the stated digest
)

// Error is returned for an invalid skill. All other errors of this package concern reading or writing.
type Error struct {
	Code   string
	Field  string // zip, SKILL.md, SKILL.md followed by a field such as name, or sha256
	Entry  string // name of the invalid entry as in the ZIP, which may be hostile; "" if there is none
	Detail string
}

func (e *Error) Error() string { return e.Field + ": " + e.Message() }

// Message returns the text of the error without the field. The name of an entry is quoted in ASCII and truncated.
func (e *Error) Message() string {
	if e.Entry == "" {
		return e.Detail
	}
	return "entry " + quoteName(e.Entry) + " " + e.Detail
}

// maxQuotedNameLength is the maximum size in bytes of an entry's name in an error.
const maxQuotedNameLength = 128

func quoteName(s string) string { return truncate.Quote(s, maxQuotedNameLength) }

func zipError(format string, args ...any) error {
	return &Error{Code: CodeInvalidZIP, Field: "zip", Detail: fmt.Sprintf(format, args...)}
}

func entryZIPError(name, format string, args ...any) error {
	return &Error{Code: CodeInvalidZIP, Field: "zip", Entry: name, Detail: fmt.Sprintf(format, args...)}
}

func refusedEntryError(name, format string, args ...any) error {
	return &Error{Code: CodeEntryRefused, Field: "zip", Entry: name, Detail: fmt.Sprintf(format, args...)}
}

func tooLargeError(format string, args ...any) error {
	return &Error{Code: CodeTooLarge, Field: "zip", Detail: fmt.Sprintf(format, args...)}
}

func documentError(field, format string, args ...any) error {
	if field != "" {
		field = ": " + field
	}
	return &Error{Code: CodeInvalidDocument, Field: DocumentName + field, Detail: fmt.Sprintf(format, args...)}
}
