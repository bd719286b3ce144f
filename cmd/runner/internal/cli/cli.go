// Package cli is the runner's command line. Every command prints JSON objects on stdout, one a line, and errors on
// stderr, one sentence each.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/settings"
)

// The exit codes other than 0.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// System holds what the runner's command line uses of its process: standard streams, environment and program path.
// Tests replace it.
type System struct {
	Stdin         io.Reader
	Stdout        io.Writer
	Stderr        io.Writer
	Environ       []string
	Getenv        func(string) string
	Unsetenv      func(string) error
	Executable    func() (string, error)
	Architectures map[string]agent.Adapter // nil means Architectures()
}

// silentExit is an error that only determines the exit code: the command has already printed a message.
type silentExit int

func (e silentExit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// commandLine is the command line of the runner, which the library kong parses.
type commandLine struct {
	settings.Logging

	Serve                 serveCommand             `cmd:"" help:"Supervise agents: a Unix socket, one agent process that stays warm, a journal."`
	Attach                attachFollowerCommand    `cmd:"" help:"Join stdin and stdout to a serving runner: commands in, journal out. Ends with stdin."`
	ExecuteQuery          executeQueryCommand      `cmd:"" help:"Run one query and print its journal. Exit code 0 completed, 1 failed, 130 interrupted."`
	LoadAgentProfile      loadProfileCommand       `cmd:"" help:"Read a profile {systemPrompt, memoryFile, model, tools, subagents, commands, mcpServers, skills, maxTurns} from stdin for the queries that follow."`
	LoadSessionTranscript loadTranscriptCommand    `cmd:"" help:"Put a transcript from stdin where the agent looks for it."`
	ReadSessionTranscript readTranscriptCommand    `cmd:"" help:"Print an agent's transcript as the agent wrote it, one JSON object a line."`
	ProvideTranscript     provideTranscriptCommand `cmd:"" help:"Keep a transcript from stdin that came from outside, for a query with fork.provided to begin with."`
	Interrupt             interruptTurnCommand     `cmd:"" help:"Ask the agent of a serving runner to stop its turn."`
	WaitReady             waitReadyCommand         `cmd:"" help:"Wait until a runner serves at the socket, and print its status."`
	Exec                  execProgramCommand       `cmd:"" help:"Run a command that runner kill can end, with all that it started. Exit code the command's, 128 + signal if it was killed."`
	Kill                  killProgramCommand       `cmd:"" help:"End a command of runner exec, with all that it started."`
	List                  listFolderCommand        `cmd:"" help:"Print what is below a folder of the workspace, one object a line, sorted by path. Exit code of this and the next three: 3 no such file, 4 outside the workspace."`
	Get                   getFileCommand           `cmd:"" help:"Print a file of the workspace."`
	Put                   putFileCommand           `cmd:"" help:"Write stdin to a file of the workspace, in one step."`
	Snapshot              takeSnapshotCommand      `cmd:"" help:"Send the changes of workspace and state to the host, in frames on stdin and stdout."`
	Restore               restoreSnapshotCommand   `cmd:"" help:"Lay down the workspace and state that the host sends."`
	Unpack                unpackTarCommand         `cmd:"" help:"Unpack a tar from stdin into a folder of the workspace. No file is written outside of the workspace."`
	Remove                removePathCommand        `cmd:"" help:"Remove a file of the workspace, or a folder with all below it."`
	McpServe              mcpServeCommand          `cmd:"" help:"First process of an MCP server's container: starts the server anew for each connection to a Unix socket."`
	McpReady              mcpWaitReadyCommand      `cmd:"" help:"Wait until mcp-serve answers at the socket."`
	McpJoin               mcpJoinCommand           `cmd:"" help:"Stand for an MCP server that runs in a container: join stdin, stdout and stderr to it. Exit code the server's."`
	Volume                volumeCommand            `cmd:"" help:"Volumes of a fixed size, on the engine's machine."`
	Agent                 builtinAgentCommand      `cmd:"" help:"The built-in agent's process: JSON lines on stdin and stdout. Started by the runner itself."`
}

// Run runs the command that args name and returns the exit code. The caller ends ctx on SIGINT and SIGTERM.
func Run(ctx context.Context, args []string, sys System) int {
	if sys.Architectures == nil {
		sys.Architectures = Architectures()
	}
	var c commandLine
	status := -1
	parser, err := kong.New(&c,
		kong.Name("runner"),
		kong.Description("Runs agents inside a sandbox."),
		kong.Writers(sys.Stdout, sys.Stderr),
		kong.Exit(func(code int) { status = code }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(&sys),
		kong.UsageOnError(),
		kong.Vars{"egress": runner.EgressAddress, "journal_limit": strconv.Itoa(journal.DefaultLimit)},
	)
	if err != nil {
		return printError(sys, err, exitUsage)
	}
	k, err := parser.Parse(args)
	if status >= 0 { // --help
		return status
	}
	if err != nil {
		return printError(sys, err, exitUsage)
	}
	log := slog.New(slog.NewTextHandler(sys.Stderr, &slog.HandlerOptions{Level: c.LogLevel}))
	if sys.Getenv(egressTokenVariable) != "" {
		hideProcess(log) // also for attach and the other commands: they have the same variables as the sandbox's first process
	}
	err = k.Run(log)
	var code silentExit
	var failed exitCodeError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case errors.As(err, &failed):
		return printError(sys, err, failed.code)
	}
	return printError(sys, err, exitFailed)
}

// printError prints err on stderr, and returns code, the exit code.
func printError(sys System, err error, code int) int {
	if _, werr := fmt.Fprintf(sys.Stderr, "runner: %v\n", err); werr != nil {
		return exitFailed
	}
	return code
}

// ProcessSystem returns the System of this process.
func ProcessSystem() System {
	return System{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Environ: os.Environ(), Getenv: os.Getenv, Unsetenv: os.Unsetenv, Executable: os.Executable}
}
