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
	// BlockSize is the size in bytes of the parts of a file that are hashed, stored and sent separately; the last
	// block of a file is shorter.
	BlockSize = 1 << 20
	// MaxFileSize is the maximum size in bytes of a file in a snapshot; a larger file is skipped and reported.
	MaxFileSize = 16 << 30
	// MaxPath is the maximum length in bytes of a path and of the target of a link.
	MaxPath = 4096
	// MaxEntries is the maximum number of entries of a snapshot.
	MaxEntries = 1_000_000
)

// The two trees of a snapshot. Every path starts with one of them.
const (
	Workspace = "workspace"
	State     = "state"
)

// Hash is a SHA-256 hash of content.
type Hash [sha256.Size]byte

// Sum returns the hash of b.
func Sum(b []byte) Hash { return sha256.Sum256(b) }

// String returns the hash in hex.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// MarshalText returns the hash in hex.
func (h Hash) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h[:]), nil }

// UnmarshalText parses the form of MarshalText.
func (h *Hash) UnmarshalText(text []byte) error {
	if len(text) != hex.EncodedLen(len(h)) {
		return fmt.Errorf("hash: %d characters instead of %d", len(text), hex.EncodedLen(len(h)))
	}
	_, err := hex.Decode(h[:], text)
	return err
}

// Kind is the kind of a tree's entry.
type Kind string

// The kinds. Other files (sockets, devices, pipes) are in no snapshot.
const (
	File    Kind = "file"
	Dir     Kind = "dir"
	Symlink Kind = "symlink"
)

// Entry is a file, a folder or a symbolic link.
type Entry struct {
	Path      string // slash-separated, starts with workspace/ or state/; any bytes except NUL
	Kind      Kind
	Size      int64     // size of a file in bytes
	Mode      uint32    // permission bits; 0 for a link
	ModTime   time.Time // with nanoseconds; zero for a link
	Target    string    // target of a link, unchanged
	Blocks    []Hash    // hashes of a file's content, BlockSize bytes each except the last
	Unsettled bool      // the file changed during every attempt to read it: its blocks may be of different times
}

// entryJSON is the canonical form of an entry. JSON contains only UTF-8, so a path or target that is not valid
// UTF-8 has a separate field in base64.
type entryJSON struct {
	Path      string `json:"path,omitempty"`
	RawPath   []byte `json:"rawPath,omitempty"`
	Kind      Kind   `json:"kind"`
	Size      int64  `json:"size,omitempty"`
	Mode      uint32 `json:"mode,omitempty"`
	MTime     *int64 `json:"mtime,omitempty"` // seconds since 1970
	MTimeNS   int    `json:"mtimeNs,omitempty"`
	Target    string `json:"target,omitempty"`
	RawTarget []byte `json:"rawTarget,omitempty"`
	Blocks    []Hash `json:"sha256,omitempty"`
	Unsettled bool   `json:"unsettled,omitempty"`
}

// Line returns the canonical form, without a newline.
func (e *Entry) Line() ([]byte, error) {
	j := entryJSON{Kind: e.Kind, Size: e.Size, Mode: e.Mode, Blocks: e.Blocks, Unsettled: e.Unsettled}
	j.Path, j.RawPath = split(e.Path)
	j.Target, j.RawTarget = split(e.Target)
	if e.Kind != Symlink {
		s := e.ModTime.Unix()
		j.MTime, j.MTimeNS = &s, e.ModTime.Nanosecond()
	}
	return json.Marshal(j)
}

func split(s string) (string, []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return "", []byte(s)
}

// ParseEntry parses the form of Line. It does not validate the result.
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

// BlockLen returns the length in bytes of a file's i-th block.
func (e *Entry) BlockLen(i int) int {
	return int(min(BlockSize, e.Size-int64(i)*BlockSize))
}

// Blocks returns the number of blocks of a file of size bytes.
func Blocks(size int64) int { return int((size + BlockSize - 1) / BlockSize) }

// Check returns an error for an entry that leads out of its tree or contradicts itself.
func (e *Entry) Check() error {
	if err := checkPath(e.Path); err != nil {
		return err
	}
	switch {
	case e.Mode&^0o777 != 0:
		return fmt.Errorf("entry %q: mode %#o has more than permission bits", e.Path, e.Mode)
	case e.Kind != File && (e.Size != 0 || len(e.Blocks) != 0 || e.Unsettled):
		return fmt.Errorf("entry %q: a %s has no content", e.Path, e.Kind)
	case e.Kind != Symlink && e.Target != "":
		return fmt.Errorf("entry %q: a %s has no target", e.Path, e.Kind)
	}
	switch e.Kind {
	case Dir:
	case Symlink:
		if e.Target == "" || len(e.Target) > MaxPath || strings.IndexByte(e.Target, 0) >= 0 || e.Mode != 0 {
			return fmt.Errorf("entry %q: a link needs a target of 1 to %d bytes without NUL, and has no mode", e.Path, MaxPath)
		}
	case File:
		if e.Size < 0 || e.Size > MaxFileSize || len(e.Blocks) != Blocks(e.Size) {
			return fmt.Errorf("entry %q: %d bytes do not have %d blocks", e.Path, e.Size, len(e.Blocks))
		}
	default:
		return fmt.Errorf("entry %q: kind %q is not file, dir or symlink", e.Path, e.Kind)
	}
	return nil
}

func checkPath(path string) error {
	if len(path) > MaxPath+len(Workspace) || strings.IndexByte(path, 0) >= 0 {
		return fmt.Errorf("entry %.64q: a path has at most %d bytes and no NUL", path, MaxPath)
	}
	tree, rest, _ := strings.Cut(path, "/")
	if tree != Workspace && tree != State {
		return fmt.Errorf("entry %q: is in neither %s/ nor %s/", path, Workspace, State)
	}
	for part := range strings.SplitSeq(rest, "/") {
		if part == "" || part == "." || part == ".." {
			return fmt.Errorf("entry %q: has the path element %q", path, part)
		}
	}
	return nil
}

// Compare compares paths in the order of a depth-first walk: a folder precedes everything below it, which precedes the
// folder's next sibling. Siblings are ordered by their bytes. The result is negative, 0 or positive.
func Compare(a, b string) int {
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
