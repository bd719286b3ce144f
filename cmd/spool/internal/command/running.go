package command

import (
	"cmp"
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

// queryRun is one run of "spool run", from the start of its server to the end of its execution.
type queryRun struct {
	app     *app
	cmd     *runCommand
	query   string
	options *spoolv1.SessionOptions
	files   []*spoolv1.WorkspaceFile
	watcher *sessionWatcher

	transcript string // reference of the uploaded transcript; "" for none

	folder        string // absolute path of the folder in which a new session works; "" for none
	folderSession string // the session that was created for the folder
	variables     map[string]*spoolv1.RunVariable
	client        atomic.Pointer[client.Client]
	joined        bool           // the server is a stack on the data folder that another process runs
	stack         Stack          // nil if a server was already running
	posting       atomic.Bool    // the request that stores the query was sent, and its outcome is unknown
	typed         chan os.Signal // interrupts that the user typed at a prompt
	dispatched    atomic.Bool    // an executor may have received the query
}

// run sends the query, shows the execution until its end, and returns the error that sets the exit code.
func (r *queryRun) run() (err error) {
	ctx, cancel := context.WithCancelCause(r.app.ctx)
	defer cancel(nil)
	posted := make(chan *spoolv1.StartExecutionResponse, 1) // when it has a message, r.client is set
	var signals sync.WaitGroup
	defer signals.Wait()
	defer cancel(nil)
	closeRenderer := r.watcher.startRenderer(ctx)
	defer func() { err = errors.Join(err, closeRenderer()) }()
	signals.Go(func() { r.handleSignals(ctx, cancel, posted) })

	defer func() {
		cancel(nil)
		signals.Wait() // from here on closeStack receives the signals
		if r.stack != nil {
			err = errors.Join(err, r.closeStack())
		}
		if c := r.client.Load(); c != nil {
			c.Close()
		}
	}()
	if err := r.connectServer(ctx, cancel); err != nil {
		return err
	}
	if err := r.uploadTranscript(ctx); err != nil {
		return err
	}
	r.posting.Store(true)
	accepted, tip, err := r.postQuery(ctx)
	if r.isStackGone(err) && client.IsDialError(err) { // the stack ended just now, and nothing was sent
		if err := r.connectServer(ctx, cancel); err != nil {
			return err
		}
		accepted, tip, err = r.postQuery(ctx)
	}
	if err != nil {
		return err
	}
	posted <- accepted
	if r.cmd.Detach {
		return r.printIDs(accepted)
	}
	r.watcher.session, r.watcher.only = accepted.SessionId, accepted.ExecutionId
	r.watcher.onDispatched = func() { r.dispatched.Store(true) }
	if r.watcher.renderer != nil {
		r.watcher.renderer.SetHint("Ctrl-C stops the turn")
	}
	stopPrompts := r.watcher.startPrompts(ctx, r.client.Load, func() { r.typed <- os.Interrupt })
	defer stopPrompts()
	waiting, stopWaiting := r.withWaitLimit(ctx)
	defer stopWaiting()
	end, err := r.watcher.followToEnd(waiting, tip)
	for r.isStackGone(err) {
		// The stack of another run ended with it. The query is in the log: a stack of this run continues it.
		if err = r.connectServer(ctx, cancel); err == nil {
			end, err = r.watcher.followToEnd(waiting, r.watcher.cursor)
		}
	}
	stopPrompts()
	if r.cmd.Wait.set && (err == nil || errors.Is(err, errWaitTimeout)) {
		return r.printResult(ctx, accepted)
	}
	if err := errors.Join(err, closeRenderer()); err != nil {
		if errors.Is(err, errInterrupted) {
			terminal.Fprintf(r.app.Err, "spool: detached while the query was still running; follow it with `spool attach %s`\n", accepted.SessionId)
		}
		return err
	}
	return r.resultError(end, accepted)
}

// resultError returns the error that sets the exit code for the end of the execution. It prints how to continue the
// session.
func (r *queryRun) resultError(end events.Payload, accepted *spoolv1.StartExecutionResponse) error {
	if !r.cmd.JSON && r.cmd.Session == "" {
		terminal.Fprintf(r.app.Err, "session %s; continue with `spool run --session %s \"…\"`\n", accepted.SessionId, accepted.SessionId)
	}
	return executionEndError(r.app, r.cmd.JSON, end)
}

// executionEndError returns the error for the end of an execution, or nil if the execution has completed. The error has
// no message if the terminal has already shown the failure.
func executionEndError(a *app, asJSON bool, end events.Payload) error {
	switch d := end.(type) {
	case events.ExecutionFailed:
		if a.OutTTY && !asJSON {
			return &exitError{code: ExitFailed}
		}
		return queryFailedError(d.Code, d.Message)
	case events.ExecutionCancelled, events.ExecutionWithdrawn:
		return &exitError{code: ExitCancelled}
	}
	return nil
}

// queryFailedError returns the error for a query that has failed.
func queryFailedError(code, message string) error {
	return fmt.Errorf("the query failed: %s (%s)", message, code)
}

// connectServer connects to a running server, or starts a stack and connects to it.
func (r *queryRun) connectServer(ctx context.Context, cancel context.CancelCauseFunc) error {
	c, err := r.findOrStartServer(ctx, cancel)
	if err != nil {
		return err
	}
	if old := r.client.Swap(c); old != nil {
		old.Close()
	}
	r.watcher.client = c
	return nil
}

// isStackGone reports whether err means that the stack of another process, which this run used, has ended.
func (r *queryRun) isStackGone(err error) bool {
	var gone *client.UnreachableError
	return r.joined && errors.As(err, &gone)
}

// findOrStartServer returns a client of a running server. If there is none, it starts a stack, which ends with this
// run.
func (r *queryRun) findOrStartServer(ctx context.Context, cancel context.CancelCauseFunc) (c *client.Client, err error) {
	c, r.joined, err = r.cmd.findServer(ctx, r.app)
	if c != nil || r.cmd.URL != "" || ctx.Err() != nil {
		return c, err
	}
	if r.cmd.Detach {
		return nil, fmt.Errorf("detach: %w (with --detach the query needs a server that stays)", err)
	}
	if r.cmd.Wait.limit > 0 {
		return nil, fmt.Errorf("wait: %w (with a time limit the query needs a server that stays)", err)
	}
	dir, err := dataDirOrDefault(r.app, r.cmd.Data)
	if err != nil {
		return nil, err
	}
	if r.watcher.renderer != nil {
		r.watcher.renderer.SetProgramState("starting Spool on " + dir)
		defer r.watcher.renderer.SetProgramState("")
	}
	r.stack, err = r.app.Local.Start(ctx, StackOptions{DataDir: dir, Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0", MockLLM: r.cmd.MockLLM})
	if errors.Is(err, ErrDataFolderLocked) { // another run was faster: join its stack
		return r.joinStack(ctx)
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
	return client.New(client.Config{URL: r.stack.URL(), Key: cmp.Or(r.cmd.Key, r.stack.LocalKey())})
}

// errStackEnded is returned if the stack that this run has started ends before the run.
var errStackEnded = errors.New("run the command again to continue where it stopped")

// joinStack waits until the stack that another process is starting responds, and returns a client of it.
func (r *queryRun) joinStack(ctx context.Context) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		c, local, err := r.cmd.findServer(ctx, r.app)
		if c != nil {
			r.joined = local
			return c, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w, but it does not respond: %w", ErrDataFolderLocked, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// uploadTranscript uploads the transcript from which the new session continues.
func (r *queryRun) uploadTranscript(ctx context.Context) error {
	name := r.cmd.Transcript
	if name == "" {
		return nil
	}
	f, err := os.Open(name) //nolint:gosec // a file that the user named
	if err != nil {
		return usageError("transcript: %v", err)
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	switch {
	case err != nil:
		return usageError("transcript: %v", err)
	case !info.Mode().IsRegular():
		return usageError("transcript: %s is not a regular file", name)
	}
	doc, err := r.client.Load().PutTranscript(ctx, f, info.Size())
	if err != nil {
		return err
	}
	r.transcript = doc.Value.Transcript
	r.printNote(fmt.Sprintf("the agent continues a conversation of %s with %d messages", terminal.SafeLine(doc.Value.Architecture), doc.Value.Messages))
	return nil
}

// postQuery stores the query on the server, in a new or an existing session. The events of the execution follow seq
// tip.
func (r *queryRun) postQuery(ctx context.Context) (accepted *spoolv1.StartExecutionResponse, tip uint32, err error) {
	c := r.client.Load()
	switch {
	case r.folder != "":
		if r.folderSession == "" {
			r.folderSession, err = r.createSession(ctx)
		}
		if err == nil {
			accepted, err = r.postToSession(ctx, r.folderSession)
			if client.IsPermanent(err) {
				err = r.deleteUnusedSession(ctx, r.folderSession, err)
				r.folderSession = ""
			}
		}
	case r.cmd.Session == "":
		s := r.newSessionRequest()
		accepted, err = c.Executions.StartExecution(ctx, &spoolv1.StartExecutionRequest{
			Agent: s.Agent, Instance: s.Instance, Environments: s.Environments, Architecture: s.Architecture, Sandbox: s.Sandbox, Model: s.Model,
			SessionOptions: s.SessionOptions, Transcript: s.Transcript, Content: r.query, WorkspaceFiles: r.files, Environment: r.variables, Permissions: r.queryPermissions(),
		})
	default:
		var s *spoolv1.Session
		if s, err = c.Sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: r.cmd.Session}); err == nil {
			tip = s.Tip
			accepted, err = r.postToSession(ctx, r.cmd.Session)
		}
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return accepted, tip, err
}

// postToSession stores the query in the session with the given id.
func (r *queryRun) postToSession(ctx context.Context, session string) (*spoolv1.StartExecutionResponse, error) {
	response, err := r.client.Load().Sessions.PostMessage(ctx, &spoolv1.PostMessageRequest{
		SessionId: session, Content: r.query, WorkspaceFiles: r.files, Environment: r.variables, Permissions: r.queryPermissions(),
	})
	return &spoolv1.StartExecutionResponse{SessionId: response.GetSessionId(), ExecutionId: response.GetExecutionId(), Position: response.GetPosition()}, err
}

// queryPermissions returns the permissions to send with the query, or nil if only those of the agent apply.
func (r *queryRun) queryPermissions() *spoolv1.ExecutionPermissions {
	if r.cmd.Unattended || !r.app.InTTY && !r.cmd.Attended {
		return &spoolv1.ExecutionPermissions{Unattended: true}
	}
	return nil
}

// newSessionRequest returns the request that creates a session as the flags describe.
func (r *queryRun) newSessionRequest() *spoolv1.CreateSessionRequest {
	return &spoolv1.CreateSessionRequest{
		Agent: r.cmd.Agent, Instance: r.cmd.Instance, Environments: r.cmd.Env,
		Architecture: r.cmd.Architecture, Sandbox: r.cmd.Sandbox, Model: r.cmd.Model, SessionOptions: r.options, Transcript: r.transcript,
	}
}

// printIDs prints the ids of the session and of the execution.
func (r *queryRun) printIDs(accepted *spoolv1.StartExecutionResponse) error {
	if r.cmd.JSON {
		return r.app.printJSON(json.RawMessage(wirejson.Marshal(accepted)))
	}
	if r.watcher.renderer != nil {
		if err := r.watcher.renderer.Close(); err != nil {
			return err
		}
	}
	_, err := terminal.Fprintf(r.app.Out, "session %s\nexecution %s\nfollow it with: spool attach %s\n", accepted.SessionId, accepted.ExecutionId, accepted.SessionId)
	return err
}
