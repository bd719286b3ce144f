// Package livefiles reads files of an engine's running sandboxes for gateways.
package livefiles

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/livefiles"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Config configures a Source. Every field is required.
type Config struct {
	Sessions eventlog.Sessions
	Sandbox  sandbox.Provider
	Provider string
	Engine   string
}

// Source reads files of running sandboxes on this executor's engine. It implements livefiles.FileSource of package
// pkg/livefiles, and is safe for concurrent use.
type Source struct{ cfg Config }

// New returns a Source.
func New(cfg Config) *Source { return &Source{cfg} }

// Open returns a reader of a file, or of a listing of a folder, in a sandbox, and the number of its bytes. It first
// copies the content to a temporary file, so that the size is known, no sandbox waits for a slow reader, and the
// content is from a single moment.
func (s *Source) Open(ctx context.Context, r livefiles.Request) (io.ReadCloser, int64, error) {
	if err := command.CheckPath("path", r.Path, r.Op == livefiles.OpListFiles); err != nil {
		return nil, 0, &livefiles.Error{Code: livefiles.CodeOutsideWorkspace, Detail: err.Error()}
	}
	box, err := s.attachSandbox(ctx, r)
	if err != nil {
		return nil, 0, err
	}
	kept, err := os.CreateTemp("", "spool-live-")
	if err != nil {
		return nil, 0, err
	}
	// The file has no name from now on, and is deleted when it is closed.
	if err := os.Remove(kept.Name()); err != nil {
		return nil, 0, errors.Join(err, kept.Close())
	}
	size, err := copyContent(ctx, box, r, kept)
	if err == nil {
		_, err = kept.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, 0, errors.Join(refusalError(err), kept.Close())
	}
	return kept, size, nil
}

// attachSandbox returns the running sandbox of the session that a request names.
func (s *Source) attachSandbox(ctx context.Context, r livefiles.Request) (sandbox.Sandbox, error) {
	l, err := s.cfg.Sessions.Load(ctx, r.Tenant, r.Session, eventlog.LeaderOnly)
	if err != nil {
		return nil, err
	}
	sb := l.Run.Sandbox
	switch {
	case l.Life.Status == session.None, l.Life.Status == session.Deleted, sb.ID == "", sb.Journal == "", sb.Engine != s.cfg.Engine, sb.Provider != s.cfg.Provider:
		return nil, &livefiles.Error{Code: livefiles.CodeNoSandbox, Detail: "the session has no running sandbox"}
	case sb.Paused:
		return nil, &livefiles.Error{Code: livefiles.CodeNoSandbox, Detail: "the session's sandbox is paused: resume it"}
	}
	box, err := s.cfg.Sandbox.Attach(ctx, sb.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, &livefiles.Error{Code: livefiles.CodeNoSandbox, Detail: "the session's sandbox has ended"}
	}
	return box, err
}

// copyContent copies the file or the listing that a request asks for to the writer to, and returns its size.
func copyContent(ctx context.Context, box sandbox.Sandbox, r livefiles.Request, to io.Writer) (int64, error) {
	switch r.Op {
	case livefiles.OpGetFile:
		content, err := box.Files().Get(ctx, r.Path)
		if err != nil {
			return 0, err
		}
		// A sandbox that stops during the read would block the read, and so the executor's shutdown.
		stop := context.AfterFunc(ctx, func() { content.Close() }) //nolint:errcheck // ctx has the error
		n, err := io.Copy(to, io.LimitReader(content, livefiles.MaxFileSize+1))
		if !stop() {
			return n, fmt.Errorf("read %q: %w", r.Path, ctx.Err())
		}
		if n > livefiles.MaxFileSize {
			content.Close() //nolint:errcheck // the read is aborted on purpose
			return n, &livefiles.Error{Code: livefiles.CodeTooLarge, Detail: fmt.Sprintf("the file has more than %d bytes", livefiles.MaxFileSize)}
		}
		return n, errors.Join(err, content.Close())
	case livefiles.OpListFiles:
		list, err := box.Files().List(ctx, r.Path)
		if err != nil {
			return 0, err
		}
		if len(list) > livefiles.MaxListingEntries {
			return 0, &livefiles.Error{Code: livefiles.CodeTooLarge, Detail: fmt.Sprintf("the folder holds %d files and folders; at most %d are listed: name a folder in it", len(list), livefiles.MaxListingEntries)}
		}
		return writeEntries(list, to)
	}
	return 0, &livefiles.Error{Code: livefiles.CodeFailed, Detail: fmt.Sprintf("operation %.20q is unknown", r.Op)}
}

// writeEntries writes a listing of files as a JSON array, and returns the number of bytes.
func writeEntries(list []sandbox.File, to io.Writer) (int64, error) {
	out := make([]livefiles.Entry, len(list))
	for i, f := range list {
		out[i] = livefiles.Entry{Path: f.Path, Kind: "file", Size: f.Size, ModTime: f.ModTime.UTC()}
		if f.Dir {
			out[i].Kind, out[i].Size = "dir", 0
		}
	}
	raw, err := json.Marshal(out)
	if err != nil {
		return 0, err
	}
	if len(raw) > livefiles.MaxFileSize {
		return 0, &livefiles.Error{Code: livefiles.CodeTooLarge, Detail: "the listing is too long: name a folder"}
	}
	n, err := to.Write(raw)
	return int64(n), err
}

// refusalError converts an error of a sandbox's files to an error with a code that the gateway can return.
func refusalError(err error) error {
	var refused *livefiles.Error
	switch {
	case errors.As(err, &refused):
		return err
	case errors.Is(err, sandbox.ErrNotFound):
		return &livefiles.Error{Code: livefiles.CodeNotFound, Detail: "the workspace has no such file now"}
	case errors.Is(err, sandbox.ErrOutsideWorkspace):
		return &livefiles.Error{Code: livefiles.CodeOutsideWorkspace, Detail: "the path leads out of the workspace"}
	case errors.Is(err, fs.ErrPermission):
		return &livefiles.Error{Code: livefiles.CodeUnreadable, Detail: "the mode of the file, or of a folder, does not let it be read"}
	case errors.Is(err, fs.ErrInvalid):
		return &livefiles.Error{Code: livefiles.CodeNotFound, Detail: "the path is not a regular file"}
	}
	return err
}
