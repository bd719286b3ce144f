// Package builtin is the adapter of the architecture spool: the agent that is built into the runner. Its process is the
// runner's own binary, `runner agent`, driven over JSON lines like the process of any other agent.
//
// A turn is a loop: the model answers, tools do what it requests, and the results go back to the model, until it
// requests nothing more. The loop uses the model and the tools through small interfaces (packages model and tool).
package builtin

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/runner"
)

// Architecture is the name of the architecture of the built-in agent.
const Architecture = architecture.Spool

// Adapter implements agent.Adapter for the built-in agent.
type Adapter struct{}

// Command returns the command that starts the runner's own binary as an agent.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	args := []string{"agent", "--workspace", l.Workspace, "--state", l.State}
	resume, err := sessionToResume(l)
	if err != nil {
		return agent.Command{}, err
	}
	if resume != "" {
		args = append(args, "--resume", resume)
	}
	set := map[string]string{}
	if digest := serversDigest(l); digest != "" {
		set[setupDigestVariable] = digest
	}
	return agent.Command{Path: l.Executable, Args: args, Env: l.Environment(set)}, nil
}

// OpenSession returns the session of a process that was just started. The protocol of the built-in agent has no
// handshake.
func (Adapter) OpenSession(l agent.Launch, in agent.Stdin) agent.Session {
	return &session{in: in, refs: map[string]string{}, lost: whyNotResumable(l)}
}

// TranscriptPath returns the path of the file with the messages of an agent session.
func (Adapter) TranscriptPath(p agent.Folders, agentSession string) (string, error) {
	return transcriptPath(p.State, agentSession)
}

// sessionIDPattern matches the ids of agent sessions, which become a part of file names.
var sessionIDPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$`)

// transcriptPath returns the path of the file with the messages of an agent session, or an error for an id that cannot
// be part of a file name.
func transcriptPath(state, agentSession string) (string, error) {
	if !sessionIDPattern.MatchString(agentSession) {
		return "", fmt.Errorf("agent session %.100q: want 1 to 100 letters, digits, - and _", agentSession)
	}
	return filepath.Join(state, "spool", agentSession+".jsonl"), nil
}

// session implements agent.Session for one process of the built-in agent. refs maps the process's references of blocks
// to the ids of the turn's blocks.
type session struct {
	in    agent.Stdin
	refs  map[string]string
	lost  string // why a conversation cannot be forked, until that is reported
	plain bool   // the turn's query has no permission policy; see isWithoutPolicy
}

// BeginTurn sends the query to the process. If the earlier conversation is lost, it
// journals that, or refuses the query.
func (s *session) BeginTurn(q runner.Query, t *agent.Turn) error {
	if s.lost != "" {
		if refusal := agent.ReportLoss(t, q.ContinueAfterLoss, s.lost); refusal != nil {
			return refusal
		}
		s.lost = ""
	}
	s.plain = isWithoutPolicy(q)
	q.Env, q.Redact = nil, nil // the process has the environment already, and its output is redacted here
	return s.in.Send(processOrder{Op: "query", Query: &q})
}

// HandleLine handles a report that the process printed: it decides a permission request, or applies the report to the
// turn.
func (s *session) HandleLine(line []byte, t *agent.Turn) error {
	var r processReport
	if err := json.Unmarshal(line, &r); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	if r.Op == "permission" && r.Permission != nil {
		return s.decidePermission(*r.Permission, t)
	}
	return r.applyTo(t, s.refs)
}

// Interrupt asks the process to stop the turn.
func (s *session) Interrupt() error { return s.in.Send(processOrder{Op: "interrupt"}) }
