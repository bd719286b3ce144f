package api

import (
	"errors"
	"io"

	"google.golang.org/grpc"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events/pace"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/replay"
)

// ReplayEvents sends the events of a session at the speed at which they occurred, or faster, until the last one was
// sent.
func (s *Server) ReplayEvents(r *spoolv1.ReplayEventsRequest, out grpc.ServerStreamingServer[spoolv1.ReplayEventsResponse]) error {
	p, err := auth.From(out.Context())
	if err != nil {
		return err
	}
	ask, err := replayRequest(r)
	if err != nil {
		return err
	}
	ask.Tenant, ask.Agents = p.Tenant, p.Agents
	ctx, release := s.Watch.AddStream(out.Context(), p)
	defer release()
	from, err := s.Player.Open(ctx, ask)
	if err != nil {
		return err
	}
	defer from.Close()
	defer s.Metrics.BeginStream(streamKindGRPC)()
	err = s.sendFrames(ctx, from, valueOrTrue(r.Metadata), func(f live.Frame, metadata bool) error {
		m, err := replayResponse(f, metadata)
		if err != nil {
			return err
		}
		return out.Send(m)
	})
	if errors.Is(err, io.EOF) {
		return nil
	}
	if out.Context().Err() == nil {
		s.Metrics.CountCut(streamKindGRPC, string(problem.From(err).Code))
	}
	return err
}

// replayRequest converts an API request for a replay to a replay.Request.
func replayRequest(r *spoolv1.ReplayEventsRequest) (replay.Request, error) {
	ask := replay.Request{Session: r.GetSessionId(), From: 1, To: r.To, Speed: 1, Execution: r.GetExecutionId()}
	if err := reads.CheckSessionID(ask.Session); err != nil {
		return ask, err
	}
	if r.From != nil {
		ask.From = *r.From
	}
	if ask.Execution != "" {
		if err := reads.CheckExecutionID(ask.Execution); err != nil {
			return ask, err
		}
	}
	if r.GetSpeed() == "" {
		return ask, nil
	}
	var err error
	if ask.Speed, err = pace.ParseSpeed(r.GetSpeed()); err != nil {
		return ask, problem.Invalid("speed", "%s", err)
	}
	return ask, nil
}

// replayResponse converts a frame of a replay to an API message.
func replayResponse(f live.Frame, metadata bool) (*spoolv1.ReplayEventsResponse, error) {
	if f.Notice == nil {
		e, err := frameEvent(f, metadata)
		return &spoolv1.ReplayEventsResponse{Message: &spoolv1.ReplayEventsResponse_Event{Event: e}}, err
	}
	out := &spoolv1.ReplayEventsResponse{}
	switch n := f.Notice.Data.(type) {
	case pace.StartedNotice:
		out.Message = &spoolv1.ReplayEventsResponse_Started{Started: &spoolv1.ReplayStarted{From: n.From, To: n.To, Tip: n.Tip, Speed: n.Speed}}
	case pace.ShortenedNotice:
		out.Message = &spoolv1.ReplayEventsResponse_GapShortened{GapShortened: &spoolv1.GapShortened{Seq: n.Seq, GapMs: float64(n.GapMs), LeftOutMs: float64(n.LeftOutMs)}}
	case pace.BlockWholeNotice:
		out.Message = &spoolv1.ReplayEventsResponse_BlockWhole{BlockWhole: &spoolv1.BlockWhole{Seq: n.Seq, BlockId: n.BlockID, ShownBytes: uint32(n.ShownBytes)}} //nolint:gosec // offsets in a block have 32 bits
	case pace.EndedNotice:
		out.Message = &spoolv1.ReplayEventsResponse_Ended{Ended: &spoolv1.ReplayEnded{Seq: n.Seq}}
	}
	return out, nil
}
