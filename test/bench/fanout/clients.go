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
	// clientsSubcommand is the name of the hidden subcommand ClientsCommand, which the benchmark runs in a child process.
	clientsSubcommand = "fanout-clients"
	// concurrentCreates is the number of sessions that are created concurrently.
	concurrentCreates = 16
	// reconnectDelay is the time from a failed attempt to connect to the next attempt.
	reconnectDelay = 100 * time.Millisecond
)

// clientsConfig is the configuration of the process that runs the clients. The process reads it as the first line of
// its input, as JSON.
type clientsConfig struct {
	URL                string
	Sessions, Blocks   int
	Stalled, Trickling int
}

// measureWindow is the time span in which clients measure. The process that runs the clients reads it as its second
// line of input, as JSON. Events that are received between From and To count for the rate; at Deadline the clients stop
// waiting for events.
type measureWindow struct{ From, To, Deadline time.Time }

// clientsReport holds the measurements of all clients. The process that runs them prints it as its second line of
// output; the first line is {} when all clients have joined their sessions.
type clientsReport struct {
	Events, InWindow    int // received by all clients; within the window
	P50Ms, P90Ms, P99Ms float64
	Reconnects          int
	Failed              int    // clients
	Failure             string // of the first of them
}

// clientsProcess is the child process that runs the clients of all sessions.
type clientsProcess struct {
	*jsonProcess
	done chan struct{} // closed when result and err are set
	last clientsReport
	err  error
}

// startClients starts the child process that runs the clients of all sessions, with the configuration cfg. The process
// ends when the benchmark ends.
func startClients(ctx context.Context, b *harness.Bench, cfg clientsConfig) (*clientsProcess, error) {
	p, err := startProcess(ctx, b, clientsSubcommand)
	if err != nil {
		return nil, err
	}
	return &clientsProcess{jsonProcess: p, done: make(chan struct{})}, p.in.Encode(cfg)
}

// awaitJoined blocks until every client has joined its session.
func (c *clientsProcess) awaitJoined() error {
	if err := c.out.Decode(&c.last); err != nil {
		return fmt.Errorf("clients: %w", err)
	}
	return nil
}

// startMeasuring sends the window w to the clients, which then begin to read and to measure.
func (c *clientsProcess) startMeasuring(w measureWindow) error {
	go func() {
		defer close(c.done)
		c.err = c.out.Decode(&c.last)
	}()
	return c.in.Encode(w)
}

// finalReport returns the measurements of the clients. It must be called after c.done is closed.
func (c *clientsProcess) finalReport() (clientsReport, error) { return c.last, c.err }

// ClientsCommand is the hidden subcommand fanout-clients of the benchmark program. It creates sessions, joins each over
// a WebSocket, posts a message to each, and reads events until all executions have ended. It exits at the end of its
// input.
type ClientsCommand struct{}

// Run runs the subcommand. kong, the parser of the command line, calls it.
func (ClientsCommand) Run(ctx context.Context) error {
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
	stopSlow, err := startSlowClients(ctx, cfg, readers)
	if err != nil {
		return err
	}
	defer stopSlow()
	if err := out.Encode(clientsReport{}); err != nil {
		return err
	}
	var w measureWindow
	if err := in.Decode(&w); err != nil {
		return err
	}
	if err := out.Encode(readAll(ctx, readers, w)); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// createSessions creates the number of sessions that cfg names, joins each over a WebSocket and posts a message to
// each. It returns one client for each session.
func createSessions(ctx context.Context, c *system.Client, cfg clientsConfig) ([]*sessionClient, error) {
	list := make([]*sessionClient, cfg.Sessions)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(concurrentCreates)
	for i := range list {
		group.Go(func() error {
			session, err := c.CreateSession(ctx, system.SessionSpec{Architecture: "spool"})
			if err != nil {
				return err
			}
			list[i] = &sessionClient{client: c, session: session, blocks: cfg.Blocks}
			// The socket is used after the group has ended.
			if list[i].socket, err = c.JoinSession(context.WithoutCancel(ctx), session); err != nil {
				return err
			}
			list[i].execution, err = c.PostMessage(ctx, session, "begin")
			return err
		})
	}
	return list, group.Wait()
}

// readAll makes all clients read events until their executions have ended, and returns the measurements of all of them.
// w is the time span that is measured.
func readAll(ctx context.Context, readers []*sessionClient, w measureWindow) clientsReport {
	ctx, stop := context.WithDeadline(ctx, w.Deadline)
	defer stop()
	var all sync.WaitGroup
	for _, c := range readers {
		all.Go(func() { c.err = c.readToEnd(ctx, w) })
	}
	all.Wait()
	var r clientsReport
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

// sessionClient is the client of one session. It reads the session's events and text over a WebSocket, checks them and
// measures their age.
type sessionClient struct {
	client             *system.Client
	session, execution string
	blocks             int
	socket             *system.SessionSocket

	stamps     system.TimestampChecker
	runner     int             // events of the log that the runner wrote
	samples    []time.Duration // the ages of all pieces and events
	inWindow   int             // samples that were received within the window
	reconnects int
	err        error
}

// readToEnd reads events until the execution has ended. If the connection fails, it connects again after the last event
// that it has received.
func (c *sessionClient) readToEnd(ctx context.Context, w measureWindow) error {
	c.samples = make([]time.Duration, 0, c.blocks*(piecesPerBlock+2))
	defer func() { c.socket.Close() }()
	for {
		event, received, err := c.socket.Next(ctx)
		if err != nil {
			if err := c.reconnect(ctx, err); err != nil {
				return err
			}
			continue
		}
		if ended, err := c.checkAndMeasureEvent(event, received, w); ended || err != nil {
			return err
		}
	}
}

// reconnect joins the session again after the last received event, and tries this until it succeeds or ctx ends. It
// then returns an error that contains cause, the error of the lost connection.
func (c *sessionClient) reconnect(ctx context.Context, cause error) error {
	c.socket.Close()
	for {
		if ctx.Err() != nil {
			return fmt.Errorf("not everything was received in time: %w", cause)
		}
		socket, err := c.client.JoinSessionAfter(ctx, c.session, c.stamps.Seq())
		if err == nil {
			c.socket = socket
			c.stamps.HandleRejoin()
			c.reconnects++
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(reconnectDelay):
		}
	}
}

// checkAndMeasureEvent checks a received event and measures its age. ended is true if the event ends the execution.
func (c *sessionClient) checkAndMeasureEvent(w events.WireEvent, received time.Time, in measureWindow) (ended bool, err error) {
	ages, err := c.stamps.CheckEvent(w, received)
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
	if w.ExecutionID != c.execution || !events.IsTerminal(w.Type) {
		return false, nil
	}
	if c.stamps.Pieces != c.blocks*piecesPerBlock || c.runner != 2*c.blocks || w.Type != (events.ExecutionCompleted{}).EventType() {
		return true, fmt.Errorf("%s after %d pieces of text and %d events, want %d and %d", w.Type, c.stamps.Pieces, c.runner, c.blocks*piecesPerBlock, 2*c.blocks)
	}
	return true, nil
}
