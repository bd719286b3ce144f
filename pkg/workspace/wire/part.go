package wire

import (
	"crypto/sha256"
	"fmt"
	"hash"
	"hash/fnv"
	"strings"
)

// HeaderV2 is the first line of the canonical form of a tree of version 2. The digests of its parts follow, one per
// line.
const HeaderV2 = `{"spoolWorkspace":2}`

// Limits of a part. A part ends after an entry whose path has a hash that is divisible by partEndDivisor, so that an edit
// changes one part, and at the latest when it has maxPartEntries entries or lines of maxPartBytes bytes.
const (
	partEndDivisor = 128
	maxPartEntries = 512
	maxPartBytes   = 256 << 10
)

// SplitPath returns the folder and the name of a path in a tree.
func SplitPath(path string) (folder, name string) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "", path
	}
	return path[:i], path[i+1:]
}

// ComparePartOrder compares paths in the order of the parts of a tree: by folder, in the order of ComparePaths, then by
// name. So the entries of a folder are together, and so are all folders below a folder. The result is negative, 0 or
// positive.
func ComparePartOrder(a, b string) int {
	folderA, nameA := SplitPath(a)
	folderB, nameB := SplitPath(b)
	if c := ComparePaths(folderA, folderB); c != 0 {
		return c
	}
	return strings.Compare(nameA, nameB)
}

// IsBelow reports whether path is the path of folder itself, or of something below it.
func IsBelow(path, folder string) bool {
	return strings.HasPrefix(path, folder) && (len(path) == len(folder) || path[len(folder)] == '/')
}

// PartCutter divides the entries of a tree, in the order of ComparePartOrder, into parts. Where a part ends depends
// only on its own entries, so the same entries form the same parts. The zero value is ready for use.
type PartCutter struct {
	tree    string
	entries int
	bytes   int
}

// Next must be called for each entry of a tree in order, with the length of the entry's canonical line in bytes. begins
// reports whether the entry begins another part because it is in the other tree, and ends reports whether a part ends
// after the entry.
func (c *PartCutter) Next(path string, line int) (begins, ends bool) {
	tree, _, _ := strings.Cut(path, "/")
	if begins = c.entries > 0 && tree != c.tree; begins {
		*c = PartCutter{}
	}
	c.tree, c.entries, c.bytes = tree, c.entries+1, c.bytes+line
	h := fnv.New64a()
	h.Write([]byte(path)) //nolint:errcheck // a hash never fails
	if ends = h.Sum64()%partEndDivisor == 0 || c.entries == maxPartEntries || c.bytes >= maxPartBytes; ends {
		*c = PartCutter{}
	}
	return begins, ends
}

// PartHash computes the digest of a part from the hashes of the canonical lines of its entries.
type PartHash struct{ hash hash.Hash }

// NewPartHash returns the PartHash of a part without entries.
func NewPartHash() PartHash { return PartHash{sha256.New()} }

// Add adds the hash of the canonical line of the next entry.
func (p PartHash) Add(line Hash) {
	p.hash.Write(line[:]) //nolint:errcheck // a hash never fails
}

// Sum returns the digest of the part whose entries were added.
func (p PartHash) Sum() (h Hash) {
	p.hash.Sum(h[:0])
	return h
}

// TreeIDHash computes the id of a tree of version 2 from the digests of its parts.
type TreeIDHash struct{ hash hash.Hash }

// NewTreeIDHash returns the TreeIDHash of a tree without parts.
func NewTreeIDHash() TreeIDHash {
	p := TreeIDHash{sha256.New()}
	p.hash.Write([]byte(HeaderV2 + "\n")) //nolint:errcheck // a hash never fails
	return p
}

// Add adds the digest of the next part of the tree.
func (p TreeIDHash) Add(digest Hash) {
	p.hash.Write([]byte(digest.String() + "\n")) //nolint:errcheck // a hash never fails
}

// ID returns the id of the tree with the parts that were added.
func (p TreeIDHash) ID() string { return fmt.Sprintf("%s%x", snapshotIDPrefix, p.hash.Sum(nil)) }
