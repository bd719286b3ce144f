package builtin

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/mcptool"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/model"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/cmd/runner/internal/profile"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// defaultModel is used when neither the query nor OPENAI_MODEL names a model.
const defaultModel = "gpt-4.1-mini"

// defaultPrompt is the system prompt for a query without a system prompt.
const defaultPrompt = `You are an agent that works in a sandbox. The folder /mnt/workspace is yours: read, write and list files there with your tools, and run Python or bash programs with run_code.
Do what you are asked, check that it works, and then say briefly what you did.`

// AgentProcess is the process of `runner agent`, which runs the built-in agent.
type AgentProcess struct {
	Workspace string
	State     string
	Resume    string              // the agent's own session id, "" for a new one
	Getenv    func(string) string // OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, SPOOL_AGENT_…
	Environ   []string
	Log       *slog.Logger
}

// parseSettings parses the environment variables of the agent's process.
func (p AgentProcess) parseSettings() (cfg model.Config, steps int, code time.Duration, err error) {
	cfg = model.Config{BaseURL: p.Getenv("OPENAI_BASE_URL"), APIKey: p.Getenv("OPENAI_API_KEY")}
	if s := p.Getenv("SPOOL_AGENT_MAX_STEPS"); s != "" {
		if steps, err = strconv.Atoi(s); err != nil || steps < 1 {
			return cfg, 0, 0, fmt.Errorf("SPOOL_AGENT_MAX_STEPS: %q is not a number from 1 on", s)
		}
	}
	for name, into := range map[string]*time.Duration{"SPOOL_AGENT_MODEL_TIMEOUT": &cfg.Idle, "SPOOL_AGENT_CODE_TIMEOUT": &code} {
		if s := p.Getenv(name); s != "" {
			if *into, err = time.ParseDuration(s); err != nil || *into <= 0 {
				return cfg, 0, 0, fmt.Errorf("%s: %q is not a duration such as 30s", name, s)
			}
		}
	}
	return cfg, steps, code, nil
}

// Run reads orders, such as queries, from in and writes reports about the turns to out. It returns when in or ctx ends.
func (p AgentProcess) Run(ctx context.Context, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cfg, steps, codeLimit, err := p.parseSettings()
	if err != nil {
		return err
	}
	w, err := workspace.Open(p.Workspace)
	if err != nil {
		return err
	}
	defer w.Close() //nolint:errcheck // nothing is buffered
	said, err := openTranscript(p.State, p.Resume)
	lost := ""
	if err != nil && p.Resume != "" {
		lost, err = err.Error(), nil
	}
	if err != nil {
		return err
	}
	name := p.Getenv("OPENAI_MODEL")
	if name == "" {
		name = defaultModel
	}
	environ := withoutOwnVariables(p.Environ)
	loop := &Loop{
		Model: model.NewClient(cfg), DefaultModel: name, Workspace: w, System: defaultPrompt, MaxSteps: steps, Now: time.Now, Log: p.Log,
	}
	s := &orderServer{
		loop: loop, said: said, state: p.State, lost: lost, pipe: newReportWriter(out),
		own:     append(tool.FileTools(w), tool.RunCode{Dir: p.Workspace, Environ: environ, Limit: codeLimit}),
		servers: mcptool.New(mcptool.Config{Dir: p.Workspace, Environ: environ}),
	}
	defer func() {
		if s.said != nil {
			_ = s.said.Close() //nolint:errcheck // every write was checked
		}
		if err := s.servers.Close(); err != nil {
			p.Log.Debug("end the MCP servers", "err", err)
		}
	}()
	return s.run(ctx, in)
}

// orderServer executes the orders that the runner sends to the agent's process: it runs the turns of queries.
type orderServer struct {
	loop     *Loop
	said     *Transcript // nil while lost is set
	state    string
	lost     string // why the transcript cannot be continued, until another has begun
	reported bool   // the path of the transcript was reported
	pipe     *reportWriter
	turns    int // number of turns so far

	own     []tool.Tool
	servers *mcptool.Servers
}

// errInterrupted is the cause of the end of a turn's context when the user interrupts the turn. A context that ends for
// another reason, such as the end of stdin, belongs to a process that ends.
var errInterrupted = errors.New("interrupted by the user")

// runningTurn is the turn that the process runs now.
type runningTurn struct {
	stop    context.CancelCauseFunc
	done    chan struct{} // closed when the turn has ended
	permits *permissionQueue
}

// stopAndWait stops the turn, because the process ends, and waits until the turn has ended. It does nothing for nil.
func (r *runningTurn) stopAndWait() {
	if r != nil {
		r.stop(nil)
		<-r.done
	}
}

// run reads and executes orders until in or ctx ends. A query waits for the end of the turn before it.
func (s *orderServer) run(ctx context.Context, in io.Reader) error {
	orders := make(chan processOrder)
	readErr := make(chan error, 1)
	go func() { // ends when in ends, at the latest with the process
		defer close(orders)
		readErr <- readOrders(ctx, in, orders)
	}()
	var now *runningTurn
	defer func() { now.stopAndWait() }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case o, ok := <-orders:
			switch {
			case !ok:
				now.stopAndWait()
				return errors.Join(<-readErr, s.pipe.err)
			case o.Op == "interrupt":
				if now != nil {
					now.stop(errInterrupted) // does nothing if the turn has ended
				}
			case o.Op == "permission" && o.Permission != nil:
				if now != nil {
					now.permits.addReply(*o.Permission) // does nothing if the turn has ended
				}
			case o.Op == "query" && o.Query != nil:
				if now != nil {
					<-now.done // wait until its end was reported
				}
				now.stopAndWait()
				now = s.start(ctx, *o.Query)
			default:
				return fmt.Errorf("order %q is not known, or incomplete", o.Op)
			}
		}
	}
}

// start starts the turn of a query in its own goroutine.
func (s *orderServer) start(ctx context.Context, q runner.Query) *runningTurn {
	ctx, stop := context.WithCancelCause(ctx)
	s.turns++
	r := &runningTurn{stop: stop, done: make(chan struct{}), permits: newPermissionQueue(s.pipe, s.turns)}
	go func() {
		defer close(r.done)
		s.runTurn(ctx, q, r.permits)
	}()
	return r
}

// readOrders decodes the lines of in and sends each order to the channel, until in or ctx ends.
func readOrders(ctx context.Context, in io.Reader, orders chan<- processOrder) error {
	lines := bufio.NewReader(in)
	for {
		raw, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read orders: %w", err)
		}
		var o processOrder
		if err := json.Unmarshal(raw, &o); err != nil {
			return fmt.Errorf("read orders: %w", err)
		}
		select {
		case orders <- o:
		case <-ctx.Done():
			return nil
		}
	}
}

// runTurn runs the turn of one query and reports how the turn ended.
func (s *orderServer) runTurn(ctx context.Context, q runner.Query, permits *permissionQueue) {
	s.pipe.write(processReport{Op: "begin"})
	if s.lost != "" {
		if end := s.beginAfterLoss(q); end != nil {
			s.pipe.write(processReport{Op: "end", Ended: end})
			return
		}
	}
	if !s.reported {
		s.reported = true
		s.reportTranscript() // if the process dies in its first turn, the session can be resumed
	}
	if s.loop.Memory = q.MemoryFile; q.MemoryFile == "" {
		p, err := profile.Load(s.state)
		if err != nil {
			s.pipe.RecordEvent(events.Error{Code: "INTERNAL", Message: err.Error()})
		}
		s.loop.Memory = p.MemoryFile
	}
	more, err := s.servers.ConnectAndListTools(ctx, q.MCPServers)
	if err != nil {
		s.pipe.RecordEvent(events.Error{Code: "MCP_SERVER_FAILED", Message: err.Error()})
	}
	s.loop.Tools = append(slices.Clone(s.own), more...)
	ended := s.loop.Run(ctx, q, s.said, s.pipe, permits)
	s.reportTranscript()
	s.pipe.write(processReport{Op: "end", Ended: &ended})
}

// beginAfterLoss begins a new transcript in place of the one that is lost, if the query allows that, and reports the loss. Otherwise it returns how
// the turn ends.
func (s *orderServer) beginAfterLoss(q runner.Query) *runner.TurnEnd {
	if !q.ContinueAfterLoss {
		refusal := agent.LossRefusal(s.lost)
		return &runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: refusal.Code, Message: refusal.Message}
	}
	said, err := openTranscript(s.state, "")
	if err != nil {
		return &runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "INTERNAL", Message: err.Error()}
	}
	s.pipe.RecordEvent(agent.LossEvent(s.lost))
	s.said, s.lost = said, ""
	return nil
}

// reportTranscript reports the path and the size of the transcript to the runner.
func (s *orderServer) reportTranscript() {
	s.pipe.RecordEvent(events.TranscriptWritten{AgentSessionID: s.said.ID, Path: s.said.path, Bytes: uint32(min(s.said.bytes, 1<<32-1))}) //nolint:gosec // bounded
}

// ownVariablePrefixes are the prefixes of the environment variables that only the agent's process may have, among them
// the model's key.
var ownVariablePrefixes = []string{"SPOOL_", "OPENAI_"}

// withoutOwnVariables returns the environment for programs that the model runs: environ without the variables of
// ownVariablePrefixes. It keeps the variables of the agent's environments, secrets included, as other agents do.
func withoutOwnVariables(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(kv string) bool {
		return slices.ContainsFunc(ownVariablePrefixes, func(prefix string) bool { return strings.HasPrefix(kv, prefix) })
	})
}
