package opencode_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/acp/acptest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// A fork knows what the agent knew at the anchor, and nothing that came later.
func TestRealFork(t *testing.T) {
	t.Parallel()
	parent := newBench(t)
	first := parent.Completed("Remember the number 11 please", "11", nil)
	write := parent.Completed("write a file please", "written", nil)
	parent.Completed("Remember the number 22 please", "22", nil)
	parent.Supervisor.Kill(t.Context())
	session := written(first)
	said := func(x acptest.Turn) events.Block {
		texts := x.Blocks(events.KindAssistantText)
		return texts[len(texts)-1]
	}

	t.Run("between turns", func(t *testing.T) {
		b := forkBench(t, parent)
		plain := b.Query
		b.Query.SessionID, b.Query.Resume, b.Query.Fork = "ses_fork", session, &runner.Fork{Anchor: said(write).Anchor}
		known, later := []string{"I will write hello.txt.", "Wrote file successfully.", "The file is written."}, []string{"number 22", "talk for ever"}
		x := b.Begun("talk for ever")
		x = b.Until("session", func(l runner.Line) bool { return l.Type == "transcript_written" }, x)
		own := written(x)
		if err := syscall.Kill(x.Started().PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.End(x)
		// The same fork finds the same point.
		x = b.Completed("which number was it?", "remember 11.", nil)
		b.lastRequest(known, later, 1)
		if e := acptest.All[events.Error](x, "error"); len(e) != 0 {
			t.Errorf("errors %+v", e)
		}
		if again := written(x); again == session || again == own {
			t.Errorf("the fork is the session %s, after %s and %s", again, session, own)
		}
		b.Supervisor.Kill(t.Context())
		// The first one's own session, which is what the log has, knows as much.
		b.Query.Resume, b.Query.Fork = own, nil
		b.Completed("which number was it?", "remember 11.", nil)
		b.lastRequest(known, later[:1], 1)
		b.Supervisor.Kill(t.Context())
		// The original is gone on with as if nothing had happened.
		b.Query = plain
		b.Query.Resume = session
		b.Completed("which number was it?", "remember 22.", nil)
		b.lastRequest(append(known, "number 22"), later[1:], 1)
	})

	t.Run("of the whole conversation", func(t *testing.T) {
		b := forkBench(t, parent)
		b.Query.SessionID, b.Query.Resume, b.Query.Fork = "ses_fork", session, &runner.Fork{}
		x := b.Completed("which number was it?", "remember 22.", nil)
		if written(x) == session {
			t.Errorf("the fork is the session %s itself", session)
		}
		if took, copied := x.Ended().Usage, first.Ended().Usage.OutputTokens+write.Ended().Usage.OutputTokens; took.OutputTokens == 0 || took.OutputTokens >= copied {
			t.Errorf("the fork's turn took %+v, and the answers that it copied %d", took, copied)
		}
		b.lastRequest([]string{"number 11", "The file is written.", "number 22"}, nil, 1)

		// Without the anchor the agent begins anew, and says so.
		b.Query.Fork = &runner.Fork{Anchor: "msg_unknown"}
		x = b.Completed("hello", "You said: hello", nil)
		if e := acptest.All[events.Error](x, "error"); len(e) != 1 || e[0].Code != "TRANSCRIPT_LOST" || !strings.Contains(e[0].Message, "msg_unknown") {
			t.Errorf("errors %+v", e)
		}
		b.lastRequest(nil, []string{"number 11", "number 22"}, 0)
	})
}

func written(x acptest.Turn) string {
	return acptest.All[events.TranscriptWritten](x, "transcript_written")[0].AgentSessionID
}

// forkBench is a sandbox of its own, with another workspace, that has a copy of the parent's records.
func forkBench(t *testing.T, parent bench) bench {
	t.Helper()
	b := newBench(t)
	if err := os.CopyFS(filepath.Join(b.Place.State, "opencode", "data"), os.DirFS(filepath.Join(parent.Place.State, "opencode", "data"))); err != nil {
		t.Fatal(err)
	}
	return b
}

// lastRequest checks the texts of the last request to the model, in which the question stands so often.
func (b bench) lastRequest(known, later []string, questions int) {
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
