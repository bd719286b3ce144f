// Package command is the command line of spool: what each command does, what it
// prints, and with which code it ends.
package command

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
	"unicode/utf8"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
)

// Exit codes.
const (
	ExitDone      = 0
	ExitFailed    = 1
	ExitUsage     = 2
	ExitCancelled = 130
)

// IO is the world that a command talks to.
type IO struct {
	In      io.Reader
	InTTY   bool // nothing is piped in
	Out     io.Writer
	OutTTY  bool
	Err     io.Writer
	ErrTTY  bool
	Width   func() int       // columns of the terminal now; nil means 80
	Color   bool             // colours are wanted on a terminal
	Signals <-chan os.Signal // interrupts and terminations
	// Raw makes the terminal of In give each key at once and show none, until restore is called; nil if In is no terminal.
	Raw func() (restore func() error, err error)
	// LookupEnv reads the environment's variables that definitions name; nil means there are none.
	LookupEnv func(name string) (value string, ok bool)
	Local     Local
	// DefaultURL is asked where no server is named; empty means where `spool up` listens by default.
	DefaultURL string
}

// commands is the whole command line.
type commands struct {
	Up                upCommand                `cmd:"" help:"Run all services in one process."`
	Run               runCommand               `cmd:"" help:"Run a query and stream what the agent does."`
	Attach            attachCommand            `cmd:"" help:"Show a session, and follow it live."`
	Replay            replayCommand            `cmd:"" help:"Play a session again in the terminal, as it looked live."`
	Sessions          sessionsCommand          `cmd:"" help:"Look at sessions, and at what they run in."`
	Executions        executionsCommand        `cmd:"" help:"Look at executions, and steer them."`
	Files             filesCommand             `cmd:"" help:"Files of a session's workspace: list, get, put, remove."`
	Events            eventsCommand            `cmd:"" help:"Read a session's log."`
	Fork              forkCommand              `cmd:"" help:"Make a session that goes on from an event of another one, with its history, files and conversation up to there."`
	State             stateCommand             `cmd:"" help:"Show what a session was after an event."`
	Diff              diffCommand              `cmd:"" help:"Compare two events of a session, or two sessions."`
	Verify            verifyCommand            `cmd:"" help:"Check the log: hashes, chains, order, ends, signed heads."`
	Heads             headsCommand             `cmd:"" help:"The key that heads of the log are signed with."`
	GC                gcCommand                `cmd:"" name:"gc" help:"Remove the content of deleted sessions now, as the janitor does, or list what would go."`
	Rebuild           rebuildCommand           `cmd:"" help:"Fold the read models anew from the log."`
	Provision         provisionCommand         `cmd:"" help:"Install the streams on a NATS, or bring them up to date."`
	ProvisionDatabase provisionDatabaseCommand `cmd:"" help:"Make the roles of the services in a Postgres of Spool's own, or bring them up to date."`
	Certificates      certificatesCommand      `cmd:"" help:"Make a certificate authority and the TLS certificates of an installation, and renew those that expire soon."`
	Agents            agentsCommand            `cmd:"" help:"What agents are made of: apply, list, show, remove."`
	Instances         instancesCommand         `cmd:"" help:"Agents with their environments: apply, list, show, remove."`
	Envs              envsCommand              `cmd:"" help:"Environments, which hold variables and secrets: apply, list, show, remove, explain."`
	Skills            skillsCommand            `cmd:"" help:"Skills, which agents are given: push, list, show, pull, tag, remove."`
	Secrets           secretsCommand           `cmd:"" help:"The key that secrets are encrypted to: make it, change it."`
	Budgets           budgetsCommand           `cmd:"" help:"What tenants may take in a day, a month or at all, and have taken."`
	Limits            limitsCommand            `cmd:"" help:"What tenants may hold and do at once, and what they use."`
	Audit             auditCommand             `cmd:"" help:"List who did what, the newest first: keys, end users, addresses."`
	Dead              deadCommand              `cmd:"" help:"Messages that services gave up: list, show, retry, drop."`
	Keys              keysCommand              `cmd:"" help:"Make, list and revoke API keys."`
	Doctor            doctorCommand            `cmd:"" help:"Check what Spool needs on this machine, and say what to do."`
}

// Grammar is the whole command line as kong reads it: for documents.
func Grammar() any { return &commands{} }

// app is what the commands share.
type app struct {
	IO
	ctx   context.Context // ends when Main's caller wants no more
	lines *bufio.Reader   // of In, for ask
}

// exitError ends the program with a code; without an error all has been said.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usage is a command that was called wrongly.
func usage(format string, args ...any) error {
	return &exitError{ExitUsage, fmt.Errorf(format, args...)}
}

// errInterrupted is a command that was asked to end.
var errInterrupted = errors.New("interrupted")

// Main runs a command line and returns the exit code.
func Main(ctx context.Context, args []string, world IO) int {
	if world.DefaultURL == "" {
		world.DefaultURL = defaultURL
	}
	var c commands
	exited, code := false, 0
	parser, err := kong.New(&c, kong.Name("spool"),
		kong.Description("Runs AI agents in sandboxes, records what they do as one ordered log, and streams it."),
		kong.Writers(world.Out, world.Err), kong.Exit(func(n int) { exited, code = true, n }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}))
	if err != nil {
		fmt.Fprintf(world.Err, "spool: %v\n", err)
		return ExitFailed
	}
	for i, arg := range args { // kong would replace what is wrong
		if !utf8.ValidString(arg) {
			fmt.Fprintf(world.Err, "spool: argument %d is not valid UTF-8: %s\n", i+1, terminal.Line(clip(arg)))
			return ExitUsage
		}
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	parsed, err := parser.Parse(args)
	if exited { // help was asked for
		return code
	}
	if err != nil {
		hint := "spool --help"
		var wrong *kong.ParseError
		if errors.As(err, &wrong) && wrong.Context != nil && wrong.Context.Command() != "" {
			hint = "spool " + firstWord(wrong.Context.Command()) + " --help"
		}
		fmt.Fprintf(world.Err, "spool: %s; see `%s`\n", terminal.Line(err.Error()), hint)
		return ExitUsage
	}
	return world.exit(parsed.Run(&app{IO: world, ctx: ctx}))
}

// exit says what went wrong, once and in one line, and gives the code.
func (w IO) exit(err error) int {
	if err == nil {
		return ExitDone
	}
	code, said := ExitFailed, err
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		code, said = exit.code, exit.err
	case errors.Is(err, errInterrupted), errors.Is(err, context.Canceled):
		code, said = ExitCancelled, nil
	case client.IsCode(err, "INVALID_REQUEST", "PAYLOAD_TOO_LARGE"):
		code = ExitUsage
	}
	if said != nil {
		text := "spool: " + terminal.Line(said.Error())
		if w.OutTTY && w.Color {
			text = "\x1b[31m" + text + "\x1b[0m"
		}
		fmt.Fprintln(w.Err, text)
	}
	return code
}

// interruptible is a context that the first signal ends, with errInterrupted as its cause.
func (a *app) interruptible() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(a.ctx)
	go func() {
		select {
		case <-ctx.Done():
		case <-a.Signals:
			cancel(errInterrupted)
		}
	}()
	return ctx, func() { cancel(nil) }
}

// json prints one object on one line.
func (a *app) json(v any) error {
	enc := json.NewEncoder(a.Out)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// renderer shows a session on the output.
func (a *app) renderer() *terminal.Renderer { return a.rendererOn(a.Out, time.Now) }

// rendererOn shows a session on another writer to the output, by a clock.
func (a *app) rendererOn(out io.Writer, now func() time.Time) *terminal.Renderer {
	return terminal.New(terminal.Config{Out: out, TTY: a.OutTTY, Color: a.OutTTY && a.Color, Width: a.Width, Now: now})
}

// clip shortens what is quoted in an error.
func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}

func firstWord(s string) string {
	for i, r := range s {
		if r == ' ' {
			return s[:i]
		}
	}
	return s
}
