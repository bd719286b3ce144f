package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/hostpath"
)

// folderFlags are the flags that name the local folder in which a new session works.
type folderFlags struct {
	Workspace string `placeholder:"DIR" help:"A local folder in which the new session works, . for the current one. With local sandboxes the agent works in the folder itself, without isolation; otherwise it works on a copy, and spool files pull copies the changes back."`
	Copy      bool   `help:"With --workspace: work on a copy even with local sandboxes."`
	Yes       bool   `short:"y" help:"With --workspace: accept the root of the file system or your home folder without a question."`
}

// resolveFolder returns the absolute path of the folder that the flags name, or "" if they name none. It asks the user
// for confirmation if the folder is the root of the file system or the user's home.
func (f folderFlags) resolveFolder(a *app, session string) (string, error) {
	switch {
	case f.Workspace == "" && f.Copy:
		return "", usageError("copy: requires --workspace; name a folder, such as --workspace .")
	case f.Workspace == "":
		return "", nil
	case session != "":
		return "", usageError("workspace: an existing session keeps its folder; leave --workspace out with --session")
	}
	dir, err := localFolder("workspace", f.Workspace)
	if err != nil {
		return "", err
	}
	if err := hostpath.CheckSyntax(dir); err != nil {
		return "", usageError("workspace: %v", err)
	}
	what, is := describeSensitiveFolder(dir)
	if !is || f.Yes {
		return dir, nil
	}
	if a.InTTY {
		ctx, cancel := a.interruptibleContext()
		defer cancel()
		answer, err := a.askUser(ctx, fmt.Sprintf("spool: %s is %s, and the agent may change and delete what is in it. Continue? [y/N]", terminal.SafeLine(dir), what))
		if err != nil {
			return "", err
		}
		if isYes(answer) {
			return dir, nil
		}
	}
	return "", usageError("workspace: %s is %s: name a folder in it, or confirm with --yes", dir, what)
}

// createSession creates the session that works in a local folder or on a copy of it, and tells the user which of the
// two.
func (r *queryRun) createSession(ctx context.Context) (session string, err error) {
	if !r.cmd.Copy && r.cmd.Sandbox != "docker" {
		session, err = r.createInPlace(ctx)
		var refused *client.Error
		switch {
		case client.IsCode(err, "HOST_PATH_UNSUPPORTED"): // sandboxes are containers
		case client.IsCode(err, "HOST_PATH_REFUSED") && errors.As(err, &refused):
			return "", usageError("workspace: %s", refused.Detail)
		default:
			return session, err
		}
	}
	return r.createCopy(ctx)
}

// createInPlace creates a session that works in the folder itself.
func (r *queryRun) createInPlace(ctx context.Context) (string, error) {
	identity, err := hostpath.FolderIdentity(r.folder)
	if err != nil {
		return "", usageError("workspace: %v", err)
	}
	request := r.newSessionRequest()
	request.SessionOptions = &spoolv1.SessionOptions{HostPath: &r.folder, HostPathIdentity: &identity}
	proto.Merge(request.SessionOptions, r.options)
	made, err := r.client.Load().Sessions.CreateSession(ctx, request)
	if err != nil {
		return "", err
	}
	if len(r.files) > 0 {
		return "", r.deleteUnusedSession(ctx, made.SessionId, usageError("file: the agent works in %s itself, where --file would overwrite your files: copy them there yourself, or add --copy", r.folder))
	}
	r.printNote(fmt.Sprintf("the agent works in %s itself: it changes the files there, and nothing is isolated (--copy works on a copy)", terminal.SafeLine(r.folder)))
	r.warnOfSharedFolder(ctx, made.SessionId)
	return made.SessionId, nil
}

// maxSearchedSessions is the maximum number of sessions among which warnOfSharedFolder searches.
const maxSearchedSessions = 200

// warnOfSharedFolder prints which other sessions work in the same folder, in a folder above it or in one below it.
func (r *queryRun) warnOfSharedFolder(ctx context.Context, own string) {
	seen := 0
	for s, err := range client.List[*spoolv1.Session](ctx, r.client.Load().Sessions.ListSessions, &spoolv1.ListSessionsRequest{Status: "open"}) {
		if err != nil {
			r.printNote("cannot determine whether other sessions work in this folder: " + terminal.SafeLine(err.Error()))
			return
		}
		if seen++; seen > maxSearchedSessions {
			return
		}
		v, folder := s.Value, s.Value.GetSessionOptions().GetHostPath()
		unused := v.GetActiveExecutionId() == "" && (v.CurrentSandbox == nil || v.Idle)
		if v.SessionId == own || folder == "" || !foldersOverlap(folder, r.folder) || unused {
			continue
		}
		r.printNote(fmt.Sprintf("session %s also works in %s: the sessions can overwrite each other's changes", v.SessionId, terminal.SafeLine(folder)))
	}
}

// foldersOverlap reports whether two folders are the same or one contains the other.
func foldersOverlap(a, b string) bool {
	if real, err := filepath.EvalSymlinks(b); err == nil {
		b = real
	}
	in := func(dir, p string) bool {
		rel, err := filepath.Rel(dir, p)
		return err == nil && filepath.IsLocal(rel)
	}
	return in(a, b) || in(b, a)
}

// createCopy creates a session and uploads the folder into its workspace. If the upload fails, it deletes the session.
func (r *queryRun) createCopy(ctx context.Context) (string, error) {
	root, err := os.OpenRoot(r.folder)
	if err != nil {
		return "", usageError("workspace: %v", err)
	}
	defer root.Close() //nolint:errcheck // it is only read
	list, err := scanFolder(ctx, root, uploadLimits)
	if err != nil {
		return "", err
	}
	made, err := r.client.Load().Sessions.CreateSession(ctx, r.newSessionRequest())
	if err != nil {
		return "", err
	}
	if err = r.uploadFolder(ctx, root, made.SessionId, list); err == nil {
		err = r.saveUploadRecord(made.SessionId, list)
	}
	if err != nil {
		return "", r.deleteUnusedSession(ctx, made.SessionId, err)
	}
	r.printNote(fmt.Sprintf("the agent works on a copy of %s (%d files, %s); `spool files pull %s` copies changes back", terminal.SafeLine(r.folder), countFiles(list), formatSize(totalBytes(list)), made.SessionId))
	return made.SessionId, nil
}

// deleteUnusedSession deletes a session in which nothing has run, because starting the query failed with err. It
// returns err.
func (r *queryRun) deleteUnusedSession(ctx context.Context, session string, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if _, derr := r.client.Load().Sessions.DeleteSession(ctx, &spoolv1.DeleteSessionRequest{SessionId: session}); derr != nil {
		return errors.Join(err, fmt.Errorf("session %s was created and could not be deleted: %w", session, derr))
	}
	return err
}

// countFiles returns the number of entries that are not folders.
func countFiles(list []folderEntry) (n int) {
	for _, e := range list {
		if e.Kind != entryKindDir {
			n++
		}
	}
	return n
}

// uploadFolder uploads the folder as a tar archive and shows the progress.
func (r *queryRun) uploadFolder(ctx context.Context, root *os.Root, session string, list []folderEntry) error {
	if len(list) == 0 {
		return nil
	}
	p := r.newUploadProgress(totalBytes(list))
	defer p.hide()
	in, out := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := packFolder(ctx, root, list, out, p.addBytes)
		out.CloseWithError(err)
		packed <- err
	}()
	_, err := r.client.Load().PutTar(ctx, session, "", in)
	_ = in.Close() // stops the tar if nobody reads it any more
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return perr // the server's error would only state that the tar is incomplete
	}
	return err
}

// uploadProgress shows the progress of an upload on the terminal.
type uploadProgress struct {
	show  func(text string)
	done  int64
	total int64
	shown time.Time // time of the last update
}

// progressInterval is the time between updates of the shown progress.
const progressInterval = 200 * time.Millisecond

func (r *queryRun) newUploadProgress(total int64) *uploadProgress {
	p := &uploadProgress{total: total, show: func(string) {}}
	switch {
	case r.watcher.renderer != nil && r.app.OutTTY:
		p.show = r.watcher.renderer.SetProgramState
	case r.app.ErrTTY:
		p.show = func(text string) { terminal.Fprintf(r.app.Err, "\r\x1b[K%s", text) }
	}
	return p
}

// addBytes adds n uploaded bytes to the progress. It must not be called concurrently.
func (p *uploadProgress) addBytes(n int64) {
	p.done += n
	if now := time.Now(); now.Sub(p.shown) >= progressInterval {
		p.shown = now
		p.show(fmt.Sprintf("uploading %s of %s", formatSize(p.done), formatSize(p.total)))
	}
}

// hide removes the progress from the terminal.
func (p *uploadProgress) hide() { p.show("") }

// uploadRecord records the content of an uploaded folder. "spool files pull" compares with it.
type uploadRecord struct {
	Session string                 `json:"session"`
	Folder  string                 `json:"folder"` // absolute path of the local folder
	Entries map[string]folderEntry `json:"entries"`
}

// uploadRecordPath returns the path of the file with the upload record of a session.
func uploadRecordPath(a *app, data, session string) (string, error) {
	if err := checkID("session", events.KindSession, session); err != nil {
		return "", err
	}
	dir, err := dataDirOrDefault(a, data)
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "uploads", session+".json"), nil
}

// saveUploadRecord stores what was uploaded to a session, for "spool files pull".
func (r *queryRun) saveUploadRecord(session string, list []folderEntry) error {
	u := uploadRecord{Session: session, Folder: r.folder, Entries: make(map[string]folderEntry, len(list))}
	for _, e := range list {
		u.Entries[e.Path] = e
	}
	file, err := uploadRecordPath(r.app, r.cmd.Data, session)
	if err != nil {
		return err
	}
	return u.save(file)
}

// save writes the record to a file, which it replaces atomically.
func (u uploadRecord) save(file string) error {
	raw, err := json.Marshal(u)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return fmt.Errorf("store the record of the upload: %w", err)
	}
	if _, err := saveFile(file, strings.NewReader(string(raw)), true); err != nil {
		return fmt.Errorf("store the record of the upload: %w", err)
	}
	return nil
}
