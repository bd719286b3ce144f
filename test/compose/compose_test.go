// Package compose starts deploy/compose.yaml, with each service in its own container, and uses it like clients do.
package compose

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/events"
)

const (
	sessions = 20 // every claudeEvery-th session is of Claude Code, the others of the built-in agent
	turns    = 3

	claudeEvery = 7

	// namedVolumes is the number of volumes: nats, postgres, skills-scratch, secrets-private, secrets-public, three of
	// the egress proxy, and five of the certificates.
	namedVolumes = 13
)

// TestCompose tests the whole life of an installation: it starts with several copies, is used through both gateways
// concurrently, stops, starts again on the same volumes with the streams where a release without NATS accounts stored
// them, and is removed.
func TestCompose(t *testing.T) { //nolint:paralleltest // the test uses the whole machine
	p := newProject(t)
	urls := p.up()
	key := p.key(urls[0])
	gateways := []server{{urls[0], key}, {urls[1], key}}
	all := p.use(gateways)
	p.verify(sessions)
	p.runDoctor(urls[0])
	p.report(all)
	p.kill(gateways)
	p.erase(gateways)
	p.down()

	p.withoutAccounts()
	urls = p.up()
	gateways = []server{{urls[0], key}, {urls[1], key}}
	p.checkSessions(gateways, all)
	p.verify(sessions + 3) // in addition: the session whose executor was killed, the deleted one, and the one created with it
	p.down()
	p.run(time.Minute, p.compose("down", "--volumes")...)
	if left := p.volumes(); len(left) > 0 {
		t.Errorf("`down --volumes` left %v", left)
	}
}

// withoutAccounts moves the streams to where a release without NATS accounts stored them (docs/adr/0042).
func (p *project) withoutAccounts() {
	p.t.Helper()
	p.run(time.Minute, p.compose("run", "--rm", "--no-deps", "--entrypoint", "mv", "nats", "/data/jetstream/LOG", "/data/jetstream/$G")...)
}

// key creates an API key with the root key.
func (p *project) key(url string) string {
	p.t.Helper()
	var made struct{ Key string }
	if err := (server{url, p.rootKey}).call(p.t.Context(), "POST", "/api/keys", map[string]any{"name": "test"}, http.StatusCreated, &made); err != nil {
		p.t.Fatal(err)
	}
	if err := (server{url, "spool_none"}).call(p.t.Context(), "GET", "/api/sessions", nil, http.StatusUnauthorized, nil); err != nil {
		p.t.Errorf("without a key: %v", err)
	}
	return made.Key
}

// conversation is a session and its log.
type conversation struct {
	session, architecture, word string
	log                         []events.WireEvent
}

// use runs all conversations concurrently and compares the events that each client received with the log.
func (p *project) use(gateways []server) []*conversation {
	p.t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(p.t.Context(), 10*time.Minute)
	defer cancel()
	all := make([]*conversation, sessions)
	var group errgroup.Group
	var mu sync.Mutex
	deltas, seen := 0, 0
	for i := range sessions {
		c := &conversation{architecture: "spool", word: fmt.Sprintf("heron%d", i)}
		if i%claudeEvery == claudeEvery-1 {
			c.architecture = "claude-code"
		}
		all[i] = c
		group.Go(func() error {
			d, n, err := c.run(ctx, gateways, i)
			mu.Lock()
			defer mu.Unlock()
			deltas, seen = deltas+d, seen+n
			if err != nil {
				return fmt.Errorf("session %d, %s of %s: %w", i, c.session, c.architecture, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Logf("%d queries over %d sessions in %s: %d clients received %d events and %d deltas, none lost, repeated or out of order",
		sessions*turns, sessions, time.Since(began).Round(time.Second), 2*sessions, seen, deltas)
	return all
}

// run runs one conversation of three turns. Messages go to the gateways in turn. A client at each gateway follows
// the session, and one of them moves to the other gateway during a turn.
func (c *conversation) run(ctx context.Context, gateways []server, i int) (deltas, seen int, err error) {
	here, there := gateways[i%2], gateways[(i+1)%2]
	var made struct{ SessionID string }
	if err := here.call(ctx, "POST", "/api/sessions", map[string]any{"architecture": c.architecture}, http.StatusCreated, &made); err != nil {
		return 0, 0, err
	}
	c.session = made.SessionID
	stays, moves := newStream(c.session), newStream(c.session)
	if err := errors.Join(stays.join(ctx, there), moves.join(ctx, here)); err != nil {
		return 0, 0, err
	}
	defer func() { stays.leave(); moves.leave() }()
	for turn, text := range []string{
		"Remember the code word " + c.word + ".",
		"Write a program that prints the first ten primes and run it.",
		"What did I ask you to remember?",
	} {
		end, err := c.turn(ctx, gateways[(i+turn)%2], text, stays)
		if err != nil {
			return 0, 0, fmt.Errorf("turn %d: %w", turn+1, err)
		}
		if turn == turns-1 && !strings.Contains(string(end.Data), c.word) {
			return 0, 0, fmt.Errorf("the query asked for %s, and the turn ended with %s", c.word, end.Data)
		}
		if turn == 1 { // this client has only a part of the previous turn, and receives the rest from the other gateway
			for range 5 {
				if _, err := moves.next(ctx); err != nil {
					return 0, 0, err
				}
			}
			moves.leave()
			if err := moves.join(ctx, there); err != nil {
				return 0, 0, err
			}
		}
	}
	if c.log, err = there.events(ctx, c.session); err != nil {
		return 0, 0, err
	}
	for name, s := range map[string]*stream{"the client that stayed": stays, "the client that moved": moves} {
		if err := errors.Join(s.catchUp(ctx, len(c.log)), s.compareWithLog(c.log)); err != nil {
			return 0, 0, fmt.Errorf("%s: %w", name, err)
		}
	}
	return stays.deltas + moves.deltas, len(stays.seen) + len(moves.seen), c.ends()
}

// turn posts a message and follows its execution to the end.
func (c *conversation) turn(ctx context.Context, at server, text string, s *stream) (events.WireEvent, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var accepted struct{ ExecutionID string }
	if err := at.call(ctx, "POST", "/api/sessions/"+c.session+"/messages", map[string]any{"content": text}, http.StatusAccepted, &accepted); err != nil {
		return events.WireEvent{}, err
	}
	end, err := s.until(ctx, accepted.ExecutionID)
	if err != nil {
		// This shows whether the execution does not progress, or only its stream.
		var shown map[string]any
		asked := at.call(context.WithoutCancel(ctx), "GET", "/api/executions/"+accepted.ExecutionID, nil, http.StatusOK, &shown)
		return end, errors.Join(fmt.Errorf("%w; the read models show %s as %v", err, accepted.ExecutionID, shown), asked)
	}
	if end.Type != (events.ExecutionCompleted{}).EventType() {
		err = fmt.Errorf("the turn ended with %s %s", end.Type, end.Data)
	}
	return end, err
}

// ends checks that each query has exactly one end.
func (c *conversation) ends() error {
	accepted, ended := map[string]int{}, map[string]int{}
	for _, w := range c.log {
		if w.Type == (events.MessageAccepted{}).EventType() {
			accepted[w.ExecutionID]++
		}
		if events.IsTerminal(w.Type) {
			ended[w.ExecutionID]++
		}
	}
	if len(accepted) != turns || !maps.Equal(accepted, ended) {
		return fmt.Errorf("accepted are %v, ended %v", accepted, ended)
	}
	return nil
}

// verify checks the log and the read models with the commands that operators use, in a container.
func (p *project) verify(sessions int) {
	p.t.Helper()
	out := p.run(2*time.Minute, p.compose("run", "--rm", "--no-TTY", "--no-deps", "-v", p.headsPublicKey()+":/heads.pub:ro",
		"provision", "verify", "--json", "--public-key", "/heads.pub")...)
	var report struct {
		OK                        bool
		Sessions, Commits, Events int
		Open                      []json.RawMessage
		Proved                    []struct{ Entries int }
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		p.t.Fatalf("spool verify printed %s: %v", out, err)
	}
	if !report.OK || report.Sessions != sessions || len(report.Open) != 0 {
		p.t.Errorf("spool verify: %s", out)
	}
	entries := 0
	for _, shard := range report.Proved {
		entries += shard.Entries
	}
	if entries == 0 {
		p.t.Errorf("no heads of the log were signed: %s", out)
	}
	p.t.Logf("spool verify: sound: %d sessions, %d commits, %d events", report.Sessions, report.Commits, report.Events)
	for _, command := range [][]string{{"rebuild", "--compare"}, {"gc", "--dry-run"}} { // each exits with 1 if it fails
		p.run(2*time.Minute, p.compose(append([]string{"run", "--rm", "--no-TTY", "--no-deps", "provision"}, command...)...)...)
	}
}

// headsPublicKey writes the public key of the signed heads into a file that containers can read.
func (p *project) headsPublicKey() string {
	p.t.Helper()
	env, err := os.ReadFile(filepath.Join(p.dir, "deploy", ".env"))
	if err != nil {
		p.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(env), "\nSPOOL_HEADS_KEY=")
	seed, _, _ := strings.Cut(rest, "\n")
	key, err := heads.ParsePrivateKey(seed)
	if err != nil {
		p.t.Fatalf("SPOOL_HEADS_KEY in deploy/.env: %v", err)
	}
	file := filepath.Join(p.dir, "heads.pub")
	if err := os.WriteFile(file, []byte(key.Public().String()+"\n"), 0o644); err != nil { //nolint:gosec // a public key
		p.t.Fatal(err)
	}
	return file
}

// executorID matches an executor's id in its log.
var executorID = regexp.MustCompile(`"executor":"(xtr_[0-9A-Z]{26})"`)

// report logs the number of executions of each executor.
func (p *project) report(all []*conversation) {
	p.t.Helper()
	ran := map[string]int{}
	for _, c := range all {
		for _, w := range c.log {
			if w.Type != (events.ExecutionClaimed{}).EventType() {
				continue
			}
			var claim events.ExecutionClaimed
			if err := json.Unmarshal(w.Data, &claim); err != nil {
				p.t.Fatal(err)
			}
			ran[claim.Executor]++
		}
	}
	total, busy := 0, 0
	for _, c := range p.containers() {
		if c.Service != "executor" {
			continue
		}
		id := executorID.FindStringSubmatch(p.run(time.Minute, p.compose("logs", "--no-log-prefix", "--no-color", "--index", c.Name[strings.LastIndex(c.Name, "-")+1:], "executor")...))
		if id == nil {
			p.t.Errorf("the log of %s does not contain the executor's id", c.Name)
			continue
		}
		p.t.Logf("%s (%s): %d executions", c.Name, id[1], ran[id[1]])
		total += ran[id[1]]
		if ran[id[1]] > 0 {
			busy++
		}
	}
	if total < sessions*turns {
		p.t.Errorf("the executors ran %d executions of %d: %v", total, sessions*turns, ran)
	}
	if busy < 2 {
		p.t.Errorf("one executor ran all executions")
	}
}

// down stops and removes everything except the named volumes. The workspaces are in the object store by then.
func (p *project) down() {
	p.t.Helper()
	before := p.volumes()
	began := time.Now()
	p.run(3*time.Minute, p.compose("down")...)
	kept := len(p.workspaces())
	p.t.Logf("down in %s", time.Since(began).Round(time.Second))
	if kept > 0 {
		p.t.Errorf("`down` left %d volumes of sandboxes: %v", kept, p.workspaces())
	}
	for what, names := range p.remaining() {
		p.t.Errorf("`down` left %s: %v", what, names)
	}
	if after := p.volumes(); len(after) != namedVolumes || !slices.Equal(before, after) {
		p.t.Errorf("volumes were %v and are %v", before, after)
	}
}

// checkSessions checks that every session is unchanged, and that one session of each architecture continues.
func (p *project) checkSessions(gateways []server, all []*conversation) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Minute)
	defer cancel()
	went := map[string]bool{}
	for i, c := range all {
		log, err := gateways[i%2].events(ctx, c.session)
		if err != nil {
			p.t.Fatalf("%s: %v", c.session, err)
		}
		s := newStream(c.session)
		if err := errors.Join(s.join(ctx, gateways[(i+1)%2]), s.catchUp(ctx, len(log)), s.compareWithLog(log)); err != nil {
			p.t.Errorf("%s: %v", c.session, err)
		}
		if len(log) < len(c.log) || !slices.EqualFunc(log[:len(c.log)], c.log, func(a, b events.WireEvent) bool { return a.Seq == b.Seq && a.ID == b.ID }) {
			p.t.Errorf("%s had %d events and now has %d different ones", c.session, len(c.log), len(log))
		}
		if !went[c.architecture] {
			went[c.architecture] = true
			end, err := c.turn(ctx, gateways[i%2], "What did I ask you to remember?", s)
			if err != nil || !strings.Contains(string(end.Data), c.word) {
				p.t.Errorf("the next turn of %s (%s) ended with %s, %v", c.session, c.architecture, end.Data, err)
			}
		}
		s.leave()
	}
}
