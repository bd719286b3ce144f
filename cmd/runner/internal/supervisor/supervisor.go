// Package supervisor runs one agent at a time and journals what it does. It does not depend on followers of the
// journal, which may come and go.
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/profile"
	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/cmd/runner/internal/trust"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/settings"
)

// Config configures a Supervisor. Zero durations stand for the defaults.
type Config struct {
	Adapters     map[string]agent.Adapter // by architecture
	Folders      agent.Folders            // both folders absolute
	Journal      *journal.Journal
	ProcessGroup *process.Group
	Environ      []string // the environment that agents inherit
	Executable   string   // the runner's own binary
	Log          *slog.Logger
	Now          func() time.Time // nil for time.Now
	Watch        WorkspaceWatcher // nil for none
	Disk         DiskMeter        // nil for none
	OOM          OOMCounter       // nil for none

	Limits
}

// Limits are the time limits that a Supervisor applies to agents; 0 means the default. Commands of the runner embed it
// as flags.
type Limits struct {
	SilenceWarn time.Duration `help:"Time without output after which an agent is reported." default:"2m" env:"SPOOL_RUNNER_SILENCE_WARN"`
	SilenceKill time.Duration `help:"Time without output after which an agent is ended." default:"15m" env:"SPOOL_RUNNER_SILENCE_KILL"`
	MuteKill    time.Duration `help:"Time without output after a new query after which a warm agent is replaced, and for which an ACP agent may leave a request of its handshake unanswered." default:"30s" env:"SPOOL_RUNNER_MUTE_KILL"`
	TermGrace   time.Duration `help:"Time between asking an agent's processes to end and killing them." default:"2s" env:"SPOOL_RUNNER_TERM_GRACE"`
}

// validate returns an error if a field of the configuration is missing or wrong, and sets defaults.
func (c *Config) validate() error {
	if c.Journal == nil || c.ProcessGroup == nil || c.Log == nil || len(c.Adapters) == 0 {
		return errors.New("supervisor: journal, process group, log and adapters are required")
	}
	if !filepath.IsAbs(c.Folders.Workspace) || !filepath.IsAbs(c.Folders.State) {
		return fmt.Errorf("supervisor: workspace %q and state %q must be absolute paths", c.Folders.Workspace, c.Folders.State)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	settings.SetDefaults(&c.Limits)
	for name, limit := range map[string]time.Duration{
		"silence-warn": c.SilenceWarn, "silence-kill": c.SilenceKill, "mute-kill": c.MuteKill, "term-grace": c.TermGrace,
	} {
		if limit < 0 {
			return fmt.Errorf("%s: %s is negative", name, limit)
		}
	}
	// If the limit is below the warning, the agent is ended without a warning.
	c.SilenceWarn = min(c.SilenceWarn, c.SilenceKill)
	return nil
}

// Supervisor runs queries one after the other in the process of an agent, which stays alive between them.
type Supervisor struct {
	cfg    Config
	starts chan *acceptedQuery
	warms  chan warmUpRequest
	evict  chan *warmProcess // requests the end of an idle process

	idle       *agent.Turn      // used while no turn runs; owned by Run, nil until it is needed
	idleOutput agent.IdleOutput // what the agent sent while no turn ran

	mu        sync.Mutex
	closed    bool
	active    *acceptedQuery
	recording string                    // the execution whose lines have begun and not ended
	seen      map[startedExecution]bool // executions of this journal
	warm      *warmProcess              // owned by Run; stored here for Status
	hides     *redact.Set               // secret values that the agent got; kept after its end until another agent is started
}

// setRedaction sets the secret values that the supervisor removes from all later journal lines.
func (s *Supervisor) setRedaction(set *redact.Set) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hides = set
}

// redactedValues returns the secret values that the supervisor removes from journal lines.
func (s *Supervisor) redactedValues() *redact.Set {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hides
}

// startedExecution identifies one attempt of an execution, so that a repeated request to start it is recognized.
type startedExecution struct {
	execution string
	attempt   uint32
}

// acceptedQuery is a query that the supervisor has accepted, with the state of its turn until the turn has ended.
type acceptedQuery struct {
	query   runner.Query
	adapter agent.Adapter
	launch  agent.Launch
	command agent.Command      // without Resume; it is compared with the command of a warm process
	trusted []agent.LaunchFile // the file of certificate authorities, if the query has one
	kill    context.CancelFunc
	killed  context.Context
	done    chan struct{}
	policy  *permission.Policy
	decided chan struct{} // signalled after a verdict was added

	mu          sync.Mutex
	verdicts    []runner.ApprovalDecision // decisions that the run has not applied yet
	session     agent.Session             // set once the query was sent
	interrupted bool
	exhausted   *runner.TurnEnd // the end of a run that was killed because of a resource; nil if the kill was requested
	oomBefore   uint64          // processes that the kernel ended for lack of memory before the run
	oomTold     uint64          // number of those that were reported already
}

// New checks the configuration and returns a Supervisor, which does nothing until Run is called.
func New(cfg Config) (*Supervisor, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Supervisor{cfg: cfg, starts: make(chan *acceptedQuery, 1), warms: make(chan warmUpRequest, 1), evict: make(chan *warmProcess, 1), seen: map[startedExecution]bool{}}, nil
}

// Start accepts a query, whose turn Run then runs. If the same execution and attempt was started before, Start does
// nothing, also after its end.
func (s *Supervisor) Start(q runner.Query) *runner.CommandError {
	r, refusal := s.prepareExecution(q)
	if refusal != nil {
		refusal.Message = redact.New(q.Redact...).RedactString(refusal.Message)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := startedExecution{q.ExecutionID, q.Attempt}
	switch {
	case s.seen[key]:
		return nil
	case refusal != nil:
		return refusal
	case s.closed:
		return &runner.CommandError{Code: runner.CodeStopping, Message: "the runner is shutting down"}
	case s.active != nil:
		return &runner.CommandError{Code: "BUSY", Message: fmt.Sprintf("execution %s runs; one at a time", s.active.query.ExecutionID)}
	}
	s.seen[key] = true
	s.active = r
	s.starts <- r // does not block: there is at most one active run
	return nil
}

// prepareExecution validates a query with which an execution begins, and prepares its turn.
func (s *Supervisor) prepareExecution(q runner.Query) (*acceptedQuery, *runner.CommandError) {
	switch {
	case q.ExecutionID == "":
		return nil, invalidQueryError("query.executionId is empty")
	case q.SessionID == "":
		return nil, invalidQueryError("query.sessionId is empty")
	case q.Content == "" && len(q.Parts) == 0:
		return nil, invalidQueryError("query.content is empty")
	}
	if s.cfg.Disk != nil {
		if message, over := s.cfg.Disk.CheckLimit(); over {
			return nil, &runner.CommandError{Code: CodeDiskLimit, Message: message + ": remove files before the next query"}
		}
	}
	return s.prepareQuery(q)
}

// prepareQuery fills a query from the profile, asks the adapter for the command of the agent's process, and returns the
// acceptedQuery.
func (s *Supervisor) prepareQuery(q runner.Query) (*acceptedQuery, *runner.CommandError) {
	if q.Fork != nil && q.Resume == "" {
		return nil, invalidQueryError("query.fork: query.resume is empty")
	}
	if name, ok := architecture.Canonical(q.Architecture); ok {
		q.Architecture = name
	}
	adapter, ok := s.cfg.Adapters[q.Architecture]
	if !ok {
		return nil, &runner.CommandError{Code: "UNKNOWN_ARCHITECTURE", Message: fmt.Sprintf("query.architecture: %q is not one of %v", q.Architecture, adapterNames(s.cfg.Adapters))}
	}
	p, err := profile.Load(s.cfg.Folders.State)
	if err != nil {
		return nil, &runner.CommandError{Code: "INTERNAL", Message: err.Error()}
	}
	p.FillEmptyFields(&q)
	if refusal := replaceDockerServers(&q, s.cfg.Executable); refusal != nil {
		return nil, refusal
	}
	launch := agent.Launch{
		Folders: s.cfg.Folders, SessionID: q.SessionID, Command: q.Command, Model: q.Model, ModelSet: q.ModelSet, SystemPrompt: q.SystemPrompt, MemoryFile: q.MemoryFile,
		Env: q.Env, Environ: s.cfg.Environ, Executable: s.cfg.Executable,
		Tools: q.Tools, Subagents: q.Subagents, Commands: q.Commands, MCPServers: q.MCPServers, Skills: q.Skills, MaxTurns: q.MaxTurns,
		SubagentDepth: q.SubagentDepth, ContinueAfterLoss: q.ContinueAfterLoss,
		Permissions: q.Permissions, ExecutionPermissions: q.ExecutionPermissions,
	}
	var trusted []agent.LaunchFile
	if q.Authority != "" {
		with, file, err := trust.AddAuthority(launch, q.Authority)
		if err != nil {
			return nil, invalidQueryError("query.authority: " + err.Error())
		}
		launch, trusted = with, []agent.LaunchFile{file}
	}
	command, err := adapter.Command(launch)
	command.Files = slices.Concat(command.Files, trusted)
	if err != nil {
		var refusal *runner.CommandError
		if errors.As(err, &refusal) {
			return nil, refusal
		}
		return nil, &runner.CommandError{Code: "INTERNAL", Message: err.Error()}
	}
	policy, err := permission.New(q.Permissions, q.ExecutionPermissions)
	if err != nil {
		return nil, invalidQueryError("query.permissions: " + err.Error())
	}
	r := &acceptedQuery{query: q, adapter: adapter, launch: launch, command: command, trusted: trusted, policy: policy, done: make(chan struct{}), decided: make(chan struct{}, 1)}
	r.killed, r.kill = context.WithCancel(context.Background())
	return r, nil
}

// Interrupt asks the agent to stop the running turn. It does nothing if no turn runs.
func (s *Supervisor) Interrupt() {
	s.mu.Lock()
	r := s.active
	s.mu.Unlock()
	if r == nil {
		return
	}
	r.mu.Lock()
	first, session := !r.interrupted, r.session
	r.interrupted = true
	r.mu.Unlock()
	if first && session != nil {
		s.interruptSession(session)
	}
}

// ApplyVerdict passes a person's decision on an approval request to the running turn. It does nothing if no turn runs.
// The same decision may arrive several times.
func (s *Supervisor) ApplyVerdict(v runner.ApprovalDecision) {
	s.mu.Lock()
	r := s.active
	s.mu.Unlock()
	if r == nil {
		return
	}
	r.mu.Lock()
	r.verdicts = append(r.verdicts, v)
	r.mu.Unlock()
	select {
	case r.decided <- struct{}{}:
	default:
	}
}

// takeVerdicts returns the decisions that have arrived since the last call.
func (r *acceptedQuery) takeVerdicts() []runner.ApprovalDecision {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.verdicts
	r.verdicts = nil
	return list
}

// interruptSession asks the session of the agent's process to stop the turn, and logs an error.
func (s *Supervisor) interruptSession(session agent.Session) {
	if err := session.Interrupt(); err != nil {
		s.cfg.Log.Error("ask the agent to stop", "err", err)
	}
}

// Kill ends the agent's processes and the running turn, if there is one. It returns when they have ended or when ctx
// ends.
func (s *Supervisor) Kill(ctx context.Context) {
	s.mu.Lock()
	r, w := s.active, s.warm
	s.mu.Unlock()
	var gone <-chan struct{}
	switch {
	case r != nil:
		r.kill()
		gone = r.done
	case w != nil:
		select {
		case s.evict <- w:
		default: // requested already
		}
		gone = w.gone
	default:
		return
	}
	select {
	case <-gone:
	case <-ctx.Done():
	}
}

// Busy reports whether a turn is running, and whether a process of the agent is alive (warm).
func (s *Supervisor) Busy() (running, warm bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active != nil, s.warm != nil
}

// Status returns the running execution, the agent's process, and the memory and disk usage.
func (s *Supervisor) Status() runner.Status {
	s.mu.Lock()
	var st runner.Status
	if s.active != nil {
		st.ExecutionID, st.Attempt = s.active.query.ExecutionID, s.active.query.Attempt
	}
	if s.warm != nil {
		st.Architecture, st.AgentPID = s.warm.architecture, s.warm.proc.PID()
	}
	s.mu.Unlock()
	if st.AgentPID != 0 {
		st.MemoryBytes = s.cfg.ProcessGroup.MemoryUsage()
	}
	if s.cfg.Disk != nil {
		st.DiskBytes = uint64(max(0, s.cfg.Disk.UsedBytes())) //nolint:gosec // not negative
	}
	return st
}

// invalidQueryError returns the error for a query with an invalid field.
func invalidQueryError(message string) *runner.CommandError {
	return &runner.CommandError{Code: "INVALID_COMMAND", Message: message}
}
