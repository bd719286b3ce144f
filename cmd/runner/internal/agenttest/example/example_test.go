// Package example_test is the smallest adapter that passes the suite. docs/adding-an-agent.md shows its code; a test in
// test/docs compares the two.
package example_test

import (
	"encoding/json"
	"errors"
	"os/exec"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// Adapter runs the CLI "exampleagent". The CLI reads {"prompt": "…"} and prints {"text": "…"} for each piece of its answer,
// then {"done": true}.
type Adapter struct{}

// Command returns the process to start.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	path, err := exec.LookPath("exampleagent")
	if err != nil {
		return agent.Command{}, &runner.CommandError{Code: "AGENT_NOT_FOUND", Message: "exampleagent is not installed: run `npm i -g exampleagent`"}
	}
	return agent.Command{Path: path, Args: []string{"--json"}, Env: l.Environment(nil)}, nil
}

// OpenSession returns a session for a process that has just been started.
func (Adapter) OpenSession(_ agent.Launch, in agent.Stdin) agent.Session { return &session{in: in} }

// TranscriptPath returns the path of the agent's own record. This agent has none.
func (Adapter) TranscriptPath(agent.Folders, string) (string, error) {
	return "", errors.New("exampleagent writes no transcript")
}

// session translates between the stdio of one process and the calls of a turn.
type session struct {
	in    agent.Stdin
	block string // the open block of the answer; "" for none
}

func (s *session) BeginTurn(q runner.Query, _ *agent.Turn) error {
	s.block = ""
	return s.in.Send(map[string]string{"prompt": q.Content})
}

func (s *session) HandleLine(line []byte, t *agent.Turn) error {
	var l struct {
		Text string
		Done bool
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return err
	}
	if l.Text != "" {
		if s.block == "" {
			s.block = t.OpenBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText})
		}
		t.AppendText(s.block, l.Text)
	}
	if l.Done {
		if s.block != "" {
			t.CompleteBlock(s.block, nil)
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	}
	return nil
}

func (s *session) Interrupt() error { return s.in.Send(map[string]bool{"stop": true}) }

func TestConformance(t *testing.T) {
	t.Parallel()
	agenttest.Exercise(t, agenttest.AgentUnderTest{
		Architecture: "exampleagent",
		Adapter:      Adapter{},
		Program:      "exampleagent",
		Install:      "npm i -g exampleagent",
		Env: func(url string) map[string]string {
			return map[string]string{"OPENAI_BASE_URL": url + "/v1", "OPENAI_API_KEY": "test"}
		},
	}, agenttest.Capabilities{
		Goldens: &agenttest.Goldens{
			Adapter:   Adapter{},
			Scenarios: map[string]agenttest.Scenario{"one-turn": agenttest.QueryScenario("hello")},
		},
	})
}
