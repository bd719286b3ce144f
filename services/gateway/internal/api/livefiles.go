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

// LiveFile opens a file in the session's running sandbox, and returns its size in bytes.
func (s *Server) LiveFile(ctx context.Context, session, path string) (io.ReadCloser, int64, error) {
	if err := command.CheckPath("path", path, false); err != nil {
		return nil, 0, commandProblem(err)
	}
	return s.openLive(ctx, "path", livefiles.Request{Op: livefiles.OpGetFile, Session: session, Path: path})
}

// LiveFiles lists the entries below a folder of the session's running sandbox; "" is the workspace.
func (s *Server) LiveFiles(ctx context.Context, session, dir string) ([]livefiles.Entry, error) {
	if err := command.CheckPath("dir", dir, true); err != nil {
		return nil, commandProblem(err)
	}
	content, size, err := s.openLive(ctx, "dir", livefiles.Request{Op: livefiles.OpListFiles, Session: session, Path: dir})
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

// stateReady is the state of a running sandbox in the read models.
const stateReady = "ready"

// openLive opens content on the executors of the engine that runs the session's sandbox. A session of another tenant
// yields the same 404 as one that does not exist. field is the request field that contains the path.
func (s *Server) openLive(ctx context.Context, field string, r livefiles.Request) (io.ReadCloser, int64, error) {
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
	if box.GetState() != stateReady {
		return nil, 0, problem.New(problem.NoLiveSandbox, "", "the session has no running sandbox; leave out live to read the last snapshot")
	}
	content, size, err := s.Files.Open(ctx, box.GetProvider(), box.GetEngine(), r)
	if err != nil {
		return nil, 0, liveFileError(err, field)
	}
	return content, size, nil
}

// liveCodes maps the codes of an executor's refusals to codes of the API.
var liveCodes = map[livefiles.ErrorCode]problem.Code{
	livefiles.CodeNoSandbox: problem.NoLiveSandbox, livefiles.CodeNotFound: problem.FileNotFound, livefiles.CodeOutsideWorkspace: problem.InvalidRequest,
	livefiles.CodeUnreadable: problem.Forbidden, livefiles.CodeTooLarge: problem.FileTooLarge, livefiles.CodeBusy: problem.Unavailable, livefiles.CodeFailed: problem.Unavailable,
}

// liveFileError converts an error of a transfer to a problem that names the invalid field.
func liveFileError(err error, field string) error {
	var refused *livefiles.Error
	switch {
	case errors.As(err, &refused):
		code, ok := liveCodes[refused.Code]
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
