//go:build bench

// Package modal compares a turn in a sandbox on Modal with a turn in a Docker sandbox, in one run. It is a test, because it
// uses the harness of the end-to-end tests:
//
//	cd test && go test -tags bench -run TestFirstText -v -count=1 ./bench/modal
package modal

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

const (
	rounds = 5
	turns  = 10 // of each kind in a round
	warmUp = 2  // turns before them, which are not counted
	oneWay = 25 * time.Millisecond
	// pause is the time between two turns.
	pause = 500 * time.Millisecond
)

// TestFirstText_CostsOneRoundTripMoreThanWithDocker measures the first text of a warm turn, from the message's POST to the client. With a
// latency on Modal's gRPC it may come one round trip later than with Docker: the query goes there, the text comes back.
//
// A round trip is what one request to the stand-in takes longer with the latency than without: more than twice the latency, since its
// timers are late by up to a millisecond, and later on a busy machine. Turns and requests alternate in rounds, so that both meet the same load.
func TestFirstText_CostsOneRoundTripMoreThanWithDocker(t *testing.T) {
	harness.NeedDocker(t)
	docker := newTalk(t, harness.New(t, harness.Options{Docker: true, Outages: true}))
	cluster := harness.New(t, harness.Options{Modal: true, Outages: true})
	modal, latency := newTalk(t, cluster), func(d time.Duration) {
		cluster.Modal.RequestControl(t, "POST", "/latency", map[string]any{"oneWayMs": d.Milliseconds()}, nil)
	}
	var here, near, far, nearTrip, farTrip []time.Duration
	for range rounds {
		here = append(here, docker.firstTexts(t)...)
		nearTrip, near = append(nearTrip, requests(t, cluster.Modal)...), append(near, modal.firstTexts(t)...)
		latency(oneWay)
		farTrip, far = append(farTrip, requests(t, cluster.Modal)...), append(far, modal.firstTexts(t)...)
		latency(0)
	}
	trip := median(farTrip) - median(nearTrip)
	t.Logf("first text of a warm turn, median of %d: Docker %s; Modal's stand-in %s, with %s each way %s", len(here), median(here), median(near), oneWay, median(far))
	more, distance := median(far)-median(here), median(far)-median(near)
	t.Logf("the distance costs %s, %.2f round trips of %s; with it the text comes %s later than with Docker", distance, float64(distance)/float64(trip), trip, more)
	if distance > trip*11/10 {
		t.Errorf("the distance costs %.2f round trips", float64(distance)/float64(trip))
	}
}

// median returns the middle value.
func median(all []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2].Round(10 * time.Microsecond)
}

// requests measures requests to the stand-in that need nothing but one round trip.
func requests(t *testing.T, m *harness.MockModal) (all []time.Duration) {
	t.Helper()
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: protocols}
	defer transport.CloseIdleConnections()
	for n := range turns + warmUp {
		began := time.Now()
		resp, err := (&http.Client{Transport: transport}).Get(m.URL) // gRPC refuses it
		if err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil {
			t.Fatal(err)
		}
		if n >= warmUp {
			all = append(all, time.Since(began))
		}
		time.Sleep(pause)
	}
	return all
}

// isText reports whether an event shows text: a piece of it, or a block that is complete at once.
func isText(w events.WireEvent) bool {
	return w.Type == events.TextDelta || w.Type == (events.BlockComplete{}).EventType() && strings.Contains(string(w.Data), string(events.KindAssistantText))
}

// talk is a session with the stream of its events as far as it was read.
type talk struct {
	c       *harness.Cluster
	session string
	read    *harness.Stream // nil before the first turn
}

func newTalk(t *testing.T, c *harness.Cluster) *talk {
	t.Helper()
	return &talk{c: c, session: c.CreateSession("spool", map[string]any{"model": "mock"})}
}

// firstTexts returns the times of warm turns.
func (k *talk) firstTexts(t *testing.T) (all []time.Duration) {
	t.Helper()
	stream, err := k.c.JoinSocket(0, k.session, k.read)
	if err != nil {
		t.Fatal(err)
	}
	k.read = stream
	defer stream.Close() // the gateway closes one that is not read
	for n := range turns + warmUp {
		began := time.Now()
		execution := k.c.PostMessage(k.session, "Hello")
		var first time.Duration
		for {
			w, err := stream.Next()
			if err != nil {
				t.Fatal(err)
			}
			if w.ExecutionID == execution && first == 0 && isText(w) {
				first = time.Since(began)
			}
			if w.ExecutionID == execution && events.IsTerminal(w.Type) {
				if w.Type != (events.ExecutionCompleted{}).EventType() {
					t.Fatalf("the turn ended with %s: %s", w.Type, w.Data)
				}
				break
			}
		}
		if n >= warmUp {
			all = append(all, first)
		}
		time.Sleep(pause)
	}
	return all
}
