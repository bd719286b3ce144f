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

// whichNumberQuery is a query that an agent can answer only if it knows the earlier turns of its session.
const whichNumberQuery = "which number was it?"

// Conversation describes the queries and expected results of a session that the suite runs. The script of the model
// must have a rule for every query: "Remember the number N please" (answer: N, and "Ça va, 世界"), "which number was it?"
// (N), "talk for ever" (an endless text), "hello" (repeats the query), and those that the fields name.
type Conversation struct {
	// Usage means that the agent reports tokens, Cost that it reports costs.
	Usage, Cost bool
	// Edit are the decisions of "edit the file please", which follows "write a file please". The file hello.txt is
	// "hello, spool\n" afterwards.
	Edit []ExpectedDecision
	// Command is in the answer to "run a command please", which writes 42 to answer.txt and to stdout, "oops" to stderr
	// and ends with status 3. CommandResult is the output in the journal, whose first two lines may be in either order
	// because they come from two pipes; "" if it is not checked.
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
	Failures []ExpectedFailure
	// Extra are more queries, which the warm process has to complete.
	Extra []ExtraQuery
	// Transcript means that the agent's own transcript is a text file in which what was said can be found.
	Transcript bool
	// Secrets are texts that may be in no file of the workspace and the state folder.
	Secrets []string
}

// ExpectedDecision is a permission decision that the suite expects in the journal.
type ExpectedDecision struct{ Tool, Decision, Rule string }

// ExpectedFailure is a query at which the scripted model fails, with the expected outcome of its turn.
type ExpectedFailure struct {
	Query, Code string
	Message     string // a part of the message
}

// ExtraQuery is an additional query of the suite. The agent's answer must contain Answer.
type ExtraQuery struct {
	Query, Answer string
	Check         func(testing.TB, *Harness, Turn) // may be nil
}

// ConfinementCheck describes how the suite checks that the agent cannot leave its workspace. The workspace has a
// symbolic link named "link" that leads outside.
type ConfinementCheck struct {
	Refused []string // queries at which the agent writes or reads outside of the workspace
	Answer  string   // is in the answer to each
	// Rule is the rule that refuses them; "" for outside-workspace.
	Rule string
	// Several means that a refused query may contain other calls, which are decided before.
	Several bool
	// Network is in the answer to "fetch a page please"; "" if the agent has no such tool.
	Network string
	Extra   []ExtraQuery
	// Check is called after all. May be nil.
	Check func(testing.TB, *Harness)
}

// isDelta reports whether a journal line is a text delta.
func isDelta(l runner.JournalLine) bool { return l.Type == events.TextDelta }

// requireProcess returns a function that fails the test unless the warm process pid has run a turn. The function
// returns the turn.
func requireProcess(t testing.TB, pid int) func(Turn) Turn {
	return func(x Turn) Turn {
		t.Helper()
		if s := x.Started(); s.PID != pid || !s.Warm {
			t.Errorf("started %+v, want the warm process %d", s, pid)
		}
		return x
	}
}

// allowAnyProcess returns the turn unchanged. It takes the place of the function of requireProcess where any process
// may run the turn.
func allowAnyProcess(x Turn) Turn { return x }

// sortedLines returns the text with its lines in sorted order.
func sortedLines(text string) string {
	return strings.Join(slices.Sorted(strings.SplitSeq(text, "\n")), "\n")
}

// checkOneProcess runs a session whose turns must all be run by one process, and checks the results, files, usage,
// interrupts and failures of the turns.
func checkOneProcess(t *testing.T, s AgentUnderTest, c Conversation, confined *ConfinementCheck) {
	b := NewHarness(t, s)
	first := b.RunTurnOK("Remember the number 4711 please", "Ça va, 世界", nil)
	if first.Started().Warm || first.Started().PID == 0 {
		t.Errorf("first start %+v", first.Started())
	}
	same := requireProcess(t, first.Started().PID)
	second := same(b.RunTurnOK(whichNumberQuery, "4711", nil))
	checkUsage(t, c, first, second)
	if c.Edit != nil {
		same(b.RunTurnOK("write a file please", "written", nil))
		edit := same(b.RunTurnOK("edit the file please", "edited", nil))
		if got := b.ReadFile("hello.txt"); got != "hello, spool\n" {
			t.Errorf("hello.txt: %q", got)
		}
		var got []ExpectedDecision
		for _, d := range edit.PermissionDecisions() {
			got = append(got, ExpectedDecision{d.ToolName, d.Decision, d.Rule})
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
		ran := same(b.RunTurnOK("run a command please", c.Command, nil))
		if got := b.ReadFile("answer.txt"); got != "42\n" {
			t.Errorf("answer.txt: %q", got)
		}
		if r := ran.FinishedBlocks(events.KindToolResult); len(r) != 1 || c.CommandResult != "" && sortedLines(r[0].Output) != sortedLines(c.CommandResult) || !r[0].IsError {
			t.Errorf("results %+v", r)
		}
	}
	if c.Subagent {
		CheckSubagent(t, b, same(b.RunTurnOK("delegate this please", "reported", nil)))
	}
	if c.Plan {
		plan := same(b.RunTurnOK("make a plan please", "Planned", nil)).FinishedBlocks(events.KindPlan)
		if len(plan) != 1 || len(plan[0].Plan.Items) != 2 || plan[0].Plan.Items[1].Status != events.PlanCompleted {
			t.Errorf("plans %+v", plan)
		}
	}
	if confined != nil {
		checkConfinement(t, b, *confined, same)
	}
	checkInterrupts(t, b, c, same)
	for _, f := range c.Failures {
		x := same(b.RunTurn(f.Query, nil))
		if e := x.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != f.Code || e.Message == "" || !strings.Contains(e.Message, f.Message) {
			t.Errorf("%s: ended %+v, want %s with %q%s", f.Query, e, f.Code, f.Message, x)
		}
	}
	checkExtraQueries(t, b, c.Extra, same)
	same(b.RunTurnOK(whichNumberQuery, "4711", nil))
	checkTranscript(t, s, b, c, second)
	checkNoSecrets(t, b, c.Secrets)
}

// checkExtraQueries sends additional queries and checks their answers. same is called with each turn and checks which process
// has run it.
func checkExtraQueries(t testing.TB, b *Harness, all []ExtraQuery, same func(Turn) Turn) {
	t.Helper()
	for _, e := range all {
		x := same(b.RunTurnOK(e.Query, e.Answer, nil))
		if e.Check != nil {
			e.Check(t, b, x)
		}
	}
}

// CheckSubagent checks that exactly one sub-agent ran in turn x, and that it created the file sub.txt.
func CheckSubagent(t testing.TB, b *Harness, x Turn) {
	t.Helper()
	if got := b.ReadFile("sub.txt"); got != "sub-agent-ran\n" || len(x.FinishedBlocks(events.KindSubagent)) != 1 {
		t.Errorf("sub.txt %q, blocks %+v%s", got, x.FinishedBlocks(events.KindSubagent), x)
	}
}

// checkUsage checks that the token usage of the second turn does not include that of the first.
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

// checkConfinement sends queries at which the agent tries to leave the workspace. It checks that each attempt is denied
// with the expected rule, and that no file outside of the workspace was written. same is called with each turn and
// checks which process has run it.
func checkConfinement(t testing.TB, b *Harness, c ConfinementCheck, same func(Turn) Turn) {
	t.Helper()
	outside := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(b.Folders.Workspace, "link")); err != nil {
		t.Fatal(err)
	}
	for _, content := range c.Refused {
		x := same(b.RunTurnOK(content, c.Answer, nil))
		d := x.PermissionDecisions()
		if len(d) == 0 || !c.Several && len(d) != 1 || d[len(d)-1].Decision != "deny" || d[len(d)-1].Rule != cmp.Or(c.Rule, "outside-workspace") {
			t.Errorf("%s: decisions %+v", content, d)
		}
	}
	checkExtraQueries(t, b, c.Extra, same)
	for _, path := range []string{"/etc/spool-test", filepath.Join(outside, "file.txt")} {
		if fileExists(path) {
			t.Errorf("%s was written", path)
		}
	}
	if c.Network != "" {
		if d := same(b.RunTurnOK("fetch a page please", c.Network, nil)).PermissionDecisions(); len(d) != 1 || d[0].Decision != "deny" || d[0].Rule != "network" {
			t.Errorf("fetch a page: decisions %+v", d)
		}
	}
	if c.Check != nil {
		c.Check(t, b)
	}
}

// checkInterrupts interrupts turns at different moments. It checks that the process stays warm and that no command is
// left running.
func checkInterrupts(t testing.TB, b *Harness, c Conversation, same func(Turn) Turn) {
	t.Helper()
	CheckInterrupt(t, b, "talk for ever", OnText, same)
	CheckInterrupt(t, b, "talk for ever again", AtStart, same)
	if c.Sleeps {
		CheckInterrupt(t, b, "sleep long", OnTool, same)
	}
	if c.SleepOutput {
		CheckInterrupt(t, b, "sleep long", OnOutput, same)
	}
}

// CheckInterrupt sends a query, interrupts its turn at the moment when, and checks that the turn ends as interrupted.
// same is called with the turn and checks which process has run it.
func CheckInterrupt(t testing.TB, b *Harness, content string, when InterruptMoment, same func(Turn) Turn) {
	t.Helper()
	x := b.MustStartTurn(content, nil)
	switch when {
	case AtStart:
		x = b.ReadUntil("start", func(l runner.JournalLine) bool { return l.Type == runner.AgentStarted }, x)
	case OnTool:
		x = b.ReadUntil("decision", func(l runner.JournalLine) bool { return l.Type == "permission_decided" }, x)
		awaitCondition(t, "the command does not begin", func() bool { return hasSleepProcess(t, b) })
	default:
		x = b.ReadUntil("text", isDelta, x)
	}
	b.Supervisor.Interrupt()
	x = same(b.ReadToEnd(x))
	if e := x.Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("%s: ended %+v%s", content, e, x)
	}
	x.CheckTextDeltas()
	AwaitNoSleepProcess(t, b)
}

// AwaitNoSleepProcess blocks until no process of the program sleep, which tests start as a long command, runs in the
// workspace.
func AwaitNoSleepProcess(t testing.TB, b *Harness) {
	t.Helper()
	awaitCondition(t, "the interrupted command still runs", func() bool { return !hasSleepProcess(t, b) })
}

// awaitCondition blocks until condition returns true. After agentWaitTimeout it fails the test with the message otherwise.
func awaitCondition(t testing.TB, otherwise string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(agentWaitTimeout); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(otherwise)
		}
	}
}

// hasSleepProcess reports whether a process of the program sleep runs in the workspace.
func hasSleepProcess(t testing.TB, b *Harness) bool {
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

// checkTranscript checks that the agent's own transcript is at the path that the journal names.
func checkTranscript(t testing.TB, s AgentUnderTest, b *Harness, c Conversation, x Turn) {
	t.Helper()
	w := x.TranscriptWritten()
	if w.AgentSessionID == "" {
		t.Errorf("transcript %+v has no session", w)
	}
	if !c.Transcript {
		return
	}
	path, err := s.Adapter.TranscriptPath(b.Folders, w.AgentSessionID)
	if err != nil || path != w.Path {
		t.Errorf("transcript %q, want %q: %v", path, w.Path, err)
	}
	raw, err := os.ReadFile(w.Path)
	if err != nil || !strings.Contains(string(raw), "4711") {
		t.Errorf("transcript %+v: %v", w, err)
	}
}

// checkNoSecrets checks that no file in the workspace or the state folder contains one of the secrets.
func checkNoSecrets(t testing.TB, b *Harness, secrets []string) {
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

// checkInterruptAtOnce checks that a turn which is interrupted before its process has started ends as interrupted, and
// that the agent answers the next query.
func checkInterruptAtOnce(t *testing.T, s AgentUnderTest) {
	b := NewHarness(t, s)
	x := b.MustStartTurn("talk for ever", nil)
	b.Supervisor.Interrupt()
	if e := b.ReadToEnd(x).Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("ended %+v", e)
	}
	b.RunTurnOK("hello after the interrupt", "hello after the interrupt", nil)
}

// checkMissingCLI checks that a query is refused with AGENT_NOT_FOUND if the agent's CLI is not on the PATH, and that
// the message says how to install the CLI.
func checkMissingCLI(t *testing.T, s AgentUnderTest) {
	refusal := newHarnessWithPath(t, s, t.TempDir(), nil).StartTurn("hello", nil)
	if refusal == nil || refusal.Code != "AGENT_NOT_FOUND" || !strings.Contains(refusal.Message, s.Install) {
		t.Fatalf("refused with %v", refusal)
	}
}

// ResumeCheck describes how the suite checks that a new process continues the session of a process that has ended.
type ResumeCheck struct {
	Usage bool // as Conversation.Usage
	// UnknownSession is the id of a session that the agent does not have.
	UnknownSession string
	// OtherModel is a model that is not AgentUnderTest.Model; "" if the agent does not choose its model.
	OtherModel string
	// Rules is the file of the workspace with instructions that the agent reads; "" if there is none.
	Rules string
}

// checkResume checks that a new process knows the conversation so far, after the former process was killed, ended in
// the middle of a turn, or had to be replaced. A session that the agent does not have must be reported as lost.
func checkResume(t *testing.T, s AgentUnderTest, r ResumeCheck) {
	b := NewHarness(t, s)
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
	first := cold(b.RunTurnOK("Remember the number 31 please", "31", nil))
	b.Supervisor.Kill(t.Context())
	second := cold(b.RunTurnOK(whichNumberQuery, "31", nil))
	checkUsage(t, Conversation{Usage: r.Usage}, first, second)
	kill()
	cold(b.RunTurnOK(whichNumberQuery, "31", nil))

	// The process ends in the middle of a turn.
	x := b.ReadUntil("text", isDelta, b.MustStartTurn("talk for ever", nil))
	kill()
	x = b.ReadToEnd(x)
	if e := x.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_EXITED" {
		t.Errorf("ended %+v", e)
	}
	if cut := x.FinishedBlocks(events.KindAssistantText); len(cut) != 1 || cut[0].Status != events.StatusError || cut[0].Content == "" {
		t.Errorf("blocks %+v", cut)
	}
	if r.OtherModel == "" {
		cold(b.RunTurnOK(whichNumberQuery, "31", nil))
	} else {
		checkOtherModel(t, b, r, cold)
	}

	checkLostSession(t, s, r.UnknownSession)
}

// checkLostSession checks that a query does not run without the conversation that it continues, also when it is repeated, unless it allows that.
func checkLostSession(t *testing.T, s AgentUnderTest, unknown string) {
	t.Helper()
	b := NewHarness(t, s)
	query := func(allowed bool) func(*runner.Query) {
		return func(q *runner.Query) { q.SessionID, q.Resume, q.ContinueAfterLoss = "ses_2", unknown, allowed }
	}
	for range 2 {
		refused := b.RunTurn("hello", query(false))
		if e := refused.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != runner.CodeConversationLost || !strings.Contains(e.Message, unknown) {
			t.Errorf("ended %+v%s", e, refused)
		}
		if w := DataOfType[events.TranscriptWritten](refused, "transcript_written"); len(w) > 0 {
			t.Errorf("the refused turn has the session %+v", w)
		}
	}
	lost := b.RunTurnOK("hello", "You said: hello", query(true))
	if e := lost.CheckErrorCodes("TRANSCRIPT_LOST"); len(e) == 1 && !strings.Contains(e[0].Message, unknown) {
		t.Errorf("error %+v does not name the session", e[0])
	}
}

// checkOtherModel checks that a query with another model and system prompt is answered by a new process that knows the
// session, and that the model receives the prompt, the memory file and the rules of the workspace. cold is called with
// the turn and checks that a new process has run it.
func checkOtherModel(t *testing.T, b *Harness, r ResumeCheck, cold func(Turn) Turn) {
	t.Helper()
	want := []string{"PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-PROJECT"}
	if err := profile.Save(b.Folders.State, profile.Profile{MemoryFile: want[1]}); err != nil {
		t.Fatal(err)
	}
	if r.Rules != "" {
		want = append(want, "RULES-OF-THE-WORKSPACE")
		b.WriteFile(r.Rules, want[2])
	}
	x := cold(b.RunTurnOK(whichNumberQuery, "31", func(q *runner.Query) { q.Model, q.SystemPrompt = r.OtherModel, want[0] }))
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
	if m := DataOfType[events.MetadataUpdate](x, "metadata_update"); len(m) == 0 || m[0].Model != r.OtherModel {
		t.Errorf("metadata %+v", m)
	}
}

// WorkspaceSettings describes settings files of the agent's CLI in a workspace that try to weaken the permission policy
// or to run programs.
type WorkspaceSettings struct {
	Files func(workspace string) map[string]string // content by path below the workspace
	// Check is called after the queries of Confinement. May be nil.
	Check func(testing.TB, *Harness)
}

// checkWorkspaceSettings checks that the agent cannot leave a workspace whose settings files try to weaken the
// permission policy.
func checkWorkspaceSettings(t *testing.T, s AgentUnderTest, w WorkspaceSettings, c ConfinementCheck) {
	b := NewHarness(t, s)
	for name, content := range w.Files(b.Folders.Workspace) {
		b.WriteFile(name, content)
	}
	checkConfinement(t, b, c, allowAnyProcess)
	if w.Check != nil {
		w.Check(t, b)
	}
}
