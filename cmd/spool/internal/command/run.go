package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
)

// maxQuery is the maximum size of a query in bytes.
const maxQuery = 1 << 20

type runCommand struct {
	server
	Agent         string   `placeholder:"A" help:"The agent of the new session: [ORG/]SLUG[@VERSION]."`
	Instance      string   `placeholder:"I" help:"An agent instance, instead of --agent."`
	Env           []string `placeholder:"E" help:"An environment of the new session; may be repeated. A later one overrides an earlier one."`
	Var           []string `sep:"none" placeholder:"NAME=VALUE" help:"A variable of this query only; may be repeated."`
	Secret        []string `placeholder:"NAME" help:"A secret of this query only, with the value of spool's environment variable of that name; may be repeated."`
	Architecture  string   `placeholder:"A" help:"Architecture of the agent: claude-code, codex, opencode, acp or spool."`
	Session       string   `placeholder:"SESSION" help:"Continue a session; by default a new one is created."`
	Sandbox       string   `placeholder:"P" help:"Sandbox provider of the new session."`
	Model         string   `placeholder:"M" help:"Model of the new session."`
	ModelProvider string   `name:"model-provider" placeholder:"P" help:"The API of the model: anthropic, openai or nvidia."`
	ModelPreset   string   `placeholder:"PRESET" help:"With --architecture acp: how the agent receives its model: claude, opencode or qwen (docs/agents.md)."`
	Image         string   `placeholder:"IMAGE" help:"Image of the new session's sandbox."`
	Command       string   `placeholder:"\"PROGRAM ARG…\"" help:"With --architecture acp: the agent's program and its arguments; quote arguments with spaces."`
	Egress        []string `sep:"none" placeholder:"HOST" help:"A host besides the model APIs that the sandbox may reach: host, host:port or *.host; a prefix of HTTP methods restricts the host to these methods (GET,HEAD api.example.com); may be repeated."`
	budgetFlags   `prefix:"budget-"`
	File          []string `sep:"none" placeholder:"F" help:"A file or a folder to put into the workspace first; may be repeated."`
	folderFlags   `embed:""`
	Transcript    string `placeholder:"FILE" help:"A transcript of Claude Code, Codex or OpenCode (the output of opencode export), whose conversation the agent of the new session continues."`
	Detach        bool   `help:"Print the ids and exit without waiting for the end."`
	MockLLM       bool   `name:"mock-llm" env:"SPOOL_MOCK_LLM" help:"If this run starts a stack, use a scripted model server instead of real models."`
	Query         string `arg:"" optional:"" help:"The query; without it, or with -, it is read from standard input."`
}

// Run carries out the query.
func (c *runCommand) Run(a *app) error {
	query, err := c.query(a)
	if err != nil {
		return err
	}
	options, err := c.options()
	if err != nil {
		return err
	}
	files, err := gather(c.File)
	if err != nil {
		return err
	}
	variables, err := c.variables(a)
	if err != nil {
		return err
	}
	folder, err := c.folderFlags.check(a, c.Session)
	if err != nil {
		return err
	}
	if c.Session != "" {
		if err := checkID("session", events.KindSession, c.Session); err != nil {
			return err
		}
		if c.Transcript != "" || c.Agent != "" || c.Instance != "" || len(c.Env) > 0 || c.Architecture != "" || c.Sandbox != "" || c.Model != "" || options != nil {
			return usage("session: --agent, --instance, --env, --architecture, --sandbox, --model, --model-provider, --model-preset, --image, --command, --egress and the budget are set when a session is created, as is --transcript; leave them out with --session")
		}
	}
	r := &running{app: a, cmd: c, query: query, options: options, files: files, folder: folder, variables: variables, watcher: &watcher{app: a, json: c.JSON}}
	return r.run()
}

// variables returns the variables of this query only. The value of a secret is never an argument, because other
// processes can read arguments.
func (c *runCommand) variables(a *app) (map[string]client.Variable, error) {
	out := map[string]client.Variable{}
	put := func(flag, name string, v client.Variable) error {
		if err := layers.CheckName(name); err != nil {
			return usage("%s: %v", flag, err)
		}
		if _, twice := out[name]; twice {
			return usage("%s: %s is set twice", flag, name)
		}
		out[name] = v
		return nil
	}
	for _, s := range c.Var {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return nil, usage("var: %.100q is not NAME=VALUE", s)
		}
		if err := put("var", name, client.Variable{Value: value}); err != nil {
			return nil, err
		}
	}
	for _, name := range c.Secret {
		value, ok := "", false
		if a.LookupEnv != nil {
			value, ok = a.LookupEnv(name)
		}
		if !ok || value == "" {
			return nil, usage("secret: environment variable %.100q is not set: export it, and pass only its name", name)
		}
		if err := put("secret", name, client.Variable{Value: value, Secret: true}); err != nil {
			return nil, err
		}
	}
	if len(out) == 0 {
		return nil, nil
	}
	return out, nil
}

// options returns the options of the new session, or nil if none is set.
func (c *runCommand) options() (*client.SessionOptions, error) {
	command, err := words(c.Command)
	if err != nil {
		return nil, usage("command: %v", err)
	}
	if _, err := egress.ParseAllowlist(c.Egress); err != nil {
		return nil, usage("egress: %v", err)
	}
	budget, err := c.budget("budget-")
	if err != nil {
		return nil, err
	}
	if c.Image == "" && c.ModelProvider == "" && c.ModelPreset == "" && command == nil && c.Egress == nil && budget == nil {
		return nil, nil
	}
	var settings *client.ModelSettings
	if c.ModelPreset != "" {
		settings = &client.ModelSettings{Preset: c.ModelPreset}
	}
	return &client.SessionOptions{ModelSettings: settings, ModelProvider: c.ModelProvider, Image: c.Image, Command: command, Egress: c.Egress, Budget: budget}, nil
}

// query returns the text of the query.
func (c *runCommand) query(a *app) (string, error) {
	q := c.Query
	if q == "" || q == "-" {
		if q == "" && a.InTTY {
			return "", usage("query: state what to do, for example spool run \"list the files\", or use a pipe")
		}
		b, err := io.ReadAll(io.LimitReader(a.In, maxQuery+1))
		if err != nil {
			return "", fmt.Errorf("query: read standard input: %w", err)
		}
		q = strings.TrimRight(string(b), "\r\n")
	}
	switch {
	case len(q) > maxQuery:
		return "", usage("query: larger than 1 MiB; put long text into a file of the workspace")
	case strings.TrimSpace(q) == "":
		return "", usage("query: empty")
	case !utf8.ValidString(q):
		return "", usage("query: not valid UTF-8")
	}
	return q, nil
}

// running is one execution of spool run.
type running struct {
	app     *app
	cmd     *runCommand
	query   string
	options *client.SessionOptions
	files   []client.WorkspaceFile
	watcher *watcher

	transcript string // reference of the uploaded transcript; "" for none

	folder    string // absolute path of the folder in which a new session works; "" for none
	made      string // the session that was created for the folder
	variables map[string]client.Variable
	client    atomic.Pointer[client.Client]
	here      bool        // the server is a stack on the data folder that another process runs
	stack     Stack       // nil if a server was already running
	posting   atomic.Bool // the query is being stored, with unknown outcome
	began     atomic.Bool // an executor may have received the query
}

func (r *running) run() (err error) {
	ctx, cancel := context.WithCancelCause(r.app.ctx)
	defer cancel(nil)
	posted := make(chan client.Accepted, 1) // after a message arrives, client is set
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
	r.watcher.session, r.watcher.only = accepted.SessionID, accepted.ExecutionID
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
			fmt.Fprintf(r.app.Err, "spool: detached while the query was still running; follow it with `spool attach %s`\n", accepted.SessionID)
		}
		return err
	}
	return r.ended(end, accepted)
}

// ended returns the exit code for the end of the execution. On a terminal the end was already shown.
func (r *running) ended(end events.Payload, accepted client.Accepted) error {
	if !r.cmd.JSON && r.cmd.Session == "" {
		fmt.Fprintf(r.app.Err, "session %s; continue with `spool run --session %s \"…\"`\n", accepted.SessionID, accepted.SessionID)
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

// orphaned tells whether a stack that this run had joined has ended.
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
func (r *running) post(ctx context.Context) (accepted client.Accepted, tip uint32, err error) {
	c := r.client.Load()
	switch {
	case r.folder != "":
		if r.made == "" {
			r.made, err = r.create(ctx)
		}
		if err == nil {
			accepted, err = c.PostMessage(ctx, r.made, client.Query{Content: r.query, Files: r.files, Environment: r.variables})
			if client.IsFinal(err) {
				err = r.undo(ctx, r.made, err)
				r.made = ""
			}
		}
	case r.cmd.Session == "":
		accepted, err = c.StartExecution(ctx, r.start())
	default:
		var s client.Doc[client.Session]
		if s, err = c.Session(ctx, r.cmd.Session); err == nil {
			tip = s.Value.Tip
			accepted, err = c.PostMessage(ctx, r.cmd.Session, client.Query{Content: r.query, Files: r.files, Environment: r.variables})
		}
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return accepted, tip, err
}

// start returns the request for a new session with the query as its first message.
func (r *running) start() client.Start {
	return client.Start{
		NewSession: client.NewSession{
			Agent: r.cmd.Agent, Instance: r.cmd.Instance, Environments: r.cmd.Env,
			Architecture: r.cmd.Architecture, Sandbox: r.cmd.Sandbox, Model: r.cmd.Model, Options: r.options, Transcript: r.transcript,
		},
		Environment: r.variables, Content: r.query, Files: r.files,
	}
}

func (r *running) detached(accepted client.Accepted) error {
	if r.cmd.JSON {
		return r.app.json(accepted)
	}
	if r.watcher.shown != nil {
		if err := r.watcher.shown.Close(); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(r.app.Out, "session %s\nexecution %s\nfollow it with: spool attach %s\n", accepted.SessionID, accepted.ExecutionID, accepted.SessionID)
	return err
}

// controls turns signals into controls: the first signal requests an interrupt, the second a cancellation, the
// third ends this program without waiting. A termination signal requests a cancellation at once.
func (r *running) controls(ctx context.Context, cancel context.CancelCauseFunc, posted <-chan client.Accepted) {
	var accepted client.Accepted
	asked := 0
	for {
		var sig os.Signal
		select {
		case <-ctx.Done():
			return
		case accepted = <-posted:
			if asked == 0 {
				continue
			}
		case sig = <-r.app.Signals:
			asked++
			if sig == syscall.SIGTERM {
				asked = max(asked, 2)
			}
		}
		known := accepted.ExecutionID != ""
		switch {
		case asked >= 3 || !known && (asked >= 2 || !r.posting.Load()):
			cancel(errInterrupted)
			return
		case known:
			r.control(ctx, accepted, asked)
		}
	}
}

// control asks the server to stop the query. A queued query is cancelled, because an interrupt would stop the
// running one.
func (r *running) control(ctx context.Context, accepted client.Accepted, asked int) {
	ctx, done := context.WithTimeout(ctx, 10*time.Second)
	defer done()
	var err error
	if asked == 1 && r.began.Load() {
		r.note("stopping; press Ctrl-C again to cancel")
		_, err = r.client.Load().Interrupt(ctx, accepted.SessionID)
	} else {
		r.note("cancelling; press Ctrl-C again to exit without waiting")
		_, err = r.client.Load().CancelExecution(ctx, accepted.ExecutionID)
	}
	if err != nil && ctx.Err() == nil {
		r.note("the request failed: " + err.Error())
	}
}

func (r *running) note(text string) {
	if r.watcher.shown != nil && r.app.OutTTY {
		r.watcher.shown.Note(text)
		return
	}
	fmt.Fprintln(r.app.Err, "spool: "+text)
}

// leave stops the stack of this run after the queries of other runs that joined it have ended.
func (r *running) leave() error {
	if r.client.Load() != nil && r.app.ctx.Err() == nil {
		r.wait()
	}
	return r.stack.Close()
}

// wait returns when no query is running, or at a signal.
func (r *running) wait() {
	ctx, cancel := r.app.interruptible()
	defer cancel()
	for said := false; ; said = true {
		busy := 0
		for _, phase := range []string{"queued", "starting", "running"} {
			for _, err := range r.client.Load().Executions(ctx, client.Filter{State: phase}) {
				if err != nil {
					if ctx.Err() == nil {
						fmt.Fprintln(r.app.Err, "spool: cannot determine whether other runs use this stack, so it ends: "+err.Error())
					}
					return
				}
				busy++
			}
		}
		if busy == 0 {
			return
		}
		if !said {
			fmt.Fprintf(r.app.Err, "spool: %d other queries run on this stack; waiting for them (Ctrl-C stops the stack; the next stack continues them)\n", busy)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.stack.Done():
			return
		case <-time.After(500 * time.Millisecond):
		}
	}
}
