package socket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// countingListener counts the writes of all its connections.
type countingListener struct {
	net.Listener
	writes atomic.Int64
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &countingConn{c, &l.writes}, err
}

type countingConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c *countingConn) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// serveBatches upgrades one request and calls serve with its connection. It returns the client's end.
func serveBatches(t testing.TB, serve func(*websocket.Conn, *batchConn, *countingListener)) *websocket.Conn {
	t.Helper()
	l := &countingListener{}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := &hijacker{ResponseWriter: w, timeout: time.Minute}
		ws, err := websocket.Accept(h, r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled})
		if err != nil {
			t.Error(err)
			return
		}
		serve(ws, h.conn, l)
		_ = ws.Close(websocket.StatusNormalClosure, "")
	}))
	l.Listener = srv.Listener
	srv.Listener = l
	srv.Start()
	t.Cleanup(srv.Close)
	client, _, err := websocket.Dial(t.Context(), srv.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	client.SetReadLimit(1 << 20)
	t.Cleanup(func() { _ = client.CloseNow() })
	return client
}

// TestBatch_WritesManyMessagesAtOnce tests that the messages of a batch arrive as single messages in their order, with one
// write for every 16 KiB, and that messages outside a batch are written at once.
func TestBatch_WritesManyMessagesAtOnce(t *testing.T) {
	t.Parallel()
	write := func(ws *websocket.Conn, text string) {
		if err := ws.Write(context.Background(), websocket.MessageText, []byte(text)); err != nil {
			t.Error(err)
		}
	}
	long := strings.Repeat("y", 100_000)
	client := serveBatches(t, func(ws *websocket.Conn, c *batchConn, l *countingListener) {
		count := func(what string, most int64, do func()) {
			before := l.writes.Load()
			do()
			if n := l.writes.Load() - before; n == 0 || n > most {
				t.Errorf("%s: %d writes, want 1 to %d", what, n, most)
			}
		}
		count("100 messages of 100 bytes", 1, func() {
			c.beginBatch()
			for i := range 100 {
				write(ws, fmt.Sprintf("%0100d", i))
			}
			if err := c.endBatch(); err != nil {
				t.Error(err)
			}
		})
		count("100 messages of 1000 bytes", 7, func() {
			c.beginBatch()
			for i := range 100 {
				write(ws, fmt.Sprintf("%01000d", i))
			}
			if err := c.endBatch(); err != nil {
				t.Error(err)
			}
		})
		count("a long message between short ones", 4, func() {
			c.beginBatch()
			write(ws, "before")
			write(ws, long)
			write(ws, "after")
			if err := c.endBatch(); err != nil {
				t.Error(err)
			}
		})
		count("a message outside a batch", 1, func() { write(ws, "single") })
	})
	var want []string
	for i := range 100 {
		want = append(want, fmt.Sprintf("%0100d", i))
	}
	for i := range 100 {
		want = append(want, fmt.Sprintf("%01000d", i))
	}
	for i, text := range append(want, "before", long, "after", "single") {
		kind, got, err := client.Read(t.Context())
		if err != nil || kind != websocket.MessageText || string(got) != text {
			t.Fatalf("message %d is %v %.50q, %v, want %.50q", i, kind, got, err, text)
		}
	}
}

// TestBatch_KeepsTheOrderOfEachWriter tests that concurrent batches, single messages and pings of one connection leave
// every message whole and each writer's messages in order.
func TestBatch_KeepsTheOrderOfEachWriter(t *testing.T) {
	t.Parallel()
	const writers, batches, size = 4, 50, 7
	client := serveBatches(t, func(ws *websocket.Conn, c *batchConn, _ *countingListener) {
		reading := ws.CloseRead(context.Background()) // answers to pings
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				for n := range batches {
					inBatch := w > 0
					if inBatch {
						c.beginBatch()
					}
					for i := range size {
						text := fmt.Sprintf("%d %d %s", w, n*size+i, strings.Repeat("z", (n*977+i*131)%9000))
						if err := ws.Write(context.Background(), websocket.MessageText, []byte(text)); err != nil {
							t.Error(err)
						}
					}
					if inBatch {
						if err := c.endBatch(); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
		wg.Go(func() {
			for range 20 {
				if err := ws.Ping(reading); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Wait()
	})
	next := [writers]int{}
	for range writers * batches * size {
		_, got, err := client.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var w, n int
		if _, err := fmt.Sscanf(string(got), "%d %d", &w, &n); err != nil || n != next[w] {
			t.Fatalf("got %.20q, %v, want number %d of the writer", got, err, next[w])
		}
		next[w]++
	}
	// Pings are answered while the client reads.
	if _, _, err := client.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Error(err)
	}
}

// TestBatch_EndsWhenTheClientDoesNotRead tests that a batch to a client that does not read fails after the timeout.
func TestBatch_EndsWhenTheClientDoesNotRead(t *testing.T) {
	t.Parallel()
	server, client := net.Pipe() // has no buffer
	defer client.Close()
	defer server.Close()
	c := &batchConn{Conn: server, timeout: 10 * time.Millisecond}
	c.beginBatch()
	if n, err := c.Write([]byte("collected")); n != 9 || err != nil {
		t.Fatalf("collected %d bytes, %v", n, err)
	}
	if err := c.endBatch(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want %v", err, os.ErrDeadlineExceeded)
	}
}

// BenchmarkSend measures ten messages of 300 bytes to one client, one by one and as a batch.
func BenchmarkSend(b *testing.B) {
	for _, batched := range []bool{false, true} {
		b.Run(map[bool]string{false: "single", true: "batch"}[batched], func(b *testing.B) {
			text := []byte(strings.Repeat("x", 300))
			start, done := make(chan struct{}), make(chan struct{})
			client := serveBatches(b, func(ws *websocket.Conn, c *batchConn, _ *countingListener) {
				<-start
				for b.Loop() {
					if batched {
						c.beginBatch()
					}
					for range 10 {
						if err := ws.Write(context.Background(), websocket.MessageText, text); err != nil {
							b.Error(err)
						}
					}
					if batched {
						if err := c.endBatch(); err != nil {
							b.Error(err)
						}
					}
				}
				close(done)
			})
			go func() {
				for {
					if _, _, err := client.Read(context.Background()); err != nil {
						return
					}
				}
			}()
			close(start)
			<-done
		})
	}
}
