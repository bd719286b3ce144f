package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/executor"
)

const (
	// requiredDiskBytes is the free disk space below which Spool does not work.
	requiredDiskBytes = 200 << 20
	// suggestedDiskBytes is the free disk space below which doctor advises the user to free some.
	suggestedDiskBytes = 2 << 30

	// checkTimeout is the time limit of one check of doctor.
	checkTimeout = 10 * time.Second
	// engineCheckTimeout is the time limit of checks of doctor that start containers.
	engineCheckTimeout = time.Minute
)

type doctorCommand struct {
	serverFlags
	Listen     string `default:"${gateway_Listen}" env:"SPOOL_LISTEN" help:"Where spool up will listen."`
	GRPCListen string `name:"grpc-listen" default:"${gateway_GRPCListen}" env:"SPOOL_GRPC_LISTEN" help:"Where spool up will listen for gRPC."`
	Database   string `name:"database-url" env:"SPOOL_DATABASE_URL" placeholder:"URL" help:"The Postgres to use in place of a private one."`
	Runner     string `env:"SPOOL_RUNNER" placeholder:"FILE" help:"The runner's binary, if it is not beside this program."`

	Security bool   `help:"Check the hardening of an installation, of the server and of the compose project on this engine, instead of what spool up needs."`
	Project  string `default:"spool" env:"SPOOL_PROJECT" help:"With --security: the name of the compose project."`
	EnvFile  string `name:"env-file" default:"deploy/.env" help:"With --security: the file with the passwords of compose."`

	Sandbox      string `default:"${executor_Sandbox}" env:"SPOOL_SANDBOX" help:"Sandbox provider: local, docker or modal."`
	Landlock     string `name:"local-landlock" default:"${executor_Landlock}" env:"SPOOL_LOCAL_LANDLOCK" help:"Whether Landlock keeps local agents from opening Spool's own files: auto or off."`
	DockerHost   string `env:"SPOOL_DOCKER_HOST" placeholder:"URL" help:"URL of the Docker engine, with --sandbox docker."`
	SandboxImage string `env:"SPOOL_SANDBOX_IMAGE" placeholder:"IMAGE" help:"Image of Docker sandboxes."`
	DiskLimit    string `name:"sandbox-disk-limit" default:"${executor_DiskLimit}" env:"SPOOL_SANDBOX_DISK_LIMIT" help:"Mechanism that enforces the disk limits of Docker sandboxes; doctor tries it."`

	environ func(string) string // nil means os.Getenv
	sysctls string              // folder of the kernel's settings; "" means /proc/sys
}

// finding is the result of one check of doctor.
type finding struct {
	Check  string `json:"check"`
	Status string `json:"status"` // ok, note (Spool works without it) or failed
	Detail string `json:"detail"`
	Remedy string `json:"remedy,omitempty"`
}

// okFinding returns a finding with the status ok.
func okFinding(detail string, args ...any) finding {
	return finding{Status: "ok", Detail: fmt.Sprintf(detail, args...)}
}

// noteFinding returns a finding with the status note: Spool works without it.
func noteFinding(detail, remedy string) finding {
	return finding{Status: "note", Detail: detail, Remedy: remedy}
}

// failedFinding returns a finding with the status failed.
func failedFinding(detail, remedy string) finding {
	return finding{Status: "failed", Detail: detail, Remedy: remedy}
}

// doctorChecks is the state that the checks of one run of doctor share.
type doctorChecks struct {
	*doctorCommand
	app     *app
	dir     string
	running *StackConnection // the stack on the data folder; nil if none runs
}

// diskLimitCheckName is the name of the check that tries the disk limits of Docker sandboxes. It starts containers.
const diskLimitCheckName = "disk limits"

// localAgentsCheckName is the name of the check of what the agents of local sandboxes can open.
const localAgentsCheckName = "local agents"

// modalCheckName is the name of the check that starts a sandbox at Modal.
const modalCheckName = "Modal"

// doctorCheck is one check of doctor, with the name under which its result is printed.
type doctorCheck struct {
	name string
	run  func(context.Context) finding
}

// timeLimit returns the time limit of the check.
func (c doctorCheck) timeLimit() time.Duration {
	if c.name == diskLimitCheckName || c.name == modalCheckName {
		return engineCheckTimeout
	}
	return checkTimeout
}

// requestedChecks returns the checks that the flags of doctor select.
func (x *doctorChecks) requestedChecks(ctx context.Context) []doctorCheck {
	if x.Security {
		base := []doctorCheck{{"data folder", x.checkDataFolder}, {"running stack", x.checkRunningStack}}
		return append(base, newSecurityChecks(ctx, x).allChecks()...)
	}
	list := []doctorCheck{
		{"data folder", x.checkDataFolder},
		{"disk space", x.checkDiskSpace},
		{"running stack", x.checkRunningStack},
		{"port of REST", func(context.Context) finding { return x.checkPort("listen", x.Listen) }},
		{"port of gRPC", func(context.Context) finding { return x.checkPort("grpc-listen", x.GRPCListen) }},
		{"Postgres", x.checkPostgres},
		{"runner", x.checkRunner},
		{"kernel", x.checkKernel},
		{localAgentsCheckName, x.checkLocalAgents},
		{diskLimitCheckName, x.checkDiskLimit},
		{"Claude Code", x.checkClaude},
		{"models", x.checkModels},
		{"server", x.checkGateway},
	}
	if x.Sandbox == executor.ProviderModal {
		list = append(list, doctorCheck{modalCheckName, x.checkModal})
	}
	return list
}

// Run performs every check and prints the results. It returns an error if a requirement is missing, or if something is
// exposed that must not be.
func (c *doctorCommand) Run(a *app) error {
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	if c.environ == nil {
		c.environ = os.Getenv
	}
	x := &doctorChecks{doctorCommand: c, app: a}
	bad := 0
	for _, check := range x.requestedChecks(ctx) {
		one, done := context.WithTimeout(ctx, check.timeLimit())
		f := check.run(one)
		done()
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		f.Check = check.name
		if f.Status == "failed" {
			bad++
		}
		if err := c.printFinding(a, f); err != nil {
			return err
		}
	}
	if bad > 0 {
		return fmt.Errorf("doctor: failed checks: %d", bad)
	}
	return nil
}

func (c *doctorCommand) printFinding(a *app, f finding) error {
	if c.JSON {
		return a.printJSON(f)
	}
	_, err := terminal.Fprintf(a.Out, "%-7s %-17s %s\n", f.Status, f.Check, f.Detail)
	if err == nil && f.Remedy != "" {
		_, err = terminal.Fprintf(a.Out, "%-7s %-17s → %s\n", "", "", f.Remedy)
	}
	return err
}

// checkDataFolder checks that the data folder exists or can be created, and can be written.
func (x *doctorChecks) checkDataFolder(context.Context) finding {
	remedy := "choose another folder with --data or SPOOL_DATA_DIR, or change its owner"
	var err error
	if x.dir, err = dataDirOrDefault(x.app, x.Data); err != nil {
		return failedFinding(err.Error(), remedy)
	}
	existed := pathExists(x.dir)
	if err := os.MkdirAll(x.dir, 0o700); err != nil {
		return failedFinding(fmt.Sprintf("%s cannot be created: %v", x.dir, stripPath(err)), remedy)
	}
	f, err := os.CreateTemp(x.dir, ".doctor-")
	if err != nil {
		return failedFinding(fmt.Sprintf("%s cannot be written: %v", x.dir, stripPath(err)), remedy)
	}
	err = errors.Join(f.Close(), os.Remove(f.Name()))
	if !existed { // a check must not leave anything behind
		err = errors.Join(err, os.Remove(x.dir))
	}
	if err != nil {
		return failedFinding(err.Error(), remedy)
	}
	return okFinding("%s can be written", x.dir)
}

// checkDiskSpace checks the free disk space of the data folder.
func (x *doctorChecks) checkDiskSpace(context.Context) finding {
	dir := x.dir
	for dir != "" && !pathExists(dir) && dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
	}
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return noteFinding(fmt.Sprintf("free space of %s is unknown: %v", dir, err), "")
	}
	free := s.Bavail * uint64(s.Bsize)
	has := fmt.Sprintf("%.1f GiB free for %s", float64(free)/(1<<30), x.dir)
	switch {
	case free < requiredDiskBytes:
		return failedFinding(has, "free some space, or choose another disk with --data")
	case free < suggestedDiskBytes:
		return noteFinding(has, "logs and workspaces grow: free some space, or choose another disk with --data")
	}
	return okFinding("%s", has)
}

// checkRunningStack reports whether a stack runs on the data folder, and stores it in x.running for later checks.
func (x *doctorChecks) checkRunningStack(context.Context) finding {
	c, found, err := x.app.Local.Find(x.dir)
	if err != nil {
		return failedFinding(err.Error(), "look at "+x.dir)
	}
	if !found {
		return okFinding("none on %s; `spool up` or `spool run` starts one", x.dir)
	}
	x.running = &c
	return okFinding("process %d on %s, at %s", c.PID, x.dir, c.URL)
}

// checkPort checks that an address is free, or that the running stack listens on it. flag is the flag that sets the
// address.
func (x *doctorChecks) checkPort(flag, address string) finding {
	l, err := net.Listen("tcp", address)
	if err == nil {
		if err := l.Close(); err != nil {
			return failedFinding(err.Error(), "")
		}
		return okFinding("%s is free", address)
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		if x.running != nil {
			return okFinding("%s is used by the running stack", address)
		}
		return failedFinding(address+" is in use by another program", fmt.Sprintf("stop that program, or choose another address with --%s (port 0 means any free port)", flag))
	}
	return failedFinding(fmt.Sprintf("%s cannot be listened on: %v", address, stripPath(err)), "choose another address with --"+flag)
}

// checkPostgres checks that Postgres can be reached, or that its binaries are on this machine.
func (x *doctorChecks) checkPostgres(ctx context.Context) finding {
	database := x.Database
	if database == "" && x.running != nil {
		database = x.running.DatabaseURL
	}
	if database == "" {
		found, err := pgserver.FindBinary(ctx, pgserver.Config{DataDir: filepath.Join(x.dir, "postgres")})
		if errors.Is(err, pgserver.ErrNoBinary) {
			return noteFinding("no binary on this machine; the first start downloads one", "without a network install one (Debian: apt-get install postgresql), or set SPOOL_DATABASE_URL")
		}
		if err != nil {
			return failedFinding(err.Error(), "")
		}
		return okFinding("%s", found)
	}
	remedy := "check that Postgres is running and that SPOOL_DATABASE_URL is correct"
	cfg, err := pgx.ParseConfig(database)
	if err != nil {
		return failedFinding("SPOOL_DATABASE_URL is not the URL of a Postgres database", "write it like postgres://user:password@host:5432/name")
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return failedFinding(fmt.Sprintf("no answer from %s: %v", cfg.Host, err), remedy)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var version string
	if err := conn.QueryRow(ctx, "SHOW server_version").Scan(&version); err != nil {
		return failedFinding(err.Error(), remedy)
	}
	return x.checkDatabaseRole(ctx, conn, fmt.Sprintf("version %s at %s", version, cfg.Host))
}

// checkDatabaseRole checks whether the database role has privileges that a gateway does not need.
func (x *doctorChecks) checkDatabaseRole(ctx context.Context, conn *pgx.Conn, where string) finding {
	const rights = `SELECT rolname, rolsuper OR pg_has_role(oid, 'pg_execute_server_program', 'USAGE'), has_database_privilege(oid, current_database(), 'CREATE')
		FROM pg_catalog.pg_roles WHERE rolname = current_user`
	const remedy = `see "Roles in Postgres" in docs/security.md for a separate role of the gateway`
	var role string
	var programs, owns bool
	if err := conn.QueryRow(ctx, rights).Scan(&role, &programs, &owns); err != nil {
		return failedFinding(err.Error(), "")
	}
	switch private := x.Database == "" && role == readmodel.ProjectorRole; {
	case programs:
		return noteFinding(fmt.Sprintf("%s; role %s may run programs on the machine of Postgres, and every service connects as it", where, role), remedy)
	case owns && !private:
		return noteFinding(fmt.Sprintf("%s; one role, %s, serves every service: the gateway may write, and read the hashes of API keys", where, role), remedy)
	}
	return okFinding("%s as role %s", where, role)
}

// checkRunner checks that the runner's binary exists.
func (x *doctorChecks) checkRunner(context.Context) finding {
	remedy := "build it beside this program (scripts/build), or name it with SPOOL_RUNNER"
	if x.Runner != "" {
		if !isExecutable(x.Runner) {
			return failedFinding(x.Runner+" is not an executable program", remedy)
		}
		return okFinding("%s", x.Runner)
	}
	self, err := os.Executable()
	if err != nil {
		return failedFinding(err.Error(), remedy)
	}
	if beside := filepath.Join(filepath.Dir(self), "runner"); isExecutable(beside) {
		return okFinding("%s", beside)
	}
	if path, err := exec.LookPath("runner"); err == nil {
		return okFinding("%s", path)
	}
	return failedFinding("there is no runner beside "+self+", and none on the PATH", remedy)
}

// checkDiskLimit tries the mechanism that enforces the disk limits of Docker sandboxes.
func (x *doctorChecks) checkDiskLimit(ctx context.Context) finding {
	if x.Sandbox == executor.ProviderModal {
		return okFinding("the runner enforces them in Modal sandboxes: it ends a turn that wrote more")
	}
	if x.Sandbox != executor.ProviderDocker {
		return okFinding("%s sandboxes have no disk limits; only Docker sandboxes do", x.Sandbox)
	}
	mode, err := executor.Config{DockerHost: x.DockerHost, ImageSettings: imagepolicy.ImageSettings{SandboxImage: x.SandboxImage}, DiskLimit: x.DiskLimit, Runner: x.Runner}.ProveDiskLimit(ctx, slog.New(slog.DiscardHandler))
	const remedy = "loop needs loop devices on the engine's machine and e2fsprogs in the image of sandboxes; quota needs a file system with project quota"
	switch {
	case err != nil:
		return failedFinding(err.Error(), remedy)
	case mode == executor.DiskLimitWatch:
		return noteFinding("watch: the limits are not enforced; a sandbox can fill the engine's disk before its turn is ended", remedy)
	}
	return okFinding("enforced by %s, tested on the engine", mode)
}

// checkModal checks that Modal accepts the settings of its sandboxes. It starts a sandbox and ends it.
func (x *doctorChecks) checkModal(ctx context.Context) finding {
	var cfg executor.Config
	parser, err := kong.New(&cfg, kong.Exit(func(int) {}))
	if err == nil {
		_, err = parser.Parse(nil) // reads the settings from the environment
	}
	if err != nil {
		return failedFinding(err.Error(), "")
	}
	const remedy = "docs/modal.md has the settings"
	if cfg.EgressAdmin == "" { // spool up starts the proxy
		if err := executor.CheckEgressListener(x.environ); err != nil {
			return failedFinding(err.Error(), remedy)
		}
	}
	cfg.Runner, cfg.EgressAdmin = x.Runner, cmp.Or(cfg.EgressAdmin, "started by spool up")
	found, err := cfg.ProveModal(ctx, slog.New(slog.DiscardHandler))
	if err != nil {
		return failedFinding(strings.Join(append(found, err.Error()), "; "), remedy)
	}
	return okFinding("%s", strings.Join(found, "; "))
}

// checkLocalAgents checks whether the agents of local sandboxes can open the data folder, which contains the local key.
func (x *doctorChecks) checkLocalAgents(context.Context) finding {
	if x.Sandbox != executor.ProviderLocal {
		return okFinding("sandboxes are of provider %s", x.Sandbox)
	}
	if err := (executor.Config{Landlock: x.Landlock}).CheckLandlock(); err != nil {
		return noteFinding(fmt.Sprintf("they can open %s, and with the key in it a local agent can approve its own calls: %v", x.dir, err),
			`use --sandbox docker for agents that you do not trust: docs/security.md, "Local agents"`)
	}
	return okFinding("Landlock is in force: they cannot open %s", x.dir)
}

func (x *doctorChecks) checkClaude(ctx context.Context) finding {
	path, err := exec.LookPath("claude")
	if err != nil {
		return noteFinding("not on the PATH", "for architecture claude-code: npm install -g @anthropic-ai/claude-code; architecture spool works without it")
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return noteFinding(fmt.Sprintf("%s does not run: %v", path, err), "install it again: npm install -g @anthropic-ai/claude-code")
	}
	return okFinding("%s at %s", strings.TrimSpace(string(out)), path)
}

// checkModels checks whether keys or URLs of model providers are set. It neither prints nor tries the keys, because a
// request would cost money.
func (x *doctorChecks) checkModels(context.Context) finding {
	var have, odd []string
	for _, m := range []struct{ key, base, serves string }{
		{"ANTHROPIC_API_KEY", "SPOOL_ANTHROPIC_BASE_URL", "claude-code"},
		{"OPENAI_API_KEY", "SPOOL_OPENAI_BASE_URL", "spool"},
		{"NVIDIA_API_KEY", "SPOOL_NVIDIA_BASE_URL", "spool"},
	} {
		base := x.environ(m.base)
		if u, err := url.Parse(base); base != "" && (err != nil || u.Host == "") {
			odd = append(odd, m.base+" is not a URL")
		}
		if x.environ(m.key) != "" || base != "" && m.base != "SPOOL_NVIDIA_BASE_URL" {
			have = append(have, strings.TrimSuffix(m.key, "_API_KEY")+" for architecture "+m.serves)
		}
	}
	if x.environ("SPOOL_MOCK_LLM") != "" {
		have = append(have, "a scripted server (SPOOL_MOCK_LLM)")
	}
	if len(odd) > 0 {
		return failedFinding(strings.Join(odd, ", "), "write it like https://host/v1, Anthropic's without /v1")
	}
	if len(have) == 0 {
		return noteFinding("no key", "set ANTHROPIC_API_KEY, OPENAI_API_KEY or NVIDIA_API_KEY, or use --mock-llm, which needs no key")
	}
	return okFinding("%s", strings.Join(have, "; "))
}

// checkGateway asks the server that the user named, or the running one, for the state of its parts.
func (x *doctorChecks) checkGateway(ctx context.Context) finding {
	c, _, err := x.findServer(ctx, x.app)
	if err != nil && (x.URL != "" || x.running != nil) {
		return failedFinding(err.Error(), "")
	}
	if err != nil {
		return okFinding("none runs")
	}
	defer c.Close()
	r, err := c.GetReadiness(ctx)
	var gone *client.UnreachableError
	if errors.As(err, &gone) {
		return failedFinding(err.Error(), "")
	}
	if err != nil {
		return failedFinding(c.URL()+": "+err.Error(), "")
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r.Checks)) {
		parts = append(parts, name+" "+r.Checks[name])
	}
	if !r.Ready {
		return failedFinding(c.URL()+" is not ready: "+strings.Join(parts, ", "), "look at its log; it waits for the components that are not ok")
	}
	return okFinding("%s is ready: %s", c.URL(), strings.Join(parts, ", "))
}

func pathExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir() && info.Mode()&0o111 != 0
}

// stripPath removes the path and the operation from an error of the package os, because the message already contains
// them.
func stripPath(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	var sys *os.SyscallError
	if errors.As(err, &sys) {
		return sys.Err
	}
	return err
}
