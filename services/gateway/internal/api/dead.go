package api

import (
	"context"
	"math"
	"strconv"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/dead"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Page sizes of dead letters.
const (
	defaultDeadLetterPageSize = 50
	maxDeadLetterPageSize     = 100
)

// deadLetterViewer returns the caller as a dead.Viewer, which determines the letters that the caller sees. Without
// authentication there is only one tenant, which also sees the letters that name no tenant.
func deadLetterViewer(ctx context.Context) (dead.Viewer, auth.Principal, error) {
	p, err := auth.From(ctx)
	return dead.Viewer{Tenant: p.Tenant, All: p.Admin}, p, err
}

// ListDeadLetters lists the tenant's dead letters.
func (s *Server) ListDeadLetters(ctx context.Context, r *spoolv1.ListDeadLettersRequest) (*spoolv1.ListDeadLettersResponse, error) {
	reader, _, err := deadLetterViewer(ctx)
	if err != nil {
		return nil, err
	}
	n := int(r.GetPageSize())
	if n == 0 {
		n = defaultDeadLetterPageSize
	}
	if n > maxDeadLetterPageSize {
		return nil, problem.Invalid("pageSize", "value is larger than %d", maxDeadLetterPageSize)
	}
	var after uint64
	if token := r.GetPageToken(); token != "" {
		if after, err = strconv.ParseUint(token, 10, 64); err != nil {
			return nil, problem.Invalid("pageToken", "%.64q is not the nextPageToken of a page of this list", token)
		}
	}
	list, next, err := s.Dead.List(ctx, reader, after, n)
	if err != nil {
		return nil, err
	}
	out := &spoolv1.ListDeadLettersResponse{}
	for _, d := range list {
		out.DeadLetters = append(out.DeadLetters, deadLetterMessage(d))
	}
	if next > 0 {
		out.NextPageToken = strconv.FormatUint(next, 10)
	}
	return out, nil
}

// GetDeadLetter returns a dead letter with its message.
func (s *Server) GetDeadLetter(ctx context.Context, r *spoolv1.GetDeadLetterRequest) (*spoolv1.DeadLetter, error) {
	d, _, err := s.visibleDeadLetter(ctx, r.GetId())
	if err != nil {
		return nil, err
	}
	out := deadLetterMessage(d)
	message := strings.ToValidUTF8(string(d.Payload), "\uFFFD")
	out.Message = &message
	return out, nil
}

// RetryDeadLetter makes the services look at the session of a dead letter again, and removes the letter.
func (s *Server) RetryDeadLetter(ctx context.Context, r *spoolv1.RetryDeadLetterRequest) (*spoolv1.RetryDeadLetterResponse, error) {
	return &spoolv1.RetryDeadLetterResponse{Id: r.GetId()}, s.sendDeadLetterCommand(ctx, command.TypeRetryDeadLetter, r.GetId())
}

// DropDeadLetter removes a dead letter.
func (s *Server) DropDeadLetter(ctx context.Context, r *spoolv1.DropDeadLetterRequest) (*spoolv1.DropDeadLetterResponse, error) {
	return &spoolv1.DropDeadLetterResponse{Id: r.GetId()}, s.sendDeadLetterCommand(ctx, command.TypeDropDeadLetter, r.GetId())
}

// sendDeadLetterCommand sends a command of type t about the dead letter with an id. It returns a problem if the caller may not see the letter.
func (s *Server) sendDeadLetterCommand(ctx context.Context, t command.Type, id string) error {
	d, p, err := s.visibleDeadLetter(ctx, id)
	if err != nil {
		return err
	}
	about := d.Session
	if about == "" {
		about = "dead"
	}
	_, err = s.Send.Send(ctx, commands.Request{Type: t, Principal: p, About: about, Body: command.DeadLetter{Sequence: d.Sequence}})
	return err
}

// visibleDeadLetter returns the dead letter with an id. It returns a problem if the letter does not exist or the
// caller may not see it.
func (s *Server) visibleDeadLetter(ctx context.Context, id string) (topology.DeadLetter, auth.Principal, error) {
	reader, p, err := deadLetterViewer(ctx)
	if err != nil {
		return topology.DeadLetter{}, p, err
	}
	n, err := strconv.ParseUint(id, 10, 64)
	if err != nil || n == 0 {
		return topology.DeadLetter{}, p, problem.Invalid("id", "%.64q is not the id of a dead letter, which is a number of 1 or more", id)
	}
	d, err := s.Dead.Get(ctx, reader, n)
	return d, p, err
}

// deadLetterMessage converts a dead letter to an API message.
func deadLetterMessage(d topology.DeadLetter) *spoolv1.DeadLetter {
	return &spoolv1.DeadLetter{
		Id: strconv.FormatUint(d.Sequence, 10), Time: timestamppb.New(d.Time), Reason: d.Reason, Subject: d.Subject, Handler: d.Handler,
		Delivered: uint32(min(d.Delivered, math.MaxUint32)), SessionId: d.Session, Retryable: d.IsRetryable(), //nolint:gosec // bounded
	}
}
