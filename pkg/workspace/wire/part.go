package wire

import (
	"crypto/sha256"
	"fmt"
	"hash"
	"hash/fnv"
	"strings"
)

// Header2 is the first line of the canonical form of a tree of version 2. The digests of its parts follow, one per
// line.
const Header2 = `{"spoolWorkspace":2}`

// Limits of a part. A part ends after an entry whose path has a hash that is divisible by partEntries, so that an edit
// changes one part, and at the latest when it has maxPartEntries entries or lines of maxPartBytes bytes.
const (
	partEntries    = 128
	maxPartEntries = 512
	maxPartBytes   = 256 << 10
)

// Split returns the folder and the name of a path.
func Split(path string) (folder, name string) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "", path
	}
	return path[:i], path[i+1:]
}

// ComparePart compares paths in the order of the parts of a tree: by folder, in the order of Compare, then by name. So
// the entries of a folder are together, and so are all folders below a folder. The result is negative, 0 or positive.
func ComparePart(a, b string) int {
	folderA, nameA := Split(a)
	folderB, nameB := Split(b)
	if c := Compare(folderA, folderB); c != 0 {
		return c
	}
	return strings.Compare(nameA, nameB)
}

// IsBelow reports whether path is the path of the folder itself, or of something below it.
func IsBelow(path, folder string) bool {
	return strings.HasPrefix(path, folder) && (len(path) == len(folder) || path[len(folder)] == '/')
}

// Cutter divides the entries of a tree, in the order of ComparePart, into parts. Where a part ends depends only on its
// own entries, so the same entries have the same parts. The zero value is ready for use.
type Cutter struct {
	tree    string
	entries int
	bytes   int
}

// Next must be called for each entry in order, with the length of the entry's canonical line in bytes. begins reports whether the entry
// begins another part because it is in the other tree, and ends reports whether a part ends after the entry.
func (c *Cutter) Next(path string, line int) (begins, ends bool) {
	tree, _, _ := strings.Cut(path, "/")
	if begins = c.entries > 0 && tree != c.tree; begins {
		*c = Cutter{}
	}
	c.tree, c.entries, c.bytes = tree, c.entries+1, c.bytes+line
	h := fnv.New64a()
	h.Write([]byte(path)) //nolint:errcheck // a hash never fails
	if ends = h.Sum64()%partEntries == 0 || c.entries == maxPartEntries || c.bytes >= maxPartBytes; ends {
		*c = Cutter{}
	}
	return begins, ends
}

// PartHash computes the digest of a part from the hashes of its lines.
type PartHash struct{ hash hash.Hash }

// NewPartHash returns the PartHash of a part without entries.
func NewPartHash() PartHash { return PartHash{sha256.New()} }

// Add adds the hash of the next line.
func (p PartHash) Add(line Hash) {
	p.hash.Write(line[:]) //nolint:errcheck // a hash never fails
}

// Sum returns the digest of the entries that were added.
func (p PartHash) Sum() (h Hash) {
	p.hash.Sum(h[:0])
	return h
}

// PartsID computes the id of a tree from the digests of its parts.
type PartsID struct{ hash hash.Hash }

// NewPartsID returns the PartsID of a tree without parts.
func NewPartsID() PartsID {
	p := PartsID{sha256.New()}
	p.hash.Write([]byte(Header2 + "\n")) //nolint:errcheck // a hash never fails
	return p
}

// Add adds the digest of the next part.
func (p PartsID) Add(digest Hash) {
	p.hash.Write([]byte(digest.String() + "\n")) //nolint:errcheck // a hash never fails
}

// ID returns the id of the tree with the parts that were added.
func (p PartsID) ID() string { return fmt.Sprintf("%s%x", idPrefix, p.hash.Sum(nil)) }
