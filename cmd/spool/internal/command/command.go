// Package command implements the command line of spool: the commands, their output and their exit codes.
package command

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/session/janitor"
)

// Exit codes.
const (
	ExitDone      = 0
	ExitFailed    = 1
	ExitUsage     = 2
	ExitTimeout   = 124 // the time of --wait is up, as with timeout(1)
	ExitCancelled = 130
)

// IO holds the parts of the machine that a command uses: input, output and error streams, the terminal, signals, and local
// installations of Spool.
type IO struct {
	In      io.Reader
	InTTY   bool // input comes from a terminal, not from a pipe
	Out     io.Writer
	OutTTY  bool
	Err     io.Writer
	ErrTTY  bool
	Width   func() int       // current width of the terminal in columns; nil means 80
	Color   bool             // use colours on a terminal
	Signals <-chan os.Signal // interrupts and terminations
	// Raw puts the terminal of In into raw mode, in which each key is delivered at once and not echoed, until
	// restore is called; nil if In is not a terminal.
	Raw func() (restore func() error, err error)
	// DropInput drops what was typed and not read yet; nil if In is not a terminal.
	DropInput func() error
	// Edit lets the user change a text in an editor and returns the result; nil if there is no editor.
	Edit func(ctx context.Context, text []byte) ([]byte, error)
	// LookupEnv returns an environment variable that a definition names; nil means that there are none.
	LookupEnv func(name string) (value string, ok bool)
	Local     LocalMachine
	// DefaultURL is the gateway's URL if the user names none; "" means the default address of `spool up`.
	DefaultURL string
}

// commandLine defines all commands and flags of spool, as kong parses them.
type commandLine struct {
	Up                upCommand                `cmd:"" help:"Run all services in one process."`
	Run               runCommand               `cmd:"" help:"Run a query and stream what the agent does."`
	Attach            attachCommand            `cmd:"" help:"Show a session and follow it live."`
	Replay            replayCommand            `cmd:"" help:"Replay a session in the terminal as it looked live."`
	Sessions          sessionsCommand          `cmd:"" help:"List, show and delete sessions; control their sandboxes."`
	Executions        executionsCommand        `cmd:"" help:"List, show and control executions."`
	Approvals         approvalsCommand         `cmd:"" help:"List, show and decide the requests of agents that a person decides."`
	Files             filesCommand             `cmd:"" help:"List, get, put and remove files of a session's workspace."`
	Events            eventsCommand            `cmd:"" help:"Read a session's log."`
	Blocks            blocksCommand            `cmd:"" help:"List the blocks of a session, newest first."`
	Timeline          timelineCommand          `cmd:"" help:"Show when events, errors and approval requests of a session happened."`
	Fork              forkCommand              `cmd:"" help:"Create a session that continues from an event of another session, with its history, files and conversation up to that event."`
	State             stateCommand             `cmd:"" help:"Show the state of a session after an event."`
	Diff              diffCommand              `cmd:"" help:"Compare two events of a session, or two sessions."`
	Verify            verifyCommand            `cmd:"" help:"Verify the log: hashes, chains, order, ends, signed heads."`
	Heads             headsCommand             `cmd:"" help:"Manage the key that signs the heads of the log."`
	GC                gcCommand                `cmd:"" name:"gc" help:"Remove the content of deleted sessions now, as the janitor does, or list what would be removed."`
	Rebuild           rebuildCommand           `cmd:"" help:"Rebuild the read models from the log."`
	Provision         provisionCommand         `cmd:"" help:"Create the streams of an installation on NATS, or update them."`
	ProvisionDatabase provisionDatabaseCommand `cmd:"" help:"Create the services' roles in a Postgres that only Spool uses, or update them."`
	Certificates      certificatesCommand      `cmd:"" help:"Create a certificate authority and the TLS certificates of an installation, and renew certificates that expire soon."`
	Agents            agentsCommand            `cmd:"" help:"Apply, list, show and remove agents."`
	Instances         instancesCommand         `cmd:"" help:"Apply, list, show and remove agent instances: agents with their environments."`
	Envs              envsCommand              `cmd:"" help:"Apply, list, show, remove and explain environments, which hold variables and secrets."`
	Permissions       permissionsCommand       `cmd:"" help:"Explain what an agent's permissions decide about a call of a tool."`
	Skills            skillsCommand            `cmd:"" help:"Push, list, show, pull, tag and remove skills for agents."`
	Secrets           secretsCommand           `cmd:"" help:"Create and rotate the key that encrypts secrets."`
	Budgets           budgetsCommand           `cmd:"" help:"Set, list and remove the budgets of tenants per day, per month or in total."`
	Limits            limitsCommand            `cmd:"" help:"Set, list and remove the limits of tenants."`
	Audit             auditCommand             `cmd:"" help:"List who did what, newest first, with key, end user and address."`
	Open              openCommand              `cmd:"" help:"Print a URL with a code with which a page signs in, once and within 60 seconds."`
	Dead              deadCommand              `cmd:"" help:"List, show, retry and drop dead letters: messages whose processing was given up."`
	Keys              keysCommand              `cmd:"" help:"Create, list and revoke API keys."`
	Doctor            doctorCommand            `cmd:"" help:"Check what Spool needs on this machine, and suggest remedies."`
}

// CLIModel returns kong's model of all commands and flags, from which documents are generated.
func CLIModel() (*kong.Application, error) {
	parser, err := newParser(&commandLine{})
	if err != nil {
		return nil, err
	}
	return parser.Model, nil
}

// newParser returns the parser of the command line. If a flag of a command is also a setting of a service, its tag
// refers to the default of the service, such as ${gateway_Listen}.
func newParser(c *commandLine, options ...kong.Option) (*kong.Kong, error) {
	return kong.New(c, append(options, kong.Name("spool"),
		kong.Vars(settings.DefaultVariables("daemon", daemon.Settings{}, "NATSURL")),
		kong.Vars(settings.DefaultVariables("executor", executor.Config{}, "Sandbox", "DiskLimit", "Landlock")),
		kong.Vars(settings.DefaultVariables("gateway", gateway.Config{}, "Listen", "GRPCListen")),
		kong.Vars(settings.DefaultVariables("janitor", janitor.Config{}, "Grace", "Uploads", "Snapshots")))...)
}

// app is the state that one run of spool shares with its command.
type app struct {
	IO
	ctx   context.Context // the context that Run received
	lines *bufio.Reader   // reader of In, used by askUser
}

// exitError is an error that ends the program with an exit code. If err is nil, the command has already printed its
// messages.
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

// usageError returns an error that ends the program with ExitUsage, because the user entered invalid arguments.
func usageError(format string, args ...any) error {
	return &exitError{ExitUsage, fmt.Errorf(format, args...)}
}

// errInterrupted is the cause of a context that a signal has ended.
var errInterrupted = errors.New("interrupted")

// Run parses and runs a command line, and returns the exit code.
func Run(ctx context.Context, args []string, env IO) int {
	if env.DefaultURL == "" {
		env.DefaultURL = defaultURL()
	}
	var c commandLine
	exited, code := false, 0
	parser, err := newParser(&c,
		kong.Description("Runs AI agents in sandboxes, records what they do as one ordered log, and streams it."),
		kong.Writers(env.Out, env.Err), kong.Exit(func(n int) { exited, code = true, n }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}))
	if err != nil {
		terminal.Fprintf(env.Err, "spool: %v\n", err)
		return ExitFailed
	}
	for i, arg := range args { // kong would replace invalid bytes
		if !utf8.ValidString(arg) {
			terminal.Fprintf(env.Err, "spool: argument %d is not valid UTF-8: %s\n", i+1, truncate.Text(arg, 64))
			return ExitUsage
		}
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	parsed, err := parser.Parse(args)
	if exited { // help was requested
		return code
	}
	if err != nil {
		hint := "spool --help"
		var wrong *kong.ParseError
		if errors.As(err, &wrong) && wrong.Context != nil && wrong.Context.Command() != "" {
			hint = "spool " + firstWord(wrong.Context.Command()) + " --help"
		}
		terminal.Fprintf(env.Err, "spool: %s; see `%s`\n", err.Error(), hint)
		return ExitUsage
	}
	return env.reportError(parsed.Run(&app{IO: env, ctx: ctx}))
}

// reportError prints an error on the error stream, with further lines indented, and returns the exit code for it.
func (w IO) reportError(err error) int {
	if err == nil {
		return ExitDone
	}
	code, shown := ExitFailed, err
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		code, shown = exit.code, exit.err
	case errors.Is(err, errInterrupted), errors.Is(err, context.Canceled):
		code, shown = ExitCancelled, nil
	case client.IsCode(err, "INVALID_REQUEST", "PAYLOAD_TOO_LARGE"):
		code = ExitUsage
	}
	if shown != nil {
		format := "spool: %s\n"
		if w.OutTTY && w.Color {
			format = "\x1b[31mspool: %s\x1b[0m\n"
		}
		terminal.Fprintf(w.Err, format, terminal.Lines(strings.ReplaceAll(shown.Error(), "\n", "\n  ")))
	}
	return code
}

// interruptibleContext returns a context that ends at the first signal, with errInterrupted as its cause.
func (a *app) interruptibleContext() (context.Context, context.CancelFunc) {
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

// printJSON prints v as JSON on one line.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.Out)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// newRenderer returns a renderer that shows a session on the app's output.
func (a *app) newRenderer() *terminal.Renderer {
	if a.canPrompt() {
		c := a.rendererConfig(crlfWriter{a.Out}, time.Now) // the terminal is in raw mode while a prompt is shown
		c.Prompts = true
		return terminal.New(c)
	}
	return terminal.New(a.rendererConfig(a.Out, time.Now))
}

// rendererConfig returns the configuration of a renderer that shows a session on out, with now as its clock.
func (a *app) rendererConfig(out io.Writer, now func() time.Time) terminal.Config {
	return terminal.Config{Out: out, TTY: a.OutTTY, Color: a.OutTTY && a.Color, Width: a.Width, Now: now}
}

// firstWord returns the part of s before the first space.
func firstWord(s string) string {
	for i, r := range s {
		if r == ' ' {
			return s[:i]
		}
	}
	return s
}
