package command

import (
	"archive/tar"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

// readUploadRecord reads the record of the upload, and sets the local folder.
func (p *pullRun) readUploadRecord() (err error) {
	if p.recordFile, err = uploadRecordPath(p.app, p.cmd.Data, p.cmd.Session); err != nil {
		return err
	}
	raw, err := os.ReadFile(p.recordFile)
	switch {
	case err == nil:
		if err := json.Unmarshal(raw, &p.record); err != nil {
			return fmt.Errorf("%s: %w", p.recordFile, err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read the record of the upload: %w", err)
	case p.cmd.Dir == "":
		return usageError("dir: the local folder of the session's workspace is unknown: name the folder that receives the changes")
	}
	if p.record.Entries == nil {
		p.record = uploadRecord{Session: p.cmd.Session, Entries: map[string]folderEntry{}}
	}
	dir := cmp.Or(p.cmd.Dir, p.record.Folder)
	if dir, err = localFolder("dir", dir); err != nil {
		return err
	}
	if p.record.Folder == "" { // nothing was uploaded: later pulls compare with the folder of the first one
		p.record.Folder = dir
	}
	p.folder = dir
	return nil
}

// snapshotTimeout is the maximum time to wait for a new snapshot of the session.
const snapshotTimeout = 2 * time.Minute

// requestSnapshot requests a snapshot of the session and waits for it. It does nothing if the session has no sandbox,
// because the last snapshot is then the newest state.
func (p *pullRun) requestSnapshot(ctx context.Context, s *spoolv1.Session) error {
	if s.GetCurrentSandbox().GetState() != "ready" {
		return nil
	}
	if _, err := p.client.Sessions.SyncSession(ctx, &spoolv1.SyncSessionRequest{SessionId: p.cmd.Session}); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	asked := uint32(0)
	for m, err := range p.client.Follow(wait, p.cmd.Session, s.Tip) {
		if err != nil {
			if ctx.Err() == nil && wait.Err() != nil {
				terminal.Fprintln(p.app.Err, "spool: no snapshot was taken in time; using the last one")
				return nil
			}
			return err
		}
		if m.Event == nil {
			continue
		}
		switch d := m.Event.Event().Data.(type) {
		case events.SyncRequested:
			asked = d.Sync
		case events.WorkspaceSynced:
			if asked > 0 && d.Request >= asked {
				return nil
			}
		case events.SandboxTerminated, events.SessionDeleted:
			return nil // nil only if there was a snapshot before
		}
	}
	return context.Cause(ctx)
}

// remoteEntry is an entry in the session's workspace. staged is the local file with the entry's content, or "" if the
// content equals the uploaded one.
type remoteEntry struct {
	folderEntry
	staged string
}

// pullLimits are the limits on what a pull downloads to this machine.
var pullLimits = folderLimits{entries: 200_000, bytes: 4 << 30}

// downloadWorkspace downloads the session's workspace, and stages the content that differs from the uploaded content.
func (p *pullRun) downloadWorkspace(ctx context.Context) error {
	r, err := p.client.GetTar(ctx, p.cmd.Session, "", client.WorkspaceVersion{})
	if err != nil {
		return err
	}
	defer r.Close() //nolint:errcheck // the body was read to its end, or its error is returned
	p.remote = map[string]*remoteEntry{}
	var bytes int64
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the session's files: %w", err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		if name == "" || name == "." {
			continue
		}
		if bytes += h.Size; bytes > pullLimits.bytes || len(p.remote) >= pullLimits.entries {
			return fmt.Errorf("the session's workspace has more than %s, or more than %d files: get what you need with `spool files get`, or with `spool files tar %s DIR`", formatSize(pullLimits.bytes), pullLimits.entries, p.cmd.Session)
		}
		e := &remoteEntry{folderEntry: folderEntry{Path: name, Mode: uint32(h.Mode & 0o777)}} //nolint:gosec // masked
		switch h.Typeflag {
		case tar.TypeDir:
			e.Kind = entryKindDir
		case tar.TypeSymlink:
			e.Kind, e.Mode, e.Target = entryKindSymlink, 0, h.Linkname
		case tar.TypeReg:
			e.Kind = entryKindFile
			if err := p.stageFile(e, in, len(p.remote)); err != nil {
				return err
			}
		default:
			return fmt.Errorf("read the session's files: %q has type %q", truncate.Text(name, 64), h.Typeflag)
		}
		p.remote[name] = e
	}
}

// stageFile writes the content of a file into the staging folder, unless the content equals the uploaded one.
func (p *pullRun) stageFile(e *remoteEntry, content io.Reader, n int) error {
	e.staged = filepath.Join(p.staging, fmt.Sprint(n))
	f, err := os.OpenFile(e.staged, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	sum := sha256.New()
	e.Size, err = io.Copy(io.MultiWriter(f, sum), content)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("read the session's files: %w", err)
	}
	e.SHA256 = hex.EncodeToString(sum.Sum(nil))
	if before, ok := p.record.Entries[e.Path]; ok && before.SHA256 == e.SHA256 && before.Mode == e.Mode {
		err, e.staged = os.Remove(e.staged), ""
	}
	return err
}
