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
	"sync"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/chaos/check"
)

const (
	tenant = "default"
	// settleTimeout is the time limit for queries to end after the last fault, and of each wait after that. An engine
	// counts as gone after 30 s.
	settleTimeout = 3 * time.Minute
	// proofTimeout is the time limit of "spool verify" and "spool rebuild" together.
	proofTimeout = 3 * time.Minute
)

// settings are the flags of the command.
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

// runChaos executes one run. It keeps the run's folder when it returns an error.
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
		writeTerminalEvents(os.Stdout, c.ends(), c.faults)
		err = errors.Join(err, c.end(), c.sweep())
	}()
	if err != nil {
		return err
	}
	return runWork(ctx, c, s)
}

// runWork runs clients and faults, waits until every query has ended, and checks the evidence.
func runWork(ctx context.Context, c *cluster, s settings) error {
	d := &driver{c: c, accepted: map[string]string{}, open: map[string]bool{}, ended: map[string]bool{}}
	following, stop := context.WithCancel(ctx)
	defer stop()
	var followers sync.WaitGroup
	calm := make(chan struct{})
	var sessions []string
	for n := range s.sessions {
		id, err := d.create(ctx, fmt.Sprintf("session-%d", n))
		if err != nil {
			return err
		}
		sessions = append(sessions, id)
		for i, kind := range []string{"SSE", "WebSocket"} {
			cl := &client{kind: kind, session: id}
			d.clients = append(d.clients, cl)
			followers.Go(func() { d.follow(following, cl, n+i) })
		}
		d.posts.Add(1)
		go d.post(ctx, calm, id, rand.New(rand.NewPCG(s.seed, uint64(n)+2))) //nolint:gosec // runs must be repeatable
	}
	d.posts.Add(1)
	go d.createAndDelete(ctx, calm, rand.New(rand.NewPCG(s.seed, uint64(s.sessions)+2))) //nolint:gosec // runs must be repeatable
	began := time.Now()
	err := inject(ctx, c, s)
	close(calm)
	if err != nil {
		return err
	}
	faulty := time.Since(began)
	d.posts.Wait()
	if err := errors.Join(c.awaitReady(ctx), d.resume(ctx), d.awaitSettled(ctx)); err != nil {
		return err
	}
	evidence, err := d.collectEvidence(ctx, sessions)
	if err != nil {
		return err
	}
	stop()
	followers.Wait()
	var errs []error
	for _, why := range append(check.Check(evidence), d.refused...) {
		errs = append(errs, errors.New(why))
	}
	if !slices.ContainsFunc(evidence.Streams, func(s check.Stream) bool { return len(s.Pieces) > 0 }) {
		errs = append(errs, errors.New("no client received text in flight, so the run proves nothing about it"))
	}
	errs = append(errs, c.runProofs(ctx), d.awaitErased(ctx), d.deleteSessions(ctx, sessions))
	d.report(c, s, evidence, faulty)
	return errors.Join(errs...)
}

// inject injects the demanded number of faults, and returns when no process is frozen any more.
func inject(ctx context.Context, c *cluster, s settings) error {
	plan, began := newSchedule(s.seed, len(c.parts)), time.Now()
	var thaws sync.WaitGroup
	defer thaws.Wait()
	var mu sync.Mutex
	var errs []error
	for len(c.faults) < s.faults || time.Since(began) < s.least {
		f := plan.next()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(f.after):
		}
		if err := c.reap(); err != nil {
			return err
		}
		p := c.parts[f.part]
		made := injectedFault{time.Now(), p.name, f}
		c.faults = append(c.faults, made)
		fmt.Fprintf(os.Stderr, "%s  %s\n", made.at.Format(clockFormat), made)
		if !f.freeze {
			if err := p.kill(f.length); err != nil {
				return err
			}
			continue
		}
		if err := p.freeze(); err != nil {
			return err
		}
		thaws.Go(func() {
			time.Sleep(f.length)
			if err := p.thaw(); err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	thaws.Wait()
	return errors.Join(errs...)
}

// resume resumes every execution that has not ended: a control may have paused it.
func (d *driver) resume(ctx context.Context) error {
	d.mu.Lock()
	open := slices.Collect(maps.Keys(d.open))
	d.mu.Unlock()
	for _, x := range open {
		if status, answer, err := d.callUntilKnown(ctx, http.MethodPost, "/api/executions/"+x+"/resume", "", map[string]any{}, nil); err != nil || status/100 != 2 && status != http.StatusConflict {
			return errors.Join(fmt.Errorf("resume of %s: %d %s", x, status, answer), err)
		}
	}
	return nil
}

// awaitSettled blocks until clients have received the end of every query.
func (d *driver) awaitSettled(ctx context.Context) error {
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

// collectEvidence reads the log, and blocks until every client has as many events as its session.
func (d *driver) collectEvidence(ctx context.Context, sessions []string) (check.Evidence, error) {
	e := check.Evidence{Log: map[string][]check.Event{}, Texts: map[string]string{}}
	nc, log, err := d.c.openLog(ctx)
	if nc != nil {
		defer nc.Close()
	}
	if err != nil {
		return e, err
	}
	deadline := time.Now().Add(settleTimeout)
	for {
		behind := false
		for _, id := range sessions {
			var list []check.Event
			for n, err := range eventlog.Session(ctx, log, tenant, id) {
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
			e.Streams = append(e.Streams, check.Stream{Client: c.kind, Session: c.session, Events: slices.Clone(c.events), Pieces: slices.Clone(c.pieces)})
			behind = behind || len(c.events) < len(e.Log[c.session])
			c.mu.Unlock()
		}
		if !behind || time.Now().After(deadline) {
			break
		}
		time.Sleep(retryPause)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e.Accepted = maps.Clone(d.accepted)
	return e, nil
}

// runProofs runs "spool verify" and "spool rebuild --compare".
func (c *cluster) runProofs(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, proofTimeout)
	defer cancel()
	key, err := c.headsPublicKey()
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

// deleteSessions deletes the sessions and blocks until no process and no folder of a sandbox is left.
func (d *driver) deleteSessions(ctx context.Context, sessions []string) error {
	for _, id := range sessions {
		if err := d.delete(ctx, id); err != nil {
			return err
		}
	}
	deadline := time.Now().Add(settleTimeout)
	for {
		left, err := d.c.leftProcesses()
		folders, ferr := d.c.leftFolders()
		if err := errors.Join(err, ferr, d.c.reap()); err != nil {
			return err
		}
		if len(left) == 0 && len(folders) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s after all sessions were deleted there are still processes %q and folders %q", settleTimeout, describe(left), folders)
		}
		time.Sleep(retryPause)
	}
}
