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
	// Free disk space in bytes: below the first value nothing works, below the second one it soon will not.
	diskRequired  = 200 << 20
	diskSuggested = 2 << 30

	checkTimeout = 10 * time.Second
	// engineTimeout is the time limit of checks that start containers.
	engineTimeout = time.Minute
)

type doctorCommand struct {
	server
	Listen     string `default:"${gateway_Listen}" env:"SPOOL_LISTEN" help:"Where spool up will listen."`
	GRPCListen string `name:"grpc-listen" default:"${gateway_GRPCListen}" env:"SPOOL_GRPC_LISTEN" help:"Where spool up will listen for gRPC."`
	Database   string `name:"database-url" env:"SPOOL_DATABASE_URL" placeholder:"URL" help:"The Postgres to use in place of a private one."`
	Runner     string `env:"SPOOL_RUNNER" placeholder:"FILE" help:"The runner's binary, if it is not beside this program."`

	Security bool   `help:"Check the hardening of an installation, of the server and of the compose project on this engine, instead of what spool up needs."`
	Project  string `default:"spool" env:"SPOOL_PROJECT" help:"With --security: the name of the compose project."`
	EnvFile  string `name:"env-file" default:"deploy/.env" help:"With --security: the file with the passwords of compose."`

	Sandbox      string `default:"${executor_Sandbox}" env:"SPOOL_SANDBOX" help:"Sandbox provider: local, docker or modal."`
	DockerHost   string `env:"SPOOL_DOCKER_HOST" placeholder:"URL" help:"URL of the Docker engine, with --sandbox docker."`
	SandboxImage string `env:"SPOOL_SANDBOX_IMAGE" placeholder:"IMAGE" help:"Image of Docker sandboxes."`
	DiskLimit    string `name:"sandbox-disk-limit" default:"${executor_DiskLimit}" env:"SPOOL_SANDBOX_DISK_LIMIT" help:"Mechanism that enforces the disk limits of Docker sandboxes; doctor tries it."`

	environ func(string) string // nil means os.Getenv
	sysctls string              // folder of the kernel's settings; "" means /proc/sys
}

// finding is the result of a check.
type finding struct {
	Check  string `json:"check"`
	Status string `json:"status"` // ok, note (Spool works without it) or failed
	Detail string `json:"detail"`
	Remedy string `json:"remedy,omitempty"`
}

func ok(detail string, args ...any) finding {
	return finding{Status: "ok", Detail: fmt.Sprintf(detail, args...)}
}
func note(detail, remedy string) finding {
	return finding{Status: "note", Detail: detail, Remedy: remedy}
}
func failedFinding(detail, remedy string) finding {
	return finding{Status: "failed", Detail: detail, Remedy: remedy}
}

// examination is the state that the checks share.
type examination struct {
	*doctorCommand
	app     *app
	dir     string
	running *Connection // the stack on the data folder; nil if none runs
}

// diskLimits is the name of the check that starts containers.
const diskLimits = "disk limits"

// modalSettings is the name of the check that asks Modal.
const modalSettings = "Modal"

// check is one check of doctor.
type check struct {
	name string
	run  func(context.Context) finding
}

func (c check) within() time.Duration {
	if c.name == diskLimits || c.name == modalSettings {
		return engineTimeout
	}
	return checkTimeout
}

// checks returns the requested checks.
func (x *examination) checks(ctx context.Context) []check {
	if x.Security {
		base := []check{{"data folder", x.folder}, {"running stack", x.stack}}
		return append(base, newSecurityExamination(ctx, x).checks()...)
	}
	list := []check{
		{"data folder", x.folder},
		{"disk space", x.disk},
		{"running stack", x.stack},
		{"port of REST", func(context.Context) finding { return x.port("listen", x.Listen) }},
		{"port of gRPC", func(context.Context) finding { return x.port("grpc-listen", x.GRPCListen) }},
		{"Postgres", x.postgres},
		{"runner", x.runner},
		{"kernel", x.kernel},
		{diskLimits, x.diskLimit},
		{"Claude Code", x.claude},
		{"models", x.models},
		{"server", x.gateway},
	}
	if x.Sandbox == executor.Modal {
		list = append(list, check{modalSettings, x.modal})
	}
	return list
}

// Run performs every check. It returns an error if a requirement is missing, or if something is exposed that must
// not be.
func (c *doctorCommand) Run(a *app) error {
	ctx, cancel := a.interruptible()
	defer cancel()
	if c.environ == nil {
		c.environ = os.Getenv
	}
	x := &examination{doctorCommand: c, app: a}
	bad := 0
	for _, check := range x.checks(ctx) {
		one, done := context.WithTimeout(ctx, check.within())
		f := check.run(one)
		done()
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		f.Check = check.name
		if f.Status == "failed" {
			bad++
		}
		if err := c.print(a, f); err != nil {
			return err
		}
	}
	if bad > 0 {
		return fmt.Errorf("doctor: failed checks: %d", bad)
	}
	return nil
}

func (c *doctorCommand) print(a *app, f finding) error {
	if c.JSON {
		return a.printJSON(f)
	}
	_, err := fmt.Fprintf(a.Out, "%-7s %-17s %s\n", f.Status, f.Check, terminal.Line(f.Detail))
	if err == nil && f.Remedy != "" {
		_, err = fmt.Fprintf(a.Out, "%-7s %-17s → %s\n", "", "", terminal.Line(f.Remedy))
	}
	return err
}

func (x *examination) folder(context.Context) finding {
	remedy := "choose another folder with --data or SPOOL_DATA_DIR, or change its owner"
	var err error
	if x.dir, err = dataDir(x.app, x.Data); err != nil {
		return failedFinding(err.Error(), remedy)
	}
	existed := exists(x.dir)
	if err := os.MkdirAll(x.dir, 0o700); err != nil {
		return failedFinding(fmt.Sprintf("%s cannot be created: %v", x.dir, removePath(err)), remedy)
	}
	f, err := os.CreateTemp(x.dir, ".doctor-")
	if err != nil {
		return failedFinding(fmt.Sprintf("%s cannot be written: %v", x.dir, removePath(err)), remedy)
	}
	err = errors.Join(f.Close(), os.Remove(f.Name()))
	if !existed { // a check must not leave anything behind
		err = errors.Join(err, os.Remove(x.dir))
	}
	if err != nil {
		return failedFinding(err.Error(), remedy)
	}
	return ok("%s can be written", x.dir)
}

func (x *examination) disk(context.Context) finding {
	dir := x.dir
	for dir != "" && !exists(dir) && dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
	}
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return note(fmt.Sprintf("free space of %s is unknown: %v", dir, err), "")
	}
	free := s.Bavail * uint64(s.Bsize)
	has := fmt.Sprintf("%.1f GiB free for %s", float64(free)/(1<<30), x.dir)
	switch {
	case free < diskRequired:
		return failedFinding(has, "free some space, or choose another disk with --data")
	case free < diskSuggested:
		return note(has, "logs and workspaces grow: free some space, or choose another disk with --data")
	}
	return ok("%s", has)
}

func (x *examination) stack(context.Context) finding {
	c, found, err := x.app.Local.Find(x.dir)
	if err != nil {
		return failedFinding(err.Error(), "look at "+x.dir)
	}
	if !found {
		return ok("none on %s; `spool up` or `spool run` starts one", x.dir)
	}
	x.running = &c
	return ok("process %d on %s, at %s", c.PID, x.dir, c.URL)
}

// port checks that an address is free, or is used by the running stack.
func (x *examination) port(flag, address string) finding {
	l, err := net.Listen("tcp", address)
	if err == nil {
		if err := l.Close(); err != nil {
			return failedFinding(err.Error(), "")
		}
		return ok("%s is free", address)
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		if x.running != nil {
			return ok("%s is used by the running stack", address)
		}
		return failedFinding(address+" is in use by another program", fmt.Sprintf("stop that program, or choose another address with --%s (port 0 means any free port)", flag))
	}
	return failedFinding(fmt.Sprintf("%s cannot be listened on: %v", address, removePath(err)), "choose another address with --"+flag)
}

func (x *examination) postgres(ctx context.Context) finding {
	database := x.Database
	if database == "" && x.running != nil {
		database = x.running.DatabaseURL
	}
	if database == "" {
		found, err := pgserver.FindBinary(ctx, pgserver.Config{DataDir: filepath.Join(x.dir, "postgres")})
		if errors.Is(err, pgserver.ErrNoBinary) {
			return note("no binary on this machine; the first start downloads one", "without a network install one (Debian: apt-get install postgresql), or set SPOOL_DATABASE_URL")
		}
		if err != nil {
			return failedFinding(err.Error(), "")
		}
		return ok("%s", found)
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
	return x.role(ctx, conn, fmt.Sprintf("version %s at %s", version, cfg.Host))
}

// role reports which privileges the database role has beyond what a gateway needs.
func (x *examination) role(ctx context.Context, conn *pgx.Conn, where string) finding {
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
		return note(fmt.Sprintf("%s; role %s may run programs on the machine of Postgres, and every service connects as it", where, role), remedy)
	case owns && !private:
		return note(fmt.Sprintf("%s; one role, %s, serves every service: the gateway may write, and read the hashes of API keys", where, role), remedy)
	}
	return ok("%s as role %s", where, role)
}

func (x *examination) runner(context.Context) finding {
	remedy := "build it beside this program (scripts/build), or name it with SPOOL_RUNNER"
	if x.Runner != "" {
		if !isExecutable(x.Runner) {
			return failedFinding(x.Runner+" is not an executable program", remedy)
		}
		return ok("%s", x.Runner)
	}
	self, err := os.Executable()
	if err != nil {
		return failedFinding(err.Error(), remedy)
	}
	if beside := filepath.Join(filepath.Dir(self), "runner"); isExecutable(beside) {
		return ok("%s", beside)
	}
	if path, err := exec.LookPath("runner"); err == nil {
		return ok("%s", path)
	}
	return failedFinding("there is no runner beside "+self+", and none on the PATH", remedy)
}

// diskLimit tries the mechanism that enforces the disk limits of Docker sandboxes.
func (x *examination) diskLimit(ctx context.Context) finding {
	if x.Sandbox == executor.Modal {
		return ok("the runner enforces them in Modal sandboxes: it ends a turn that wrote more")
	}
	if x.Sandbox != executor.Docker {
		return ok("%s sandboxes have no disk limits; only Docker sandboxes do", x.Sandbox)
	}
	mode, err := executor.Config{DockerHost: x.DockerHost, ImageSettings: imagepolicy.ImageSettings{SandboxImage: x.SandboxImage}, DiskLimit: x.DiskLimit, Runner: x.Runner}.ProveDiskLimit(ctx, slog.New(slog.DiscardHandler))
	const remedy = "loop needs loop devices on the engine's machine and e2fsprogs in the image of sandboxes; quota needs a file system with project quota"
	switch {
	case err != nil:
		return failedFinding(err.Error(), remedy)
	case mode == executor.DiskWatch:
		return note("watch: the limits are not enforced; a sandbox can fill the engine's disk before its turn is ended", remedy)
	}
	return ok("enforced by %s, tested on the engine", mode)
}

// modal reports whether Modal accepts the settings of its sandboxes. It starts a sandbox and ends it.
func (x *examination) modal(ctx context.Context) finding {
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
	return ok("%s", strings.Join(found, "; "))
}

func (x *examination) claude(ctx context.Context) finding {
	path, err := exec.LookPath("claude")
	if err != nil {
		return note("not on the PATH", "for architecture claude-code: npm install -g @anthropic-ai/claude-code; architecture spool works without it")
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return note(fmt.Sprintf("%s does not run: %v", path, err), "install it again: npm install -g @anthropic-ai/claude-code")
	}
	return ok("%s at %s", strings.TrimSpace(string(out)), path)
}

// models reports which models are configured. Keys are neither shown nor tried, because a request would cost money.
func (x *examination) models(context.Context) finding {
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
		return note("no key", "set ANTHROPIC_API_KEY, OPENAI_API_KEY or NVIDIA_API_KEY, or use --mock-llm, which needs no key")
	}
	return ok("%s", strings.Join(have, "; "))
}

// gateway asks a server, if one is named or runs, for the state of its components.
func (x *examination) gateway(ctx context.Context) finding {
	c, _, err := x.find(ctx, x.app)
	if err != nil && (x.URL != "" || x.running != nil) {
		return failedFinding(err.Error(), "")
	}
	if err != nil {
		return ok("none runs")
	}
	defer c.Close()
	r, err := c.Ready(ctx)
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
	return ok("%s is ready: %s", c.URL(), strings.Join(parts, ", "))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir() && info.Mode()&0o111 != 0
}

// removePath removes the path and the operation from an error, because the message already contains them.
func removePath(err error) error {
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
