package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/system"
)

// playedSystem starts all services with a gateway for many clients and runners that play a script.
func playedSystem(t *testing.T, script fake.Script) (*system.System, *system.Client) {
	t.Helper()
	s, err := system.Start(t.Context(), system.Config{Dir: t.TempDir(), Provider: fake.New(script), Gateway: gateway.Config{MaxTenantStreams: 10_000, MaxConnections: 10_000, MaxAddressConns: 10_000}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, system.NewClient(s.URL)
}

// received is the text of one session as a client received it.
type received struct {
	pieces, bytes int
	content       string // of the complete block
	err           error
}

// readText reads a session with one block to the end of its execution. Each piece of the text must follow the one before
// it, from the first byte on, and be that of pattern. whole is called after size bytes of text in flight.
func readText(ctx context.Context, s *system.SessionSocket, size int, whole func()) (r received) {
	for {
		w, _, err := s.Next(ctx)
		if err != nil {
			return received{err: fmt.Errorf("after %d bytes: %w", r.bytes, err)}
		}
		if events.IsTerminal(w.Type) {
			return r
		}
		piece, ok, err := system.AgentTextOf(w)
		if err != nil {
			return received{err: err}
		}
		if piece.Complete {
			r.content = piece.Piece
		}
		if !ok || piece.Complete {
			continue
		}
		if piece.Offset != r.bytes {
			return received{err: fmt.Errorf("a piece at %d after %d bytes", piece.Offset, r.bytes)}
		}
		if piece.Piece != pattern(piece.Offset, len(piece.Piece)) {
			return received{err: fmt.Errorf("another text at %d", piece.Offset)}
		}
		r.pieces++
		if r.bytes += len(piece.Piece); r.bytes == size {
			whole()
		}
	}
}

// pattern returns a text that is another one at each offset.
func pattern(offset, size int) string {
	var b strings.Builder
	for n := offset / 16; b.Len() < size+16; n++ {
		fmt.Fprintf(&b, "%015d\n", n)
	}
	return b.String()[offset%16:][:size]
}

// TestFlood_OfTextReachesEveryClientOnce tests a block of 50 MB and 100,000 tiny deltas at once, beside a session that
// writes slowly. Clients that join before, and in the middle, receive the whole text once and in order.
func TestFlood_OfTextReachesEveryClientOnce(t *testing.T) {
	t.Parallel()
	const large, piece, tiny, slow = 50 << 20, 64 << 10, 100_000, 100
	const longest = 7 << 20         // content of a complete block that fits into a line of the journal
	half := make(chan struct{})     // closed when half of the large text was written
	inMiddle := make(chan struct{}) // closed when further clients have joined
	scripts := make(chan fake.Script, 3)
	_, c := playedSystem(t, func(ctx context.Context, turn *fake.Turn) { (<-scripts)(ctx, turn) })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	wholes := map[string]*sync.WaitGroup{"large": {}, "tiny": {}, "slow": {}}
	for _, w := range wholes {
		w.Add(2)
	}
	write := func(ctx context.Context, turn *fake.Turn, block string, size, piece int, each func(offset int)) {
		turn.OpenBlock(block)
		for at := 0; at < size && ctx.Err() == nil; at += piece {
			each(at)
			turn.AppendText(block, at, pattern(at, piece))
		}
		wholes[block].Wait() // a client that lags would get the complete block instead of the text in flight
		turn.CompleteBlock(block, pattern(0, min(size, longest)))
	}
	play := map[string]fake.Script{
		"large": func(ctx context.Context, turn *fake.Turn) {
			write(ctx, turn, "large", large, piece, func(at int) {
				if at == large/2 {
					close(half)
					select {
					case <-inMiddle:
					case <-ctx.Done():
					}
				}
			})
		},
		"tiny": func(ctx context.Context, turn *fake.Turn) { write(ctx, turn, "tiny", tiny, 1, func(int) {}) },
		"slow": func(ctx context.Context, turn *fake.Turn) {
			write(ctx, turn, "slow", slow*16, 16, func(int) { time.Sleep(20 * time.Millisecond) })
		},
	}
	sizes := map[string]int{"large": large, "tiny": tiny, "slow": slow * 16}
	var clients sync.WaitGroup
	follow := func(name, session string) {
		socket, err := c.JoinSession(ctx, session)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		clients.Go(func() {
			defer socket.Close()
			whole := sync.OnceFunc(wholes[name].Done)
			defer whole()
			r := readText(ctx, socket, sizes[name], whole)
			if r.err != nil || r.bytes != sizes[name] {
				t.Errorf("%s: %d of %d bytes: %v", name, r.bytes, sizes[name], r.err)
			}
			if r.content != pattern(0, min(sizes[name], longest)) {
				t.Errorf("%s: the complete block has another text of %d bytes", name, len(r.content))
			}
			t.Logf("%s: %d bytes in %d pieces", name, r.bytes, r.pieces)
		})
	}
	sessions := map[string]string{}
	for _, name := range []string{"large", "tiny", "slow"} {
		session, err := c.CreateSession(ctx, system.SessionSpec{Architecture: "spool"})
		if err != nil {
			t.Fatal(err)
		}
		sessions[name] = session
		follow(name, session)
		scripts <- play[name]
		if _, err := c.PostMessage(ctx, session, name); err != nil {
			t.Fatal(err)
		}
		for len(scripts) > 0 && ctx.Err() == nil { // the next script is that of the next session
			time.Sleep(time.Millisecond)
		}
	}
	select {
	case <-half:
	case <-ctx.Done():
	}
	for name, session := range sessions {
		follow(name, session)
	}
	close(inMiddle)
	clients.Wait()
}

// TestFlood_OfReconnectingClients tests that 5,000 clients whose gateway is replaced connect again at once, and that each
// receives every event of its session once. They are fewer where this process may not open so many files.
func TestFlood_OfReconnectingClients(t *testing.T) {
	t.Parallel()
	const sessions, pieces = 50, 20
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	clients := min(5000, int64(files.Cur/3)) //nolint:gosec // far below the limit
	begin, goOn := make(chan struct{}), make(chan struct{})
	s, c := playedSystem(t, func(ctx context.Context, turn *fake.Turn) {
		text := ""
		turn.OpenBlock("b")
		for i := range pieces {
			if gate := map[int]chan struct{}{0: begin, pieces / 2: goOn}[i]; gate != nil {
				select {
				case <-gate:
				case <-ctx.Done():
					return
				}
			}
			piece := pattern(len(text), 16)
			turn.AppendText("b", len(text), piece)
			text += piece
		}
		turn.CompleteBlock("b", text)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	ids := make([]string, sessions)
	for i := range ids {
		var err error
		if ids[i], err = c.CreateSession(ctx, system.SessionSpec{Architecture: "spool"}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.PostMessage(ctx, ids[i], "go"); err != nil {
			t.Fatal(err)
		}
	}
	var joined, reconnects atomic.Int64
	var all sync.WaitGroup
	dials := make(chan struct{}, 200) // at a time: the test has one address
	for i := range clients {
		all.Go(func() {
			if err := readAcross(ctx, c, ids[i%sessions], dials, &joined, &reconnects); err != nil {
				t.Errorf("client %d: %v", i, err)
			}
		})
	}
	for joined.Load() < clients && ctx.Err() == nil && !t.Failed() {
		time.Sleep(10 * time.Millisecond)
	}
	close(begin)
	if err := s.RestartGateway(ctx); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	all.Wait()
	if n := reconnects.Load(); n < clients {
		t.Errorf("%d clients connected again, want all %d", n, clients)
	}
}

// readAcross reads a session to the end of its execution, and joins again with its cursor whenever the connection ends.
// Every event must be the next one.
func readAcross(ctx context.Context, c *system.Client, session string, dials chan struct{}, joined, reconnects *atomic.Int64) error {
	var seq uint32
	for first := true; ; first = false {
		dials <- struct{}{}
		socket, err := c.JoinSessionAfter(ctx, session, seq)
		<-dials
		if err != nil {
			if ctx.Err() != nil || first {
				return err
			}
			time.Sleep(20 * time.Millisecond) // the gateway is not there yet
			continue
		}
		if first {
			joined.Add(1)
		} else {
			reconnects.Add(1)
		}
		for {
			w, _, err := socket.Next(ctx)
			if err != nil {
				break
			}
			if w.Type == events.TextDelta {
				continue // text in flight has the seq of the event before it
			}
			if w.Seq != seq+1 {
				socket.Close()
				return fmt.Errorf("event %d, %s, after %d", w.Seq, w.Type, seq)
			}
			if seq = w.Seq; events.IsTerminal(w.Type) {
				socket.Close()
				return nil
			}
		}
		socket.Close()
	}
}
