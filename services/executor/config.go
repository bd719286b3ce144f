package executor

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/hostpath"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/lease"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/docker"
)

// Config has the settings of the executor. The zero value of a field means the default of its setting.
type Config struct {
	DataDir string `default:"" env:"SPOOL_DATA_DIR" help:"Folder of local sandboxes and of the engine's name; empty means the user's data folder."`
	Runner  string `default:"" env:"SPOOL_RUNNER" help:"Path of the runner's binary; for Docker and Modal also the path of a folder with runner-linux-amd64 and runner-linux-arm64. Empty means the runner next to this program, else on the PATH."`
	Engine  string `default:"" env:"SPOOL_ENGINE" help:"Name of the engine, which holds the sandboxes and is shared by the executors of one machine; empty means the name in the data folder."`
	Address string `default:"" env:"SPOOL_ADDRESS" help:"Where operators find this executor, as its lease shows it. Empty means the host's name."`

	Sandbox    string   `default:"local" env:"SPOOL_SANDBOX" help:"Provider of sandboxes: local (processes of this machine, for development), docker or modal (machines of modal.com)."`
	HostPaths  []string `name:"host-paths" default:"" env:"SPOOL_HOST_PATHS" help:"Folders of this machine in which, and below which, local sandboxes may work when a session names one; / allows all. Empty or none allows no folder, except that empty allows all for spool up on loopback. Session services need the same value and the same folders."`
	Landlock   string   `name:"local-landlock" default:"auto" env:"SPOOL_LOCAL_LANDLOCK" help:"Whether Landlock keeps the agents of local sandboxes from opening Spool's own files, such as keys: auto (where the kernel has Landlock) or off. With Landlock, agents can use neither sudo nor mount, and can neither create nor remove entries of the folders that contain the data folder."`
	DockerHost string   `default:"" env:"SPOOL_DOCKER_HOST" help:"Address of the Docker engine, in the form of DOCKER_HOST; empty means the value of DOCKER_HOST, else the local socket."`
	imagepolicy.ImageSettings
	PullImages     bool    `name:"sandbox-images-pull" default:"false" env:"SPOOL_SANDBOX_IMAGES_PULL" help:"Pull such an image if it is not on the engine: the engine then connects to the registry in the image's name. Otherwise the image must be on the engine; sandbox-image and egress-image are pulled in any case."`
	SandboxRuntime string  `default:"" env:"SPOOL_SANDBOX_RUNTIME" help:"Runtime of Docker sandboxes, for example runsc; empty means the engine's default."`
	SandboxMemory  int64   `default:"2147483648" env:"SPOOL_SANDBOX_MEMORY" help:"Bytes of memory that a Docker sandbox may use; a Modal sandbox has as many reserved."`
	SandboxCPUs    float64 `name:"sandbox-cpus" default:"2" env:"SPOOL_SANDBOX_CPUS" help:"CPUs that a Docker sandbox may use; a Modal sandbox has as many physical cores reserved."`
	SandboxPIDs    int64   `name:"sandbox-pids" default:"512" env:"SPOOL_SANDBOX_PIDS" help:"Processes and threads that a Docker sandbox may have."`
	SandboxDisk    int64   `default:"10737418240" env:"SPOOL_SANDBOX_DISK" help:"Bytes that a Docker sandbox's workspace and its agent's records may use together; the runner ends the turn at the limit. Each of the two has a hard limit slightly above it, see sandbox-disk-limit."`
	SandboxFiles   int64   `default:"1000000" env:"SPOOL_SANDBOX_FILES" help:"Files and folders that a Docker sandbox's workspace may have; the agent's records may have as many. At most one for each 4096 bytes of sandbox-disk. Enforced if sandbox-disk-limit is loop."`
	DiskLimit      string  `name:"sandbox-disk-limit" default:"auto" env:"SPOOL_SANDBOX_DISK_LIMIT" help:"How the disk limits of Docker sandboxes and of installed dependencies are enforced: loop (each volume is a file system in a file, on a loop device of the engine's machine; sandbox-image must have e2fsprogs), quota (project quota of the engine's file system; the number of files is not limited) or watch (not enforced: the runner ends a turn after it wrote too much). auto is the first of these that works, which the executor tests when it starts. A volume keeps the mode with which it was created."`
	SandboxTmp     int64   `default:"536870912" env:"SPOOL_SANDBOX_TMP" help:"Bytes of a Docker sandbox's /tmp, and of its home folder; they are in memory."`
	SandboxUIDs    string  `name:"sandbox-uids" default:"70000-99999" env:"SPOOL_SANDBOX_UIDS" help:"User numbers of Docker sandboxes and of MCP servers in containers, FIRST-LAST: one for each, and its group. A kept workspace keeps its number. No account of the engine's machine may have one of them. An engine that maps users (rootless, userns-remap) needs a range below 65534."`

	ModalTokenID         string        `name:"modal-token-id" default:"" env:"SPOOL_MODAL_TOKEN_ID" help:"Id of the token with which the executor creates sandboxes on Modal. Required with sandbox modal."`
	ModalTokenSecret     string        `name:"modal-token-secret" default:"" env:"SPOOL_MODAL_TOKEN_SECRET" help:"Secret of modal-token-id. Required with sandbox modal, unless modal-token-secret-file is set."`
	ModalTokenSecretFile string        `name:"modal-token-secret-file" default:"" env:"SPOOL_MODAL_TOKEN_SECRET_FILE" help:"File that contains modal-token-secret."`
	ModalEnvironment     string        `name:"modal-environment" default:"" env:"SPOOL_MODAL_ENVIRONMENT" help:"Environment of the Modal workspace in which sandboxes are created; empty means the workspace's default."`
	ModalApp             string        `name:"modal-app" default:"spool" env:"SPOOL_MODAL_APP" help:"Modal app of the sandboxes; it is created if it does not exist. Executors with the same workspace, environment and app share their sandboxes: they are one engine, whose name is modal- and the app unless engine is set."`
	ModalRegion          string        `name:"modal-region" default:"" env:"SPOOL_MODAL_REGION" help:"Region in which Modal sandboxes run, for example us-east; empty lets Modal choose."`
	ModalImage           string        `name:"modal-image" default:"" env:"SPOOL_MODAL_IMAGE" help:"Image of Modal sandboxes, unless the session sets another one: a reference in a registry from which Modal can pull. Required with sandbox modal."`
	ModalServerURL       string        `name:"modal-server-url" default:"" env:"SPOOL_MODAL_SERVER_URL" help:"Address of Modal's API, https://host:port; empty means Modal itself."`
	ModalTimeout         time.Duration `name:"modal-timeout" default:"24h" env:"SPOOL_MODAL_TIMEOUT" help:"How long a Modal sandbox may live, from 10m to 24h, which is Modal's maximum. After four fifths of this time an idle sandbox is ended with a snapshot, and no turn begins in it. A turn that still runs at the end loses its sandbox and continues in another one, with the files of the last snapshot."`
	ModalSandboxPrice    float64       `name:"modal-sandbox-price" default:"0" env:"SPOOL_MODAL_SANDBOX_PRICE" help:"Price in US dollars of one second of a Modal sandbox, by Modal's prices for sandbox-cpus and sandbox-memory. The cost is recorded for each session and counts against dollar budgets. 0 means unknown: only the time is recorded."`

	EgressSockets   string `default:"" env:"SPOOL_EGRESS_SOCKETS" help:"Docker volume, or folder of the engine's machine, with the egress proxy's socket for sandboxes; without it and without egress-image, Docker sandboxes reach no other host, not even models."`
	EgressAdmin     string `default:"" env:"SPOOL_EGRESS_ADMIN" help:"Path of the egress proxy's admin socket."`
	EgressServer    string `default:"" env:"SPOOL_EGRESS_SERVER" help:"Address (host:port) at which Modal sandboxes reach the egress proxy's TLS port: its SPOOL_EGRESS_LISTEN_TLS as reachable from the internet. They reach nothing else. The proxy's certificate must be valid for this host. Required with sandbox modal."`
	EgressAuthority string `default:"" env:"SPOOL_EGRESS_AUTHORITY" help:"PEM file of the authority that signed this certificate; sandboxes trust only this authority. It is read when the executor starts. Required with sandbox modal."`
	EgressImage     string `default:"" env:"SPOOL_EGRESS_IMAGE" help:"Image of an egress proxy that executors start on the Docker engine, for example on a remote one, as the container spool-egress-ENGINE, with the executors' own models' keys and base URLs; instead of egress-sockets and egress-admin. The container outlives executors and keeps its settings until it is removed with docker stop and docker rm; the next use then creates it again. Empty means none."`
	EgressNetwork   string `default:"bridge" env:"SPOOL_EGRESS_NETWORK" help:"Docker network by which that container reaches models and other hosts."`

	NPMRegistry         string        `name:"npm-registry" default:"" env:"SPOOL_NPM_REGISTRY" help:"Registry of the npm packages that agents depend on; empty means https://registry.npmjs.org, and for local sandboxes the registry in the settings of this machine's npm. If the registry is in your own network, or needs a credential, add it to SPOOL_EGRESS_HOSTS, at the root of its host, and set the address of the route here: http://127.0.0.1:7070/NAME."`
	PIPIndexURL         string        `name:"pip-index-url" default:"" env:"SPOOL_PIP_INDEX_URL" help:"Index of the Python packages that agents depend on; empty means https://pypi.org/simple, and for local sandboxes the index in the settings of this machine's pip. Otherwise as for npm-registry; an index behind a route must name its files by relative addresses."`
	DependenciesHosts   []string      `default:"" env:"SPOOL_DEPENDENCIES_HOSTS" help:"Further hosts that installations of dependencies may reach in Docker, besides both registries and, for PyPI, files.pythonhosted.org; for example hosts from which packages download programs. host, host:port or *.host."`
	DependenciesTimeout time.Duration `default:"10m" env:"SPOOL_DEPENDENCIES_TIMEOUT" help:"How long the installation of an agent's dependencies may take."`
	DependenciesSize    int64         `default:"2147483648" env:"SPOOL_DEPENDENCIES_SIZE" help:"Bytes that an agent's dependencies may use on the engine."`
	DependenciesKeep    time.Duration `default:"168h" env:"SPOOL_DEPENDENCIES_KEEP" help:"How long installed dependencies stay on the engine when no sandbox uses them."`

	Pool      []string      `default:"" env:"SPOOL_POOL" help:"Docker sandboxes to keep ready with their agent started, by architecture: claude-code=2,codex=1."`
	PoolEvery time.Duration `default:"5s" env:"SPOOL_POOL_EVERY" help:"Interval at which the pool is filled; it is also filled after each sandbox that was taken from it."`

	Slots           int   `default:"0" env:"SPOOL_SLOTS" help:"Number of executions that run at once; 0 means 4 for each core."`
	Reserved        int   `name:"reserved-slots" default:"0" env:"SPOOL_RESERVED_SLOTS" help:"Further executions, only of tenants that run none on this executor, so that a tenant whose executions occupy all slots does not delay others; 0 means a quarter of the slots, at least one; negative means none."`
	TenantSlots     int   `name:"tenant-slots" default:"0" env:"SPOOL_TENANT_SLOTS" help:"Number of executions of one tenant that run at once, over all executors, unless the tenant has a limit of its own; further executions wait. 0 means no limit. Every executor needs the same value."`
	TenantSandboxes int   `name:"tenant-sandboxes" default:"0" env:"SPOOL_TENANT_SANDBOXES" help:"Number of sandboxes of one tenant on an engine, unless the tenant has a limit of its own. Beyond it the sandbox that has been idle for the longest is ended, with a snapshot. 0 means no limit."`
	WarmMemory      int64 `default:"0" env:"SPOOL_WARM_MEMORY" help:"Bytes of memory that agents may use together before idle ones are ended, the longest idle first; 0 means half of the machine's memory; negative means that no idle agent is kept."`

	CommitWindow time.Duration `default:"20ms" env:"SPOOL_COMMIT_WINDOW" help:"Shortest time between two commits of an execution."`
	storage.ReserveSettings
	OutputEventsPerSecond int   `default:"200" env:"SPOOL_OUTPUT_EVENTS_PER_SECOND" help:"Events per second that an agent may write. It may be 10 s ahead of this rate; then it must wait."`
	OutputBytesPerSecond  int   `default:"2097152" env:"SPOOL_OUTPUT_BYTES_PER_SECOND" help:"Bytes per second of these events and of text in flight, with the same rule."`
	OutputEvents          int64 `default:"100000" env:"SPOOL_OUTPUT_EVENTS" help:"Events that an agent may write in one execution, which ends with OUTPUT_LIMIT beyond it; an agent's limits may be lower."`
	OutputBytes           int64 `default:"268435456" env:"SPOOL_OUTPUT_BYTES" help:"Bytes of these events, with the same rule: their text and data, and 256 for each event."`
	SessionEvents         int64 `default:"2000000" env:"SPOOL_SESSION_EVENTS" help:"Events that agents may write in all executions of a session; beyond it an execution ends with OUTPUT_LIMIT."`
	SessionBytes          int64 `default:"4294967296" env:"SPOOL_SESSION_BYTES" help:"Bytes of these events, with the same rule."`

	SnapshotVersion int `default:"2" env:"SPOOL_SNAPSHOT_VERSION" help:"Version of the snapshots of workspaces that are written, 1 or 2. Services before version 2 cannot read snapshots of version 2: set 1 until all services of the installation are upgraded. Both versions are always read."`

	KillAfter   time.Duration `default:"10s" env:"SPOOL_KILL_AFTER" help:"How long a turn that must end may continue before its process is killed, and after that before its sandbox is ended."`
	MaxAttempts int           `default:"3" env:"SPOOL_MAX_ATTEMPTS" help:"Number of starts of an execution whose sandbox is lost, unless its agent has retries."`
	lease.EngineTimeoutSettings
	Beat       time.Duration `default:"1s" env:"SPOOL_BEAT" help:"Interval at which a running execution's controls and limits are checked; hints cause further checks."`
	WarmEvery  time.Duration `default:"5s" env:"SPOOL_WARM_EVERY" help:"Interval at which the agents' memory is measured."`
	SweepEvery time.Duration `default:"1m" env:"SPOOL_SWEEP_EVERY" help:"Interval at which the executor looks for sandboxes that are no longer needed."`

	SecretsKey     string `default:"" env:"SPOOL_SECRETS_KEY" help:"Private keys (AGE-SECRET-KEY-1…, one per line) that decrypt secrets; several while keys are rotated. Without them and without secrets-key-file, executions with secrets fail."`
	SecretsKeyFile string `default:"" env:"SPOOL_SECRETS_KEY_FILE" help:"File that contains secrets-key."`

	StopSandboxes bool `default:"false" env:"SPOOL_STOP_SANDBOXES" help:"End the engine's sandboxes when the last of its executors stops; for installations that stop as a whole. Otherwise the sandboxes stay for the next executor."`

	ModelProvider  string   `default:"" env:"SPOOL_MODEL_PROVIDER" help:"Model provider if neither the session nor its agent names one: anthropic, openai or nvidia; an architecture that cannot use it has its own default. Empty means the first of openai and nvidia that is configured (claude-code: anthropic); for a model with a slash in its name it means nvidia, if nvidia is configured."`
	ModelProviders []string `default:"" env:"SPOOL_MODEL_PROVIDERS" help:"Model providers that are configured, for executors whose egress proxy has the keys; empty means those for which this executor has a key or an address. Used only if no model provider is named."`

	// Private lists folders of the installation itself. No sandbox may work in them.
	Private []string `kong:"-"`

	AnthropicKey     string `name:"anthropic-api-key" default:"" env:"ANTHROPIC_API_KEY" help:"Key for Anthropic's models."`
	AnthropicBaseURL string `name:"anthropic-base-url" default:"" env:"SPOOL_ANTHROPIC_BASE_URL" help:"Base URL of Anthropic's API, without /v1; empty means Anthropic itself."`
	AnthropicModel   string `name:"anthropic-model" default:"" env:"SPOOL_ANTHROPIC_MODEL" help:"Model of architecture claude-code if the session names none; empty means the CLI's default."`
	OpenAIKey        string `name:"openai-api-key" default:"" env:"OPENAI_API_KEY" help:"Key for an OpenAI-compatible API."`
	OpenAIBaseURL    string `name:"openai-base-url" default:"" env:"SPOOL_OPENAI_BASE_URL" help:"Base URL of that API, with /v1; empty means OpenAI itself."`
	OpenAIModel      string `name:"openai-model" default:"" env:"SPOOL_OPENAI_MODEL" help:"Model of the architectures spool, codex and opencode if the session names none; empty means the agent's default."`
	NVIDIAKey        string `name:"nvidia-api-key" default:"" env:"NVIDIA_API_KEY" help:"Key for NVIDIA's API."`
	NVIDIABaseURL    string `name:"nvidia-base-url" default:"" env:"SPOOL_NVIDIA_BASE_URL" help:"Base URL of NVIDIA's API, with /v1; empty means NVIDIA itself."`
	NVIDIAModel      string `name:"nvidia-model" default:"meta/llama-3.3-70b-instruct" env:"SPOOL_NVIDIA_MODEL" help:"Model of architecture spool if the session names none and NVIDIA's API is used."`
}

// The sandbox providers.
const (
	ProviderLocal  = "local"
	ProviderDocker = "docker"
	ProviderModal  = "modal"
)

// The values of Config.Landlock.
const (
	LandlockAuto = "auto"
	LandlockOff  = "off"
)

// DiskLimitWatch is the value of Config.DiskLimit with which no file system enforces the disk limit: only the runner
// measures the disk usage.
const DiskLimitWatch = docker.DiskLimitWatch

// withDefaults returns the config with its defaults set, or an error that begins with the name of the invalid setting.
func (c Config) withDefaults() (Config, error) {
	settings.SetDefaults(&c)
	if c.Sandbox != ProviderLocal && c.Sandbox != ProviderDocker && c.Sandbox != ProviderModal {
		return c, fmt.Errorf("sandbox: %q is none of %s, %s and %s", c.Sandbox, ProviderLocal, ProviderDocker, ProviderModal)
	}
	if c.Landlock != LandlockAuto && c.Landlock != LandlockOff {
		return c, fmt.Errorf("local-landlock: %q is neither %s nor %s", c.Landlock, LandlockAuto, LandlockOff)
	}
	if _, err := imagepolicy.Parse("sandbox-images", c.SandboxImages); err != nil {
		return c, err
	}
	// The default lies between the numbers of 16 bits, which accounts of the machine have, and 100000, from which useradd
	// takes the subordinate users of rootless containers.
	users, err := docker.ParseUserRange(c.SandboxUIDs)
	if err != nil {
		return c, fmt.Errorf("sandbox-uids: %w", err)
	}
	c.SandboxUIDs = users.String()
	if err := storage.CheckReserve(c.StoreReserve); err != nil {
		return c, err
	}
	if c.HostPaths, err = hostpath.ParseRoots("host-paths", c.HostPaths); err != nil {
		return c, err
	}
	for _, n := range []struct {
		name  string
		value int64
	}{
		{"sandbox-memory", c.SandboxMemory}, {"sandbox-pids", c.SandboxPIDs}, {"sandbox-disk", c.SandboxDisk}, {"sandbox-tmp", c.SandboxTmp},
		{"sandbox-files", c.SandboxFiles}, {"output-events", c.OutputEvents}, {"output-bytes", c.OutputBytes},
		{"session-events", c.SessionEvents}, {"session-bytes", c.SessionBytes},
	} {
		if n.value < 0 {
			return c, fmt.Errorf("%s: %d is negative", n.name, n.value)
		}
	}
	if !slices.Contains(docker.DiskLimits(), c.DiskLimit) {
		return c, fmt.Errorf("sandbox-disk-limit: %q is none of %s", c.DiskLimit, strings.Join(docker.DiskLimits(), ", "))
	}
	for _, n := range []struct {
		name  string
		value int
	}{{"output-events-per-second", c.OutputEventsPerSecond}, {"output-bytes-per-second", c.OutputBytesPerSecond}} {
		if n.value < 0 || n.value > math.MaxInt32 {
			return c, fmt.Errorf("%s: %d is not between 1 and %d", n.name, n.value, math.MaxInt32)
		}
	}
	if c.SnapshotVersion != 1 && c.SnapshotVersion != 2 {
		return c, fmt.Errorf("snapshot-version: %d is not 1 or 2", c.SnapshotVersion)
	}
	if c.SandboxCPUs < 0 {
		return c, fmt.Errorf("sandbox-cpus: %g is negative", c.SandboxCPUs)
	}
	if err := c.checkEgressSettings(); err != nil {
		return c, err
	}
	if c, err = c.checkModalSettings(); err != nil {
		return c, err
	}
	if err := c.checkDependencies(); err != nil {
		return c, err
	}
	c.Pool = slices.DeleteFunc(c.Pool, func(entry string) bool { return entry == "" })
	if len(c.Pool) == 0 {
		c.Pool = nil
	}
	if _, err := c.poolSizes(); err != nil {
		return c, err
	}
	if c.Slots == 0 {
		c.Slots = 4 * runtime.NumCPU()
	}
	if c.Slots < 0 || c.Slots > maxSlots {
		return c, fmt.Errorf("slots: %d is not between 1 and %d", c.Slots, maxSlots)
	}
	if c.TenantSlots < 0 {
		return c, fmt.Errorf("tenant-slots: %d is negative", c.TenantSlots)
	}
	if c.TenantSandboxes < 0 {
		return c, fmt.Errorf("tenant-sandboxes: %d is negative", c.TenantSandboxes)
	}
	if c.Reserved == 0 {
		c.Reserved = max(1, c.Slots/4)
	}
	if c.Reserved > maxSlots {
		return c, fmt.Errorf("reserved-slots: %d is more than %d", c.Reserved, maxSlots)
	}
	if c.MaxAttempts < 0 || c.MaxAttempts > 100 {
		return c, fmt.Errorf("max-attempts: %d is not between 1 and 100", c.MaxAttempts)
	}
	if c.WarmMemory == 0 {
		c.WarmMemory = halfOfMachineMemory()
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"commit-window", c.CommitWindow}, {"kill-after", c.KillAfter}, {"engine-gone", c.EngineGone}, {"beat", c.Beat}, {"warm-every", c.WarmEvery},
		{"sweep-every", c.SweepEvery}, {"pool-every", c.PoolEvery}, {"dependencies-timeout", c.DependenciesTimeout},
	} {
		if d.value < time.Millisecond || d.value > 24*time.Hour {
			return c, fmt.Errorf("%s: %s is not between 1ms and 24h", d.name, d.value)
		}
	}
	if err := c.checkModelProviders(); err != nil {
		return c, err
	}
	if c.Address == "" {
		host, err := os.Hostname()
		if err != nil {
			return c, fmt.Errorf("address: %w: set one", err)
		}
		c.Address = host
	}
	return c, nil
}

// maxSlots is the largest number of executions that one executor may run.
const maxSlots = 1024

// withDataFolder creates the data folder, and returns the config with the folder's path and with the engine's name that
// is stored in the folder.
func (c Config) withDataFolder() (Config, error) {
	if c.DataDir == "" {
		base := os.Getenv("XDG_DATA_HOME")
		if base == "" {
			home, err := os.UserHomeDir()
			if err != nil {
				return c, fmt.Errorf("data-dir: %w: set one", err)
			}
			base = filepath.Join(home, ".local", "share")
		}
		c.DataDir = filepath.Join(base, "spool")
	}
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return c, fmt.Errorf("data-dir: %w: choose another, or make this one writable", err)
	}
	if c.Engine == "" {
		var err error
		if c.Engine, err = storedEngine(c.DataDir); err != nil {
			return c, fmt.Errorf("engine: %w", err)
		}
	}
	return c, topology.CheckToken("engine", c.Engine)
}

// storedEngine returns the engine's name that is stored in the data folder dir. If there is none, it creates a name and
// stores it. If two executors create a name at the same time, both return the same one.
func storedEngine(dir string) (string, error) {
	path := filepath.Join(dir, "engine")
	raw, err := os.ReadFile(path)
	if err == nil {
		return strings.TrimSpace(string(raw)), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	tmp, err := os.CreateTemp(dir, "engine-")
	if err != nil {
		return "", err
	}
	defer os.Remove(tmp.Name()) //nolint:errcheck // a second name of the same file, or a leftover
	_, werr := tmp.WriteString(newEngineName() + "\n")
	if err := errors.Join(werr, tmp.Close()); err != nil {
		return "", err
	}
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	raw, err = os.ReadFile(path)
	return strings.TrimSpace(string(raw)), err
}

// withRunnerPath returns the config with the path of the runner's binary. If the setting Runner is empty, it looks next
// to this executable and on the PATH.
func (c Config) withRunnerPath() (Config, error) {
	if c.Runner != "" {
		if info, err := os.Stat(c.Runner); err != nil {
			return c, fmt.Errorf("runner: %w", err)
		} else if info.IsDir() && c.Sandbox != ProviderLocal {
			return c, nil // one binary for each of an engine's architectures
		} else if info.IsDir() || info.Mode()&0o111 == 0 {
			return c, fmt.Errorf("runner: %s is not a program", c.Runner)
		}
		return c, nil
	}
	self, err := os.Executable()
	if err != nil {
		return c, fmt.Errorf("runner: %w", err)
	}
	c.Runner = filepath.Join(filepath.Dir(self), "runner")
	if info, err := os.Stat(c.Runner); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
		return c, nil
	}
	if c.Runner, err = exec.LookPath("runner"); err != nil {
		return c, fmt.Errorf("runner: no binary beside %s, and none on the PATH: name one with --runner or SPOOL_RUNNER", self)
	}
	return c, nil
}

// halfOfMachineMemory returns half of the machine's memory in bytes, or 2 GiB if the size of the memory is unknown.
func halfOfMachineMemory() int64 {
	const unknown = 2 << 30
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return unknown
	}
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "MemTotal:" {
			continue
		}
		kib, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			return unknown
		}
		return kib * 1024 / 2
	}
	return unknown
}
