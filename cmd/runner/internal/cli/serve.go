package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/loopback"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/serve"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/pkg/runner"
)

// limitFlags are the flags of the commands serve and execute-query that limit the size of the journal and the times of
// agents.
type limitFlags struct {
	JournalLimit int `help:"Bytes of the journal that may wait for acknowledgement; past it the agent is held up." default:"${journal_limit}" env:"SPOOL_RUNNER_JOURNAL_LIMIT"`
	supervisor.Limits
}

// agentRuntime is a supervisor of agents, with the journal, processes and monitors that it uses.
type agentRuntime struct {
	journal      *journal.Journal
	processGroup *process.Group
	supervisor   *supervisor.Supervisor
	monitors     *monitors // nil for a single query
}

// diskConfig configures whether and how the disk usage of an agent's folders is measured.
type diskConfig struct {
	limit     int64 // bytes; 0 for none
	stateOnly bool  // the workspace is not measured
}

// buildRuntime returns the agentRuntime for an agent that works in the folders of place; it starts no process. disk is
// nil for a single query, whose files and disk usage are not watched.
func (l limitFlags) buildRuntime(sys *System, log *slog.Logger, place agent.Folders, disk *diskConfig) (*agentRuntime, error) {
	exe, err := sys.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the runner's own binary: %w", err)
	}
	w := &agentRuntime{processGroup: process.NewGroup(log)}
	if w.journal, err = journal.New(time.Now(), rand.Reader, l.JournalLimit); err != nil {
		return nil, err
	}
	cfg := supervisor.Config{
		Adapters: sys.Architectures, Folders: place, Journal: w.journal, ProcessGroup: w.processGroup, Environ: sys.Environ, Executable: exe, Log: log,
		Limits: l.Limits, OOM: process.FindMemoryGroup(""),
	}
	if disk != nil {
		if w.monitors, err = newMonitors(place, *disk, w.processGroup.Descendants, log); err != nil {
			return nil, err
		}
		cfg.Watch, cfg.Disk = w.monitors.files, w.monitors.disk
	}
	if w.supervisor, err = supervisor.New(cfg); err != nil {
		return nil, err
	}
	if w.monitors != nil {
		w.monitors.sup = w.supervisor
	}
	if err := w.processGroup.AdoptOrphans(); err != nil {
		log.Warn("orphans of agents are not adopted", "err", err)
	}
	return w, nil
}

// prepareFolders returns the workspace and the state folder with absolute paths. The workspace must exist; the state
// folder is created.
func prepareFolders(workspace, state string) (agent.Folders, error) {
	ws, err := filepath.Abs(workspace)
	if err != nil {
		return agent.Folders{}, fmt.Errorf("workspace %s: %w", workspace, err)
	}
	if info, err := os.Stat(ws); err != nil {
		return agent.Folders{}, fmt.Errorf("workspace: %w", err)
	} else if !info.IsDir() {
		return agent.Folders{}, fmt.Errorf("workspace %s: is not a folder", ws)
	}
	st, err := filepath.Abs(state)
	if err != nil {
		return agent.Folders{}, fmt.Errorf("state %s: %w", state, err)
	}
	if rel, err := filepath.Rel(ws, st); err == nil && filepath.IsLocal(rel) {
		return agent.Folders{}, fmt.Errorf("state %s: lies inside the workspace; the agent's own files do not belong there", st)
	}
	if err := os.MkdirAll(st, 0o700); err != nil {
		return agent.Folders{}, fmt.Errorf("make state folder: %w", err)
	}
	return agent.Folders{Workspace: ws, State: st}, nil
}

// runWithReaping runs f, and collects the exit status of orphaned processes until f has returned.
func (w *agentRuntime) runWithReaping(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // until f has returned, also after ctx has ended
	var wg sync.WaitGroup
	var reapErr error
	wg.Go(func() { reapErr = w.processGroup.Run(ctx) })
	err := f(ctx)
	cancel()
	wg.Wait()
	return errors.Join(err, reapErr)
}

// serveCommand is the command serve, which supervises agents and serves the runner's Unix socket.
type serveCommand struct {
	Socket    string      `required:"" help:"Path of the Unix socket." env:"SPOOL_RUNNER_SOCKET"`
	Workspace string      `required:"" help:"The workspace, an existing folder." env:"SPOOL_RUNNER_WORKSPACE"`
	State     string      `required:"" help:"Folder for the agents' own files, outside the workspace." env:"SPOOL_RUNNER_STATE"`
	DiskLimit int64       `help:"Bytes that the workspace and the agents' own files may take on disk; at the limit the agent is ended. 0 for no limit." default:"0" env:"SPOOL_RUNNER_DISK_LIMIT"`
	Shared    bool        `help:"The workspace is a folder of a person's: it is not measured." env:"SPOOL_RUNNER_SHARED"`
	Egress    egressFlags `embed:"" prefix:"egress-"`
	Limits    limitFlags  `embed:""`
}

func (c *serveCommand) Run(ctx context.Context, sys *System, log *slog.Logger) error {
	place, err := prepareFolders(c.Workspace, c.State)
	if err != nil {
		return err
	}
	w, err := c.Limits.buildRuntime(sys, log, place, &diskConfig{limit: c.DiskLimit, stateOnly: c.Shared})
	if err != nil {
		return err
	}
	defer ignoreHangups()()
	out, err := c.Egress.openForwarder(ctx, sys, log)
	if err != nil {
		return err
	}
	server, err := serve.Listen(serve.Config{
		Socket: c.Socket, Supervisor: w.supervisor, Journal: w.journal, Log: log,
		Claimed: func() { hideProcess(log) },
	})
	if err != nil {
		return err
	}
	log.Info("serving", "socket", c.Socket, "journal", w.journal.Name())
	return w.runWithReaping(ctx, func(whole context.Context) error {
		whole, stop := context.WithCancel(whole)
		background := errgroup.Group{}
		if out != nil {
			background.Go(func() error { return out.Run(whole) })
		}
		background.Go(func() error { return w.monitors.run(whole, log) })
		err := server.Run(ctx)
		stop()
		return errors.Join(err, background.Wait())
	})
}

// ignoreHangups receives and drops SIGHUP, which a terminal sends when it closes, and SIGPIPE, which is sent when the
// reader of the log has closed its pipe: each would end the runner. The signals are not set to be ignored, because
// agents would inherit that. undo restores the default.
func ignoreHangups() (undo func()) {
	dropped := make(chan os.Signal, 1)
	signal.Notify(dropped, syscall.SIGHUP, syscall.SIGPIPE)
	return func() { signal.Stop(dropped) }
}

// egressFlags are the flags of the forwarder that connects agents to the egress proxy.
type egressFlags struct {
	Socket    string `help:"Path of the egress proxy's Unix socket; without it and without a server nothing listens. The variable SPOOL_RUNNER_EGRESS_TOKEN holds the sandbox's token." env:"SPOOL_RUNNER_EGRESS_SOCKET"`
	Server    string `help:"Address (host:port) at which the egress proxy speaks TLS, in place of its socket." env:"SPOOL_RUNNER_EGRESS_SERVER"`
	Authority string `help:"Certificates in PEM form: the server's has to be signed by one of them." env:"SPOOL_RUNNER_EGRESS_AUTHORITY"`
	Address   string `help:"Loopback address whose connections are forwarded to the proxy." default:"${egress}" env:"SPOOL_RUNNER_EGRESS_ADDRESS"`

	hostsOnly bool // see loopback.Config.HostsOnly
}

// egressTokenVariable is the environment variable with the sandbox's token for the egress proxy. The token is not a flag,
// because every process can read the arguments of others.
const egressTokenVariable = "SPOOL_RUNNER_EGRESS_TOKEN"

// openForwarder starts to listen on the loopback port and removes the token from the environment. It returns nil if
// neither a socket nor a server is set.
func (o egressFlags) openForwarder(ctx context.Context, sys *System, log *slog.Logger) (*loopback.Forwarder, error) {
	token := sys.Getenv(egressTokenVariable)
	if token != "" {
		if err := sys.Unsetenv(egressTokenVariable); err != nil {
			return nil, fmt.Errorf("forget %s: %w", egressTokenVariable, err)
		}
	}
	if o.Socket == "" && o.Server == "" {
		if token != "" {
			log.Warn("an egress token is set, but neither a socket nor a server of the egress proxy: nothing is forwarded", "variable", egressTokenVariable)
		}
		return nil, nil //nolint:nilnil // a runner without a proxy is valid
	}
	if token == "" {
		return nil, fmt.Errorf("egress-socket, egress-server: need the sandbox's token in %s", egressTokenVariable)
	}
	f, err := loopback.Listen(ctx, loopback.Config{Socket: o.Socket, Server: o.Server, Authority: o.Authority, Token: token, Address: o.Address, HostsOnly: o.hostsOnly, Log: log})
	if err == nil {
		log.Info("forwarding to the egress proxy", "address", f.Addr(), "proxy", cmp.Or(o.Server, o.Socket))
	}
	return f, err
}

// attachFollowerCommand is the command attach, which connects stdin and stdout to a serving runner.
type attachFollowerCommand struct {
	Socket string `required:"" help:"Path of the serving runner's socket." env:"SPOOL_RUNNER_SOCKET"`
	Sealed bool   `help:"Stdin and stdout carry the stream by which an executor proves the sandbox's secret; after and epoch come inside."`
	After  uint64 `help:"Send lines with a greater number." default:"0"`
	Epoch  uint64 `help:"The caller's epoch; a lower one than the highest seen is refused." default:"0"`
}

func (c *attachFollowerCommand) Run(ctx context.Context, sys *System) error {
	if c.Sealed {
		return serve.CopyBothWays(ctx, c.Socket, sys.Stdin, sys.Stdout)
	}
	return serve.Attach(ctx, c.Socket, runner.Attach{Epoch: c.Epoch, After: c.After}, sys.Stdin, sys.Stdout)
}

// interruptTurnCommand is the command interrupt, which asks the agent of a serving runner to stop its turn.
type interruptTurnCommand struct {
	Socket string `required:"" help:"Path of the serving runner's socket." env:"SPOOL_RUNNER_SOCKET"`
}

func (c *interruptTurnCommand) Run(ctx context.Context, sys *System) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	line, err := serve.SendCommand(ctx, c.Socket, runner.OpInterrupt)
	if err != nil {
		return err
	}
	_, err = sys.Stdout.Write(line)
	return err
}
