// Command chaos runs Spool as real processes, kills and freezes them at random while clients work, and then checks
// the promises of Spool. docs/reliability.md lists the promises. The command signals only processes that it started
// and their descendants. `make chaos` builds the programs and runs it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/chaos/check"
)

const (
	// defaultTenant is the tenant of all sessions, because authentication is off.
	defaultTenant = "default"
	// settleTimeout is the time limit for all queries to end after the last fault, and of each wait after that. An
	// executor's engine counts as gone after 30 s.
	settleTimeout = 3 * time.Minute
	// verifyTimeout is the time limit of "spool verify" and "spool rebuild" together.
	verifyTimeout = 3 * time.Minute
)

// sessionBudgets are the budgets of sessions that have one. A run uses them up.
var sessionBudgets = []events.Budget{{Turns: 8}, {Tokens: 1000}}

// settings are the flags of the chaos test's command line.
type settings struct {
	bin, dir string
	seed     uint64
	faults   int
	least    time.Duration
	sessions int
}

func main() {
	var s settings
	flag.StringVar(&s.bin, "bin", "", "`folder` with the programs")
	flag.Uint64Var(&s.seed, "seed", 0, "seed of the schedule of faults; 0 picks one at random")
	flag.IntVar(&s.faults, "faults", 60, "least number of faults")
	flag.DurationVar(&s.least, "for", 0, "least duration of the faults")
	flag.IntVar(&s.sessions, "sessions", 6, "number of sessions with clients")
	long := flag.Bool("long", false, "inject faults for an hour")
	flag.Parse()
	if *long {
		s.least = time.Hour
	}
	if s.seed == 0 {
		s.seed = rand.Uint64() >> 32 //nolint:gosec // any seed is good
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := runChaos(ctx, s); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1) //nolint:gocritic // no deferred call is left to run
	}
}

// runChaos executes one run of the chaos test. It keeps the run's folder if it returns an error.
func runChaos(ctx context.Context, s settings) (err error) {
	if s.dir, err = os.MkdirTemp("", "spool-chaos-"); err != nil {
		return err
	}
	// Postgres may run as another user, who has to reach its folder.
	if err := os.Chmod(s.dir, 0o755); err != nil { //nolint:gosec // see above
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\nseed %d; what all processes logged is in %s", err, s.seed, s.dir)
			return
		}
		err = os.RemoveAll(s.dir)
	}()
	if err := adoptOrphans(true); err != nil {
		return err
	}
	fmt.Printf("seed %d, folder %s\n", s.seed, s.dir)
	c, err := startCluster(ctx, s.bin, s.dir)
	defer func() {
		ends := c.unexpectedEnds()
		writeUnexpectedEnds(os.Stdout, ends, c.faults)
		err = errors.Join(err, unexplainedEnds(ends, c.faults), c.stopAll(), c.killRemainingProcesses())
	}()
	if err != nil {
		return err
	}
	return testUnderFaults(ctx, c, s)
}

// testUnderFaults runs clients against the installation c while it injects faults. It waits until all queries have
// ended, and checks that what the clients received agrees with the log.
func testUnderFaults(ctx context.Context, c *cluster, s settings) error {
	d := &clientDriver{c: c, accepted: map[string]string{}, open: map[string]bool{}, ended: map[string]bool{}}
	following, stop := context.WithCancel(ctx)
	defer stop()
	calm := make(chan struct{})
	sessions, budgets, err := d.startClients(ctx, following, s, calm)
	if err != nil {
		return err
	}
	began := time.Now()
	err = injectFaults(ctx, c, s)
	close(calm)
	if err != nil {
		return err
	}
	faulty := time.Since(began)
	d.posts.Wait()
	if err := errors.Join(c.awaitReady(ctx), d.resumeExecutions(ctx), d.awaitQueriesEnded(ctx)); err != nil {
		return err
	}
	observed, err := d.collectObservations(ctx, sessions)
	if err != nil {
		return err
	}
	stop()
	d.followers.Wait()
	var errs []error
	for _, why := range slices.Concat(check.CompareWithLog(observed), check.CheckBudgets(budgets, observed.Log), d.refused) {
		errs = append(errs, errors.New(why))
	}
	if !check.HasRefusals(budgets, observed.Log) {
		errs = append(errs, errors.New("a session did not use up its budget, so the run proves nothing about it"))
	}
	if !slices.ContainsFunc(observed.Streams, func(s check.ClientRecord) bool { return len(s.Pieces) > 0 }) {
		errs = append(errs, errors.New("no client received text in flight, so the run proves nothing about it"))
	}
	errs = append(errs, c.verifyLogAndReadModels(ctx), d.awaitErased(ctx), d.deleteSessions(ctx, sessions))
	d.printReport(c, s, observed, faulty)
	return errors.Join(errs...)
}

// startClients creates the sessions of a run, starts two clients that follow each of them until following ends, and the
// clients that post messages until the channel calm is closed. It returns the ids of the sessions, and the budgets of
// those that have one.
func (d *clientDriver) startClients(ctx, following context.Context, s settings, calm <-chan struct{}) (sessions []string, budgets map[string]events.Budget, err error) {
	budgets = map[string]events.Budget{}
	for n, budget := range append(make([]events.Budget, s.sessions), sessionBudgets...) {
		id, err := d.createSession(ctx, fmt.Sprintf("session-%d", n), budget)
		if err != nil {
			return nil, nil, err
		}
		sessions = append(sessions, id)
		if budget != (events.Budget{}) {
			budgets[id] = budget
		}
		for i, kind := range []string{"SSE", "WebSocket"} {
			cl := &followingClient{kind: kind, session: id}
			d.clients = append(d.clients, cl)
			d.followers.Go(func() { d.followSession(following, cl, n+i) })
		}
		d.posts.Add(1)
		go d.postMessages(ctx, calm, id, rand.New(rand.NewPCG(s.seed, uint64(n)+2))) //nolint:gosec // runs must be repeatable
	}
	d.posts.Add(1)
	go d.createAndDelete(ctx, calm, rand.New(rand.NewPCG(s.seed, uint64(len(sessions))+2))) //nolint:gosec // runs must be repeatable
	return sessions, budgets, nil
}

// resumeExecutions resumes every execution that has not ended, because a client may have paused it.
func (d *clientDriver) resumeExecutions(ctx context.Context) error {
	d.mu.Lock()
	open := slices.Collect(maps.Keys(d.open))
	d.mu.Unlock()
	for _, x := range open {
		if status, answer, err := d.sendUntilAnswered(ctx, http.MethodPost, "/api/executions/"+x+"/resume", "", map[string]any{}, nil); err != nil || status/100 != 2 && status != http.StatusConflict {
			return errors.Join(fmt.Errorf("resume of %s: %d %s", x, status, answer), err)
		}
	}
	return nil
}

// awaitQueriesEnded blocks until clients have received the end of every query.
func (d *clientDriver) awaitQueriesEnded(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for {
		d.mu.Lock()
		open := slices.Sorted(maps.Keys(d.open))
		d.mu.Unlock()
		if len(open) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no client saw the end of %v within %s of the last fault", open, settleTimeout)
		case <-time.After(retryPause):
		}
	}
}

// collectObservations reads the log of the sessions, blocks until every client has received as many events as the log
// of its session has, no fewer and no more, and returns both for check.CompareWithLog.
func (d *clientDriver) collectObservations(ctx context.Context, sessions []string) (check.Observations, error) {
	e := check.Observations{Log: map[string][]check.Event{}, Texts: map[string]string{}}
	nc, log, err := d.c.openLog(ctx)
	if nc != nil {
		defer nc.Close()
	}
	if err != nil {
		return e, err
	}
	deadline := time.Now().Add(settleTimeout)
	for {
		differ := false // the log is read first, and may have grown since, for example by a snapshot after a turn
		for _, id := range sessions {
			var list []check.Event
			for n, err := range eventlog.SessionEvents(ctx, log, defaultTenant, id) {
				if err != nil {
					return e, err
				}
				if b, ok := n.Event.Data.(events.BlockComplete); ok {
					e.Texts[b.Block.ID] = b.Block.Content + string(b.Block.Input) // a block has only one of the two
				}
				w, err := n.Event.ToWire(id, n.Seq, n.Position.String())
				if err != nil {
					return e, err
				}
				list = append(list, check.Event{Seq: w.Seq, ID: w.ID, Type: w.Type, ExecutionID: w.ExecutionID, Data: canonicalJSON(w.Data)})
			}
			e.Log[id] = list
		}
		e.Streams = nil
		for _, c := range d.clients {
			c.mu.Lock()
			e.Streams = append(e.Streams, check.ClientRecord{Client: c.kind, Session: c.session, Events: slices.Clone(c.events), Pieces: slices.Clone(c.pieces)})
			differ = differ || len(c.events) != len(e.Log[c.session])
			c.mu.Unlock()
		}
		if !differ || time.Now().After(deadline) {
			break
		}
		time.Sleep(retryPause)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e.Accepted = maps.Clone(d.accepted)
	return e, nil
}

// verifyLogAndReadModels runs "spool verify", which checks the log, and "spool rebuild --compare", which checks the
// read models. It returns an error if one of them finds a difference.
func (c *cluster) verifyLogAndReadModels(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	key, err := c.writeHeadsPublicKey()
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range []struct {
		args []string
		says []string
	}{{[]string{"verify", "--public-key", key}, []string{"no commit is missing up to ", "\nsound: "}}, {[]string{"rebuild", "--compare"}, []string{"equal: "}}} {
		out, err := c.runSpool(ctx, p.args...)
		if missing := slices.ContainsFunc(p.says, func(s string) bool { return !strings.Contains(out, s) }); err != nil || missing {
			errs = append(errs, errors.Join(fmt.Errorf("spool %s: %s", strings.Join(p.args, " "), out), err))
			continue
		}
		fmt.Println(out)
	}
	return errors.Join(errs...)
}

// deleteSessions deletes the sessions and blocks until no process and no folder of their sandboxes is left.
func (d *clientDriver) deleteSessions(ctx context.Context, sessions []string) error {
	for _, id := range sessions {
		if err := d.deleteSession(ctx, id); err != nil {
			return err
		}
	}
	deadline := time.Now().Add(settleTimeout)
	for {
		left, err := d.c.remainingSandboxProcesses()
		folders, ferr := d.c.remainingSessionFolders()
		if err := errors.Join(err, ferr, d.c.reapOrphans()); err != nil {
			return err
		}
		if len(left) == 0 && len(folders) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s after all sessions were deleted there are still processes %q and folders %q", settleTimeout, describeProcesses(left), folders)
		}
		time.Sleep(retryPause)
	}
}
