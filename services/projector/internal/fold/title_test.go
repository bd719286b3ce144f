package fold_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// TestTitle_IsTheBeginningOfTheFirstMessage tests that an execution keeps the beginning of its message, and a session
// the beginning of its first message.
func TestTitle_IsTheBeginningOfTheFirstMessage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		message events.MessageAccepted
		want    string
	}{
		"text":                    {events.MessageAccepted{Content: "what is this?"}, "what is this?"},
		"a long text":             {events.MessageAccepted{Content: strings.Repeat("é", 1001)}, strings.Repeat("é", 1000)},
		"the first part of text":  {events.MessageAccepted{Parts: []events.Part{{Type: "image", Data: "AA=="}, {Type: "text"}, {Type: "text", Text: "look"}, {Type: "text", Text: "more"}}}, "look"},
		"an image alone":          {events.MessageAccepted{Parts: []events.Part{{Type: "image", Data: "AA=="}}}, ""},
		"what Postgres cannot do": {events.MessageAccepted{Content: "a\x00b"}, "a\uFFFDb"},
	} {
		m, model := newMemory(t), fold.New(3, 1000)
		at := func(seq uint64, id string, d events.Payload) {
			m.fold(model, fold.CommitBatch{Records: []eventlog.Record{{
				Position: eventlog.Position{Seq: seq}, Subject: events.Subject{Tenant: "t", ID: "ses_1", Aspect: events.Life},
				Events: []events.Event{{ExecutionID: id, Data: d}},
			}}})
		}
		at(1, "exe_1", c.message)
		at(2, "exe_1", events.ExecutionWithdrawn{Reason: "cancelled"})
		at(3, "exe_2", events.MessageAccepted{Content: "the second"})
		if got := m.sessions[fold.RowKey{Tenant: "t", ID: "ses_1"}].Title; got != c.want {
			t.Errorf("%s: the title is %q, want %q", name, got, c.want)
		}
		if got := m.executions[child("t", "ses_1", "exe_1")].Query; got != c.want {
			t.Errorf("%s: the query is %q, want %q", name, got, c.want)
		}
		if got := m.executions[child("t", "ses_1", "exe_2")].Query; got != "the second" {
			t.Errorf("%s: the second query is %q", name, got)
		}
	}
}
