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

// folderFlags name the local folder in which a new session works.
type folderFlags struct {
	Workspace string `placeholder:"DIR" help:"A local folder in which the new session works, . for the current one. With local sandboxes the agent works in the folder itself, without isolation; otherwise it works on a copy, and spool files pull copies the changes back."`
	Copy      bool   `help:"With --workspace: work on a copy even with local sandboxes."`
	Yes       bool   `short:"y" help:"With --workspace: accept the root of the file system or your home folder without a question."`
}

// check returns the folder's absolute path, or "" for none. It asks for confirmation if the folder is unlikely to
// be meant.
func (f folderFlags) check(a *app, session string) (string, error) {
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
	what, is := sensitiveFolder(dir)
	if !is || f.Yes {
		return dir, nil
	}
	if a.InTTY {
		ctx, cancel := a.interruptible()
		defer cancel()
		answer, err := a.ask(ctx, fmt.Sprintf("spool: %s is %s, and the agent may change and delete what is in it. Continue? [y/N]", terminal.Line(dir), what))
		if err != nil {
			return "", err
		}
		if isYes(answer) {
			return dir, nil
		}
	}
	return "", usageError("workspace: %s is %s: name a folder in it, or confirm with --yes", dir, what)
}

// create creates the session that works in a folder, in place or on a copy. It tells the user which before the
// query is posted.
func (r *queryRun) create(ctx context.Context) (session string, err error) {
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

func (r *queryRun) createInPlace(ctx context.Context) (string, error) {
	identity, err := hostpath.FolderIdentity(r.folder)
	if err != nil {
		return "", usageError("workspace: %v", err)
	}
	request := r.newSession()
	request.SessionOptions = &spoolv1.SessionOptions{HostPath: &r.folder, HostPathIdentity: &identity}
	proto.Merge(request.SessionOptions, r.options)
	made, err := r.client.Load().Sessions.CreateSession(ctx, request)
	if err != nil {
		return "", err
	}
	if len(r.files) > 0 {
		return "", r.undo(ctx, made.SessionId, usageError("file: the agent works in %s itself, where --file would overwrite your files: copy them there yourself, or add --copy", r.folder))
	}
	r.note(fmt.Sprintf("the agent works in %s itself: it changes the files there, and nothing is isolated (--copy works on a copy)", terminal.Line(r.folder)))
	r.warnOfOthers(ctx, made.SessionId)
	return made.SessionId, nil
}

// maxSessionsSeen is the maximum number of sessions that are searched for others in the same folder.
const maxSessionsSeen = 200

// warnOfOthers prints which sessions work in the same folder, or in one above or below it.
func (r *queryRun) warnOfOthers(ctx context.Context, own string) {
	seen := 0
	for s, err := range client.List[*spoolv1.Session](ctx, r.client.Load().Sessions.ListSessions, &spoolv1.ListSessionsRequest{Status: "open"}) {
		if err != nil {
			r.note("cannot determine whether other sessions work in this folder: " + terminal.Line(err.Error()))
			return
		}
		if seen++; seen > maxSessionsSeen {
			return
		}
		v, folder := s.Value, s.Value.GetSessionOptions().GetHostPath()
		unused := v.GetActiveExecutionId() == "" && (v.CurrentSandbox == nil || v.Idle)
		if v.SessionId == own || folder == "" || !overlap(folder, r.folder) || unused {
			continue
		}
		r.note(fmt.Sprintf("session %s also works in %s: the sessions can overwrite each other's changes", v.SessionId, terminal.Line(folder)))
	}
}

// overlap reports whether one folder is, or contains, the other.
func overlap(a, b string) bool {
	if real, err := filepath.EvalSymlinks(b); err == nil {
		b = real
	}
	in := func(dir, p string) bool {
		rel, err := filepath.Rel(dir, p)
		return err == nil && filepath.IsLocal(rel)
	}
	return in(a, b) || in(b, a)
}

// createCopy creates a session and uploads the folder into its workspace. It deletes the session again if the
// upload fails.
func (r *queryRun) createCopy(ctx context.Context) (string, error) {
	root, err := os.OpenRoot(r.folder)
	if err != nil {
		return "", usageError("workspace: %v", err)
	}
	defer root.Close() //nolint:errcheck // it is only read
	list, err := scan(ctx, root, uploadLimits)
	if err != nil {
		return "", err
	}
	made, err := r.client.Load().Sessions.CreateSession(ctx, r.newSession())
	if err != nil {
		return "", err
	}
	if err = r.upload(ctx, root, made.SessionId, list); err == nil {
		err = r.saveUploadRecord(made.SessionId, list)
	}
	if err != nil {
		return "", r.undo(ctx, made.SessionId, err)
	}
	r.note(fmt.Sprintf("the agent works on a copy of %s (%d files, %s); `spool files pull %s` copies changes back", terminal.Line(r.folder), count(list), size(totalBytes(list)), made.SessionId))
	return made.SessionId, nil
}

// undo deletes a session in which nothing has run, because of err, and returns err.
func (r *queryRun) undo(ctx context.Context, session string, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if _, derr := r.client.Load().Sessions.DeleteSession(ctx, &spoolv1.DeleteSessionRequest{SessionId: session}); derr != nil {
		return errors.Join(err, fmt.Errorf("session %s was created and could not be deleted: %w", session, derr))
	}
	return err
}

func count(list []entry) (n int) {
	for _, e := range list {
		if e.Kind != kindDir {
			n++
		}
	}
	return n
}

// upload sends the folder as a tar and shows its progress.
func (r *queryRun) upload(ctx context.Context, root *os.Root, session string, list []entry) error {
	if len(list) == 0 {
		return nil
	}
	p := r.progress(totalBytes(list))
	defer p.end()
	in, out := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := pack(ctx, root, list, out, p.add)
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

// progress shows the progress of an upload on the terminal.
type progress struct {
	show  func(text string)
	done  int64
	total int64
	shown time.Time // time of the last update
}

// progressEvery is the interval between updates of the progress.
const progressEvery = 200 * time.Millisecond

func (r *queryRun) progress(total int64) *progress {
	p := &progress{total: total, show: func(string) {}}
	switch {
	case r.watcher.renderer != nil && r.app.OutTTY:
		p.show = r.watcher.renderer.State
	case r.app.ErrTTY:
		p.show = func(text string) { fmt.Fprintf(r.app.Err, "\r\x1b[K%s", text) }
	}
	return p
}

// add must not be called concurrently.
func (p *progress) add(n int64) {
	p.done += n
	if now := time.Now(); now.Sub(p.shown) >= progressEvery {
		p.shown = now
		p.show(fmt.Sprintf("uploading %s of %s", size(p.done), size(p.total)))
	}
}

func (p *progress) end() { p.show("") }

// uploadRecord records the content of an uploaded folder, with which a pull compares.
type uploadRecord struct {
	Session string           `json:"session"`
	Folder  string           `json:"folder"` // absolute
	Entries map[string]entry `json:"entries"`
}

// uploadFile returns the path of the record of an upload.
func uploadFile(a *app, data, session string) (string, error) {
	if err := checkID("session", events.KindSession, session); err != nil {
		return "", err
	}
	dir, err := dataDir(a, data)
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "uploads", session+".json"), nil
}

// saveUploadRecord stores what was uploaded, for spool files pull.
func (r *queryRun) saveUploadRecord(session string, list []entry) error {
	u := uploadRecord{Session: session, Folder: r.folder, Entries: make(map[string]entry, len(list))}
	for _, e := range list {
		u.Entries[e.Path] = e
	}
	file, err := uploadFile(r.app, r.cmd.Data, session)
	if err != nil {
		return err
	}
	return u.save(file)
}

// save replaces the file atomically.
func (u uploadRecord) save(file string) error {
	raw, err := json.Marshal(u)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return fmt.Errorf("store the record of the upload: %w", err)
	}
	if _, err := save(file, strings.NewReader(string(raw)), true); err != nil {
		return fmt.Errorf("store the record of the upload: %w", err)
	}
	return nil
}
