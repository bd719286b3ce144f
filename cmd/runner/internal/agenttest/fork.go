package agenttest

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// ForkCheck describes how the suite checks that an agent continues with a copy of a session, the parent.
type ForkCheck struct {
	// Copy copies the agent's records from one state folder to another.
	Copy func(t testing.TB, from, to string)
	// Cases returns the forks by name. AfterKill is one of them, and is done once more by a process that is killed.
	Cases func(ForkParent) map[string]ForkCase
	// AfterKill names a case that is cut at an anchor.
	AfterKill string
	// CutMark is a text that the agent adds to the conversation when its process ended in the middle of a turn; "" for
	// none. ForkCase.Absent of AfterKill may have it, although the session of the killed fork contains it.
	CutMark string
	// UnknownAnchor is a well-formed anchor that the parent's session does not have.
	UnknownAnchor string
	// File means that the transcript of a session is a file of its own, which is written again by the same fork.
	File bool
	// Records is a pattern of the parent's transcripts below the state folder, which a fork must not change. "" means
	// that the records cannot be compared; then the suite goes on with the parent's session after the fork.
	Records string
}

// ForkParent holds the turns of the session that the suite forks. The comment of each turn is its query.
type ForkParent struct {
	Session string
	First   Turn // "Remember the number 11 please"
	Write   Turn // "write a file please"
	Pair    Turn // "two at once please", in another process
	Last    Turn // "Remember the number 22 please"
}

// ForkCase is one fork of the parent, with its expected result: the agent must answer the query "which number was it?"
// with Answer.
type ForkCase struct {
	Anchor          string // "" for the whole conversation
	Answer          string
	Present, Absent []string // texts of the last request to the model
}

// checkFork checks for each ForkCase that the agent of the fork knows the conversation up to the anchor, and nothing
// later.
func checkFork(t *testing.T, s AgentUnderTest, f ForkCheck) {
	parent := NewHarness(t, s)
	p := ForkParent{First: parent.RunTurnOK("Remember the number 11 please", "11", nil), Write: parent.RunTurnOK("write a file please", "written", nil)}
	parent.Supervisor.Kill(t.Context()) // another process writes the next turns
	p.Pair = parent.RunTurnOK("two at once please", "Results", nil)
	p.Last = parent.RunTurnOK("Remember the number 22 please", "22", nil)
	parent.Supervisor.Kill(t.Context())
	p.Session = p.First.TranscriptWritten().AgentSessionID
	newBench := func(t *testing.T) *Harness {
		b := NewHarness(t, s)
		f.Copy(t, parent.Folders.State, b.Folders.State)
		return b
	}
	unchanged := func(t *testing.T, b *Harness) {
		t.Helper()
		if f.Records != "" {
			checkSameRecords(t, parent.Folders, b.Folders, f.Records)
		}
	}
	query := func(c ForkCase) func(*runner.Query) {
		return func(q *runner.Query) {
			q.SessionID, q.Resume, q.Fork = "ses_fork", p.Session, &runner.Fork{Anchor: c.Anchor}
		}
	}
	cases, forks := f.Cases(p), 1
	if f.File {
		forks = 2 // the second one finds the file of the first
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			for range forks {
				x := b.RunTurnOK(whichNumberQuery, c.Answer, query(c))
				x.CheckErrorCodes()
				b.CheckLastModelRequest(c.Present, c.Absent, 1)
				if w := x.TranscriptWritten(); w.AgentSessionID == p.Session || f.File && w.Path == p.First.TranscriptWritten().Path {
					t.Errorf("the fork is the session %+v itself", w)
				}
				// The turn is not charged for the answers that were copied.
				took, copied := x.Ended().Usage, p.First.Ended().Usage.OutputTokens+p.Write.Ended().Usage.OutputTokens
				if took.OutputTokens == 0 || took.OutputTokens >= copied {
					t.Errorf("the turn of the fork took %+v, and the answers that it copied %d", took, copied)
				}
			}
			unchanged(t, b)
		})
	}
	t.Run("again after a kill", func(t *testing.T) {
		t.Parallel()
		b, c := newBench(t), cases[f.AfterKill]
		x := b.ReadUntil("session", func(l runner.JournalLine) bool { return l.Type == "transcript_written" }, b.MustStartTurn("talk for ever", query(c)))
		own := x.TranscriptWritten().AgentSessionID
		if err := syscall.Kill(x.Started().PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.ReadToEnd(x)
		// The session of the fork, which is what the log has, knows as much as the fork did.
		b.RunTurnOK(whichNumberQuery, c.Answer, func(q *runner.Query) { q.SessionID, q.Resume = "ses_fork", own })
		b.CheckLastModelRequest(c.Present, slices.DeleteFunc(slices.Clone(c.Absent), func(text string) bool { return text == f.CutMark }), 1)
		b.Supervisor.Kill(t.Context())
		// The same fork finds the same anchor.
		y := b.RunTurnOK(whichNumberQuery, c.Answer, query(c))
		y.CheckErrorCodes()
		b.CheckLastModelRequest(c.Present, append([]string{"talk for ever"}, c.Absent...), 1)
		if again := y.TranscriptWritten().AgentSessionID; again == p.Session || again == own && !f.File {
			t.Errorf("the fork is the session %s, after %s and %s", again, p.Session, own)
		}
		unchanged(t, b)
		if f.Records == "" {
			b.Supervisor.Kill(t.Context())
			b.RunTurnOK(whichNumberQuery, "remember 22.", func(q *runner.Query) { q.Resume = p.Session })
			b.CheckLastModelRequest(append([]string{"number 22"}, c.Present...), []string{"talk for ever"}, 1)
		}
	})
	t.Run("unknown anchor", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		fork := query(ForkCase{Anchor: f.UnknownAnchor})
		if e := b.RunTurn("hello", fork).Ended(); e.Code != runner.CodeConversationLost {
			t.Errorf("ended %+v", e)
		}
		x := b.RunTurnOK("hello", "You said: hello", func(q *runner.Query) { fork(q); q.ContinueAfterLoss = true })
		x.CheckErrorCodes("TRANSCRIPT_LOST")
		b.CheckLastModelRequest(nil, []string{"number 11", "number 22"}, 0)
	})
}

// checkSameRecords checks that the files of the agent's state folder that match pattern have the same content in parent
// and in copied, the folders of a fork.
func checkSameRecords(t testing.TB, parent, copied agent.Folders, pattern string) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(parent.State, pattern))
	if err != nil || len(found) == 0 {
		t.Fatalf("no records of the parent: %v", err)
	}
	for _, path := range found {
		rel, err := filepath.Rel(parent.State, path)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(copied.State, rel))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s was changed: %v", rel, err)
		}
	}
}

// ProvidedCheck describes how the suite checks that an agent continues with a transcript that a client uploaded.
type ProvidedCheck struct {
	// Bare holds the conversation "Remember the number 11 please" with the CLI without Spool, and returns its session
	// and transcript. Env is that of the queries.
	Bare func(t testing.TB, env map[string]string) (session string, transcript []byte)
	// Poison returns the transcript with additions that would have an effect beyond the conversation.
	Poison func(t testing.TB, session string, transcript []byte) []byte
	// Present and Absent are texts of the last request to the model.
	Present, Absent []string
	// Check checks the agent's own copy. May be nil.
	Check func(t testing.TB, b *Harness, session, path string)
	// Next is a query in another process, and Answer a part of its answer. Then checks the turn and may be nil.
	Next ExtraQuery
}

// checkProvided checks that the agent knows the conversation of an uploaded transcript, works in the workspace of its
// session, and acts on nothing else that the transcript says. The agent must not change the uploaded file.
func checkProvided(t *testing.T, s AgentUnderTest, p ProvidedCheck) {
	b := NewHarness(t, s)
	session, raw := p.Bare(t, b.Query.Env)
	given := p.Poison(t, session, bytes.Clone(raw))
	if bytes.Equal(given, raw) {
		t.Fatal("the transcript was not poisoned")
	}
	path := filepath.Join(b.Folders.State, agent.ProvidedTranscript)
	writePath(b.t, path, string(given))
	query := func(q *runner.Query) {
		q.SessionID, q.Resume, q.Fork = "ses_new", session, &runner.Fork{Provided: true}
	}

	x := b.ReadUntil("session", func(l runner.JournalLine) bool { return l.Type == "transcript_written" }, b.MustStartTurn("talk for ever", query))
	if err := syscall.Kill(x.Started().PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.ReadToEnd(x)
	x = b.RunTurnOK(whichNumberQuery, "remember 11.", query)
	x.CheckErrorCodes()
	b.CheckLastModelRequest(append([]string{"number 11"}, p.Present...), append([]string{"talk for ever"}, p.Absent...), 1)
	own := x.TranscriptWritten()
	if own.AgentSessionID == session {
		t.Errorf("the session is %s, the caller's own", session)
	}
	if p.Check != nil {
		p.Check(t, b, own.AgentSessionID, own.Path)
	}

	// The next turns are the session's own, also in a new process.
	b.Supervisor.Kill(t.Context())
	next := b.RunTurnOK(p.Next.Query, p.Next.Answer, func(q *runner.Query) { q.SessionID, q.Resume = "ses_new", own.AgentSessionID })
	if p.Next.Check != nil {
		p.Next.Check(t, b, next)
	}
	b.CheckLastModelRequest([]string{"number 11", whichNumberQuery}, nil, 1)
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, given) {
		t.Errorf("the provided transcript has changed: %v", err)
	}
	t.Run("without a file", func(t *testing.T) {
		b := NewHarness(t, s)
		if e := b.RunTurn("hello", query).Ended(); e.Code != runner.CodeConversationLost {
			t.Errorf("ended %+v", e)
		}
		b.RunTurnOK("hello", "hello", func(q *runner.Query) { query(q); q.ContinueAfterLoss = true }).CheckErrorCodes("TRANSCRIPT_LOST")
	})
}

// LastTextBlock returns the last block with text of the agent's answer in the turn.
func (x Turn) LastTextBlock() events.Block {
	x.t.Helper()
	texts := x.FinishedBlocks(events.KindAssistantText)
	if len(texts) == 0 {
		x.t.Fatalf("no text%s", x)
	}
	return texts[len(texts)-1]
}
