package cli

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// executeQueryCommand is the command execute-query, which runs one query without a socket and prints the journal.
type executeQueryCommand struct {
	Message      string     `arg:"" help:"What the agent is asked."`
	Architecture string     `required:"" help:"The agent to run, such as spool or claude-code."`
	SessionID    string     `required:"" help:"Id of the session, whose transcript the agent continues."`
	Cwd          string     `required:"" help:"The workspace, an existing folder."`
	Model        string     `help:"The model; the architecture's default without it."`
	Resume       string     `help:"The agent's own session id to go on with."`
	State        string     `help:"Folder for the agents' own files; by default one per session under $XDG_STATE_HOME/spool/runner or ~/.local/state/spool/runner." env:"SPOOL_RUNNER_STATE"`
	Limits       limitFlags `embed:""`
}

func (c *executeQueryCommand) Run(ctx context.Context, sys *System, log *slog.Logger) error {
	if c.State == "" {
		if filepath.Base(c.SessionID) != c.SessionID || strings.HasPrefix(c.SessionID, ".") {
			return fmt.Errorf("session-id: %q cannot name a folder; give --state", c.SessionID)
		}
		base := cmp.Or(sys.Getenv("XDG_STATE_HOME"), filepath.Join(cmp.Or(sys.Getenv("HOME"), "."), ".local", "state"))
		c.State = filepath.Join(base, "spool", "runner", c.SessionID)
	}
	place, err := prepareFolders(c.Cwd, c.State)
	if err != nil {
		return err
	}
	w, err := c.Limits.buildRuntime(sys, log, place, nil)
	if err != nil {
		return err
	}
	execution, err := events.NewID(events.KindExecution, time.Now(), rand.Reader)
	if err != nil {
		return err
	}
	q := runner.Query{
		SessionID: c.SessionID, ExecutionID: execution, Attempt: 1, Architecture: c.Architecture, Model: c.Model,
		Content: c.Message, Resume: c.Resume,
	}
	var ended runner.TurnEnd
	err = w.runWithReaping(ctx, func(whole context.Context) error {
		ended, err = w.runSingleQuery(ctx, whole, sys, q)
		return err
	})
	if err != nil {
		return err
	}
	switch ended.Outcome {
	case runner.OutcomeCompleted:
		return nil
	case runner.OutcomeInterrupted, runner.OutcomeKilled:
		return silentExit(exitInterrupted)
	}
	return silentExit(exitFailed)
}

// runSingleQuery runs one query and prints its journal. When ctx ends it interrupts the turn, and ends the agent if the turn
// has not ended ten seconds later. whole is the context of the supervisor, which outlives ctx.
func (w *agentRuntime) runSingleQuery(ctx, whole context.Context, sys *System, q runner.Query) (runner.TurnEnd, error) {
	whole, stop := context.WithCancel(whole)
	finished := make(chan error, 1)
	if refusal := w.supervisor.Start(q); refusal != nil {
		stop()
		return w.printRefusal(sys, q, refusal)
	}
	go func() { finished <- w.supervisor.Run(whole) }()
	defer context.AfterFunc(ctx, func() {
		w.supervisor.Interrupt()
		patience, cancel := context.WithTimeout(whole, 10*time.Second)
		defer cancel()
		<-patience.Done()
		w.supervisor.Kill(whole)
	})()
	ended, err := w.printJournal(sys)
	stop()
	return ended, errors.Join(err, <-finished)
}

// printRefusal prints a journal line with the end of a query that the supervisor refused, so that a reader of the
// journal learns about it.
func (w *agentRuntime) printRefusal(sys *System, q runner.Query, e *runner.CommandError) (runner.TurnEnd, error) {
	ended := runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: e.Code, Message: e.Message}
	data, err := json.Marshal(ended)
	if err != nil {
		return ended, err
	}
	w.journal.Append(context.Background(), runner.JournalLine{Type: runner.TurnEnded, Time: time.Now().UTC(), ExecutionID: q.ExecutionID, Data: data})
	return w.printJournal(sys)
}

// printJournal prints the journal's lines until the turn has ended, and returns the outcome of the turn.
func (w *agentRuntime) printJournal(sys *System) (runner.TurnEnd, error) {
	var after uint64
	for {
		lines, changed := w.journal.LinesAfter(after, 1<<20)
		for _, raw := range lines {
			var l runner.JournalLine
			if err := json.Unmarshal(raw, &l); err != nil {
				return runner.TurnEnd{}, fmt.Errorf("journal line: %w", err)
			}
			if _, err := sys.Stdout.Write(append(bytes.Clone(raw), '\n')); err != nil {
				return runner.TurnEnd{}, fmt.Errorf("print line %d: %w", l.N, err)
			}
			after = l.N
			w.journal.TrimUpTo(after)
			if l.Type == runner.TurnEnded {
				var e runner.TurnEnd
				err := json.Unmarshal(l.Data, &e)
				return e, err
			}
		}
		if changed != nil {
			<-changed
		}
	}
}
