//go:build bench

// Package modal measures what sandboxes on Modal cost a turn, beside those of Docker, in one run:
//
//	cd test && go test -tags bench -run TestFirstText -v -count=1 ./bench/modal
package modal

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

const (
	turns  = 30
	oneWay = 25 * time.Millisecond
	// pause is the time between two turns.
	pause = 500 * time.Millisecond
	// slack is for what differs by chance, from one run to the next: the machine is not idle.
	slack = 15 * time.Millisecond
)

// TestFirstText: the first text of a warm turn, from the message's POST to the client. With a latency on Modal's gRPC it may come one
// round trip later than with Docker: the query goes there, the text comes back.
func TestFirstText(t *testing.T) {
	harness.NeedDocker(t)
	docker := harness.New(t, harness.Options{Docker: true, Outages: true})
	modal := harness.New(t, harness.Options{Modal: true, Outages: true})
	ofDocker, ofModal := firstTexts(t, docker), firstTexts(t, modal)
	modal.Modal.Ask(t, "POST", "/latency", map[string]any{"oneWayMs": oneWay.Milliseconds()}, nil)
	far := firstTexts(t, modal)
	modal.Modal.Ask(t, "POST", "/latency", map[string]any{"oneWayMs": 0}, nil)
	more, trips := far-ofDocker, float64(far-ofDocker)/float64(2*oneWay)
	t.Logf("first text of a warm turn, median of %d: Docker %s; Modal's stand-in %s (%.2f times); with %s each way %s, that is %s more than Docker, %.2f round trips",
		turns, ofDocker, ofModal, float64(ofModal)/float64(ofDocker), oneWay, far, more, trips)
	if more > 2*oneWay+slack {
		t.Errorf("the first text comes %s later than with Docker, %.2f round trips", more, trips)
	}
}

// isText reports whether an event shows text: a piece of it, or a block that is complete at once.
func isText(w events.Wire) bool {
	return w.Type == events.TextDelta || w.Type == (events.BlockComplete{}).EventType() && strings.Contains(string(w.Data), string(events.KindAssistantText))
}

// firstTexts is the median over warm turns of a new session.
func firstTexts(t *testing.T, c *harness.Cluster) time.Duration {
	t.Helper()
	c = c.In(t)
	session := c.Create("spool", map[string]any{"model": "mock"})
	s, err := c.Join(0, session, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var all []time.Duration
	for n := range turns + 3 {
		began := time.Now()
		execution := c.Post(session, "Hello")
		var first time.Duration
		for {
			w, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			if w.ExecutionID == execution && first == 0 && isText(w) {
				first = time.Since(began)
			}
			if w.ExecutionID == execution && events.Terminal(w.Type) {
				if w.Type != (events.ExecutionCompleted{}).EventType() {
					t.Fatalf("the turn ended with %s: %s", w.Type, w.Data)
				}
				break
			}
		}
		if n >= 3 { // those before warm up
			all = append(all, first)
		}
		time.Sleep(pause)
	}
	slices.Sort(all)
	return all[len(all)/2].Round(10 * time.Microsecond)
}
