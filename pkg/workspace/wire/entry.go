// Package wire is the protocol between a runner and its host for workspaces: the entries of a tree, their canonical
// form, whose hash is the name of a snapshot, and the frames that carry them.
package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits of a tree.
const (
	// BlockSize is the size in bytes of a block: a piece of a file that is hashed, stored and sent separately. The last
	// block of a file is shorter.
	BlockSize = 1 << 20
	// MaxFileSize is the maximum size in bytes of a file in a snapshot; a larger file is skipped and reported.
	MaxFileSize = 16 << 30
	// MaxPathLength is the maximum length in bytes of a path and of the target of a link.
	MaxPathLength = 4096
	// MaxEntries is the maximum number of entries of a snapshot.
	MaxEntries = 1_000_000
)

// The two trees of a snapshot. Every path starts with one of them.
const (
	// TreeWorkspace is the name of the tree of the workspace: the first element of its paths.
	TreeWorkspace = "workspace"
	// TreeRecords is the name of the tree of the agent's own records: the first element of its paths.
	TreeRecords = "state"
)

// Hash is the SHA-256 hash of a block or of another content.
type Hash [sha256.Size]byte

// HashOf returns the SHA-256 hash of b.
func HashOf(b []byte) Hash { return sha256.Sum256(b) }

// String returns the hash in hex.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// MarshalText returns the hash in hex.
func (h Hash) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h[:]), nil }

// UnmarshalText parses a hash in hex.
func (h *Hash) UnmarshalText(text []byte) error {
	if len(text) != hex.EncodedLen(len(h)) {
		return fmt.Errorf("hash: %d characters instead of %d", len(text), hex.EncodedLen(len(h)))
	}
	_, err := hex.Decode(h[:], text)
	return err
}

// EntryKind is the kind of a tree's entry: file, folder or symbolic link.
type EntryKind string

// The kinds. Other files (sockets, devices, pipes) are in no snapshot.
const (
	KindFile    EntryKind = "file"
	KindDir     EntryKind = "dir"
	KindSymlink EntryKind = "symlink"
)

// Entry is a file, a folder or a symbolic link in the tree of a snapshot.
type Entry struct {
	Path      string // slash-separated, starts with workspace/ or state/; any bytes except NUL
	Kind      EntryKind
	Size      int64     // size of a file in bytes
	Mode      uint32    // permission bits; 0 for a link
	ModTime   time.Time // with nanoseconds; zero for a link
	Target    string    // target of a link, unchanged
	Blocks    []Hash    // hashes of a file's content, BlockSize bytes each except the last
	Unsettled bool      // the file changed during every attempt to read it: its blocks may be of different times
}

// entryJSON is the canonical JSON form of an entry. JSON contains only UTF-8, so a path or target that is not valid
// UTF-8 has a separate field in base64.
type entryJSON struct {
	Path      string    `json:"path,omitempty"`
	RawPath   []byte    `json:"rawPath,omitempty"`
	Kind      EntryKind `json:"kind"`
	Size      int64     `json:"size,omitempty"`
	Mode      uint32    `json:"mode,omitempty"`
	MTime     *int64    `json:"mtime,omitempty"` // seconds since 1970
	MTimeNS   int       `json:"mtimeNs,omitempty"`
	Target    string    `json:"target,omitempty"`
	RawTarget []byte    `json:"rawTarget,omitempty"`
	Blocks    []Hash    `json:"sha256,omitempty"`
	Unsettled bool      `json:"unsettled,omitempty"`
}

// CanonicalLine returns the canonical JSON form of the entry, without a newline.
func (e *Entry) CanonicalLine() ([]byte, error) {
	j := entryJSON{Kind: e.Kind, Size: e.Size, Mode: e.Mode, Blocks: e.Blocks, Unsettled: e.Unsettled}
	j.Path, j.RawPath = splitUTF8(e.Path)
	j.Target, j.RawTarget = splitUTF8(e.Target)
	if e.Kind != KindSymlink {
		s := e.ModTime.Unix()
		j.MTime, j.MTimeNS = &s, e.ModTime.Nanosecond()
	}
	return json.Marshal(j)
}

// splitUTF8 returns s as a string if it is valid UTF-8, and otherwise as bytes.
func splitUTF8(s string) (string, []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return "", []byte(s)
}

// ParseEntry parses a line that CanonicalLine returned. It does not validate the entry.
func ParseEntry(line []byte) (e Entry, err error) {
	var j entryJSON
	if err := json.Unmarshal(line, &j); err != nil {
		return e, fmt.Errorf("entry: %w", err)
	}
	if j.Path != "" && j.RawPath != nil || j.Target != "" && j.RawTarget != nil {
		return e, errors.New("entry: path or target is set twice")
	}
	if j.MTimeNS < 0 || j.MTimeNS >= int(time.Second) {
		return e, fmt.Errorf("entry: mtimeNs %d is not less than a second", j.MTimeNS)
	}
	e = Entry{Path: j.Path + string(j.RawPath), Kind: j.Kind, Size: j.Size, Mode: j.Mode, Target: j.Target + string(j.RawTarget), Blocks: j.Blocks, Unsettled: j.Unsettled}
	if j.MTime != nil {
		e.ModTime = time.Unix(*j.MTime, int64(j.MTimeNS)).UTC()
	}
	return e, nil
}

// BlockLength returns the length in bytes of a file's i-th block.
func (e *Entry) BlockLength(i int) int {
	return int(min(BlockSize, e.Size-int64(i)*BlockSize))
}

// BlockCount returns the number of blocks of a file of size bytes.
func BlockCount(size int64) int { return int((size + BlockSize - 1) / BlockSize) }

// Check returns an error for an entry whose path leaves its tree or whose fields contradict each other.
func (e *Entry) Check() error {
	if err := checkPath(e.Path); err != nil {
		return err
	}
	switch {
	case e.Mode&^0o777 != 0:
		return fmt.Errorf("entry %q: mode %#o has more than permission bits", e.Path, e.Mode)
	case e.Kind != KindFile && (e.Size != 0 || len(e.Blocks) != 0 || e.Unsettled):
		return fmt.Errorf("entry %q: a %s has no content", e.Path, e.Kind)
	case e.Kind != KindSymlink && e.Target != "":
		return fmt.Errorf("entry %q: a %s has no target", e.Path, e.Kind)
	}
	switch e.Kind {
	case KindDir:
	case KindSymlink:
		if e.Target == "" || len(e.Target) > MaxPathLength || strings.IndexByte(e.Target, 0) >= 0 || e.Mode != 0 {
			return fmt.Errorf("entry %q: a link needs a target of 1 to %d bytes without NUL, and has no mode", e.Path, MaxPathLength)
		}
	case KindFile:
		if e.Size < 0 || e.Size > MaxFileSize || len(e.Blocks) != BlockCount(e.Size) {
			return fmt.Errorf("entry %q: %d bytes do not have %d blocks", e.Path, e.Size, len(e.Blocks))
		}
	default:
		return fmt.Errorf("entry %q: kind %q is not file, dir or symlink", e.Path, e.Kind)
	}
	return nil
}

func checkPath(path string) error {
	if len(path) > MaxPathLength+len(TreeWorkspace) || strings.IndexByte(path, 0) >= 0 {
		return fmt.Errorf("entry %.64q: a path has at most %d bytes and no NUL", path, MaxPathLength)
	}
	tree, rest, _ := strings.Cut(path, "/")
	if tree != TreeWorkspace && tree != TreeRecords {
		return fmt.Errorf("entry %q: is in neither %s/ nor %s/", path, TreeWorkspace, TreeRecords)
	}
	for part := range strings.SplitSeq(rest, "/") {
		if part == "" || part == "." || part == ".." {
			return fmt.Errorf("entry %q: has the path element %q", path, part)
		}
	}
	return nil
}

// ComparePaths compares paths in the order of a depth-first walk: a folder precedes everything below it, which precedes
// the folder's next sibling. Siblings are ordered by their bytes. The result is negative, 0 or positive.
func ComparePaths(a, b string) int {
	for i := range min(len(a), len(b)) {
		x, y := a[i], b[i]
		if x == y {
			continue
		}
		if x == '/' {
			return -1
		}
		if y == '/' {
			return 1
		}
		return int(x) - int(y)
	}
	return len(a) - len(b)
}
