// Package approvals measures how long an agent waits after a person has decided about a call of a tool, compared with the
// same agent on bare stdio, and what a permission policy of many rules costs, per call and in a whole turn.
package approvals

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/system"
)

// turnTimeout is the time limit of one turn, including the first turn of a session.
const turnTimeout = 60 * time.Second

// Texts to which the scripted model answers with calls of tools.
const (
	// oneCommandMessage is the message to which the scripted model answers with one call of a tool, which runs a command.
	oneCommandMessage = "run one command"
	// manyCallsMessage is the message to which the scripted model answers with several calls of tools.
	manyCallsMessage = "make many calls"
)

// callsPerTurn is the number of calls of tools in a turn with manyCallsMessage. Every other one runs a command.
const callsPerTurn = 10

// Benchmark is the subcommand approvals of the benchmark program. It measures the time from a person's decision about a
// call of a tool to the call's result, and the cost of a permission policy.
type Benchmark struct {
	Decisions harness.PositiveCount `default:"30" help:"Measured decisions of each agent."`
	Rounds    harness.PositiveCount `default:"100" help:"Pairs of rounds of calls, with and without a policy."`
	Turns     harness.PositiveCount `default:"100" help:"Pairs of blocks of 5 turns, with and without a policy."`
	Agents    []string              `placeholder:"ARCHITECTURE,…" help:"Architectures whose decisions are measured; by default all that are described and whose CLI is on the PATH."`
}

// approvingAgents returns the agents that, without Spool, ask a person about calls of tools.
func approvingAgents() []bareagent.Agent {
	return slices.DeleteFunc(bareagent.Agents(), func(a bareagent.Agent) bool { return a.Command == nil })
}

// Validate checks the flags of the benchmark. kong, the parser of the command line, calls it.
func (m *Benchmark) Validate() error {
	for _, name := range m.Agents {
		if !slices.ContainsFunc(approvingAgents(), func(a bareagent.Agent) bool { return a.Architecture == name }) {
			return fmt.Errorf("--agents: unknown architecture %q, or one without a description of its requests", name)
		}
	}
	return nil
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	r, err := compareCalls(ctx, int(m.Rounds))
	if err != nil {
		return err
	}
	if err := b.ReportRow(r); err != nil {
		return err
	}
	runner, err := b.BuildRunner(ctx)
	if err != nil {
		return err
	}
	script, err := modelScript()
	if err != nil {
		return err
	}
	url, err := b.StartModel(script)
	if err != nil {
		return err
	}
	sys, err := b.StartSystem(ctx, system.Config{ModelURL: url, Executor: executor.Config{Runner: runner}})
	if err != nil {
		return err
	}
	for _, a := range approvingAgents() {
		if len(m.Agents) > 0 && !slices.Contains(m.Agents, a.Architecture) {
			continue
		}
		path := runner
		if a.Program != "" {
			if path, err = exec.LookPath(a.Program); err != nil {
				b.PrintSkipped("the row of "+a.Name, a.Program+" is not on the PATH; make install installs it")
				continue
			}
		}
		if err := compareDecisions(ctx, b, sys, a, path, url, int(m.Decisions)); err != nil {
			return fmt.Errorf("%s: %w", a.Name, err)
		}
	}
	return compareTurns(ctx, b, sys, int(m.Turns))
}

// modelScript returns the script of the model server, in mockllm's format.
func modelScript() (string, error) {
	type step = map[string]any
	rule := func(text, tool string, steps []step) step {
		return step{"match": step{"user": text, "tools": []string{tool}}, "steps": append(steps, step{"text": "Done."})}
	}
	call := func(tool string, input map[string]any) step { return step{"tool": step{"name": tool, "input": input}} }
	var rules []step
	for _, a := range approvingAgents() {
		tool, input := a.Command("touch approved")
		rules = append(rules, rule(oneCommandMessage, tool, []step{call(tool, input)}))
	}
	tool, input := bareagent.BuiltIn().Command("true")
	var calls []step
	for range callsPerTurn / 2 {
		calls = append(calls, call("list_directory", map[string]any{"path": "."}), call(tool, input))
	}
	rules = append(rules, rule(manyCallsMessage, tool, calls), step{"steps": []step{{"text": "Nothing."}}})
	raw, err := json.Marshal(step{"rules": rules})
	return string(raw), err
}

// applyAgent creates an agent of an architecture in the catalogue, with the given slug. p is nil for an agent without
// permissions. Loops are not detected, because all turns make the same calls.
func applyAgent(ctx context.Context, sys *system.System, slug, architecture string, p *events.Permissions) error {
	spec := map[string]any{"architecture": architecture, "instructions": "You run commands.", "loops": map[string]any{"action": "none"}}
	if p != nil {
		spec["permissions"] = p
	}
	return system.NewClient(sys.URL).ApplyDefinition(ctx, "agents", slug, spec)
}

// session is a session of an agent, with a WebSocket that has joined it.
type session struct {
	sys    *system.System
	client *system.Client
	socket *system.SessionSocket
	id     string

	// Times from the POST of a decision to the receipt of approval_decided and of approval_resolved, for all turns of Ask,
	// including the first.
	decided, resolved []time.Duration
}

// newSession creates a session of the agent with the given slug, and joins it over a WebSocket.
func newSession(ctx context.Context, sys *system.System, slug string) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	s := &session{sys: sys, client: system.NewClient(sys.URL)}
	var err error
	if s.id, err = s.client.CreateSession(ctx, system.SessionSpec{Agent: slug}); err != nil {
		return nil, err
	}
	s.socket, err = s.client.JoinSession(ctx, s.id)
	return s, err
}

// Close deletes the session and blocks until its sandbox has ended. The session must have had a turn.
func (s *session) Close() error {
	defer s.client.HTTP.CloseIdleConnections()
	defer s.socket.Close()
	ctx, cancel := context.WithTimeout(context.Background(), turnTimeout)
	defer cancel()
	return s.sys.DeleteAndAwaitEnd(ctx, s.id)
}

// hundredRules returns a permission policy of 100 rules about tools, paths and commands. Only the last rule matches the
// calls of this benchmark; it allows them.
func hundredRules() *events.Permissions {
	p := &events.Permissions{Preset: events.PresetReadOnly}
	for i := range 33 {
		p.Rules = append(p.Rules,
			events.PermissionRule{Tool: fmt.Sprintf("mcp__server%d__*", i), Then: events.PermissionAsk},
			events.PermissionRule{Path: []string{fmt.Sprintf("secret%d/**/*.key", i)}, Then: events.PermissionDeny},
			events.PermissionRule{Command: []string{fmt.Sprintf("deploy%d", i), fmt.Sprintf("git push origin%d", i)}, Then: events.PermissionDeny},
		)
	}
	p.Rules = append(p.Rules, events.PermissionRule{Then: events.PermissionAllow})
	return p
}
