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

// settleUpload ends the hold of an upload whose command was sent. about is the id that the position of the answer is of, and gone
// reports whether the content was removed, for a command that was refused.
func settleUpload(hold *quota.Hold, about string, a command.Answer, err error, gone func(context.Context) (bool, error)) {
	var p *problem.Error
	switch {
	case err == nil:
		hold.Accepted(about, a.Position)
	case errors.As(err, &p) && p.Code == problem.Unavailable:
		hold.Unknown()
	default:
		hold.Refused(gone)
	}
}

// keptFor is how long files of a refused request count: until the janitor has removed them, if its settings are the defaults. Their
// names follow from their content, so another request may have stored them again.
const keptFor = 75 * time.Minute

// storing returns a request that stores its files, within what the tenant may store. done must be called with the outcome.
func (s *Server) storing(r commands.Request, f files) (_ commands.Request, done func(command.Answer, error)) {
	if len(f.refs) == 0 {
		return r, func(command.Answer, error) {}
	}
	var hold *quota.Hold
	var about string
	r.Prepare = func(ctx context.Context, tenant, session string) (err error) {
		about = session
		if hold, err = s.Quota.Reserve(ctx, tenant, f.size()); err != nil {
			return err
		}
		if err := hold.Take(ctx, f.size()); err != nil {
			return err
		}
		return f.store(ctx, s.Objects, tenant, session)
	}
	return r, func(a command.Answer, err error) {
		until := s.Now().Add(keptFor)
		settleUpload(hold, about, a, err, func(context.Context) (bool, error) { return s.Now().After(until), nil })
	}
}
