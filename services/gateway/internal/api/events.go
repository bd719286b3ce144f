package api

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/changes"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Limits of a page of events.
const (
	DefaultEventPageSize = 100
	MaxEventPageSize     = 1000
)

// ListEvents lists the stored events of a session.
func (s *Server) ListEvents(ctx context.Context, r *spoolv1.ListEventsRequest) (*spoolv1.ListEventsResponse, error) {
	limit, err := eventPageSize(r.GetLimit())
	if err != nil {
		return nil, err
	}
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	page, err := s.Reads.Events(ctx, tenant, r.GetSessionId(), reads.EventQuery{
		After: r.GetAfter(), Limit: limit, Types: splitEventTypes(r.GetTypes()), Metadata: valueOrTrue(r.Metadata),
	})
	if err != nil {
		return nil, err
	}
	list, err := eventMessages(page.Events)
	return &spoolv1.ListEventsResponse{Events: list, Tip: page.Tip, Next: page.Next}, err
}

// eventPageSize returns the number of events that a page may have, or an error if the request asks for too many.
func eventPageSize(requested uint32) (int, error) {
	switch {
	case requested == 0:
		return DefaultEventPageSize, nil
	case requested > MaxEventPageSize:
		return 0, problem.Invalid("limit", "value is %d; the limit is %d", requested, MaxEventPageSize)
	}
	return int(requested), nil
}

// eventMessages converts stored events to API messages.
func eventMessages(list []reads.StoredEvent) ([]*spoolv1.Event, error) {
	var out []*spoolv1.Event
	for _, kept := range list {
		e, err := kept.Message()
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	return out, nil
}

// ListHistory lists the events that a fork inherits from its ancestors. A caller who may read the fork may read them
// too, even if the ancestors are not visible to it.
func (s *Server) ListHistory(ctx context.Context, r *spoolv1.ListHistoryRequest) (*spoolv1.ListHistoryResponse, error) {
	limit, err := eventPageSize(r.GetLimit())
	if err != nil {
		return nil, err
	}
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	h, err := s.Reads.History(ctx, tenant, r.GetSessionId(), r.GetAfter(), limit)
	if err != nil {
		return nil, err
	}
	out := &spoolv1.ListHistoryResponse{Total: h.Total, Next: h.Next}
	for _, a := range h.Ancestors {
		out.Ancestors = append(out.Ancestors, &spoolv1.Ancestor{SessionId: a.Session, Effective: a.Effective})
	}
	out.Events, err = eventMessages(h.Events)
	return out, err
}

// ListHistoryBlocks lists the blocks that a fork inherits from its ancestors.
func (s *Server) ListHistoryBlocks(ctx context.Context, r *spoolv1.ListHistoryBlocksRequest) (*spoolv1.ListHistoryBlocksResponse, error) {
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	list, next, err := s.Reads.HistoryBlocks(ctx, tenant, r.GetSessionId(), r.GetPageToken(), r.GetPageSize())
	return &spoolv1.ListHistoryBlocksResponse{Ancestors: list, NextPageToken: next}, err
}

// valueOrTrue returns the value of an option whose default is true.
func valueOrTrue(option *bool) bool { return option == nil || *option }

// splitEventTypes splits lists of event types that are separated by commas. It returns nil if the request names none,
// which means all types.
func splitEventTypes(lists []string) []string {
	var list []string
	for _, g := range lists {
		for t := range strings.SplitSeq(g, ",") {
			if t = strings.TrimSpace(t); t != "" {
				list = append(list, t)
			}
		}
	}
	return list
}

// StreamEvents sends the events of a session after a cursor, and its text in flight, until the client or the gateway ends the call.
func (s *Server) StreamEvents(r *spoolv1.StreamEventsRequest, out grpc.ServerStreamingServer[spoolv1.StreamEventsResponse]) error {
	p, err := auth.From(out.Context())
	if err != nil {
		return err
	}
	if err := reads.CheckSessionID(r.GetSessionId()); err != nil {
		return err
	}
	ctx, release := s.Watch.AddStream(out.Context(), p)
	defer release()
	reader, err := s.Live.Join(ctx, p.Tenant, p.Agents, r.GetSessionId(), r.GetAfter())
	if err != nil {
		return err
	}
	defer reader.Close()
	defer s.Metrics.BeginStream(streamKindGRPC)()
	err = s.sendFrames(ctx, reader, valueOrTrue(r.Metadata), func(f live.Frame, metadata bool) error {
		m, err := streamResponse(f, metadata)
		if err != nil {
			return err
		}
		return out.Send(m)
	})
	if out.Context().Err() == nil {
		s.Metrics.CountCut(streamKindGRPC, string(problem.From(err).Code))
	}
	return err
}

// streamKindGRPC is the kind of StreamEvents and ReplayEvents in the metrics of streams.
const streamKindGRPC = "grpc"

// frameSource returns, one batch after another, the frames that a stream sends. It is a live.Reader or a
// replay.Replay.
type frameSource interface {
	Next(ctx context.Context) ([]live.Frame, error)
	Cursor() uint32
}

// sendFrames passes the frames of from to send, until send fails or no more frames come, and returns the reason. send
// may block for as long as the call lasts if the client is slow. It therefore runs in its own goroutine: if a batch
// takes longer than WriteTimeout, sendFrames returns without waiting for send.
func (s *Server) sendFrames(ctx context.Context, from frameSource, metadata bool, send func(f live.Frame, metadata bool) error) error {
	cursor := from.Cursor()
	for {
		frames, err := from.Next(ctx)
		if err != nil {
			return err
		}
		err = s.sendInTime(ctx, func() error { return s.sendBatch(frames, metadata, send) }, fmt.Sprintf("the seq of its last event, which is %d or later", cursor))
		if err != nil {
			return err
		}
		cursor = from.Cursor()
	}
}

// sendInTime calls send in a goroutine of its own, and returns its error, or SLOW_CLIENT after WriteTimeout. again says with which cursor the client can
// call again.
func (s *Server) sendInTime(ctx context.Context, send func() error, again string) error {
	sent := make(chan error, 1)
	go func() { sent <- send() }()
	slow := time.NewTimer(s.WriteTimeout)
	defer slow.Stop()
	select {
	case err := <-sent:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-slow.C:
		return problem.New(problem.SlowClient, "", "the client took too long to read; call again with "+again)
	}
}

// StreamSessions sends the changes of the tenant's sessions after a cursor, until the client or the gateway ends the call.
func (s *Server) StreamSessions(r *spoolv1.StreamSessionsRequest, out grpc.ServerStreamingServer[spoolv1.StreamSessionsResponse]) error {
	p, err := auth.From(out.Context())
	if err != nil {
		return err
	}
	ctx, release := s.Watch.AddStream(out.Context(), p)
	defer release()
	reader, err := s.Changes.Join(ctx, p.Tenant, p.Agents, "after", r.GetAfter())
	if err != nil {
		return err
	}
	defer reader.Close()
	defer s.Metrics.BeginStream(streamKindGRPC)()
	err = s.sendChanges(ctx, reader, out)
	if out.Context().Err() == nil {
		s.Metrics.CountCut(streamKindGRPC, string(problem.From(err).Code))
	}
	return err
}

// sendChanges sends the changes that a reader returns, until an error occurs.
func (s *Server) sendChanges(ctx context.Context, reader *changes.Reader, out grpc.ServerStreamingServer[spoolv1.StreamSessionsResponse]) error {
	cursor := reader.Cursor()
	list := []*spoolv1.StreamSessionsResponse{{Cursor: cursor}}
	for {
		err := s.sendInTime(ctx, func() error {
			for _, m := range list {
				if err := out.Send(m); err != nil {
					return err
				}
			}
			return nil
		}, "cursor "+cursor)
		if err != nil {
			return err
		}
		changed, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		list, cursor = nil, reader.Cursor()
		for _, c := range changed {
			m := &spoolv1.StreamSessionsResponse{Cursor: c.Cursor.String(), Change: &spoolv1.StreamSessionsResponse_Session{Session: c.Session}}
			if c.Deleted != nil {
				m.Change = &spoolv1.StreamSessionsResponse_Deleted{Deleted: c.Deleted}
			}
			s.Metrics.CountSent(streamKindGRPC, len(c.JSON))
			list = append(list, m)
		}
	}
}

// sendBatch passes frames to send in order, and counts the events and text deltas among them.
func (s *Server) sendBatch(frames []live.Frame, metadata bool, send func(f live.Frame, metadata bool) error) error {
	for _, f := range frames {
		if err := send(f, metadata); err != nil {
			return err
		}
		if f.JSON != nil {
			s.Metrics.CountSent(streamKindGRPC, f.Len(metadata))
		}
	}
	return nil
}

// streamResponse converts a frame to a response of StreamEvents.
func streamResponse(f live.Frame, metadata bool) (*spoolv1.StreamEventsResponse, error) {
	if f.Lag != nil {
		return &spoolv1.StreamEventsResponse{Message: &spoolv1.StreamEventsResponse_Lag{
			Lag: &spoolv1.Lag{Lagging: f.Lag.Lagging, LagMs: f.Lag.LagMs},
		}}, nil
	}
	e, err := frameEvent(f, metadata)
	return &spoolv1.StreamEventsResponse{Message: &spoolv1.StreamEventsResponse_Event{Event: e}}, err
}

// frameEvent converts a frame with a stored event, or with text in flight, to an API message.
func frameEvent(f live.Frame, metadata bool) (*spoolv1.Event, error) {
	kept := reads.StoredEvent{Seq: f.Seq, Type: f.Type, JSON: f.JSON}
	if metadata {
		kept.Metadata = f.Metadata
	}
	return kept.Message()
}

// ListBlocks lists a session's blocks.
func (s *Server) ListBlocks(ctx context.Context, r *spoolv1.ListBlocksRequest) (*spoolv1.ListBlocksResponse, error) {
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	list, tip, err := s.Player.Blocks(ctx, tenant, r.GetSessionId(), r.GetConversationId(), nil)
	return &spoolv1.ListBlocksResponse{Blocks: list, Tip: tip}, err
}
