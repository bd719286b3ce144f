package api

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/objects"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// filesRequest is a request that contains files to put into a session's workspace.
type filesRequest interface {
	GetWorkspaceFiles() []*spoolv1.WorkspaceFile
}

// requestFiles holds the workspace files of a request: the references that the command to the session service contains, and
// the contents for the object store.
type requestFiles struct {
	refs     []command.File
	contents map[string][]byte // by SHA-256
}

// decodeWorkspaceFiles validates and decodes the files that a request puts into a workspace.
func decodeWorkspaceFiles(r filesRequest) (requestFiles, error) {
	out := requestFiles{contents: map[string][]byte{}}
	at := map[string]bool{}
	for i, f := range r.GetWorkspaceFiles() {
		field := fmt.Sprintf("workspaceFiles[%d]", i)
		data, err := fileContent(field, f)
		if err != nil {
			return out, err
		}
		sum := sha256.Sum256(data)
		ref := command.File{Path: f.GetPath(), Size: uint64(len(data)), SHA256: hex.EncodeToString(sum[:]), Mode: f.GetMode()}
		if err := ref.Check(field, "", ""); err != nil {
			return out, commandProblem(err)
		}
		if at[ref.Path] {
			return out, problem.Invalid(field+".path", "is set twice")
		}
		at[ref.Path] = true
		out.refs, out.contents[ref.SHA256] = append(out.refs, ref), data
	}
	return out, nil
}

// fileContent returns the content of a file of a request; field is the file's name in the request. Absent content is an error, because it is more
// likely forgotten than meant as an empty file.
func fileContent(field string, f *spoolv1.WorkspaceFile) ([]byte, error) {
	switch {
	case f.Content != nil && f.ContentBase64 != nil:
		return nil, problem.Invalid(field+".contentBase64", "content and contentBase64 exclude each other")
	case f.Content != nil:
		return []byte(f.GetContent()), nil
	case f.ContentBase64 == nil:
		return nil, problem.Invalid(field+".content", `give content, or contentBase64; an empty file has content ""`)
	}
	data, err := base64.StdEncoding.DecodeString(f.GetContentBase64())
	if err != nil {
		return nil, problem.Invalid(field+".contentBase64", "value is not base64 (A-Z, a-z, 0-9, + and /, padded with =)")
	}
	return data, nil
}

// storeContents writes the contents of the files of a request to the object store.
func (f requestFiles) storeContents(ctx context.Context, to *objects.Store, tenant, session string) error {
	for sum, data := range f.contents {
		if err := to.PutBytes(ctx, command.FileObject(tenant, session, sum), data); err != nil {
			return err
		}
	}
	return nil
}

// totalBytes returns the number of bytes that the files add to the tenant's storage.
func (f requestFiles) totalBytes() (n int64) {
	for _, r := range f.refs {
		n += int64(r.Size) //nolint:gosec // bounded by the size of a request
	}
	return n
}

// requireSession returns the caller's tenant and the status of the session with an id; the status is "" if only the
// log contains the session yet. It returns SESSION_NOT_FOUND if the session does not exist.
func (s *Server) requireSession(ctx context.Context, id string) (tenant, status string, err error) {
	p, err := auth.From(ctx)
	if err != nil {
		return "", "", err
	}
	if err := reads.CheckSessionID(id); err != nil {
		return "", "", err
	}
	if err := s.Reads.CheckVisible(ctx, p.Tenant, id, p.Agents); err != nil {
		return "", "", err
	}
	status, err = s.Reads.SessionStatus(ctx, p.Tenant, id)
	return p.Tenant, status, err
}

// FileUpload is a file, or a tar archive with several files, that a client uploads into a workspace.
type FileUpload struct {
	Path    string // for an archive, the folder to extract to
	Archive bool
	Mode    uint32 // permission bits; 0 means 0644
	Body    io.Reader
	Length  int64 // announced length in bytes; -1 if unknown
	Limit   int64 // largest accepted length in bytes
}

// FileAccepted is the response to the upload of a file: it describes the stored file, and has the position of the
// change in the log.
type FileAccepted struct {
	Position string `json:"position"`
	SHA256   string `json:"sha256"`
	Size     uint64 `json:"size"`
}

// PutFile stores the content of an upload, and requests that an executor writes it into the session's workspace. It returns before that is
// done, and reads at most f.Limit bytes.
func (s *Server) PutFile(ctx context.Context, session string, f FileUpload) (FileAccepted, error) {
	field := "path"
	if f.Archive {
		field = "dir"
	}
	if err := command.CheckPath(field, f.Path, f.Archive); err != nil {
		return FileAccepted{}, commandProblem(err)
	}
	tenant, status, err := s.requireSession(ctx, session)
	switch {
	case err != nil:
		return FileAccepted{}, err
	case status == "closed":
		return FileAccepted{}, problem.New(problem.SessionClosed, "", "the session is closed and accepts no more files; create another session")
	case f.Length > f.Limit:
		return FileAccepted{}, uploadTooLarge(fmt.Sprintf("the content has %d bytes", f.Length), f.Limit)
	}
	if err := s.Objects.CheckRoom(ctx, f.Length); err != nil {
		return FileAccepted{}, err
	}
	var unique [16]byte
	if _, err := io.ReadFull(s.Entropy, unique[:]); err != nil {
		return FileAccepted{}, problem.From(err)
	}
	hold, err := s.Quota.Reserve(ctx, tenant, max(f.Length, 0))
	if err != nil {
		return FileAccepted{}, err
	}
	// The object's name cannot contain the hash, which is known only after all content was received.
	object := command.ObjectFolder(tenant, session) + "u-" + hex.EncodeToString(unique[:])
	stored, err := s.Objects.PutStream(ctx, object, f.Body, f.Limit, hold.ReserveBytes)
	if err != nil {
		hold.SettleRefused(s.Objects.RemovedFunc(object))
	}
	if errors.Is(err, objects.ErrTooLarge) {
		return FileAccepted{}, uploadTooLarge("the content is too large", f.Limit)
	}
	if err != nil {
		return FileAccepted{}, err
	}
	a, err := s.sendChangeCommand(ctx, commands.Request{Type: command.TypePutFile, SessionID: session, Reserved: true, Body: command.PutFile{File: command.File{
		Path: f.Path, Object: object, Size: stored.Size, SHA256: stored.SHA256, Mode: f.Mode, Archive: f.Archive,
	}}})
	settleUpload(hold, session, a, err, s.Objects.RemovedFunc(object))
	return FileAccepted{Position: a.Position, SHA256: stored.SHA256, Size: stored.Size}, err
}

// uploadTooLarge returns the problem PAYLOAD_TOO_LARGE for an upload that exceeds limit.
func uploadTooLarge(what string, limit int64) error {
	return problem.New(problem.PayloadTooLarge, "file", fmt.Sprintf("%s; the limit is %d bytes (--max-file)", what, limit))
}

// RemoveFile requests that an executor removes a file, or a folder with everything below it, from the session's workspace.
func (s *Server) RemoveFile(ctx context.Context, session, path string) (position string, err error) {
	if err := command.CheckPath("path", path, false); err != nil {
		return "", commandProblem(err)
	}
	if err := reads.CheckSessionID(session); err != nil {
		return "", err
	}
	a, err := s.sendChangeCommand(ctx, commands.Request{Type: command.TypeRemoveFile, SessionID: session, Body: command.RemoveFile{Path: path}})
	return a.Position, err
}

// fieldSession is the name of the request field with the session's id, for problems that concern the session itself.
const fieldSession = "sessionId"

// WorkspaceSnapshot is an opened snapshot: the manifest of a session's workspace, and the names of the snapshot and of the
// session that took it.
type WorkspaceSnapshot struct {
	*workspace.Manifest
	Session  string // the session that the snapshot belongs to
	Tenant   string
	Snapshot string
	At       time.Time
}

// LastWorkspace opens a session's last snapshot or, for a fork without a snapshot of its own, the snapshot that it began with. If a turn has just
// ended, it first waits up to snapshotTimeout for the turn's snapshot. It returns NO_SNAPSHOT if there is none.
func (s *Server) LastWorkspace(ctx context.Context, session, minPosition string) (WorkspaceSnapshot, error) {
	tenant, err := s.checkSession(ctx, session, minPosition)
	if err != nil {
		return WorkspaceSnapshot{}, err
	}
	one, err := s.awaitSnapshot(ctx, tenant, session)
	if err != nil {
		return WorkspaceSnapshot{}, err
	}
	w := WorkspaceSnapshot{Session: session, Tenant: tenant, Snapshot: one.GetSnapshot(), At: one.GetSnapshotAt().AsTime()}
	if w.Snapshot == "" && one.GetParent().GetSnapshot() != "" {
		p, err := s.Reads.StateAfter(ctx, tenant, session, fieldSession, nil)
		if err != nil {
			return w, err
		}
		return s.openSnapshot(ctx, p, fieldSession)
	}
	if w.Snapshot == "" {
		return w, problem.New(problem.NoSnapshot, "", "the session has no snapshot of its workspace yet: POST /api/sessions/{id}/sync asks for one, and the end of each turn takes one")
	}
	id := w.Snapshot
	if strings.Contains(id, "/") {
		var owner, of string
		if owner, of, id, err = workspace.ParseManifestName(w.Snapshot); err == nil && (owner != tenant || of != session) {
			err = fmt.Errorf("snapshot %s does not belong to session %s", w.Snapshot, session)
		}
		if err != nil {
			return w, problem.From(err)
		}
	}
	if w.Manifest, err = workspace.Open(ctx, s.Objects, tenant, session, id); err != nil {
		return w, snapshotError(err)
	}
	return w, nil
}

const (
	// snapshotTimeout is the time that awaitSnapshot waits for the snapshot of a turn that has just ended.
	snapshotTimeout = 5 * time.Second
	// snapshotPollInterval is the interval at which awaitSnapshot checks for the snapshot.
	snapshotPollInterval = 50 * time.Millisecond
)

// awaitSnapshot returns the session after the snapshot of its last turn was taken, so that a client that has seen the end
// of a turn gets the files of that turn. It does not wait while another turn runs, and gives up after snapshotTimeout.
func (s *Server) awaitSnapshot(ctx context.Context, tenant, session string) (*spoolv1.Session, error) {
	deadline := time.NewTimer(snapshotTimeout)
	defer deadline.Stop()
	for {
		one, err := s.Reads.Session(ctx, tenant, session)
		if err != nil || one.GetExecutions() == 0 || one.ActiveExecutionId != nil {
			return one, err
		}
		ended, err := s.Reads.LastExecutionEnd(ctx, tenant, session)
		if err != nil || !ended.After(one.GetSnapshotAt().AsTime()) || s.Now().Sub(ended) > snapshotTimeout {
			return one, err
		}
		select {
		case <-time.After(snapshotPollInterval):
		case <-deadline.C:
			return one, nil
		case <-ctx.Done():
			return one, ctx.Err()
		}
	}
}

// snapshotError converts an error of reading a snapshot to a problem: a damaged snapshot is INTERNAL, an object store
// that does not respond is UNAVAILABLE.
func snapshotError(err error) error {
	var refused *problem.Error
	var corrupt *workspace.CorruptError
	switch {
	case errors.As(err, &refused):
		return err
	case errors.As(err, &corrupt), errors.Is(err, workspace.ErrNotFound):
		return problem.New(problem.Internal, "", "the snapshot in the object store is damaged; the server's log says where, and the next snapshot replaces it").WithCause(err)
	}
	return problem.New(problem.Unavailable, "", "the object store does not answer; try again").WithCause(err)
}

// FindFile returns the entry of a regular file of the snapshot. For any other path it returns FILE_NOT_FOUND.
func (w WorkspaceSnapshot) FindFile(path string) (workspace.Entry, error) {
	if err := command.CheckPath("path", path, false); err != nil {
		return workspace.Entry{}, commandProblem(err)
	}
	e, err := w.Lookup(path)
	switch {
	case err != nil:
		return e, problem.New(problem.FileNotFound, "", "the session's last snapshot has no such file; POST /api/sessions/{id}/sync asks for a new one")
	case e.Kind == workspace.KindDir:
		return e, problem.New(problem.FileNotFound, "", "the path is a folder: GET /api/sessions/{id}/files?dir= lists it")
	case e.Kind == workspace.KindSymlink:
		return e, problem.New(problem.FileNotFound, "", fmt.Sprintf("the path is a symbolic link to %+q, which is not followed", truncate.Text(e.Target, 100)))
	}
	return e, nil
}

// EntriesBelow returns the entries below a folder of the snapshot at any depth; "" is the workspace.
func (w WorkspaceSnapshot) EntriesBelow(dir string) ([]workspace.Entry, error) {
	if err := command.CheckPath("dir", dir, true); err != nil {
		return nil, commandProblem(err)
	}
	list, err := w.List(dir)
	if err != nil {
		return nil, problem.New(problem.FileNotFound, "dir", "the session's last snapshot has no such folder")
	}
	return list, nil
}

// OpenFile opens the content of a file of the snapshot w. The caller must close it.
func (s *Server) OpenFile(ctx context.Context, w WorkspaceSnapshot, path string) (io.ReadCloser, error) {
	r, err := w.Reader(ctx, s.Objects, path)
	if err != nil {
		return nil, snapshotError(err)
	}
	return r, nil
}

// WriteTar writes everything below a folder of the snapshot w to an io.Writer, as a tar archive.
func (s *Server) WriteTar(ctx context.Context, w WorkspaceSnapshot, dir string, to io.Writer) error {
	return w.Tar(ctx, s.Objects, dir, to)
}
