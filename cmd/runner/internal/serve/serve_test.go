package serve_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/serve"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo is an agent that ends every turn with the text of the query.
type echo struct{ in agent.Stdin }

func (echo) Command(l agent.Launch) (agent.Command, error) {
	return agent.Command{Path: "/bin/cat", Env: l.Environment(nil)}, nil
}
func (echo) OpenSession(_ agent.Launch, in agent.Stdin) agent.Session { return echo{in} }
func (echo) TranscriptPath(agent.Folders, string) (string, error) {
	return "", errors.New("none is kept")
}
func (e echo) BeginTurn(q runner.Query, _ *agent.Turn) error { return e.in.Send(q.Content) }
func (e echo) Interrupt() error                              { return nil }
func (e echo) HandleLine(line []byte, t *agent.Turn) error {
	t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: string(line)})
	return nil
}

// start runs a server in this process; stop ends it and returns its error.
func start(t *testing.T) (socket string, stop func() error) {
	t.Helper()
	dir, err := os.MkdirTemp("", "rs") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	log := slog.New(slog.DiscardHandler)
	j, err := journal.New(time.Now(), rand.Reader, 0)
	if err != nil {
		t.Fatal(err)
	}
	sup, err := supervisor.New(supervisor.Config{
		Adapters: map[string]agent.Adapter{"echo": echo{}}, Folders: agent.Folders{Workspace: dir, State: dir}, Journal: j,
		ProcessGroup: process.NewGroup(log), Environ: os.Environ(), Executable: "/bin/false", Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	s, err := serve.Listen(serve.Config{Socket: dir + "/s", Supervisor: sup, Journal: j, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	return dir + "/s", func() error { cancel(); return <-done }
}

// attach attaches with serve.Attach; the caller reads messages and writes commands.
func attach(t *testing.T, socket string) (messages *bufio.Scanner, commands io.WriteCloser, ended <-chan error) {
	t.Helper()
	in, commands := io.Pipe()
	out, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := serve.Attach(context.WithoutCancel(t.Context()), socket, runner.Attach{Epoch: 1}, in, w)
		_ = w.Close()
		done <- err
	}()
	return bufio.NewScanner(out), commands, done
}

func TestEverythingEndsWithRun(t *testing.T) {
	t.Parallel()
	socket, stop := start(t)
	messages, commands, ended := attach(t, socket)
	raw, err := json.Marshal(runner.Command{ID: 1, Op: runner.OpStart, Epoch: 1, Query: &runner.Query{SessionID: "ses_1", ExecutionID: "exe_1", Architecture: "echo", Content: "hello"}})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = commands.Write(append(raw, '\n')) }()
	// Replies and lines are not ordered: for such a short turn the reply may come after the end.
	var end runner.TurnEnd
	replied := false
	for (end.Outcome == "" || !replied) && messages.Scan() {
		var m runner.Message
		if err := json.Unmarshal(messages.Bytes(), &m); err != nil {
			t.Fatal(err)
		}
		if m.Reply != nil {
			replied = m.Reply.ID == 1 && m.Reply.Error == nil
		}
		if m.Line != nil && m.Line.Type == runner.TurnEnded {
			if err := json.Unmarshal(m.Line.Data, &end); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !replied {
		t.Error("the start was not answered")
	}
	if end.Result != `"hello"` {
		t.Errorf("end %+v", end)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if messages.Scan() {
		t.Errorf("after the end: %s", messages.Bytes())
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	_ = commands.Close()
	if err := serve.Attach(t.Context(), socket, runner.Attach{}, nil, io.Discard); err == nil {
		t.Error("attached to a runner that is gone")
	}
}

func TestAttachEndsWithItsCaller(t *testing.T) {
	t.Parallel()
	socket, stop := start(t)
	messages, commands, ended := attach(t, socket)
	if !messages.Scan() {
		t.Fatal("no hello")
	}
	if err := commands.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if line, err := serve.SendCommand(t.Context(), socket, runner.OpStatus); err != nil || len(line) == 0 {
		t.Errorf("status %s, %v", line, err)
	}
	if line, err := serve.SendCommand(t.Context(), socket, runner.OpKill); err != nil || !json.Valid(line) || !containsFenced(line) {
		t.Errorf("a kill without an epoch: %s, %v", line, err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func containsFenced(line []byte) bool {
	var m runner.Message
	return json.Unmarshal(line, &m) == nil && m.Reply != nil && m.Reply.Error != nil && m.Reply.Error.Code == "FENCED"
}
