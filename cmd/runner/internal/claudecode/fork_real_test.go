package claudecode_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/claudecode"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// A fork knows what the agent knew at the anchor, and nothing that came later.
func TestRealFork(t *testing.T) {
	t.Parallel()
	parent := newBench(t)
	first := parent.completed("Remember the number 11 please", "11", nil)
	write := parent.completed("write a file please", "written", nil)
	parent.supervisor.Kill(t.Context()) // the transcript of the next turns is another process's
	pair := parent.completed("two at once please", "Results", nil)
	last := parent.completed("Remember the number 22 please", "22", nil)
	parent.supervisor.Kill(t.Context())
	session := all[events.TranscriptWritten](first, "transcript_written")[0].AgentSessionID

	results := pair.blocks(events.KindToolResult)
	for name, c := range map[string]struct {
		fork         runner.Fork
		answer       string
		known, later []string // texts of the model's request
	}{
		"at a text in a turn": {
			runner.Fork{Anchor: write.blocks(events.KindAssistantText)[0].Anchor}, "remember 11.",
			[]string{"I will write hello.txt."}, []string{"File created", "The file is written", "two at once", "number 22"},
		},
		"at a tool's result in a turn": {
			runner.Fork{Anchor: write.blocks(events.KindToolResult)[0].Anchor}, "remember 11.",
			[]string{"I will write hello.txt.", "File created"}, []string{"The file is written", "two at once", "number 22", "No response requested"},
		},
		"at the last of parallel results": {
			runner.Fork{Anchor: results[1].Anchor}, "remember 11.",
			[]string{"The file is written", "two at once", results[0].Output, results[1].Output}, []string{"Results:", "number 22", "No response requested", "Tool result missing"},
		},
		"at the end": {
			runner.Fork{Anchor: last.blocks(events.KindAssistantText)[0].Anchor}, "remember 22.",
			[]string{"number 11", "The file is written", "Results:", "number 22"}, []string{"No response requested"},
		},
		"of the whole conversation": {
			runner.Fork{}, "remember 22.",
			[]string{"number 11", "The file is written", "Results:", "number 22"}, []string{"No response requested"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := forkBench(t, parent)
			fork := func(q *runner.Query) { q.SessionID, q.Resume, q.Fork = "ses_fork", session, &c.fork }
			for range 2 {
				x := b.completed("which number was it?", c.answer, fork)
				if e := all[events.Error](x, "error"); len(e) != 0 {
					t.Errorf("errors %+v", e)
				}
				b.lastRequest(c.known, c.later, 1)
				if w := all[events.TranscriptWritten](x, "transcript_written"); w[0].AgentSessionID == session {
					t.Errorf("the fork is the session %s itself", session)
				}
			}
			unchanged(t, parent, b)
		})
	}

	t.Run("again after a kill", func(t *testing.T) {
		b := forkBench(t, parent)
		fork := runner.Fork{Anchor: write.blocks(events.KindToolResult)[0].Anchor}
		change := func(q *runner.Query) { q.SessionID, q.Resume, q.Fork = "ses_fork", session, &fork }
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
		b.lastRequest([]string{"File created"}, []string{"The file is written", "number 22"}, 1)
		b.supervisor.Kill(t.Context())
		b.completed("which number was it?", "remember 11.", change)
		b.lastRequest([]string{"File created"}, []string{"The file is written", "number 22", "talk for ever"}, 1)
		unchanged(t, parent, b)
	})

	t.Run("unknown anchor", func(t *testing.T) {
		b := forkBench(t, parent)
		x := b.completed("hello", "You said: hello", func(q *runner.Query) {
			q.SessionID, q.Resume, q.Fork = "ses_fork", session, &runner.Fork{Anchor: "00000000-0000-4000-8000-000000000000"}
		})
		if e := all[events.Error](x, "error"); len(e) != 1 || e[0].Code != "TRANSCRIPT_LOST" {
			t.Errorf("errors %+v", e)
		}
		b.lastRequest(nil, []string{"number 11", "number 22"}, 0)
	})
}

// forkBench is a sandbox of its own, with another workspace, that has a copy of the parent's records.
func forkBench(t *testing.T, parent *bench) *bench {
	t.Helper()
	b := newBench(t)
	if err := os.CopyFS(filepath.Join(b.place.State, "claude"), os.DirFS(filepath.Join(parent.place.State, "claude"))); err != nil {
		t.Fatal(err)
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
func unchanged(t *testing.T, parent, b *bench) {
	t.Helper()
	read := func(x *bench) []byte {
		found, err := filepath.Glob(filepath.Join(x.place.State, "claude", "projects", "*", "*.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			if own, err := (claudecode.Adapter{}).Transcript(parent.place, strings.TrimSuffix(filepath.Base(path), ".jsonl")); err == nil {
				if filepath.Base(filepath.Dir(own)) == filepath.Base(filepath.Dir(path)) {
					raw, err := os.ReadFile(path) //nolint:gosec // a test's
					if err != nil {
						t.Fatal(err)
					}
					return raw
				}
			}
		}
		t.Fatalf("no transcript of the parent in %v", found)
		return nil
	}
	if !bytes.Equal(read(parent), read(b)) {
		t.Error("the parent's transcript was changed")
	}
}
