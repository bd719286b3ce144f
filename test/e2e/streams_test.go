package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// opener opens a stream by one of the transports.
type opener func(gateway int, session string, from *harness.Stream) (*harness.Stream, error)

// TestStreams_CutAtEveryEvent tests a client that is cut off after every single event or delta, and reconnects to the
// other gateway. It ends with the same blocks and the same seq as a client that is never cut off. The same holds for
// many clients that are cut off once, each at another event, by WebSocket and by SSE.
func TestStreams_CutAtEveryEvent(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateways: 2, Projectors: 2, Script: script(t, "stream.yaml")})
	session := c.CreateSession("spool", nil)
	ready := make(chan struct{})
	type outcome struct {
		name string
		s    *harness.Stream
		err  error
	}
	outcomes := make(chan outcome)
	var executions [2]string
	// read follows both turns. cut reports whether to disconnect after the nth message.
	read := func(name string, open opener, cut func(n int) bool) {
		gateway, n := 0, 0
		s, err := open(gateway, session, nil)
		for ended := 0; err == nil && ended < len(executions); n++ {
			w, e := s.Next()
			if err = e; err != nil {
				break
			}
			if events.IsTerminal(w.Type) {
				ended++
			}
			if ended < len(executions) && cut(n) {
				s.Close()
				gateway = 1 - gateway
				s, err = open(gateway, session, s)
			}
		}
		if s != nil {
			s.Close()
		}
		<-ready
		outcomes <- outcome{name, s, err}
	}
	never := func(int) bool { return false }
	always := func(int) bool { return true }
	once := func(k int) func(int) bool { return func(n int) bool { return n == k } }
	var clients sync.WaitGroup
	start := func(name string, open opener, cut func(int) bool) { clients.Go(func() { read(name, open, cut) }) }
	start("uncut", c.JoinSocket, never)
	start("websocket, cut always", c.JoinSocket, always)
	start("sse, cut always", c.JoinSSE, always)
	const cuts = 60
	for k := range cuts {
		start(fmt.Sprint("websocket, cut at ", k), c.JoinSocket, once(k))
		start(fmt.Sprint("sse, cut at ", k), c.JoinSSE, once(k))
	}
	for i := range executions {
		executions[i] = c.PostMessage(session, fmt.Sprint("list the folder, turn ", i))
	}
	close(ready)
	go func() { clients.Wait(); close(outcomes) }()
	views := map[string]string{}
	tips := map[string]uint32{}
	for o := range outcomes {
		if o.err != nil {
			t.Errorf("%s: %v", o.name, o.err)
			continue
		}
		views[o.name], tips[o.name] = blocksOf(t, o.s), o.s.Cursor
	}
	want, tip := views["uncut"], tips["uncut"]
	if tip < 20 {
		t.Fatalf("the run had %d events, too few to prove anything", tip)
	}
	for name, got := range views {
		if got != want || tips[name] != tip {
			t.Errorf("%s ended at seq %d with\n%s\nuncut at %d with\n%s", name, tips[name], got, tip, want)
		}
	}
	var reload struct {
		Blocks []events.Block `json:"blocks"`
	}
	c.Call(1, "GET", "/api/sessions/"+session+"/blocks", nil, &reload)
	got, err := json.Marshal(reload.Blocks)
	if err != nil || string(got) != want {
		t.Errorf("a reload shows\n%s\na stream\n%s", got, want)
	}
}

func blocksOf(t *testing.T, s *harness.Stream) string {
	t.Helper()
	b, err := json.Marshal(s.View.Blocks())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// script returns a script of the model server.
func script(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
