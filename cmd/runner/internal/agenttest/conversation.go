package agenttest

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/profile"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// whichNumber is the query that an agent can answer only from the earlier turns of its session.
const whichNumber = "which number was it?"

// Conversation describes the turns of one session. The script of the model has to have a rule for every query:
// "Remember the number N please" (answer: N, and "Ça va, 世界"), "which number was it?" (N), "talk for ever" (an endless
// text), "hello" (repeats the query), and those that the fields name.
type Conversation struct {
	// Usage means that the agent reports tokens, Cost that it reports costs.
	Usage, Cost bool
	// Edit are the decisions of "edit the file please", which follows "write a file please". The file hello.txt is
	// "hello, spool\n" afterwards.
	Edit []Decision
	// Command is in the answer to "run a command please", which writes 42 to answer.txt and to stdout, "oops" to stderr
	// and ends with status 3. CommandResult is the output in the journal; "" if it is not checked.
	Command, CommandResult string
	// Subagent means that "delegate this please" has a sub-agent create sub.txt.
	Subagent bool
	// Plan means that "make a plan please" leads to a plan of two steps that are completed.
	Plan bool
	// Sleeps means that "sleep long" runs the program sleep in the workspace.
	Sleeps bool
	// SleepOutput means that the command of "sleep long" prints something after it has begun.
	SleepOutput bool
	// Failures are queries at which the model fails. The process stays warm after each.
	Failures []Failure
	// Extra are more queries, which the warm process has to complete.
	Extra []Extra
	// Transcript means that the agent's own transcript is a text file in which what was said can be found.
	Transcript bool
	// Secrets are texts that may be in no file of the workspace and the state folder.
	Secrets []string
}

// Decision is the answer to a permission request that the suite expects in an event.
type Decision struct{ Tool, Decision, Rule string }

// Failure is the expected end of a turn at which the model fails.
type Failure struct {
	Query, Code string
	Message     string // a part of the message
}

// Extra is an additional query of the suite. The agent must answer it with a text that contains Answer.
type Extra struct {
	Query, Answer string
	Check         func(testing.TB, *Bench, Turn) // may be nil
}

// Confinement describes how the suite checks that the agent is kept inside its workspace. The workspace has a symbolic
// link named "link" that leads outside.
type Confinement struct {
	Refused []string // queries at which the agent writes or reads outside of the workspace
	Answer  string   // is in the answer to each
	// Rule is the rule that refuses them; "" for outside-workspace.
	Rule string
	// Several means that a refused query may contain other calls, which are decided before.
	Several bool
	// Network is in the answer to "fetch a page please"; "" if the agent has no such tool.
	Network string
	Extra   []Extra
	// Check is called after all. May be nil.
	Check func(testing.TB, *Bench)
}

// isDelta reports whether a journal line is a text delta.
func isDelta(l runner.JournalLine) bool { return l.Type == events.TextDelta }

// sameProcess returns a function that checks that a turn was done by the warm process pid, and returns the turn.
func sameProcess(t testing.TB, pid int) func(Turn) Turn {
	return func(x Turn) Turn {
		t.Helper()
		if s := x.Started(); s.PID != pid || !s.Warm {
			t.Errorf("started %+v, want the warm process %d", s, pid)
		}
		return x
	}
}

// anyProcess returns the turn unchanged. It takes the place of a sameProcess function where any process may do the
// turn.
func anyProcess(x Turn) Turn { return x }

// oneProcess runs a session whose turns must all be done by one process. It checks the results, files, usage,
// interrupts and failures of the turns.
func oneProcess(t *testing.T, s Subject, c Conversation, confined *Confinement) {
	b := NewBench(t, s)
	first := b.AskOK("Remember the number 4711 please", "Ça va, 世界", nil)
	if first.Started().Warm || first.Started().PID == 0 {
		t.Errorf("first start %+v", first.Started())
	}
	same := sameProcess(t, first.Started().PID)
	second := same(b.AskOK(whichNumber, "4711", nil))
	checkUsage(t, c, first, second)
	if c.Edit != nil {
		same(b.AskOK("write a file please", "written", nil))
		edit := same(b.AskOK("edit the file please", "edited", nil))
		if got := b.File("hello.txt"); got != "hello, spool\n" {
			t.Errorf("hello.txt: %q", got)
		}
		var got []Decision
		for _, d := range edit.Decisions() {
			got = append(got, Decision{d.ToolName, d.Decision, d.Rule})
		}
		if !slices.Equal(got, c.Edit) {
			t.Errorf("decisions %+v, want %+v", got, c.Edit)
		}
		// A turn with several requests to the model is charged for all of them.
		if one, all := second.Ended().Usage, edit.Ended().Usage; c.Usage && all.InputTokens < 2*one.InputTokens {
			t.Errorf("usage %+v, of a turn with one request to the model %+v", all, one)
		}
	}
	if c.Command != "" {
		ran := same(b.AskOK("run a command please", c.Command, nil))
		if got := b.File("answer.txt"); got != "42\n" {
			t.Errorf("answer.txt: %q", got)
		}
		if r := ran.Blocks(events.KindToolResult); len(r) != 1 || c.CommandResult != "" && r[0].Output != c.CommandResult || !r[0].IsError {
			t.Errorf("results %+v", r)
		}
	}
	if c.Subagent {
		CheckSubagent(t, b, same(b.AskOK("delegate this please", "reported", nil)))
	}
	if c.Plan {
		plan := same(b.AskOK("make a plan please", "Planned", nil)).Blocks(events.KindTodo)
		if len(plan) != 1 || len(plan[0].Todos) != 2 || plan[0].Todos[1].Status != "completed" {
			t.Errorf("plans %+v", plan)
		}
	}
	if confined != nil {
		checkConfinement(t, b, *confined, same)
	}
	checkInterrupts(t, b, c, same)
	for _, f := range c.Failures {
		x := same(b.Ask(f.Query, nil))
		if e := x.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != f.Code || e.Message == "" || !strings.Contains(e.Message, f.Message) {
			t.Errorf("%s: ended %+v, want %s with %q%s", f.Query, e, f.Code, f.Message, x)
		}
	}
	checkExtras(t, b, c.Extra, same)
	same(b.AskOK(whichNumber, "4711", nil))
	checkTranscript(t, s, b, c, second)
	noSecrets(t, b, c.Secrets)
}

// checkExtras sends additional queries and checks their answers. same is called with each turn and checks which process
// did it.
func checkExtras(t testing.TB, b *Bench, all []Extra, same func(Turn) Turn) {
	t.Helper()
	for _, e := range all {
		x := same(b.AskOK(e.Query, e.Answer, nil))
		if e.Check != nil {
			e.Check(t, b, x)
		}
	}
}

// CheckSubagent checks that in turn x one sub-agent ran and created the file sub.txt.
func CheckSubagent(t testing.TB, b *Bench, x Turn) {
	t.Helper()
	if got := b.File("sub.txt"); got != "sub-agent-ran\n" || len(x.Blocks(events.KindSubagent)) != 1 {
		t.Errorf("sub.txt %q, blocks %+v%s", got, x.Blocks(events.KindSubagent), x)
	}
}

// checkUsage checks that the usage of the second turn does not include that of the first.
func checkUsage(t testing.TB, c Conversation, first, second Turn) {
	t.Helper()
	f, s := first.Ended(), second.Ended()
	if c.Usage && (s.Usage.InputTokens == 0 || s.Usage.OutputTokens == 0 || s.Usage.InputTokens > 2*f.Usage.InputTokens) {
		t.Errorf("usage %+v after %+v", s, f)
	}
	if c.Cost && (s.CostUSD == 0 || s.CostUSD > 1.5*f.CostUSD) {
		t.Errorf("cost %+v after %+v", s, f)
	}
}

// checkConfinement sends queries at which the agent tries to leave the workspace. It checks that each is denied with
// the expected rule and that no file outside was written. same is called with each turn and checks which process did
// it.
func checkConfinement(t testing.TB, b *Bench, c Confinement, same func(Turn) Turn) {
	t.Helper()
	outside := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(b.Folders.Workspace, "link")); err != nil {
		t.Fatal(err)
	}
	for _, content := range c.Refused {
		x := same(b.AskOK(content, c.Answer, nil))
		d := x.Decisions()
		if len(d) == 0 || !c.Several && len(d) != 1 || d[len(d)-1].Decision != "deny" || d[len(d)-1].Rule != cmp.Or(c.Rule, "outside-workspace") {
			t.Errorf("%s: decisions %+v", content, d)
		}
	}
	checkExtras(t, b, c.Extra, same)
	for _, path := range []string{"/etc/spool-test", filepath.Join(outside, "file.txt")} {
		if exists(path) {
			t.Errorf("%s was written", path)
		}
	}
	if c.Network != "" {
		if d := same(b.AskOK("fetch a page please", c.Network, nil)).Decisions(); len(d) != 1 || d[0].Decision != "deny" || d[0].Rule != "network" {
			t.Errorf("fetch a page: decisions %+v", d)
		}
	}
	if c.Check != nil {
		c.Check(t, b)
	}
}

// checkInterrupts interrupts turns at different moments. It checks that the process stays warm and that no command is
// left running.
func checkInterrupts(t testing.TB, b *Bench, c Conversation, same func(Turn) Turn) {
	t.Helper()
	Interrupt(t, b, "talk for ever", OnText, same)
	Interrupt(t, b, "talk for ever again", AtStart, same)
	if c.Sleeps {
		Interrupt(t, b, "sleep long", OnTool, same)
	}
	if c.SleepOutput {
		Interrupt(t, b, "sleep long", OnOutput, same)
	}
}

// Interrupt sends a query, interrupts its turn at the moment when, and checks that the turn ends as interrupted. same
// is called with the turn and checks which process did it.
func Interrupt(t testing.TB, b *Bench, content string, when When, same func(Turn) Turn) {
	t.Helper()
	x := b.MustStart(content, nil)
	switch when {
	case AtStart:
		x = b.Until("start", func(l runner.JournalLine) bool { return l.Type == runner.AgentStarted }, x)
	case OnTool:
		x = b.Until("decision", func(l runner.JournalLine) bool { return l.Type == "permission_decided" }, x)
		await(t, "the command does not begin", func() bool { return isSleeping(t, b) })
	default:
		x = b.Until("text", isDelta, x)
	}
	b.Supervisor.Interrupt()
	x = same(b.End(x))
	if e := x.Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("%s: ended %+v%s", content, e, x)
	}
	x.CheckText()
	CheckNothingSleeps(t, b)
}

// CheckNothingSleeps waits until no process of the program sleep, which tests start, runs in the workspace.
func CheckNothingSleeps(t testing.TB, b *Bench) {
	t.Helper()
	await(t, "the interrupted command still runs", func() bool { return !isSleeping(t, b) })
}

// await blocks until condition returns true. After waitTimeout it fails the test with the message otherwise.
func await(t testing.TB, otherwise string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(waitTimeout); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(otherwise)
		}
	}
}

// isSleeping reports whether a program sleep runs in the workspace.
func isSleeping(t testing.TB, b *Bench) bool {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		cwd, err := os.Readlink(filepath.Join(p, "cwd"))
		if err != nil || cwd != b.Folders.Workspace {
			continue
		}
		if name, err := os.ReadFile(filepath.Join(p, "comm")); err == nil && string(name) == "sleep\n" {
			return true
		}
	}
	return false
}

// checkTranscript checks that the agent's own transcript is where the journal says it is.
func checkTranscript(t testing.TB, s Subject, b *Bench, c Conversation, x Turn) {
	t.Helper()
	w := x.Written()
	if w.AgentSessionID == "" {
		t.Errorf("transcript %+v has no session", w)
	}
	if !c.Transcript {
		return
	}
	path, err := s.Adapter.Transcript(b.Folders, w.AgentSessionID)
	if err != nil || path != w.Path {
		t.Errorf("transcript %q, want %q: %v", path, w.Path, err)
	}
	raw, err := os.ReadFile(w.Path)
	if err != nil || !strings.Contains(string(raw), "4711") {
		t.Errorf("transcript %+v: %v", w, err)
	}
}

// noSecrets checks that no file in the workspace or the state folder contains one of the secrets.
func noSecrets(t testing.TB, b *Bench, secrets []string) {
	t.Helper()
	for _, root := range []string{b.Folders.State, b.Folders.Workspace} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			raw, err := os.ReadFile(path)
			for _, secret := range secrets {
				if strings.Contains(string(raw), secret) {
					t.Errorf("%s contains a secret", path)
				}
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	}
}

// interruptAtOnce checks that a turn which is interrupted before its process has started ends as interrupted, and that
// the next query is answered.
func interruptAtOnce(t *testing.T, s Subject) {
	b := NewBench(t, s)
	x := b.MustStart("talk for ever", nil)
	b.Supervisor.Interrupt()
	if e := b.End(x).Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("ended %+v", e)
	}
	b.AskOK("hello after the interrupt", "hello after the interrupt", nil)
}

// checkMissingCLI checks that a query is refused with AGENT_NOT_FOUND if the agent's CLI is not on the PATH, and that
// the message says how to install the CLI.
func checkMissingCLI(t *testing.T, s Subject) {
	refusal := newBenchOn(t, s, t.TempDir(), nil).Start("hello", nil)
	if refusal == nil || refusal.Code != "AGENT_NOT_FOUND" || !strings.Contains(refusal.Message, s.Install) {
		t.Fatalf("refused with %v", refusal)
	}
}

// Resume describes how the suite checks that a new process continues the session of a process that has ended.
type Resume struct {
	Usage bool // as Conversation.Usage
	// UnknownSession is the id of a session that the agent does not have.
	UnknownSession string
	// OtherModel is a model that is not Subject.Model; "" if the agent does not choose its model.
	OtherModel string
	// Rules is the file of the workspace with instructions that the agent reads; "" if there is none.
	Rules string
}

// resume checks that a new process knows the conversation so far, after the former process was killed, ended in the
// middle of a turn, or had to be replaced. An unknown session must be reported as lost.
func resume(t *testing.T, s Subject, r Resume) {
	b := NewBench(t, s)
	pid := 0
	cold := func(x Turn) Turn {
		t.Helper()
		if s := x.Started(); s.Warm || s.PID == pid {
			t.Errorf("started %+v after process %d is gone", s, pid)
		}
		pid = x.Started().PID
		return x
	}
	kill := func() {
		t.Helper()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	first := cold(b.AskOK("Remember the number 31 please", "31", nil))
	b.Supervisor.Kill(t.Context())
	second := cold(b.AskOK(whichNumber, "31", nil))
	checkUsage(t, Conversation{Usage: r.Usage}, first, second)
	kill()
	cold(b.AskOK(whichNumber, "31", nil))

	// The process ends in the middle of a turn.
	x := b.Until("text", isDelta, b.MustStart("talk for ever", nil))
	kill()
	x = b.End(x)
	if e := x.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_EXITED" {
		t.Errorf("ended %+v", e)
	}
	if cut := x.Blocks(events.KindAssistantText); len(cut) != 1 || cut[0].Status != events.StatusError || cut[0].Content == "" {
		t.Errorf("blocks %+v", cut)
	}
	if r.OtherModel == "" {
		cold(b.AskOK(whichNumber, "31", nil))
	} else {
		otherModel(t, b, r, cold)
	}

	// The journal says that an unknown session is lost, and the query is answered all the same.
	lost := b.AskOK("hello", "You said: hello", func(q *runner.Query) { q.SessionID, q.Resume = "ses_2", r.UnknownSession })
	if e := lost.CheckErrors("TRANSCRIPT_LOST"); len(e) == 1 && !strings.Contains(e[0].Message, r.UnknownSession) {
		t.Errorf("error %+v does not name the session", e[0])
	}
}

// otherModel checks that a query with another model and system prompt is answered by a new process that knows the
// session, and that the model receives the prompt, the memory file and the rules of the workspace. cold is called with
// the turn and checks that a new process did it.
func otherModel(t *testing.T, b *Bench, r Resume, cold func(Turn) Turn) {
	t.Helper()
	want := []string{"PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-PROJECT"}
	if err := profile.Save(b.Folders.State, profile.Profile{MemoryFile: want[1]}); err != nil {
		t.Fatal(err)
	}
	if r.Rules != "" {
		want = append(want, "RULES-OF-THE-WORKSPACE")
		b.Put(r.Rules, want[2])
	}
	x := cold(b.AskOK(whichNumber, "31", func(q *runner.Query) { q.Model, q.SystemPrompt = r.OtherModel, want[0] }))
	requests := b.Model.Requests()
	last := requests[len(requests)-1]
	if last.Model != r.OtherModel {
		t.Errorf("the request is for model %q, want %q", last.Model, r.OtherModel)
	}
	for _, text := range want {
		if !strings.Contains(string(last.Body), text) {
			t.Errorf("the last request to the model does not contain %s", text)
		}
	}
	if m := All[events.MetadataUpdate](x, "metadata_update"); len(m) == 0 || m[0].Model != r.OtherModel {
		t.Errorf("metadata %+v", m)
	}
}

// WorkspaceSettings describes settings files of the agent's CLI in a workspace that try to weaken the permission policy
// or to run programs.
type WorkspaceSettings struct {
	Files func(workspace string) map[string]string // content by path below the workspace
	// Check is called after the queries of Confinement. May be nil.
	Check func(testing.TB, *Bench)
}

// checkWorkspaceSettings checks that the agent stays confined although its workspace has such settings files.
func checkWorkspaceSettings(t *testing.T, s Subject, w WorkspaceSettings, c Confinement) {
	b := NewBench(t, s)
	for name, content := range w.Files(b.Folders.Workspace) {
		b.Put(name, content)
	}
	checkConfinement(t, b, c, anyProcess)
	if w.Check != nil {
		w.Check(t, b)
	}
}
