package api

import (
	"context"
	"encoding/json"
	"fmt"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

const (
	// comparePageEvents and comparePageBytes are the largest number and total size of the events that a comparison holds in
	// memory for each of the two sessions.
	comparePageEvents = 100
	comparePageBytes  = 256 << 10
	// sessionCompareCost is the number of bytes that a comparison of two sessions takes from the in-flight limit. It stands
	// for a page of each session, with an event as large as a commit, and the decoded form of both pages.
	sessionCompareCost = 6 << 20
)

// CompareSessions returns the first events at which two sessions differ, or that they are equal. If one is a fork of the other, the fork's
// events are compared with the parent's events after the fork. Other sessions are compared from their first messages on.
func (s *Server) CompareSessions(ctx context.Context, r *spoolv1.CompareSessionsRequest) (*spoolv1.SessionComparison, error) {
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	if err := s.checkComparable(ctx, tenant, r.GetWith()); err != nil {
		return nil, err
	}
	if err := admission.From(ctx).ReserveBytes(sessionCompareCost); err != nil {
		return nil, err
	}
	a, err := s.newSessionReader(ctx, tenant, r.GetSessionId())
	if err != nil {
		return nil, err
	}
	b, err := s.newSessionReader(ctx, tenant, r.GetWith())
	if err != nil {
		return nil, otherSessionError(err)
	}
	out := &spoolv1.SessionComparison{}
	switch {
	case a.parent == b.id:
		b.after, out.Fork = a.fork, true
	case b.parent == a.id:
		a.after, out.Fork = b.fork, true
	}
	for {
		x, err := a.nextEvent(ctx)
		if err != nil {
			return nil, err
		}
		y, err := b.nextEvent(ctx)
		if err != nil {
			return nil, err
		}
		if x == nil && y == nil {
			out.Equal, out.Summary = true, fmt.Sprintf("The sessions do not differ: %d events are alike.", out.EqualEvents)
			return out, nil
		}
		if x != nil && y != nil {
			if out.Field = history.FirstDifference(x.content, y.content); out.Field == "" {
				out.EqualEvents++
				continue
			}
		}
		out.Summary = describeDifference(a, b, x, y, out)
		return out, nil
	}
}

// checkComparable returns a problem unless other is the id of a session that the caller may see, and so may compare
// with another session.
func (s *Server) checkComparable(ctx context.Context, tenant, other string) error {
	p, err := auth.From(ctx)
	if err != nil {
		return err
	}
	if err = reads.CheckSessionID(other); err == nil {
		err = s.Reads.CheckVisible(ctx, tenant, other, p.Agents)
	}
	return otherSessionError(err)
}

// otherSessionError returns an error about the other session as a problem whose field is "with" instead of "sessionId", so that the
// client knows which of the two sessions it concerns. It returns nil for nil.
func otherSessionError(err error) error {
	if err == nil {
		return nil
	}
	p := *problem.From(err)
	if p.Field == "sessionId" {
		p.Field = "with"
	}
	return &p
}

// describeDifference sets x and y, the first events that differ between the sessions of a and b, in the response out.
// It returns a sentence about the difference.
func describeDifference(a, b *sessionReader, x, y *comparedEvent, out *spoolv1.SessionComparison) string {
	if x != nil {
		out.Event = reads.EventMessage(x.wire)
	}
	if y != nil {
		out.WithEvent = reads.EventMessage(y.wire)
	}
	switch {
	case y == nil:
		return fmt.Sprintf("Event %d (%s) of %s has no counterpart: %s has no more events.", x.wire.Seq, x.wire.Type, a.id, b.id)
	case x == nil:
		return fmt.Sprintf("Event %d (%s) of %s has no counterpart: %s has no more events.", y.wire.Seq, y.wire.Type, b.id, a.id)
	case out.Field == "type":
		return fmt.Sprintf("Event %d of %s is %s, event %d of %s is %s.", x.wire.Seq, a.id, x.wire.Type, y.wire.Seq, b.id, y.wire.Type)
	}
	return fmt.Sprintf("Event %d of %s and event %d of %s (%s) differ in %s.", x.wire.Seq, a.id, y.wire.Seq, b.id, x.wire.Type, out.Field)
}

// sessionReader reads the events of a session in order, without those that a comparison of sessions ignores.
type sessionReader struct {
	reads      *reads.Store
	tenant, id string
	parent     string // parent session; "" if the session is not a fork
	fork       uint32 // seq of the parent's event after which the fork continues
	tip        uint32
	read       uint32 // seq of the last event that was read
	after      uint32 // events up to this seq are skipped
	begun      bool   // whether the first message was read
	normalizer *history.EventNormalizer
	waiting    []comparedEvent
}

// comparedEvent is an event of one of two compared sessions, with the content that is compared.
type comparedEvent struct {
	wire    events.WireEvent
	content history.ComparableEvent
}

// newSessionReader returns a sessionReader at the beginning of a session.
func (s *Server) newSessionReader(ctx context.Context, tenant, id string) (*sessionReader, error) {
	one, err := s.Reads.Session(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	r := &sessionReader{reads: s.Reads, tenant: tenant, id: id, tip: one.GetTip(), normalizer: history.NewEventNormalizer(id)}
	err = s.Reads.EachEvent(ctx, tenant, id, 0, 2, []events.Type{"session_forked"}, 1, func(w events.WireEvent) error {
		var d struct {
			Parent    string `json:"parent"`
			Effective uint32 `json:"effective"`
		}
		if err := json.Unmarshal(w.Data, &d); err != nil {
			return problem.From(fmt.Errorf("event %d of %s: %w", w.Seq, id, err))
		}
		r.parent, r.fork = d.Parent, d.Effective
		return nil
	})
	return r, err
}

// nextEvent returns the next event to compare, or nil after the last one.
func (r *sessionReader) nextEvent(ctx context.Context) (*comparedEvent, error) {
	for len(r.waiting) == 0 {
		if r.read >= r.tip {
			return nil, nil
		}
		page, err := r.reads.Events(ctx, r.tenant, r.id, reads.EventQuery{After: r.read, Limit: int(min(comparePageEvents, r.tip-r.read)), Bytes: comparePageBytes})
		if err != nil {
			return nil, err
		}
		if len(page.Events) == 0 {
			return nil, r.reads.MissingUnlessFolding(ctx, r.id, problem.NoSuchSession())
		}
		for _, kept := range page.Events {
			if err := r.addUnlessIgnored(kept); err != nil {
				return nil, err
			}
		}
	}
	first := r.waiting[0]
	r.waiting = r.waiting[1:]
	return &first, nil
}

// addUnlessIgnored appends an event of the session to r.waiting, the events that next returns, unless a comparison of
// sessions ignores such an event.
func (r *sessionReader) addUnlessIgnored(kept reads.StoredEvent) error {
	var w events.WireEvent
	if err := json.Unmarshal(kept.JSON, &w); err != nil {
		return problem.From(fmt.Errorf("event %d of %s: %w", kept.Seq, r.id, err))
	}
	r.read = kept.Seq
	r.begun = r.begun || w.Type == (events.MessageAccepted{}).EventType()
	if !r.begun || w.Seq <= r.after {
		return nil
	}
	if content, ok := r.normalizer.Normalize(w); ok {
		r.waiting = append(r.waiting, comparedEvent{w, content})
	}
	return nil
}
