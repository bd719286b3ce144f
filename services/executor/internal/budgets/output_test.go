package budgets_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
)

func never() bool  { return false }
func always() bool { return true }

// line returns the nth event of a journal, of a type.
func line(n uint64, p events.Payload) events.Event { return events.Event{N: n, Data: p} }

// TestOutputMeter_CutsAtALimit: the event over a limit is named by a message once, and of later events only those are kept that the
// next turn needs.
func TestOutputMeter_CutsAtALimit(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limits          budgets.OutputLimits
		before, written events.OutputSize
		want            string
	}{
		"of the execution":          {limits: budgets.OutputLimits{Execution: events.OutputSize{Events: 2}}, want: "the output of the execution is cut here: its limit is 2 events"},
		"of the session":            {limits: budgets.OutputLimits{Session: events.OutputSize{Events: 12}}, before: events.OutputSize{Events: 10}, want: "the output of the session is cut here: its limit is 12 events"},
		"of an earlier claim":       {limits: budgets.OutputLimits{Execution: events.OutputSize{Events: 7}}, written: events.OutputSize{Events: 5}, want: "the output of the execution is cut here: its limit is 7 events"},
		"lower limits of the agent": {limits: budgets.OutputLimits{Execution: events.OutputSize{Events: 100}}.ForAgent(events.Limits{OutputEvents: 2}), want: "the output of the execution is cut here: its limit is 2 events"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := budgets.NewOutputMeter(c.limits, c.before, c.written)
			for n := range uint64(2) {
				if keep, message := m.CountEvent(line(n+1, events.Log{Message: "x"}), never); !keep || message != "" {
					t.Fatalf("event %d: kept %v, %q", n+1, keep, message)
				}
			}
			if keep, message := m.CountEvent(line(3, events.Log{Message: "x"}), never); keep || !strings.HasPrefix(message, c.want) || !m.IsCut() {
				t.Errorf("event 3: kept %v, %q, want %q; cut %v", keep, message, c.want, m.IsCut())
			}
			if keep, message := m.CountEvent(line(4, events.Log{Message: "x"}), never); keep || message != "" {
				t.Errorf("event 4: kept %v, %q", keep, message)
			}
			kept := 0
			for n := range uint64(100) {
				if keep, _ := m.CountEvent(line(5+n, events.MetadataUpdate{}), never); keep {
					kept++
				}
			}
			if kept != 64 {
				t.Errorf("%d needed events are kept after the cut, want 64", kept)
			}
			if keep, _ := m.CountEvent(events.Event{Data: events.Log{}}, never); !keep {
				t.Error("an event of the executor is cut")
			}
		})
	}
}

// TestOutputMeter_Text: text in flight has the byte limit of the execution for itself.
func TestOutputMeter_Text(t *testing.T) {
	t.Parallel()
	m := budgets.NewOutputMeter(budgets.OutputLimits{Execution: events.OutputSize{Bytes: 1000}}, events.OutputSize{}, events.OutputSize{Bytes: 900})
	if keep, message := m.CountText(1000); !keep || message != "" {
		t.Errorf("at the limit: kept %v, %q", keep, message)
	}
	if keep, message := m.CountText(1); keep || message == "" || !m.IsCut() {
		t.Errorf("over the limit: kept %v, %q, cut %v", keep, message, m.IsCut())
	}
	if keep, message := m.CountText(1); keep || message != "" {
		t.Errorf("after the cut: kept %v, %q", keep, message)
	}
}

// TestOutputMeter_Reserve: a turn that is being stopped may take one megabyte of the reserve of the store.
func TestOutputMeter_Reserve(t *testing.T) {
	t.Parallel()
	m := budgets.NewOutputMeter(budgets.OutputLimits{}, events.OutputSize{}, events.OutputSize{})
	big := events.Log{Message: strings.Repeat("x", 600<<10)}
	if keep, _ := m.CountEvent(line(1, big), never); !keep {
		t.Error("cut without a limit")
	}
	if keep, message := m.CountEvent(line(2, big), always); !keep || message != "" {
		t.Errorf("the first event of the reserve: kept %v, %q", keep, message)
	}
	if keep, message := m.CountEvent(line(3, big), always); keep || !strings.Contains(message, "the store of NATS is full but for its reserve") {
		t.Errorf("over the reserve: kept %v, %q", keep, message)
	}
}
