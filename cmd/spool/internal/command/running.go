package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
)

// running is one execution of spool run.
type running struct {
	app     *app
	cmd     *runCommand
	query   string
	options *spoolv1.SessionOptions
	files   []*spoolv1.WorkspaceFile
	watcher *watcher

	transcript string // reference of the uploaded transcript; "" for none

	folder    string // absolute path of the folder in which a new session works; "" for none
	made      string // the session that was created for the folder
	variables map[string]*spoolv1.RunVariable
	client    atomic.Pointer[client.Client]
	here      bool        // the server is a stack on the data folder that another process runs
	stack     Stack       // nil if a server was already running
	posting   atomic.Bool // the query is being stored, with unknown outcome
	began     atomic.Bool // an executor may have received the query
}

func (r *running) run() (err error) {
	ctx, cancel := context.WithCancelCause(r.app.ctx)
	defer cancel(nil)
	posted := make(chan *spoolv1.StartExecutionResponse, 1) // when it has a message, r.client is set
	var signals sync.WaitGroup
	defer signals.Wait()
	defer cancel(nil)
	shown := r.watcher.show(ctx)
	defer func() { err = errors.Join(err, shown()) }()
	signals.Go(func() { r.controls(ctx, cancel, posted) })

	defer func() {
		cancel(nil)
		signals.Wait() // from here on leave receives the signals
		if r.stack != nil {
			err = errors.Join(err, r.leave())
		}
		if c := r.client.Load(); c != nil {
			c.Close()
		}
	}()
	if err := r.reach(ctx, cancel); err != nil {
		return err
	}
	if err := r.provide(ctx); err != nil {
		return err
	}
	r.posting.Store(true)
	accepted, tip, err := r.post(ctx)
	if r.orphaned(err) && client.IsRefused(err) { // the stack ended just now, and nothing was sent
		if err := r.reach(ctx, cancel); err != nil {
			return err
		}
		accepted, tip, err = r.post(ctx)
	}
	if err != nil {
		return err
	}
	posted <- accepted
	if r.cmd.Detach {
		return r.detached(accepted)
	}
	r.watcher.session, r.watcher.only = accepted.SessionId, accepted.ExecutionId
	r.watcher.began = func() { r.began.Store(true) }
	if r.watcher.shown != nil {
		r.watcher.shown.Hint("Ctrl-C stops the turn")
	}
	end, err := r.watcher.watch(ctx, tip)
	for r.orphaned(err) {
		// The stack of another run ended with it. The query is in the log: a stack of this run continues it.
		if err = r.reach(ctx, cancel); err == nil {
			end, err = r.watcher.watch(ctx, r.watcher.cursor)
		}
	}
	if err := errors.Join(err, shown()); err != nil {
		if errors.Is(err, errInterrupted) {
			fmt.Fprintf(r.app.Err, "spool: detached while the query was still running; follow it with `spool attach %s`\n", accepted.SessionId)
		}
		return err
	}
	return r.ended(end, accepted)
}

// ended returns the exit code for the end of the execution. On a terminal the end was already shown.
func (r *running) ended(end events.Payload, accepted *spoolv1.StartExecutionResponse) error {
	if !r.cmd.JSON && r.cmd.Session == "" {
		fmt.Fprintf(r.app.Err, "session %s; continue with `spool run --session %s \"…\"`\n", accepted.SessionId, accepted.SessionId)
	}
	switch d := end.(type) {
	case events.ExecutionFailed:
		if r.app.OutTTY && !r.cmd.JSON {
			return &exitError{code: ExitFailed}
		}
		return fmt.Errorf("the query failed: %s (%s)", d.Message, d.Code)
	case events.ExecutionCancelled, events.ExecutionWithdrawn:
		return &exitError{code: ExitCancelled}
	}
	return nil
}

// reach connects to a server, or starts a stack.
func (r *running) reach(ctx context.Context, cancel context.CancelCauseFunc) error {
	c, err := r.server(ctx, cancel)
	if err != nil {
		return err
	}
	if old := r.client.Swap(c); old != nil {
		old.Close()
	}
	r.watcher.client = c
	return nil
}

// orphaned reports whether err means that the stack of another process, which this run used, has ended.
func (r *running) orphaned(err error) bool {
	var gone *client.UnreachableError
	return r.here && errors.As(err, &gone)
}

func (r *running) server(ctx context.Context, cancel context.CancelCauseFunc) (c *client.Client, err error) {
	c, r.here, err = r.cmd.find(ctx, r.app)
	if c != nil || r.cmd.URL != "" || ctx.Err() != nil {
		return c, err
	}
	if r.cmd.Detach {
		return nil, fmt.Errorf("detach: %w (with --detach the query needs a server that stays)", err)
	}
	dir, err := dataDir(r.app, r.cmd.Data)
	if err != nil {
		return nil, err
	}
	if r.watcher.shown != nil {
		r.watcher.shown.State("starting Spool on " + dir)
		defer r.watcher.shown.State("")
	}
	r.stack, err = r.app.Local.Start(ctx, StackOptions{DataDir: dir, Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0", MockLLM: r.cmd.MockLLM})
	if errors.Is(err, ErrBusy) { // another run was faster: join its stack
		return r.join(ctx)
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, cause
		}
		return nil, err
	}
	go func() {
		<-r.stack.Done()
		cancel(fmt.Errorf("the stack that was started for this run ended: %w", errors.Join(r.stack.Err(), errStackEnded)))
	}()
	return client.New(client.Config{URL: r.stack.URL(), Key: r.cmd.Key})
}

// errStackEnded is returned if the embedded stack ends before the run.
var errStackEnded = errors.New("run the command again to continue where it stopped")

// join waits until the stack that another process is starting responds.
func (r *running) join(ctx context.Context) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		c, here, err := r.cmd.find(ctx, r.app)
		if c != nil {
			r.here = here
			return c, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w, but it does not respond: %w", ErrBusy, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// provide uploads the transcript with which the new session starts. The file itself is not changed.
func (r *running) provide(ctx context.Context) error {
	name := r.cmd.Transcript
	if name == "" {
		return nil
	}
	f, err := os.Open(name) //nolint:gosec // a file that the user named
	if err != nil {
		return usage("transcript: %v", err)
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	switch {
	case err != nil:
		return usage("transcript: %v", err)
	case !info.Mode().IsRegular():
		return usage("transcript: %s is not a regular file", name)
	}
	doc, err := r.client.Load().PutTranscript(ctx, f, info.Size())
	if err != nil {
		return err
	}
	r.transcript = doc.Value.Transcript
	r.note(fmt.Sprintf("the agent continues a conversation of %s with %d messages", terminal.Line(doc.Value.Architecture), doc.Value.Messages))
	return nil
}

// post stores the query. Its events follow seq tip.
func (r *running) post(ctx context.Context) (accepted *spoolv1.StartExecutionResponse, tip uint32, err error) {
	c := r.client.Load()
	switch {
	case r.folder != "":
		if r.made == "" {
			r.made, err = r.create(ctx)
		}
		if err == nil {
			accepted, err = r.postTo(ctx, r.made)
			if client.IsFinal(err) {
				err = r.undo(ctx, r.made, err)
				r.made = ""
			}
		}
	case r.cmd.Session == "":
		s := r.newSession()
		accepted, err = c.Executions.StartExecution(ctx, &spoolv1.StartExecutionRequest{
			Agent: s.Agent, Instance: s.Instance, Environments: s.Environments, Architecture: s.Architecture, Sandbox: s.Sandbox, Model: s.Model,
			SessionOptions: s.SessionOptions, Transcript: s.Transcript, Content: r.query, WorkspaceFiles: r.files, Environment: r.variables,
		})
	default:
		var s *spoolv1.Session
		if s, err = c.Sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: r.cmd.Session}); err == nil {
			tip = s.Tip
			accepted, err = r.postTo(ctx, r.cmd.Session)
		}
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return accepted, tip, err
}

// postTo posts the query to a session.
func (r *running) postTo(ctx context.Context, session string) (*spoolv1.StartExecutionResponse, error) {
	response, err := r.client.Load().Sessions.PostMessage(ctx, &spoolv1.PostMessageRequest{
		SessionId: session, Content: r.query, WorkspaceFiles: r.files, Environment: r.variables,
	})
	return &spoolv1.StartExecutionResponse{SessionId: response.GetSessionId(), ExecutionId: response.GetExecutionId(), Position: response.GetPosition()}, err
}

// newSession returns the request for a new session.
func (r *running) newSession() *spoolv1.CreateSessionRequest {
	return &spoolv1.CreateSessionRequest{
		Agent: r.cmd.Agent, Instance: r.cmd.Instance, Environments: r.cmd.Env,
		Architecture: r.cmd.Architecture, Sandbox: r.cmd.Sandbox, Model: r.cmd.Model, SessionOptions: r.options, Transcript: r.transcript,
	}
}

// detached prints the ids.
func (r *running) detached(accepted *spoolv1.StartExecutionResponse) error {
	if r.cmd.JSON {
		return r.app.json(json.RawMessage(wirejson.Marshal(accepted)))
	}
	if r.watcher.shown != nil {
		if err := r.watcher.shown.Close(); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(r.app.Out, "session %s\nexecution %s\nfollow it with: spool attach %s\n", accepted.SessionId, accepted.ExecutionId, accepted.SessionId)
	return err
}
