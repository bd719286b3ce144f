package reads

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// Limits of a timeline.
const (
	maxTimelineConversations = 100
	maxTimelineMarks         = 500
	maxMarkMessage           = 200 // bytes
	maxMarkEventBytes        = 64 << 10
)

// The kinds of the lanes of a timeline.
const (
	laneSession      = "session"
	laneSandbox      = "sandbox"
	laneModel        = "model"
	laneConversation = "conversation"
)

// lane identifies a lane of a timeline.
type lane struct {
	kind         string
	conversation string // of a conversation; otherwise ""
}

// Timeline returns a summary of a session over time, with a number of buckets. It counts all events of the session.
func (s *Store) Timeline(ctx context.Context, tenant, session string, buckets uint32) (*spoolv1.Timeline, error) {
	var out *spoolv1.Timeline
	err := s.awaitRead(ctx, s.sessionSearch(tenant, session), func() error {
		out = &spoolv1.Timeline{}
		lanes, err := s.timelineLanes(ctx, tenant, session, int(buckets), out)
		switch {
		case err != nil:
			return err
		case out.Tip == 0:
			return s.missingSessionError(ctx, tenant, session)
		}
		conversations, err := s.queries.Conversations(ctx, tenant, session)
		if err != nil {
			return err
		}
		out.Lanes, out.MoreLanes = sortLanes(lanes, conversations)
		return s.addTimelineMarks(ctx, tenant, session, out)
	})
	return out, err
}

// timelineLanes counts the events of a session by lane and bucket, and sets the times and the tip of out.
func (s *Store) timelineLanes(ctx context.Context, tenant, session string, buckets int, out *spoolv1.Timeline) (map[lane]*spoolv1.TimelineLane, error) {
	lanes := map[lane]*spoolv1.TimelineLane{}
	err := s.queryRows(ctx, func(r pgx.Rows) error {
		var tip int64
		var start, end *time.Time
		var kind, conversation *string
		var bucket, n *int64
		if err := r.Scan(&tip, &start, &end, &kind, &conversation, &bucket, &n); err != nil {
			return err
		}
		out.Tip, out.Start, out.End = uint32(tip), timestampMessage(start), timestampMessage(end)
		if kind == nil {
			return nil
		}
		out.BucketMs = max(0, float64(end.Sub(*start))) / float64(time.Millisecond) / float64(buckets) // the clock of an earlier event may have been ahead
		id := lane{*kind, *conversation}
		if lanes[id] == nil {
			lanes[id] = &spoolv1.TimelineLane{Kind: id.kind, ConversationId: nilIfEmpty(id.conversation), Events: make([]uint32, buckets)}
		}
		lanes[id].Events[*bucket] += uint32(*n)
		lanes[id].Total += uint32(*n)
		return nil
	}, `
		WITH s AS (SELECT tip FROM sessions WHERE tenant = $1 AND id = $2),
		     r AS (SELECT (SELECT at FROM events WHERE tenant = $1 AND session = $2 ORDER BY seq LIMIT 1) AS first,
		                  (SELECT at FROM events WHERE tenant = $1 AND session = $2 ORDER BY seq DESC LIMIT 1) AS last)
		SELECT s.tip, r.first, r.last, l.kind, CASE WHEN l.kind = 'conversation' THEN l.conversation ELSE '' END, l.bucket, l.n FROM s CROSS JOIN r
		  LEFT JOIN LATERAL (
		    SELECT CASE WHEN e.type LIKE 'sandbox\_%' OR e.type = 'egress_denied' THEN 'sandbox' WHEN e.type = 'model_called' THEN 'model'
		                WHEN e.conversation <> '' THEN 'conversation' ELSE 'session' END AS kind, e.conversation,
		           greatest(0, least($3::bigint - 1, floor(date_part('epoch', e.at - r.first) * $3::bigint / greatest(date_part('epoch', r.last - r.first), 0.000001))))::bigint AS bucket,
		           count(*) AS n
		      FROM events e WHERE e.tenant = $1 AND e.session = $2 AND e.at IS NOT NULL GROUP BY 1, 2, 3) l ON true`, tenant, session, buckets)
	return lanes, err
}

// sortLanes returns the lanes in the order in which a timeline shows them: the session, the sandbox, models, main and
// the conversations of sub-agents. It omits the conversations with the fewest events, and returns their number.
func sortLanes(lanes map[lane]*spoolv1.TimelineLane, conversations []queries.ConversationsRow) (list []*spoolv1.TimelineLane, omitted uint32) {
	for _, id := range []lane{{kind: laneSession}, {kind: laneSandbox}, {kind: laneModel}, {laneConversation, events.MainConversation}} {
		if l := lanes[id]; l != nil {
			list = append(list, l)
			delete(lanes, id)
		}
	}
	var subagents []*spoolv1.TimelineLane
	order := map[string]int{} // order of the conversations
	for i, c := range conversations {
		order[c.ID] = i
		if l := lanes[lane{laneConversation, c.ID}]; l != nil {
			l.Name = nilIfEmpty(c.Name)
		}
	}
	for id, l := range lanes {
		if _, known := order[id.conversation]; !known {
			order[id.conversation] = len(conversations)
		}
		subagents = append(subagents, l)
	}
	inOrder := func(a, b *spoolv1.TimelineLane) int {
		if d := order[a.GetConversationId()] - order[b.GetConversationId()]; d != 0 {
			return d
		}
		return strings.Compare(a.GetConversationId(), b.GetConversationId())
	}
	slices.SortFunc(subagents, func(a, b *spoolv1.TimelineLane) int {
		if a.Total != b.Total {
			return int(int64(b.Total) - int64(a.Total))
		}
		return inOrder(a, b)
	})
	if n := len(subagents); n > maxTimelineConversations {
		subagents, omitted = subagents[:maxTimelineConversations], uint32(n-maxTimelineConversations)
	}
	slices.SortFunc(subagents, inOrder)
	return append(list, subagents...), omitted
}

// addTimelineMarks adds the last marks up to the tip of a timeline. The types of events are those of the index
// events_marks.
func (s *Store) addTimelineMarks(ctx context.Context, tenant, session string, out *spoolv1.Timeline) error {
	const marks = `e.tenant = $1 AND e.session = $2 AND e.seq <= $3 AND e.type IN ('error', 'attempt_failed', 'sandbox_failed', 'approval_requested',
		'execution_started', 'execution_completed', 'execution_failed', 'execution_cancelled', 'execution_withdrawn')`
	var all int64
	err := s.queryRows(ctx, func(r pgx.Rows) error {
		var seq int64
		var eventType, conversation string
		var at *time.Time
		var stored, approval, status, title *string
		var endedSeq *int64
		var endedAt *time.Time
		if err := r.Scan(&all, &seq, &eventType, &conversation, &at, &stored, &approval, &status, &title, &endedSeq, &endedAt); err != nil {
			return err
		}
		m := &spoolv1.TimelineMark{
			Seq: uint32(seq), Time: timestampMessage(at), Kind: markKind(events.Type(eventType)), Type: eventType, ConversationId: nilIfEmpty(conversation),
			ApprovalId: approval, Status: status, EndedAt: timestampMessage(endedAt),
		}
		if endedSeq != nil && *endedSeq > 0 {
			ended := uint32(*endedSeq)
			m.EndedSeq = &ended
		}
		if stored != nil {
			if err := setMarkFields(m, *stored); err != nil {
				return err
			}
		}
		if title != nil {
			m.Message = nilIfEmpty(truncate.Text(*title, maxMarkMessage))
		}
		out.Marks = append(out.Marks, m)
		return nil
	}, `
		SELECT (SELECT count(*) FROM events e WHERE `+marks+`), e.seq, e.type, e.conversation, e.at, CASE WHEN octet_length(e.event) <= $5 THEN e.event END,
		       a.id, a.status, a.title, a.ended_seq, a.ended_at
		  FROM (SELECT e.seq, e.type, e.conversation, e.at, e.event FROM events e WHERE `+marks+` ORDER BY e.seq DESC LIMIT $4) e
		  LEFT JOIN approvals a ON e.type = 'approval_requested' AND a.tenant = $1 AND a.session = $2 AND a.requested_seq = e.seq
		 ORDER BY e.seq`, tenant, session, int64(out.Tip), maxTimelineMarks, maxMarkEventBytes)
	out.MoreMarks = uint32(all) - uint32(len(out.Marks))
	return err
}

// markKind returns the kind of the mark for an event of a type.
func markKind(t events.Type) string {
	switch {
	case events.IsTerminal(t):
		return "execution_ended"
	case t == events.ExecutionStarted{}.EventType():
		return "execution_started"
	case t == events.ApprovalRequested{}.EventType():
		return "approval"
	}
	return "error"
}

// setMarkFields sets the fields of a mark that are taken from its event.
func setMarkFields(m *spoolv1.TimelineMark, stored string) error {
	var w events.WireEvent
	if err := json.Unmarshal([]byte(stored), &w); err != nil {
		return errUnreadableEvent(err)
	}
	m.ExecutionId = nilIfEmpty(w.ExecutionID)
	var data struct {
		Code, Message any // strings, unless a later build changed them
	}
	if json.Unmarshal(w.Data, &data) != nil {
		return nil // the data of an event that could not be read is no object
	}
	if code, ok := data.Code.(string); ok {
		m.Code = nilIfEmpty(truncate.Text(code, maxMarkMessage))
	}
	if message, ok := data.Message.(string); ok {
		m.Message = nilIfEmpty(truncate.Text(message, maxMarkMessage))
	}
	return nil
}
