package wire

import (
	"crypto/sha256"
	"fmt"
	"hash"
	"strings"
)

// HeaderV1 is the first line of the canonical form of a tree of version 1. The entries follow, one per line.
const HeaderV1 = `{"spoolWorkspace":1}`

// snapshotIDPrefix is the prefix of the id of a snapshot.
const snapshotIDPrefix = "m-"

// TreeValidator validates the entries of a tree of version 1 one by one and computes the id of the tree. It does not
// keep the entries.
type TreeValidator struct {
	hash    hash.Hash
	last    string
	folders []string // the folders that contain the last entry
	entries int
}

// NewTreeValidator returns a TreeValidator of an empty tree.
func NewTreeValidator() *TreeValidator {
	t := &TreeValidator{hash: sha256.New()}
	t.hash.Write([]byte(HeaderV1 + "\n")) //nolint:errcheck // a hash never fails
	return t
}

// Add adds the next entry of the tree and returns its canonical line, without the newline. It returns an error for an
// entry that Check refuses, that is out of order, or whose parent was not added as a folder, so that no path leads
// through a link.
func (t *TreeValidator) Add(e *Entry) ([]byte, error) {
	if err := e.Check(); err != nil {
		return nil, err
	}
	if t.last != "" && ComparePaths(t.last, e.Path) >= 0 {
		return nil, fmt.Errorf("entry %q: does not come after %q", e.Path, t.last)
	}
	if t.entries++; t.entries > MaxEntries {
		return nil, fmt.Errorf("entry %q: a snapshot has at most %d files and folders", e.Path, MaxEntries)
	}
	parent := e.Path[:strings.LastIndexByte(e.Path, '/')]
	for len(t.folders) > 0 && t.folders[len(t.folders)-1] != parent {
		t.folders = t.folders[:len(t.folders)-1]
	}
	if len(t.folders) == 0 && parent != TreeWorkspace && parent != TreeRecords {
		return nil, fmt.Errorf("entry %q: parent is not a folder of the snapshot", e.Path)
	}
	if e.Kind == KindDir {
		t.folders = append(t.folders, e.Path)
	}
	t.last = e.Path
	line, err := e.CanonicalLine()
	if err != nil {
		return nil, err
	}
	t.hash.Write(line)         //nolint:errcheck // a hash never fails
	t.hash.Write([]byte{'\n'}) //nolint:errcheck // a hash never fails
	return line, nil
}

// ID returns the id of the tree with the entries added so far: m- and the SHA-256 of its canonical form in hex.
func (t *TreeValidator) ID() string { return fmt.Sprintf("%s%x", snapshotIDPrefix, t.hash.Sum(nil)) }

// CheckSnapshotID returns an error unless id has the form of the id of a snapshot.
func CheckSnapshotID(id string) error {
	var h Hash
	rest, ok := strings.CutPrefix(id, snapshotIDPrefix)
	if !ok || h.UnmarshalText([]byte(rest)) != nil || h.String() != rest {
		return fmt.Errorf("snapshot: %.80q must be %s and 64 hex digits", id, snapshotIDPrefix)
	}
	return nil
}
