// Package peer compares Spool with Rivet's sandbox-agent on the same agent, OpenCode, and the same scripted model. Both
// run the agent on this machine without a container, with the same configuration. The bare agent, over ACP on its stdio,
// shows which part of a turn is the agent's.
//
// It measures the time from the message to the first text, split at the moment at which the model receives the request;
// a new session with its first turn; the rate at which a long answer reaches the client; and the processor time of a
// turn. Spool stores every event durably, and sandbox-agent keeps them in memory: the rows do not compare that.
package peer

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

const (
	// longAnswerPieces is the number of pieces of text in the model's answer to "write a long answer".
	longAnswerPieces = 2000
	// turnTimeout is the time limit of one turn.
	turnTimeout = 2 * time.Minute
)

// modelScript returns the script of the model server, in mockllm's format. The model answers without delay.
func modelScript() string {
	return "stream: {piece: 12}\nrules:\n  - match: {user: write a long answer}\n    steps:\n      - text: '" + strings.Repeat("twelve bytes", longAnswerPieces) +
		"'\n  - steps:\n      - text: 'You said {{user}}, and this is what there is to say about it.'\n"
}

// Benchmark is the subcommand peer of the benchmark program. It compares OpenCode through Spool, through sandbox-agent
// and without either. The subcommand all does not run it, because it installs sandbox-agent.
type Benchmark struct {
	Turns   harness.PositiveCount `default:"15" help:"Measured warm turns of each system, in alternation."`
	Long    harness.PositiveCount `default:"3" help:"Measured long answers of each system."`
	Systems []string              `default:"acp,peer,spool" enum:"acp,peer,spool" help:"Systems to measure: bare OpenCode over ACP, sandbox-agent, Spool."`
	Binary  string                `placeholder:"FILE" help:"The program sandbox-agent; by default npm installs the version of test/bench/peer/package.json into .tools/peer."`
}

// Optional returns true. The subcommand all therefore runs this benchmark only if its arguments name it.
func (*Benchmark) Optional() bool { return true }

// conversation is a conversation with OpenCode through one of the compared systems: Spool, sandbox-agent, or OpenCode
// alone.
type conversation interface {
	Turn(ctx context.Context, text string) (first time.Duration, err error)
	Close() error
}

// comparedSystem is one of the compared systems (Spool, sandbox-agent, or OpenCode alone), with its conversation and
// the measurements of it.
type comparedSystem struct {
	key, name string
	conv      conversation

	created               time.Duration // from the start to the first text of a new session
	first, request, after []time.Duration
	cpu                   time.Duration
	rates                 []float64 // pieces per second, from the message to the end of the turn
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	agent := bareagent.OpenCode()
	path, err := exec.LookPath(agent.Program)
	if err != nil {
		return fmt.Errorf("%w; make install installs it", err)
	}
	target, err := b.StartModel(modelScript())
	if err != nil {
		return err
	}
	model, err := startRecordingProxy(target)
	if err != nil {
		return err
	}
	b.Cleanup(func() error { model.server.Close(); return nil })
	var list []*comparedSystem
	for _, key := range m.Systems {
		c, err := m.startSystem(ctx, b, key, path, model.server.URL)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		list = append(list, c)
	}
	if err := m.measureTurns(ctx, model, list); err != nil {
		return err
	}
	for _, c := range list {
		if err := m.reportSystem(b, c, list[0]); err != nil {
			return err
		}
	}
	return nil
}

// startSystem starts the compared system with the given key, creates a session in it, and takes the first turn. path is
// the program of OpenCode; modelURL is the model that it uses.
func (m *Benchmark) startSystem(ctx context.Context, b *harness.Bench, key, path, modelURL string) (*comparedSystem, error) {
	c := &comparedSystem{key: key}
	dir := filepath.Join(b.Dir, key)
	begun := time.Now()
	var err error
	switch key {
	case "acp":
		c.name = "bare OpenCode, ACP on stdio"
		c.conv, err = bareagent.OpenCode().Warm(path, dir, modelURL)
	case "peer":
		c.name = "sandbox-agent"
		binary := m.Binary
		if binary == "" {
			if binary, err = installSandboxAgent(ctx); err != nil {
				return nil, err
			}
		}
		begun = time.Now()
		c.conv, err = startSandboxAgent(ctx, binary, filepath.Dir(path), dir, modelURL)
	case "spool":
		c.name = "Spool"
		var runner string
		if runner, err = b.BuildRunner(ctx); err != nil {
			return nil, err
		}
		var sys *system.System
		if sys, err = b.StartSystem(ctx, system.Config{ModelURL: modelURL, Executor: executor.Config{Runner: runner}}); err != nil {
			return nil, err
		}
		begun = time.Now()
		c.conv, err = startSpoolConversation(ctx, sys)
	}
	if err != nil {
		return nil, err
	}
	b.Cleanup(c.conv.Close)
	if _, err := takeTurn(ctx, c.conv, "begin"); err != nil {
		return nil, err
	}
	c.created = time.Since(begun)
	return c, nil
}

// takeTurn posts text as a message to a conversation, blocks until the turn has ended, and returns the time to the
// first text. turnTimeout limits the turn.
func takeTurn(ctx context.Context, c conversation, text string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	return c.Turn(ctx, text)
}

// measureTurns takes turns in the conversations of all compared systems, alternately, and stores the measurements in
// the list.
func (m *Benchmark) measureTurns(ctx context.Context, model *recordingProxy, list []*comparedSystem) error {
	for i := range int(m.Turns) + 2 { // the first two are not measured
		for _, c := range list {
			before, err := harness.Processes(os.Getpid())
			if err != nil {
				return err
			}
			begun := time.Now()
			first, err := takeTurn(ctx, c.conv, fmt.Sprint("number ", i))
			if err != nil {
				return fmt.Errorf("%s: turn %d: %w", c.name, i, err)
			}
			after, err := harness.Processes(os.Getpid())
			if err != nil {
				return err
			}
			if i < 2 {
				continue
			}
			request := time.Unix(0, model.last.Load()).Sub(begun)
			c.first, c.request, c.after = append(c.first, first), append(c.request, request), append(c.after, first-request)
			c.cpu += harness.TotalCPU(after) - harness.TotalCPU(before) // all others are idle
		}
	}
	for range int(m.Long) {
		for _, c := range list {
			begun := time.Now()
			if _, err := takeTurn(ctx, c.conv, "write a long answer"); err != nil {
				return fmt.Errorf("%s: long answer: %w", c.name, err)
			}
			c.rates = append(c.rates, longAnswerPieces/time.Since(begun).Seconds())
		}
	}
	return nil
}

// reportSystem reports the rows of docs/performance.md about the compared system c. Unless c is base, they compare it
// with base.
func (m *Benchmark) reportSystem(b *harness.Bench, c, base *comparedSystem) error {
	ms := func(list []time.Duration, share float64) float64 { return row.Percentile(list, share) }
	command := harness.ShellCommand("peer")
	against := ""
	ratio := 0.0
	if c != base {
		against, ratio = fmt.Sprintf("%s, alternating: p50 %.1f ms", base.name, ms(base.first, 0.5)), ms(c.first, 0.5)/ms(base.first, 0.5)
	}
	return errors.Join(
		b.ReportRow(row.Row{
			What: "warm turn of OpenCode, message to first text: " + c.name, Measured: fmt.Sprintf("fastest %.1f ms, p50 %.1f ms, of %d turns", ms(c.first, 0), ms(c.first, 0.5), len(c.first)),
			Against: against, Ratio: ratio, P50Ms: ms(c.first, 0.5), P99Ms: ms(c.first, 0.99), Command: command,
			Note: fmt.Sprintf("p50 %.1f ms to the model's receipt of the request, %.1f ms from there; fastest %.1f and %.1f ms; %.0f ms of processor time per turn, in all processes",
				ms(c.request, 0.5), ms(c.after, 0.5), ms(c.request, 0), ms(c.after, 0), c.cpu.Seconds()*1000/float64(len(c.first))),
		}),
		b.ReportRow(row.Row{
			What: "new session of OpenCode with its first turn, to the end of the turn: " + c.name, Measured: fmt.Sprintf("%.0f ms, once", c.created.Seconds()*1000), Command: command,
			Note: "with the start of the agent, and without that of Spool's services; sandbox-agent includes the start of its server",
		}),
		b.ReportRow(row.Row{
			What:     fmt.Sprintf("long answer of OpenCode, %d pieces that the model sends at once: %s", longAnswerPieces, c.name),
			Measured: fmt.Sprintf("%.0f pieces/s from the message to the end of the turn, median of %d", harness.Median(c.rates), len(c.rates)), Command: command,
		}),
	)
}

// recordingProxy is an HTTP proxy in front of the model server. It records when the last request arrived.
type recordingProxy struct {
	server *httptest.Server
	last   atomic.Int64 // Unix time in nanoseconds
}

// startRecordingProxy starts a recordingProxy in front of the model server at the URL target.
func startRecordingProxy(target string) (*recordingProxy, error) {
	u, err := url.Parse(target)
	if err != nil {
		return nil, err
	}
	m := &recordingProxy{}
	proxy := httputil.NewSingleHostReverseProxy(u)
	proxy.FlushInterval = -1
	m.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.last.Store(time.Now().UnixNano())
		proxy.ServeHTTP(w, r)
	}))
	return m, nil
}
