package api

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/quota"
)

// settleUpload settles the hold of an upload after the command about it was sent, with the answer a or the error err.
// about is the id that the answer's position belongs to. If the command was refused, the upload counts until the
// function removed reports that its content was removed.
func settleUpload(hold *quota.UploadHold, about string, a command.Answer, err error, removed func(context.Context) (bool, error)) {
	var p *problem.Error
	switch {
	case err == nil:
		hold.SettleAccepted(about, a.Position)
	case errors.As(err, &p) && p.Code == problem.Unavailable:
		hold.SettleUnknown()
	default:
		hold.SettleRefused(removed)
	}
}

// refusedFilesTTL is the time for which the files of a refused request count as stored. A janitor with default settings has
// removed them by then. The names of the objects derive from their content, so another request may have stored the same objects
// again; their absence cannot be checked.
const refusedFilesTTL = 75 * time.Minute

// withStoredFiles returns the command request r with a Prepare function that stores the files f, within the tenant's
// storage limit. done must be called with the outcome of the command.
func (s *Server) withStoredFiles(r commands.Request, f requestFiles) (_ commands.Request, done func(command.Answer, error)) {
	if len(f.refs) == 0 {
		return r, func(command.Answer, error) {}
	}
	var hold *quota.UploadHold
	var about string
	r.Prepare = func(ctx context.Context, tenant, session string) (err error) {
		about = session
		if hold, err = s.Quota.Reserve(ctx, tenant, f.totalBytes()); err != nil {
			return err
		}
		if err := hold.ReserveBytes(ctx, f.totalBytes()); err != nil {
			return err
		}
		return f.storeContents(ctx, s.Objects, tenant, session)
	}
	return r, func(a command.Answer, err error) {
		until := s.Now().Add(refusedFilesTTL)
		settleUpload(hold, about, a, err, func(context.Context) (bool, error) { return s.Now().After(until), nil })
	}
}
