package egress_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress"
)

func TestConnections_AreLimitedPerSandbox(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *egress.Config, _ *egress.Deps) { c.Connections = 2 })
	b, other := w.box(), w.box()
	open := func() (net.Conn, int) {
		c, err := b.dialWith(b.token)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(within))
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		return c, res.StatusCode
	}
	first, status := open()
	if status != http.StatusNotFound {
		t.Fatal(status)
	}
	open()
	if _, status := open(); status != http.StatusServiceUnavailable {
		t.Errorf("one too many: %d", status)
	}
	if status, _, _ := other.post("/", ""); status != http.StatusNotFound {
		t.Errorf("another sandbox: %d", status)
	}
	first.Close()
	poll(t, "there is room again", func() bool {
		_, status := open()
		return status == http.StatusNotFound
	})
}

// A connection that sends no preamble does not count towards the limit of connections.
func TestConnections_WithoutAPreambleDoNotCount(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	b := w.box()
	for range 1200 {
		c, err := net.Dial("unix", w.cfg.ListenSandboxes)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if status, _, _ := b.post("/", ""); status != http.StatusNotFound {
		t.Error(status)
	}
}

// A tunnel or connection without traffic is closed after the idle timeout.
func TestIdle_ConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, nil)
	p.at["93.184.216.34:443"] = listen(t, func(c net.Conn) {
		_, _ = io.Copy(io.Discard, c)
		c.Close()
	})
	w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		change(c, d)
		c.Idle = 150 * time.Millisecond
	})
	b := w.box("ok.example")
	for _, text := range []string{"CONNECT ok.example:443 HTTP/1.1\r\nHost: x\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"} {
		c, err := b.dialWith(b.token)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(within))
		_, _ = io.WriteString(c, text)
		if raw, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(raw), "HTTP/1.1 ") {
			t.Errorf("%q, %v", raw, err)
		}
	}
}

// The connection of a sandbox that does not read its answer is closed, and holds no memory.
func TestStalledSandbox_ConnectionIsClosed(t *testing.T) {
	t.Parallel()
	sent := make(chan int64, 1)
	change := models(t, func(w http.ResponseWriter, _ *http.Request) {
		n, _ := io.CopyN(w, zeros{}, 1<<30)
		sent <- n
	})
	w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		change(c, d)
		c.Idle = 200 * time.Millisecond
	})
	b := w.box()
	c, err := b.dialWith(b.token)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "POST /openai/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
	select {
	case n := <-sent:
		if n > 64<<20 {
			t.Errorf("%d bytes were taken off the model for a sandbox that reads nothing", n)
		}
	case <-time.After(within):
		t.Fatal("it is not cut")
	}
	if m := b.called(b.lines(0, 1)[0]); m.Error == "" {
		t.Errorf("%+v", m)
	}
}

// While no executor reads the journal and the journal is full, model calls are refused, because their usage could not
// be journaled.
func TestFullJournal_RefusesModelCalls(t *testing.T) {
	t.Parallel()
	change := models(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"model":"`+strings.Repeat("m", 190)+`"}`)
	})
	w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		change(c, d)
		c.JournalMax = 64 << 10
	})
	b := w.box()
	calls := uint64(0)
	for {
		status, header, _ := b.post("/openai/responses", "{}")
		if status == http.StatusServiceUnavailable && header.Get("Spool-Egress") == "JOURNAL_FULL" {
			break
		}
		if calls++; status != http.StatusOK || calls > 1000 {
			t.Fatalf("call %d: %d", calls, status)
		}
	}
	b.lines(0, int(calls))
	s, err := w.client.State(t.Context(), b.id)
	if err != nil || s.Last != calls {
		t.Fatalf("%+v, %v", s, err)
	}
	if err := w.client.AckLines(t.Context(), b.id, s.Journal, calls); err != nil {
		t.Fatal(err)
	}
	if status, _, _ := b.post("/openai/responses", "{}"); status != http.StatusOK {
		t.Errorf("after all is taken: %d", status)
	}
}
