// Package workspace stores the workspaces of sessions, together with the agents' own records, as snapshots in an
// object store. Snapshots are content-addressed: only changes are stored, and a snapshot can be restored into a new
// sandbox. The runner inside the sandbox reads and writes the files; this package is the other end of the runner's
// stream.
//
// A snapshot is one object, the manifest, which lists the files. Their content is divided into blocks of wire.BlockSize. Blocks of
// many files are stored one after the other in objects called packs, each named by its SHA-256. A manifest of version 1 contains the
// whole list of files. A manifest of version 2 refers to parts: pieces of the list that are stored in packs too, so that a small change
// stores one part again and not the whole list. The runner sends the difference to the previous snapshot, called edits.
package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// Store stores objects, such as packs and manifests, by name. A name may contain slashes. An object is stored
// completely or not at all, even if the reader from which Put reads fails.
type Store interface {
	// Put stores the content of r. It replaces an existing object of that name.
	Put(ctx context.Context, name string, r io.Reader) error
	// Get opens an object. It returns ErrNotFound if the object does not exist.
	Get(ctx context.Context, name string) (io.ReadCloser, error)
	// Has reports whether an object exists.
	Has(ctx context.Context, name string) (bool, error)
}

// Errors that a caller may branch on.
var (
	// ErrNotFound is returned for an object, or a path of a snapshot, that does not exist.
	ErrNotFound = errors.New("not found in the workspaces' store")
	// ErrNotFile is returned for a path of a snapshot that is a folder or a symbolic link.
	ErrNotFile = errors.New("is not a file")
	// ErrStreamCut is returned if the stream from a sandbox ended before it was complete.
	ErrStreamCut = wire.ErrStreamCut
	// ErrTooLarge is returned for a tree that exceeds the limits of a snapshot.
	ErrTooLarge = errors.New("the workspace exceeds the limits of a snapshot")
)

// CorruptError is returned for an object whose content does not match its name.
type CorruptError struct {
	Object string // its name in the store
	Err    error
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("object %s is corrupt: %v", e.Object, e.Err)
}
func (e *CorruptError) Unwrap() error { return e.Err }

// RefusedError is returned for a tar with an entry that is not allowed in a workspace.
type RefusedError struct {
	Message string // one sentence that names the entry
}

func (e *RefusedError) Error() string { return e.Message }

// Entry is a file, a folder or a symbolic link of a snapshot.
type Entry = wire.Entry

// The kinds of entries.
const (
	KindFile    = wire.KindFile
	KindDir     = wire.KindDir
	KindSymlink = wire.KindSymlink
)

// SkippedFile is a file of a sandbox that a snapshot does not contain, with the reason.
type SkippedFile = wire.SkippedFile

// MaxListedSkips is the maximum number of skipped files that a Result lists.
const MaxListedSkips = 100

// Options are the parameters of Snapshot.
type Options struct {
	Tenant  string
	Session string
	// Previous is the id of the session's previous snapshot, "" for none. Its content is not stored again.
	Previous string
	// Full makes the runner look at every file, and not only at those that its watcher reported. The caller sets it for the last
	// snapshot before the sandbox is terminated.
	Full bool
	// Version is the version of the manifest to write, 1 or 2; 0 means the latest. Earlier builds of Spool read version 1 only.
	Version int
}

// latestManifestVersion is the version of the manifests that Snapshot writes by default. For a runner of an earlier
// build, which cannot send edits, Snapshot writes version 1.
const latestManifestVersion = 2

// Result is the result of a snapshot or a restore.
type Result struct {
	ID        string // id of the snapshot, m-…; the same files have the same id
	Files     uint32
	Bytes     uint64 // total size of all files
	NewBytes  uint64 // size of the blocks that were not stored before
	Stored    uint64 // bytes of the objects that were added: packs and the manifest
	Repacked  uint64 // bytes stored again, so that the snapshot needs fewer objects
	ReadBytes uint64 // bytes that the runner read to find changes
	Duration  time.Duration
	Skips     []SkippedFile // files that are not in the snapshot, at most MaxListedSkips
	Skipped   uint32        // number of files that are not in the snapshot
	Unsettled uint32        // number of files that changed during every attempt to read them
	Full      bool          // the runner looked at all files
	Missed    uint32        // number of folders in which a full walk found changes that the runner's watcher had not reported
	Diverged  bool          // a full walk found another tree than the edits had made of Previous, so the whole tree was taken again
	Lost      error         // why Previous could not be used, so that all content was stored again; nil if it was used
}

// ManifestName returns the name of the object in the store that is a snapshot's manifest.
func ManifestName(tenant, session, id string) string { return tenant + "/" + session + "/" + id }

// ParseManifestName returns the tenant, session and id from which ManifestName made the name.
func ParseManifestName(name string) (tenant, session, id string, err error) {
	parts := strings.Split(name, "/")
	if len(parts) != 3 {
		return "", "", "", fmt.Errorf("snapshot %.200q: must be tenant/session/id", name)
	}
	if err := checkNameParts(parts[0], parts[1], parts[2]); err != nil {
		return "", "", "", err
	}
	return parts[0], parts[1], parts[2], nil
}

// checkNameParts returns an error if a tenant, session or id cannot be part of an object's name.
func checkNameParts(tenant, session, id string) error {
	for _, f := range [][2]string{{"tenant", tenant}, {"session", session}} {
		if f[1] == "" || strings.ContainsAny(f[1], "/ .*>") {
			return fmt.Errorf("%s: %.80q cannot be part of an object's name", f[0], f[1])
		}
	}
	return wire.CheckSnapshotID(id)
}
