package executor

import (
	"cmp"
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
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/docker"
)

// Config has the service's settings. The zero value of a field means its default.
type Config struct {
	DataDir string `default:"" env:"SPOOL_DATA_DIR" help:"Folder of local sandboxes and of what the engine is called; empty means the user's data folder."`
	Runner  string `default:"" env:"SPOOL_RUNNER" help:"Path of the runner's binary; for Docker and Modal also of a folder with runner-linux-amd64 and runner-linux-arm64. Empty means runner beside this one, else on the PATH."`
	Engine  string `default:"" env:"SPOOL_ENGINE" help:"Name of what holds the sandboxes, shared by the executors of one machine; empty means the one kept in the data folder."`
	Address string `default:"" env:"SPOOL_ADDRESS" help:"Where people find this executor; it is shown in its lease. Empty means the host's name."`

	Sandbox        string   `default:"local" env:"SPOOL_SANDBOX" help:"What sandboxes are made of: local (processes of this machine, for development), docker or modal (machines of modal.com)."`
	HostPaths      []string `name:"host-paths" default:"" env:"SPOOL_HOST_PATHS" help:"Folders of this machine in which, and below which, local sandboxes may work when a session names one; / for all. Empty or none means nowhere, but for spool up on loopback, where empty means everywhere. Session services need the same value, and see the same folders."`
	DockerHost     string   `default:"" env:"SPOOL_DOCKER_HOST" help:"Where the Docker engine listens, as DOCKER_HOST writes it; empty means what DOCKER_HOST says, else the local socket."`
	SandboxImage   string   `default:"spool/sandbox:latest" env:"SPOOL_SANDBOX_IMAGE" help:"Image of Docker sandboxes, unless the session says otherwise."`
	SandboxImages  []string `default:"" env:"SPOOL_SANDBOX_IMAGES" help:"Other images that tenants may name for Docker sandboxes and for MCP servers in containers: name:tag, name@sha256:…, name (every tag), registry/folder/* (every name below), * for all. Empty means sandbox-image alone. Session services need the same value."`
	PullImages     bool     `name:"sandbox-images-pull" default:"false" env:"SPOOL_SANDBOX_IMAGES_PULL" help:"Pull such an image when it is not on the engine, which connects to the registry that its name has. Otherwise it has to be there; sandbox-image and egress-image are pulled in any case."`
	SandboxRuntime string   `default:"" env:"SPOOL_SANDBOX_RUNTIME" help:"Runtime of Docker sandboxes, runsc for example; empty means the engine's own default."`
	SandboxMemory  int64    `default:"2147483648" env:"SPOOL_SANDBOX_MEMORY" help:"Bytes of memory that a Docker sandbox may take; a Modal sandbox has as many reserved."`
	SandboxCPUs    float64  `name:"sandbox-cpus" default:"2" env:"SPOOL_SANDBOX_CPUS" help:"Processors' worth of time that a Docker sandbox may take; a Modal sandbox has as many physical cores reserved."`
	SandboxPIDs    int64    `name:"sandbox-pids" default:"512" env:"SPOOL_SANDBOX_PIDS" help:"Processes and threads that a Docker sandbox may have."`
	SandboxDisk    int64    `default:"10737418240" env:"SPOOL_SANDBOX_DISK" help:"Bytes that a Docker sandbox's workspace and its agent's records may take together; its runner ends the turn at the limit. Each of both has a hard limit a little above it, see sandbox-disk-limit."`
	SandboxFiles   int64    `default:"1000000" env:"SPOOL_SANDBOX_FILES" help:"Files and folders that a Docker sandbox's workspace may have, and as many its agent's records; not more than one for 4096 bytes of sandbox-disk. Enforced where sandbox-disk-limit is loop."`
	DiskLimit      string   `name:"sandbox-disk-limit" default:"auto" env:"SPOOL_SANDBOX_DISK_LIMIT" help:"What enforces the disk limits of Docker sandboxes, and of installed dependencies: loop (each volume is a file system in a file, on a loop device of the engine's machine; sandbox-image has to have e2fsprogs), quota (project quota of the engine's file system; files are not limited) or watch (nothing: the runner ends a turn after it wrote too much). auto is the first of these that works, which the executor tries at its start. Volumes stay what they were made as."`
	SandboxTmp     int64    `default:"536870912" env:"SPOOL_SANDBOX_TMP" help:"Bytes of a Docker sandbox's /tmp, and of its home folder; they are in memory."`
	SandboxUIDs    string   `name:"sandbox-uids" default:"70000-99999" env:"SPOOL_SANDBOX_UIDS" help:"User numbers of Docker sandboxes and of MCP servers in containers, FIRST-LAST: one for each, and its group. A kept workspace keeps its number. No account of the engine's machine may have one of them. An engine that maps users (rootless, userns-remap) needs a range below 65534."`

	ModalTokenID         string        `name:"modal-token-id" default:"" env:"SPOOL_MODAL_TOKEN_ID" help:"Id of the token with which the executor makes sandboxes on Modal. Required with sandbox modal."`
	ModalTokenSecret     string        `name:"modal-token-secret" default:"" env:"SPOOL_MODAL_TOKEN_SECRET" help:"That token's secret. Required with sandbox modal, unless modal-token-secret-file has it."`
	ModalTokenSecretFile string        `name:"modal-token-secret-file" default:"" env:"SPOOL_MODAL_TOKEN_SECRET_FILE" help:"File with that secret, in place of modal-token-secret."`
	ModalEnvironment     string        `name:"modal-environment" default:"" env:"SPOOL_MODAL_ENVIRONMENT" help:"Environment of the Modal workspace in which sandboxes are made; empty means the workspace's default."`
	ModalApp             string        `name:"modal-app" default:"spool" env:"SPOOL_MODAL_APP" help:"Modal app that sandboxes belong to, which is made if it is not there. Executors with the same workspace, environment and app share their sandboxes: they are one engine, called modal- and the app unless engine is set."`
	ModalRegion          string        `name:"modal-region" default:"" env:"SPOOL_MODAL_REGION" help:"Region in which Modal sandboxes run, us-east for example; empty leaves it to Modal."`
	ModalImage           string        `name:"modal-image" default:"" env:"SPOOL_MODAL_IMAGE" help:"Image of Modal sandboxes, unless the session says otherwise: a reference in a registry from which Modal can pull. Required with sandbox modal."`
	ModalServerURL       string        `name:"modal-server-url" default:"" env:"SPOOL_MODAL_SERVER_URL" help:"Address of Modal's API, https://host:port; empty means Modal itself."`
	ModalTimeout         time.Duration `name:"modal-timeout" default:"24h" env:"SPOOL_MODAL_TIMEOUT" help:"How long a Modal sandbox may live, from 10m to 24h, which is the most that Modal gives. Once four fifths of it are over, an idle sandbox is ended with a snapshot, and no turn begins in it. A turn that runs at its end loses its sandbox and goes on in another one, with the files of the last snapshot."`
	ModalSandboxPrice    float64       `name:"modal-sandbox-price" default:"0" env:"SPOOL_MODAL_SANDBOX_PRICE" help:"US dollars that a second of a Modal sandbox costs, by the prices of Modal for sandbox-cpus and sandbox-memory; it is recorded for each session and counts against budgets of dollars. 0 means unknown: the time alone is recorded."`

	EgressSockets   string `default:"" env:"SPOOL_EGRESS_SOCKETS" help:"Docker volume, or folder of the engine's machine, with the egress proxy's socket for sandboxes; empty, and without egress-image, means that Docker sandboxes have no way out, to models neither."`
	EgressAdmin     string `default:"" env:"SPOOL_EGRESS_ADMIN" help:"Path of the egress proxy's admin socket."`
	EgressServer    string `default:"" env:"SPOOL_EGRESS_SERVER" help:"Address (host:port) at which Modal sandboxes reach the egress proxy's TLS port: its SPOOL_EGRESS_LISTEN_TLS, as the internet sees it. They reach nothing else. Its certificate has to be for this host. Required with sandbox modal."`
	EgressAuthority string `default:"" env:"SPOOL_EGRESS_AUTHORITY" help:"PEM file of the authority that signed that certificate: sandboxes trust it alone. It is read when the executor starts. Required with sandbox modal."`
	EgressImage     string `default:"" env:"SPOOL_EGRESS_IMAGE" help:"Image of an egress proxy that executors start on the Docker engine, a remote one for example, as the container spool-egress-ENGINE with their own models' keys and base URLs; instead of egress-sockets and egress-admin. It outlives executors and keeps its settings until docker stop and docker rm end it there; then the next use makes it again. Empty for none."`
	EgressNetwork   string `default:"bridge" env:"SPOOL_EGRESS_NETWORK" help:"Docker network by which that container reaches models and other hosts."`

	NPMRegistry         string        `name:"npm-registry" default:"" env:"SPOOL_NPM_REGISTRY" help:"Registry of the npm packages that agents depend on; empty means https://registry.npmjs.org, and for local sandboxes what this machine's npm is set to. One of your own network, or one that wants a credential, is a host of SPOOL_EGRESS_HOSTS, at the root of which it has to be, and its address here that of the route, http://127.0.0.1:7070/NAME."`
	PIPIndexURL         string        `name:"pip-index-url" default:"" env:"SPOOL_PIP_INDEX_URL" help:"Index of the Python packages that agents depend on; empty means https://pypi.org/simple, and for local sandboxes what this machine's pip is set to. Otherwise as npm-registry; one behind a route names its files by relative addresses."`
	DependenciesHosts   []string      `default:"" env:"SPOOL_DEPENDENCIES_HOSTS" help:"More hosts that installations of dependencies reach in Docker, beside both registries and, for PyPI, files.pythonhosted.org: from which packages fetch programs, for example; host, host:port or *.host."`
	DependenciesTimeout time.Duration `default:"10m" env:"SPOOL_DEPENDENCIES_TIMEOUT" help:"How long the installation of an agent's dependencies may take."`
	DependenciesSize    int64         `default:"2147483648" env:"SPOOL_DEPENDENCIES_SIZE" help:"Bytes that an agent's dependencies may take on the engine."`
	DependenciesKeep    time.Duration `default:"168h" env:"SPOOL_DEPENDENCIES_KEEP" help:"How long installed dependencies stay on the engine when no sandbox uses them."`

	Pool      []string      `default:"" env:"SPOOL_POOL" help:"Docker sandboxes to keep ready with their agent started, by architecture: claude-code=2,codex=1."`
	PoolEvery time.Duration `default:"5s" env:"SPOOL_POOL_EVERY" help:"How often the pool is filled, beside whenever one was taken from it."`

	Slots           int   `default:"0" env:"SPOOL_SLOTS" help:"Executions at once; 0 means 4 for each core."`
	Reserved        int   `name:"reserved-slots" default:"0" env:"SPOOL_RESERVED_SLOTS" help:"Further executions, only of tenants that run none on this executor, so that a tenant whose executions take all slots does not hold up another's; 0 means a quarter of the slots and at least one, negative none."`
	TenantSlots     int   `name:"tenant-slots" default:"0" env:"SPOOL_TENANT_SLOTS" help:"Executions of one tenant at once, over all executors, unless the tenant has a limit of its own; others of it wait. 0 means no limit. Every executor needs the same value."`
	TenantSandboxes int   `name:"tenant-sandboxes" default:"0" env:"SPOOL_TENANT_SANDBOXES" help:"Sandboxes of one tenant at once on an engine, unless the tenant has a limit of its own. Past it the one that has been idle for the longest ends, with a snapshot. 0 means no limit."`
	WarmMemory      int64 `default:"0" env:"SPOOL_WARM_MEMORY" help:"Bytes that agents may take together before resting ones are ended, longest rested first; 0 means half of the machine's memory, negative that no agent rests."`

	CommitWindow          time.Duration `default:"20ms" env:"SPOOL_COMMIT_WINDOW" help:"Least time from one commit of an execution to the next."`
	StoreReserve          int           `default:"10" env:"SPOOL_STORE_RESERVE" help:"Percent of what the streams of NATS may take on disk that is kept for ends, controls and deletions: past it executions are not started, and the output of those that run waits. Gateways and session services need the same value."`
	OutputEventsPerSecond int           `default:"200" env:"SPOOL_OUTPUT_EVENTS_PER_SECOND" help:"Events a second that an agent may write; it may be ahead by 10 s of them, and has to wait past that."`
	OutputBytesPerSecond  int           `default:"2097152" env:"SPOOL_OUTPUT_BYTES_PER_SECOND" help:"Bytes a second of these events and of text in flight, likewise."`
	OutputEvents          int64         `default:"100000" env:"SPOOL_OUTPUT_EVENTS" help:"Events that an agent may write in one execution, which ends with OUTPUT_LIMIT past it; an agent's limits may set less."`
	OutputBytes           int64         `default:"268435456" env:"SPOOL_OUTPUT_BYTES" help:"Bytes of these events, likewise: their text and data, and 256 for each."`
	SessionEvents         int64         `default:"2000000" env:"SPOOL_SESSION_EVENTS" help:"Events that agents may write in all executions of a session; past it an execution ends with OUTPUT_LIMIT."`
	SessionBytes          int64         `default:"4294967296" env:"SPOOL_SESSION_BYTES" help:"Bytes of these events, likewise."`

	KillAfter   time.Duration `default:"10s" env:"SPOOL_KILL_AFTER" help:"How long a turn that has to end may go on before its process is ended, and then again before its sandbox is."`
	MaxAttempts int           `default:"3" env:"SPOOL_MAX_ATTEMPTS" help:"How often an execution is started when its sandbox is lost, unless its agent has retries."`
	EngineGone  time.Duration `default:"30s" env:"SPOOL_ENGINE_GONE" help:"How long an engine may be without a live executor before others of its provider take its sessions over; as long is an engine waited for that does not answer, or its egress proxy."`
	Beat        time.Duration `default:"1s" env:"SPOOL_BEAT" help:"How often a running execution's controls and limits are looked at, hints apart."`
	WarmEvery   time.Duration `default:"5s" env:"SPOOL_WARM_EVERY" help:"How often the agents' memory is measured."`
	SweepEvery  time.Duration `default:"1m" env:"SPOOL_SWEEP_EVERY" help:"How often sandboxes that are over are looked for."`

	SecretsKey     string `default:"" env:"SPOOL_SECRETS_KEY" help:"Private keys (AGE-SECRET-KEY-1…, one a line) that open secrets; several while keys are rotated. Empty, and without secrets-key-file, means that executions with secrets fail."`
	SecretsKeyFile string `default:"" env:"SPOOL_SECRETS_KEY_FILE" help:"File with those keys, in place of secrets-key."`

	StopSandboxes bool `default:"false" env:"SPOOL_STOP_SANDBOXES" help:"End the engine's sandboxes when the last of its executors stops; for stacks that go as a whole. Otherwise they stay for the next executor."`

	ModelProvider  string   `default:"" env:"SPOOL_MODEL_PROVIDER" help:"Model provider where neither the session nor its agent names one: anthropic, openai or nvidia; an architecture that cannot use it has its own default. Empty means the first of openai and nvidia that is set up (claude-code: anthropic), but nvidia, if it is set up, for a model whose name has a slash."`
	ModelProviders []string `default:"" env:"SPOOL_MODEL_PROVIDERS" help:"Model providers that are set up, for executors whose egress proxy has the keys; empty means those of which this executor has a key or an address. It matters only where none is named."`

	// Private are folders of the installation itself, in which no sandbox may work.
	Private []string `kong:"-"`

	AnthropicKey     string `name:"anthropic-api-key" default:"" env:"ANTHROPIC_API_KEY" help:"Key for Anthropic's models."`
	AnthropicBaseURL string `name:"anthropic-base-url" default:"" env:"SPOOL_ANTHROPIC_BASE_URL" help:"Where Anthropic's API is, without /v1; empty means Anthropic itself."`
	AnthropicModel   string `name:"anthropic-model" default:"" env:"SPOOL_ANTHROPIC_MODEL" help:"Model of architecture claude-code where the session names none; empty means the CLI's default."`
	OpenAIKey        string `name:"openai-api-key" default:"" env:"OPENAI_API_KEY" help:"Key for an OpenAI-compatible API."`
	OpenAIBaseURL    string `name:"openai-base-url" default:"" env:"SPOOL_OPENAI_BASE_URL" help:"Where that API is, with /v1; empty means OpenAI itself."`
	OpenAIModel      string `name:"openai-model" default:"" env:"SPOOL_OPENAI_MODEL" help:"Model of the architectures spool, codex and opencode where the session names none; empty means the agent's default."`
	NVIDIAKey        string `name:"nvidia-api-key" default:"" env:"NVIDIA_API_KEY" help:"Key for NVIDIA's API."`
	NVIDIABaseURL    string `name:"nvidia-base-url" default:"https://integrate.api.nvidia.com/v1" env:"SPOOL_NVIDIA_BASE_URL" help:"Where NVIDIA's API is, with /v1."`
	NVIDIAModel      string `name:"nvidia-model" default:"meta/llama-3.3-70b-instruct" env:"SPOOL_NVIDIA_MODEL" help:"Model of architecture spool where the session names none and NVIDIA's API is used."`
}

// nvidiaURL is the address of NVIDIA's own API.
const nvidiaURL = "https://integrate.api.nvidia.com/v1"

// The sandbox providers.
const (
	Local  = "local"
	Docker = "docker"
	Modal  = "modal"
)

// DiskWatch is the DiskLimit that enforces nothing.
const DiskWatch = docker.DiskWatch

// withDefaults returns the config with every default filled in, or an error if a setting is invalid.
func (c Config) withDefaults() (Config, error) {
	if c.Sandbox == "" {
		c.Sandbox = Local
	}
	if c.Sandbox != Local && c.Sandbox != Docker && c.Sandbox != Modal {
		return c, fmt.Errorf("sandbox: %q is none of %s, %s and %s", c.Sandbox, Local, Docker, Modal)
	}
	if c.SandboxImage == "" {
		c.SandboxImage = "spool/sandbox:latest"
	}
	if _, err := imagepolicy.Parse("sandbox-images", c.SandboxImages); err != nil {
		return c, err
	}
	users, err := docker.ParseUsers(c.SandboxUIDs)
	if err != nil {
		return c, fmt.Errorf("sandbox-uids: %w", err)
	}
	c.SandboxUIDs = users.String()
	if c.StoreReserve, err = storage.ReserveOf(c.StoreReserve); err != nil {
		return c, err
	}
	if c.HostPaths, err = hostpath.ParseRoots("host-paths", c.HostPaths); err != nil {
		return c, err
	}
	for _, n := range []struct {
		name  string
		value *int64
		unset int64
	}{
		{"sandbox-memory", &c.SandboxMemory, 2 << 30}, {"sandbox-pids", &c.SandboxPIDs, 512},
		{"sandbox-disk", &c.SandboxDisk, 10 << 30}, {"sandbox-tmp", &c.SandboxTmp, 512 << 20},
		{"sandbox-files", &c.SandboxFiles, 1_000_000},
		{"output-events", &c.OutputEvents, 100_000}, {"output-bytes", &c.OutputBytes, 256 << 20},
		{"session-events", &c.SessionEvents, 2_000_000}, {"session-bytes", &c.SessionBytes, 4 << 30},
	} {
		if *n.value == 0 {
			*n.value = n.unset
		}
		if *n.value < 0 {
			return c, fmt.Errorf("%s: %d is negative", n.name, *n.value)
		}
	}
	c.DiskLimit = cmp.Or(c.DiskLimit, docker.DiskAuto)
	if !slices.Contains(docker.DiskLimits(), c.DiskLimit) {
		return c, fmt.Errorf("sandbox-disk-limit: %q is none of %s", c.DiskLimit, strings.Join(docker.DiskLimits(), ", "))
	}
	for _, n := range []struct {
		name  string
		value *int
		unset int
	}{{"output-events-per-second", &c.OutputEventsPerSecond, 200}, {"output-bytes-per-second", &c.OutputBytesPerSecond, 2 << 20}} {
		if *n.value == 0 {
			*n.value = n.unset
		}
		if *n.value < 0 || *n.value > math.MaxInt32 {
			return c, fmt.Errorf("%s: %d is not between 1 and %d", n.name, *n.value, math.MaxInt32)
		}
	}
	if c.SandboxCPUs == 0 {
		c.SandboxCPUs = 2
	}
	if c.SandboxCPUs < 0 {
		return c, fmt.Errorf("sandbox-cpus: %g is negative", c.SandboxCPUs)
	}
	if c.EgressNetwork == "" {
		c.EgressNetwork = "bridge"
	}
	if err := c.checkEgress(); err != nil {
		return c, err
	}
	if c, err = c.checkModal(); err != nil {
		return c, err
	}
	if err := c.checkDependencies(); err != nil {
		return c, err
	}
	c.Pool = slices.DeleteFunc(c.Pool, func(entry string) bool { return entry == "" })
	if len(c.Pool) == 0 {
		c.Pool = nil
	}
	if _, err := c.pool(); err != nil {
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
	if c.MaxAttempts == 0 {
		c.MaxAttempts = 3
	}
	if c.MaxAttempts < 0 || c.MaxAttempts > 100 {
		return c, fmt.Errorf("max-attempts: %d is not between 1 and 100", c.MaxAttempts)
	}
	if c.WarmMemory == 0 {
		c.WarmMemory = halfOfMemory()
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		unset time.Duration
	}{
		{"commit-window", &c.CommitWindow, 20 * time.Millisecond},
		{"kill-after", &c.KillAfter, 10 * time.Second},
		{"engine-gone", &c.EngineGone, 30 * time.Second},
		{"beat", &c.Beat, time.Second},
		{"warm-every", &c.WarmEvery, 5 * time.Second},
		{"sweep-every", &c.SweepEvery, time.Minute},
		{"pool-every", &c.PoolEvery, 5 * time.Second},
		{"dependencies-timeout", &c.DependenciesTimeout, 10 * time.Minute},
	} {
		if *d.value == 0 {
			*d.value = d.unset
		}
		if *d.value < time.Millisecond || *d.value > 24*time.Hour {
			return c, fmt.Errorf("%s: %s is not between 1ms and 24h", d.name, *d.value)
		}
	}
	if err := c.checkModelProviders(); err != nil {
		return c, err
	}
	if c.NVIDIABaseURL == "" {
		c.NVIDIABaseURL = nvidiaURL
	}
	if c.NVIDIAModel == "" {
		c.NVIDIAModel = "meta/llama-3.3-70b-instruct"
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

// withFolder creates the data folder and fills in the settings that are stored there.
func (c Config) withFolder() (Config, error) {
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
		if c.Engine, err = keptEngine(c.DataDir); err != nil {
			return c, fmt.Errorf("engine: %w", err)
		}
	}
	return c, topology.CheckToken("engine", c.Engine)
}

// keptEngine reads the engine's name from the data folder, or creates one. Of two executors that start at once, the
// second reads the name that the first created.
func keptEngine(dir string) (string, error) {
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
	_, werr := tmp.WriteString(newEngine() + "\n")
	if err := errors.Join(werr, tmp.Close()); err != nil {
		return "", err
	}
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	raw, err = os.ReadFile(path)
	return strings.TrimSpace(string(raw)), err
}

// withRunner finds the runner's binary.
func (c Config) withRunner() (Config, error) {
	if c.Runner != "" {
		if info, err := os.Stat(c.Runner); err != nil {
			return c, fmt.Errorf("runner: %w", err)
		} else if info.IsDir() && c.Sandbox != Local {
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

// halfOfMemory returns half of the machine's memory in bytes, 2 GiB if that is unknown.
func halfOfMemory() int64 {
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
