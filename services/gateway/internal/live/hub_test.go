package live_test

import (
	"context"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// storedSession is a ReadModels with the events of one session.
type storedSession struct {
	mu     sync.Mutex
	events []reads.StoredEvent
}

func (s *storedSession) add() {
	s.mu.Lock()
	defer s.mu.Unlock()
	seq := len(s.events) + 1
	s.events = append(s.events, reads.StoredEvent{Seq: uint32(seq), Type: "log", JSON: []byte(
		`{"seq":` + strconv.Itoa(seq) + `,"position":"0-1","type":"log","time":"2026-01-02T03:04:05Z","sessionId":"s","source":"server","data":{"message":"x"}}`)})
}

func (s *storedSession) Tip(context.Context, string, string) (reads.SessionTip, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return reads.SessionTip{Seq: uint32(len(s.events)), Position: "0-1"}, nil
}

func (s *storedSession) Events(_ context.Context, _, _ string, q reads.EventQuery) (reads.EventPage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.events[min(int(q.After), len(s.events)):]
	list = list[:min(q.Limit, len(list))]
	return reads.EventPage{Events: list, Tip: uint32(len(s.events)), Next: q.After + uint32(len(list))}, nil
}

func (s *storedSession) CheckVisible(context.Context, string, string, []string) error { return nil }

func (s *storedSession) Tips(_ context.Context, _ string, sessions []string) (map[string]uint32, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]uint32{}
	for _, id := range sessions {
		out[id] = uint32(len(s.events))
	}
	return out, nil
}

func (s *storedSession) Progress(context.Context) (map[int]reads.GroupProgress, error) {
	return nil, nil
}

// cutter dials NATS and can cut the connection.
type cutter struct {
	mu   sync.Mutex
	conn net.Conn
}

func (c *cutter) Dial(network, address string) (net.Conn, error) {
	conn, err := net.Dial(network, address)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn = conn
	return conn, err
}

func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.conn.Close()
}

// TestHub_ReadsWhatItMissedAfterAReconnection tests that a Hub reads missed events when NATS is connected again, and not
// only at its next regular comparison with Postgres.
func TestHub_ReadsWhatItMissedAfterAReconnection(t *testing.T) {
	t.Parallel()
	var c cutter
	nc := natstest.RunRestartable(t).Conn(nats.SetCustomDialer(&c))
	source := &storedSession{}
	source.add()
	h := live.NewHub(live.Config{
		ReadModels: source, NATS: nc, Logger: natstest.Logger(t), Admission: admission.New(admission.Limits{Bytes: 64 << 20, TenantBytes: 64 << 20}), CheckEvery: time.Hour,
	})
	ctx, cancel := context.WithCancel(t.Context())
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- h.Run(ctx, func() { close(started) }) }()
	<-started
	r, err := h.Join(ctx, "default", nil, events.DeriveID(events.KindSession, "s"), 0)
	if err != nil {
		t.Fatal(err)
	}
	for want := uint32(1); want <= 3; want++ {
		wait, stop := context.WithTimeout(ctx, time.Minute)
		frames, err := r.Next(wait)
		stop()
		if err != nil || len(frames) != 1 || frames[0].Seq != want {
			t.Fatalf("got %+v, %v, want event %d", frames, err, want)
		}
		source.add() // without an announcement
		c.cut()
	}
	r.Close()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
