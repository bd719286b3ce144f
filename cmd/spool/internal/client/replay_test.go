package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

// replayServer is a fake gateway that replays a session with an open block from event 2 on. It closes each connection
// after some events, and responds to the first requests with error statuses.
type replayServer struct {
	tip, cut uint32
	statuses []int
	asked    atomic.Int32
	froms    []string
}

func (s *replayServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n := int(s.asked.Add(1))
	if n <= len(s.statuses) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(s.statuses[n-1])
		code := map[int]string{404: "SESSION_NOT_FOUND", 503: "UNAVAILABLE"}[s.statuses[n-1]]
		fmt.Fprintf(w, `{"code":%q,"detail":"try again"}`, code)
		return
	}
	q := r.URL.Query()
	s.froms = append(s.froms, q.Get("from")+"-"+q.Get("to"))
	var from uint32
	_, _ = fmt.Sscan(q.Get("from"), &from) // 0 is refused below
	if r.URL.Path != "/api/sessions/ses/events/stream" || q.Get("replay") != "1" || q.Get("speed") != "max" || from == 0 {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "retry: 1000\n\nevent: replay_started\ndata: {\"from\":%d,\"to\":%d,\"tip\":%d,\"speed\":\"max\"}\n\n", from, s.tip, s.tip)
	if from > 2 { // the server sends the text of the open block from its start
		fmt.Fprintf(w, "id: 1\nevent: text_delta\ndata: %s\n\n", text(0, strings.Repeat("x", int(from-2))))
	}
	for seq := from; seq <= s.tip; seq++ {
		if s.cut > 0 && seq == from+s.cut {
			return
		}
		fmt.Fprintf(w, "id: %d\nevent: log\ndata: {\"seq\":%d,\ndata: \"type\":\"log\",\"data\":{}}\n\n", seq, seq)
		if seq > 1 && seq < s.tip {
			fmt.Fprintf(w, ": \n\nid: 1\nevent: text_delta\ndata: %s\n\n", text(int(seq-2), "x"))
		}
	}
	fmt.Fprintf(w, "event: replay_ended\ndata: {\"seq\":%d}\n\n", s.tip)
}

func text(offset int, delta string) string {
	return fmt.Sprintf(`{"seq":1,"type":"text_delta","data":{"blockId":"blk","offset":%d,"delta":%q}}`, offset, delta)
}

func replayAll(t *testing.T, s *replayServer, from uint32) (seqs []uint32, pieces int, started int, err error) {
	t.Helper()
	srv := httptest.NewServer(s)
	defer srv.Close()
	c, err := New(Config{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for one, err := range c.Replay(context.Background(), "ses", from, nil) {
		switch {
		case err != nil:
			return seqs, pieces, started, err
		case one.Started != nil:
			started++
		case one.Event.Type == events.TextDelta:
			pieces++
		default:
			seqs = append(seqs, one.Event.Seq)
		}
	}
	return seqs, pieces, started, nil
}

// TestReplay_InParts tests that each event and each delta is yielded once, although a replay is read in parts and
// connections are lost.
func TestReplay_InParts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		s     *replayServer
		from  uint32
		froms string
	}{
		{"one part", &replayServer{tip: 5}, 1, "1-"},
		{"many parts", &replayServer{tip: 450}, 1, "1- 201-450 401-450"},
		{"connections that break off", &replayServer{tip: 7, cut: 3}, 1, "1- 4-7 7-7"},
		{"a server that is away at first", &replayServer{tip: 5, statuses: []int{503, 503}}, 1, "1-"},
		{"from the middle", &replayServer{tip: 5}, 4, "4-"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			seqs, pieces, started, err := replayAll(t, c.s, c.from)
			if err != nil || started != 1 {
				t.Fatalf("started %d times, %v", started, err)
			}
			for i, seq := range seqs {
				if seq != c.from+uint32(i) {
					t.Fatalf("event %d is %d", i, seq)
				}
			}
			if got := strings.Join(c.s.froms, " "); len(seqs) != int(c.s.tip-c.from+1) || got != c.froms {
				t.Errorf("%d events, asked for %s, want %s", len(seqs), got, c.froms)
			}
			want := int(c.s.tip) - 2
			if c.from > 1 { // the earlier text arrives in one delta
				want = int(c.s.tip-c.from) + 1
			}
			if pieces != want {
				t.Errorf("%d pieces of text, want %d", pieces, want)
			}
		})
	}
}

// TestReplay_Fails tests that the error of the server is returned, and that retries without progress end.
func TestReplay_Fails(t *testing.T) {
	t.Parallel()
	s := &replayServer{tip: 5, statuses: []int{404}}
	if _, _, _, err := replayAll(t, s, 1); !IsCode(err, CodeSessionNotFound) || s.asked.Load() != 1 {
		t.Errorf("asked %d times, got %v", s.asked.Load(), err)
	}
	s = &replayServer{tip: 5, statuses: []int{503, 503, 503, 503, 503}}
	if _, _, _, err := replayAll(t, s, 1); !IsCode(err, "UNAVAILABLE") || s.asked.Load() != maxRetries+1 {
		t.Errorf("asked %d times, got %v", s.asked.Load(), err)
	}
	hole := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "event: log\ndata: {\"seq\":3,\"type\":\"log\",\"data\":{}}\n\n")
	}))
	defer hole.Close()
	c, err := New(Config{URL: hole.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, err := range c.Replay(context.Background(), "ses", 1, nil) {
		var left *skippedEventsError
		if !errors.As(err, &left) {
			t.Errorf("got %v", err)
		}
	}
}
