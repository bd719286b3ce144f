package codex_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/codex"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// A fork knows what the agent knew at the anchor, and nothing that came later.
func TestRealFork(t *testing.T) {
	t.Parallel()
	parent := newBench(t)
	parent.model = classic
	first := parent.completed("Remember the number 11 please", "11", nil)
	write := parent.completed("write a file please", "written", nil)
	parent.supervisor.Kill(t.Context())
	pair := parent.completed("two at once please", "Results", nil)
	last := parent.completed("Remember the number 22 please", "22", nil)
	parent.supervisor.Kill(t.Context())
	written := all[events.TranscriptWritten](first, "transcript_written")[0]

	results := pair.blocks(events.KindToolResult)
	for name, c := range map[string]struct {
		fork         runner.Fork
		answer       string
		known, later []string // texts of the model's request
	}{
		"at a text in a turn": {
			runner.Fork{Anchor: write.blocks(events.KindAssistantText)[0].Anchor}, "remember 11.",
			[]string{"I will write hello.txt."}, []string{"Add File: hello.txt", "Success. Updated", "The file is written", "two at once", "number 22", "aborted"},
		},
		"at a call's result in a turn": {
			runner.Fork{Anchor: write.blocks(events.KindToolResult)[0].Anchor}, "remember 11.",
			[]string{"I will write hello.txt.", "Add File: hello.txt", "Success. Updated"}, []string{"The file is written", "two at once", "number 22", "aborted"},
		},
		"at the last of parallel results": {
			runner.Fork{Anchor: results[1].Anchor}, "remember 11.",
			[]string{"The file is written", "two at once", `one\n`, `two\n`}, []string{"Results:", "number 22", "aborted"},
		},
		"at the end": {
			runner.Fork{Anchor: last.blocks(events.KindAssistantText)[0].Anchor}, "remember 22.",
			[]string{"number 11", "The file is written", "Results:", "number 22"}, []string{"aborted"},
		},
		"of the whole conversation": {
			runner.Fork{}, "remember 22.",
			[]string{"number 11", "The file is written", "Results:", "number 22"}, []string{"aborted"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := forkBench(t, parent)
			fork := func(q *runner.Query) { q.SessionID, q.Resume, q.Fork = "ses_fork", written.AgentSessionID, &c.fork }
			for range 2 {
				x := b.completed("which number was it?", c.answer, fork)
				if e := all[events.Error](x, "error"); len(e) != 0 {
					t.Errorf("errors %+v", e)
				}
				b.lastRequest(c.known, c.later, 1)
				if w := all[events.TranscriptWritten](x, "transcript_written"); w[0].AgentSessionID == written.AgentSessionID || w[0].Path == written.Path {
					t.Errorf("the fork is the session %+v itself", w[0])
				}
			}
			unchanged(t, parent, b, written)
		})
	}

	t.Run("again after a kill", func(t *testing.T) {
		b := forkBench(t, parent)
		fork := runner.Fork{Anchor: write.blocks(events.KindToolResult)[0].Anchor}
		change := func(q *runner.Query) { q.SessionID, q.Resume, q.Fork = "ses_fork", written.AgentSessionID, &fork }
		if refusal := b.start("talk for ever", change); refusal != nil {
			t.Fatal(refusal)
		}
		x := b.until("session", func(l runner.Line) bool { return l.Type == "transcript_written" }, turn{t: t})
		own := all[events.TranscriptWritten](x, "transcript_written")[0].AgentSessionID
		if err := syscall.Kill(x.started().PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.end(x)
		// Its own session, which is what the log has, knows as much as the fork did.
		b.completed("which number was it?", "remember 11.", func(q *runner.Query) { q.SessionID, q.Resume = "ses_fork", own })
		b.lastRequest([]string{"Success. Updated"}, []string{"The file is written", "number 22"}, 1)
		b.supervisor.Kill(t.Context())
		b.completed("which number was it?", "remember 11.", change)
		b.lastRequest([]string{"Success. Updated"}, []string{"The file is written", "number 22", "talk for ever"}, 1)
		unchanged(t, parent, b, written)
	})

	t.Run("unknown anchor", func(t *testing.T) {
		b := forkBench(t, parent)
		x := b.completed("hello", "You said: hello", func(q *runner.Query) {
			q.SessionID, q.Resume, q.Fork = "ses_fork", written.AgentSessionID, &runner.Fork{Anchor: "turn/item"}
		})
		if e := all[events.Error](x, "error"); len(e) != 1 || e[0].Code != "TRANSCRIPT_LOST" {
			t.Errorf("errors %+v", e)
		}
		b.lastRequest(nil, []string{"number 11", "number 22"}, 0)
	})
}

// The model's own script makes several calls, whose results it sees at the script's end alone: there is no place to cut
// between them. After its next words there is.
func TestRealForkAfterAScript(t *testing.T) {
	t.Parallel()
	parent := newBench(t)
	pair := parent.completed("two at once please", "Results", nil)
	parent.completed("Remember the number 22 please", "22", nil)
	parent.supervisor.Kill(t.Context())
	for _, b := range pair.blocks(events.KindToolResult) {
		if b.Anchor != "" {
			t.Errorf("the result of a call within a script has the anchor %q", b.Anchor)
		}
	}
	session := all[events.TranscriptWritten](pair, "transcript_written")[0].AgentSessionID
	b := forkBench(t, parent)
	b.completed("hello", "You said: hello", func(q *runner.Query) {
		q.SessionID, q.Resume, q.Fork = "ses_fork", session, &runner.Fork{Anchor: pair.blocks(events.KindAssistantText)[0].Anchor}
	})
	b.lastRequest([]string{"two at once", "Results:"}, []string{"number 22", "aborted"}, 0)
}

// forkBench is a sandbox of its own, with another workspace, that has a copy of the parent's records.
func forkBench(t *testing.T, parent *bench) *bench {
	t.Helper()
	b := newBench(t)
	b.model = parent.model
	if err := os.CopyFS(filepath.Join(b.place.State, "codex", "sessions"), os.DirFS(filepath.Join(parent.place.State, "codex", "sessions"))); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(parent.place.State, "codex", "*.sqlite*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range files { // its index of threads, which does not know the fork
		raw, err := os.ReadFile(path) //nolint:gosec // a test's
		if err == nil {
			err = os.WriteFile(filepath.Join(b.place.State, "codex", filepath.Base(path)), raw, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// lastRequest checks the texts of the last request to the model, in which the question stands so often.
func (b *bench) lastRequest(known, later []string, questions int) {
	b.t.Helper()
	requests := b.mock.Requests()
	body := string(requests[len(requests)-1].Body)
	for _, text := range known {
		if !strings.Contains(body, text) {
			b.t.Errorf("the model was asked without %q", text)
		}
	}
	for _, text := range later {
		if strings.Contains(body, text) {
			b.t.Errorf("the model was asked with %q", text)
		}
	}
	if n := strings.Count(body, "which number was it?"); n != questions {
		b.t.Errorf("the question stands %d times in the request, want %d", n, questions)
	}
}

// unchanged checks that a fork left the copy of its parent's transcript as it was.
func unchanged(t *testing.T, parent, b *bench, written events.TranscriptWritten) {
	t.Helper()
	var raw [2][]byte
	for i, x := range []*bench{parent, b} {
		path, err := codex.Adapter{}.Transcript(x.place, written.AgentSessionID)
		if err == nil {
			raw[i], err = os.ReadFile(path) //nolint:gosec // a test's
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(raw[0], raw[1]) {
		t.Error("the parent's transcript was changed")
	}
}
