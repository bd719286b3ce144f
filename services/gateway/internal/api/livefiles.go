package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/livefiles"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// OpenLiveFile opens a file in the session's running sandbox, and returns its size in bytes.
func (s *Server) OpenLiveFile(ctx context.Context, session, path string) (io.ReadCloser, int64, error) {
	if err := command.CheckPath("path", path, false); err != nil {
		return nil, 0, commandProblem(err)
	}
	return s.openLiveContent(ctx, "path", livefiles.Request{Op: livefiles.OpGetFile, Session: session, Path: path})
}

// ListLiveFiles lists the entries below a folder of the session's running sandbox; "" is the workspace.
func (s *Server) ListLiveFiles(ctx context.Context, session, dir string) ([]livefiles.Entry, error) {
	if err := command.CheckPath("dir", dir, true); err != nil {
		return nil, commandProblem(err)
	}
	content, size, err := s.openLiveContent(ctx, "dir", livefiles.Request{Op: livefiles.OpListFiles, Session: session, Path: dir})
	if err != nil {
		return nil, err
	}
	defer content.Close() //nolint:errcheck // it was read to its end, or the error was returned
	raw := make([]byte, size)
	if _, err := io.ReadFull(content, raw); err != nil {
		return nil, liveFileError(err, "dir")
	}
	list := []livefiles.Entry{}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, problem.From(err)
	}
	return list, nil
}

// sandboxReady is the state that the read models have for a running sandbox.
const sandboxReady = "ready"

// openLiveContent asks the executors that share the engine of the session's sandbox for the content of a live file or
// listing. A session of another tenant yields the same 404 as one that does not exist. field is the request field
// that contains the path.
func (s *Server) openLiveContent(ctx context.Context, field string, r livefiles.Request) (io.ReadCloser, int64, error) {
	tenant, err := s.checkSession(ctx, r.Session, "")
	if err != nil {
		return nil, 0, err
	}
	one, err := s.Reads.Session(ctx, tenant, r.Session)
	if err != nil {
		return nil, 0, err
	}
	r.Tenant = tenant
	box := one.GetCurrentSandbox()
	if box.GetState() != sandboxReady {
		return nil, 0, problem.New(problem.NoLiveSandbox, "", "the session has no running sandbox; leave out live to read the last snapshot")
	}
	content, size, err := s.Files.Open(ctx, box.GetProvider(), box.GetEngine(), r)
	if err != nil {
		return nil, 0, liveFileError(err, field)
	}
	return content, size, nil
}

// liveFileCodes maps the codes of an executor's refusals to codes of the API.
var liveFileCodes = map[livefiles.ErrorCode]problem.Code{
	livefiles.CodeNoSandbox: problem.NoLiveSandbox, livefiles.CodeNotFound: problem.FileNotFound, livefiles.CodeOutsideWorkspace: problem.InvalidRequest,
	livefiles.CodeUnreadable: problem.Forbidden, livefiles.CodeTooLarge: problem.FileTooLarge, livefiles.CodeBusy: problem.Unavailable, livefiles.CodeFailed: problem.Unavailable,
}

// liveFileError converts an error of the transfer of a live file to a problem. field is the request field with the
// path.
func liveFileError(err error, field string) error {
	var refused *livefiles.Error
	switch {
	case errors.As(err, &refused):
		code, ok := liveFileCodes[refused.Code]
		if !ok {
			code = problem.Unavailable
		}
		switch refused.Code {
		case livefiles.CodeOutsideWorkspace, livefiles.CodeUnreadable, livefiles.CodeNotFound, livefiles.CodeTooLarge:
		default:
			field = "" // the default field of the code
		}
		return problem.New(code, field, strings.ToValidUTF8(refused.Detail, "\uFFFD"))
	case errors.Is(err, livefiles.ErrNoExecutor):
		return problem.New(problem.NoLiveSandbox, "", "no executor of the sandbox's engine answers; leave out live to read the last snapshot").WithCause(err)
	}
	return problem.New(problem.Unavailable, "", "the sandbox's files cannot be read now; try again").WithCause(err)
}
