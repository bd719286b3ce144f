package fanout

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

const (
	// clientsCommand is the hidden subcommand with which the benchmark starts its own program again.
	clientsCommand = "fanout-clients"
	// creators is the number of sessions that are created at once.
	creators = 16
	// reconnectDelay is the time from a failed connection to the next attempt.
	reconnectDelay = 100 * time.Millisecond
)

// clientsConfig is the first line of input of the clients' process.
type clientsConfig struct {
	URL                string
	Sessions, Blocks   int
	Stalled, Trickling int
}

// window is the second line of input of the clients' process: the time span whose events count for the rate, and the
// time at which the clients give up.
type window struct{ From, To, Deadline time.Time }

// report is the second line of output of the clients' process. The first one is {} when all clients have joined their
// sessions.
type report struct {
	Events, InWindow    int // received by all clients; within the window
	P50Ms, P90Ms, P99Ms float64
	Reconnects          int
	Failed              int    // clients
	Failure             string // of the first of them
}

// clients is the process that runs the clients of all sessions.
type clients struct {
	*process
	done chan struct{} // closed when result and err are set
	last report
	err  error
}

// startClients starts the process of the clients. It stops at the end of the benchmark.
func startClients(ctx context.Context, b *harness.Bench, cfg clientsConfig) (*clients, error) {
	p, err := startProcess(ctx, b, clientsCommand)
	if err != nil {
		return nil, err
	}
	return &clients{process: p, done: make(chan struct{})}, p.in.Encode(cfg)
}

// awaitJoined blocks until all clients have joined.
func (c *clients) awaitJoined() error {
	if err := c.out.Decode(&c.last); err != nil {
		return fmt.Errorf("clients: %w", err)
	}
	return nil
}

// begin makes the clients begin to measure, within the window w.
func (c *clients) begin(w window) error {
	go func() {
		defer close(c.done)
		c.err = c.out.Decode(&c.last)
	}()
	return c.in.Encode(w)
}

// end returns the clients' report. It must be called after c.done is closed.
func (c *clients) end() (report, error) { return c.last, c.err }

// Clients is the subcommand fanout-clients. It creates sessions, joins them, posts a message to each and reads until all
// executions have ended. It stops at the end of its input.
type Clients struct{}

// Run is called by kong.
func (Clients) Run(ctx context.Context) error {
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), json.NewEncoder(os.Stdout)
	var cfg clientsConfig
	if err := in.Decode(&cfg); err != nil {
		return err
	}
	c := system.NewClient(cfg.URL)
	readers, err := createSessions(ctx, c, cfg)
	if err != nil {
		return err
	}
	stopSlow, err := startSlow(ctx, cfg, readers)
	if err != nil {
		return err
	}
	defer stopSlow()
	if err := out.Encode(report{}); err != nil {
		return err
	}
	var w window
	if err := in.Decode(&w); err != nil {
		return err
	}
	if err := out.Encode(readAll(ctx, readers, w)); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// createSessions creates the sessions, joins them and posts a message to each.
func createSessions(ctx context.Context, c *system.Client, cfg clientsConfig) ([]*reader, error) {
	list := make([]*reader, cfg.Sessions)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(creators)
	for i := range list {
		group.Go(func() error {
			session, err := c.Create(ctx, system.SessionSpec{Architecture: "spool"})
			if err != nil {
				return err
			}
			list[i] = &reader{client: c, session: session, blocks: cfg.Blocks}
			// The socket is used after the group has ended.
			if list[i].socket, err = c.Join(context.WithoutCancel(ctx), session); err != nil {
				return err
			}
			list[i].execution, err = c.Post(ctx, session, "begin")
			return err
		})
	}
	return list, group.Wait()
}

// readAll blocks until all readers have read to the end of their executions, or have failed.
func readAll(ctx context.Context, readers []*reader, w window) report {
	ctx, stop := context.WithDeadline(ctx, w.Deadline)
	defer stop()
	var all sync.WaitGroup
	for _, c := range readers {
		all.Go(func() { c.err = c.read(ctx, w) })
	}
	all.Wait()
	var r report
	var samples []time.Duration
	for _, c := range readers {
		samples = append(samples, c.samples...)
		r.InWindow += c.inWindow
		r.Reconnects += c.reconnects
		if c.err != nil {
			r.Failed++
			if r.Failure == "" {
				r.Failure = fmt.Sprintf("session %s, after seq %d: %v", c.session, c.stamps.Seq(), c.err)
			}
		}
	}
	r.Events = len(samples)
	r.P50Ms, r.P90Ms, r.P99Ms = row.Percentile(samples, 0.5), row.Percentile(samples, 0.9), row.Percentile(samples, 0.99)
	return r
}

// reader is the client of one session, which reads its events and text over a WebSocket.
type reader struct {
	client             *system.Client
	session, execution string
	blocks             int
	socket             *system.Socket

	stamps     system.Stamps
	runner     int             // events of the log that the runner wrote
	samples    []time.Duration // the ages of all pieces and events
	inWindow   int             // samples that were received within the window
	reconnects int
	err        error
}

// read reads until the end of the execution. It connects again with its cursor after the connection has failed.
func (c *reader) read(ctx context.Context, w window) error {
	c.samples = make([]time.Duration, 0, c.blocks*(blockPieces+2))
	defer func() { c.socket.Close() }()
	for {
		event, received, err := c.socket.Next(ctx)
		if err != nil {
			if err := c.reconnect(ctx, err); err != nil {
				return err
			}
			continue
		}
		if ended, err := c.add(event, received, w); ended || err != nil {
			return err
		}
	}
}

// reconnect joins again after the last event, until it succeeds or ctx ends. The error is then the cause of the first
// failure.
func (c *reader) reconnect(ctx context.Context, cause error) error {
	c.socket.Close()
	for {
		if ctx.Err() != nil {
			return fmt.Errorf("not everything was received in time: %w", cause)
		}
		socket, err := c.client.JoinAfter(ctx, c.session, c.stamps.Seq())
		if err == nil {
			c.socket = socket
			c.stamps.Joined()
			c.reconnects++
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(reconnectDelay):
		}
	}
}

// add checks an event and counts it. ended reports whether the execution has ended.
func (c *reader) add(w events.Wire, received time.Time, in window) (ended bool, err error) {
	ages, err := c.stamps.Add(w, received)
	if err != nil {
		return false, err
	}
	if t := w.Type; w.Source == events.FromRunner && (t == events.BlockStart{}.EventType() || t == events.BlockComplete{}.EventType()) {
		ages = append(ages, received.Sub(w.Time))
		c.runner++
	}
	c.samples = append(c.samples, ages...)
	if !received.Before(in.From) && received.Before(in.To) {
		c.inWindow += len(ages)
	}
	if w.ExecutionID != c.execution || !events.Terminal(w.Type) {
		return false, nil
	}
	if c.stamps.Pieces != c.blocks*blockPieces || c.runner != 2*c.blocks || w.Type != (events.ExecutionCompleted{}).EventType() {
		return true, fmt.Errorf("%s after %d pieces of text and %d events, want %d and %d", w.Type, c.stamps.Pieces, c.runner, c.blocks*blockPieces, 2*c.blocks)
	}
	return true, nil
}
