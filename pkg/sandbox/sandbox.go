// Package sandbox defines the interface between an executor and a sandbox provider. Every provider passes the
// conformance suite in sandboxtest.
package sandbox

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spoolhq/spool/pkg/dependency"
)

// Errors that a caller may test for.
var (
	// ErrNotFound is returned for a sandbox or file that does not exist.
	ErrNotFound = errors.New("not found in the sandbox provider")
	// ErrOutsideWorkspace is returned for a path that leaves the workspace through "..", a symlink or a sibling folder.
	ErrOutsideWorkspace = errors.New("path is outside the workspace")
)

// Error is a failure of a sandbox provider, with the code that the event sandbox_failed states.
type Error struct {
	Code    string // one of the codes below
	Message string // one sentence that includes the remedy
	Err     error  // the cause; may be nil
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.Err }

// The error codes.
const (
	CodeEngineUnavailable  = "ENGINE_UNAVAILABLE"  // the engine is not available
	CodeEgressUnavailable  = "EGRESS_UNAVAILABLE"  // the engine's egress proxy does not respond: the sandbox would have no egress
	CodeImageNotFound      = "IMAGE_NOT_FOUND"     // the image does not exist locally and cannot be pulled
	CodeImageNotAllowed    = "IMAGE_NOT_ALLOWED"   // the operator's list does not contain the image
	CodeImageUnsupported   = "IMAGE_UNSUPPORTED"   // there is no runner for the image's architecture
	CodeDiskFull           = "DISK_FULL"           // the engine has no disk space left
	CodeRunnerSilent       = "RUNNER_SILENT"       // the sandbox was created, but its runner does not respond
	CodeMCPServerFailed    = "MCP_SERVER_FAILED"   // the container of an MCP server was created, but the server does not start
	CodeHostPathRefused    = "HOST_PATH_REFUSED"   // the folder in which the session works does not exist or is not allowed
	CodeQuotaExceeded      = "QUOTA_EXCEEDED"      // the account with the provider has no quota for another sandbox
	CodeCredentialsRefused = "CREDENTIALS_REFUSED" // the provider rejects the installation's token
	CodeRegionUnknown      = "REGION_UNKNOWN"      // the provider does not have the region
	CodeSandboxFailed      = "SANDBOX_FAILED"      // any other failure

	CodeDependenciesFailed      = "DEPENDENCIES_FAILED"      // an agent's dependencies could not be installed
	CodeDependenciesUnavailable = "DEPENDENCIES_UNAVAILABLE" // dependencies cannot be installed here
)

// Labels identify the owner of a sandbox. The executor's sweep compares them with the log. A sandbox of the warm
// pool has no tenant and no session until it is adopted.
type Labels struct {
	Tenant   string `json:"tenant"`
	Session  string `json:"session"`
	Engine   string `json:"engine"`
	Epoch    uint64 `json:"epoch"`
	Executor string `json:"executor,omitempty"` // for a pooled sandbox: the executor that owns the pool
}

// Limits are the resource limits of a sandbox. 0 means the provider's default.
type Limits struct {
	MemoryBytes int64   // resident memory of all processes together
	CPUs        float64 // CPU time, in number of processors
	PIDs        int64   // processes and threads
	DiskBytes   int64   // workspace and the agent's records; the runner enforces it
}

// Spec describes the sandbox that Provider.Create creates.
type Spec struct {
	ID     string // sbx_…, chosen by the caller; creating the same id again returns the existing sandbox and restarts its runner if it has ended
	Labels Labels
	Image  string // "" for the provider's default; ignored by providers without images
	Limits Limits
	// Workspace is the id of a lost sandbox whose workspace and agent records the new sandbox takes over if they
	// still exist; "" for an empty workspace. Providers that keep workspaces by session ignore it.
	Workspace string
	// HostPath is a folder of the provider's machine to use as the workspace; "" for a workspace of the sandbox's
	// own. The provider never removes it. Only local sandboxes support it; other providers return an error.
	HostPath string
	// Servers is the maximum number of MCP server containers of the sandbox; see ServerHost.
	Servers int
	// EgressToken authenticates the sandbox to the egress proxy; "" for a sandbox without egress.
	EgressToken string
	// Layer is a read-only layer of packages in the sandbox, as returned by a LayerCreator; "" for none.
	Layer string
	// LayerTarget is the layer into which this sandbox installs packages; "" for none. Only a LayerCreator sets it.
	LayerTarget string
}

// Info describes a sandbox that Provider.List returns.
type Info struct {
	ID      string
	Labels  Labels
	Created time.Time
	Running bool // its runner is alive
	Paused  bool
}

// Pauser is implemented by providers that can pause a sandbox with all of its memory.
type Pauser interface {
	Pause(ctx context.Context, id string) error  // a paused sandbox is not an error
	Resume(ctx context.Context, id string) error // a running sandbox is not an error
}

// Adopter is implemented by providers whose sandboxes can be created before their session is known.
type Adopter interface {
	// Adopt assigns a pooled sandbox to a session. From then on List returns the new labels.
	Adopt(ctx context.Context, id string, labels Labels) error
}

// LayerCreator is implemented by providers that can install packages once for many sandboxes.
type LayerCreator interface {
	// Layer returns the layer with the given packages for Spec.Layer, and creates it if it does not exist. An
	// existing layer needs no access to a registry. Concurrent callers, also in other executors, wait for the
	// caller that creates the layer. An *Error with CodeDependenciesFailed contains the end of the installer's
	// output.
	Layer(ctx context.Context, want LayerPackages, use LayerBuilder) (string, error)
}

// LayerPackages are the packages that a layer contains.
type LayerPackages struct {
	dependency.PackageSet
	Image string // image of the sandboxes that use the layer; "" for the provider's default
}

// LayerBuilder provides what a LayerCreator needs to create a layer.
type LayerBuilder struct {
	// Begun is called when the layer does not exist, before the LayerCreator creates it or waits for it. It is called at
	// most once, from any goroutine. It may be nil.
	Begun func()
	// Build creates a sandbox from spec, in which it sets ID, Labels and EgressToken. The sandbox belongs to no
	// session and can reach only package registries. Build calls work with the sandbox and terminates it before it
	// returns. Build is nil if there is no egress.
	Build func(ctx context.Context, spec Spec, work func(context.Context, Sandbox) error) error
}

// WorkspaceKeeper is implemented by providers that keep the workspace of a session after its sandbox has ended.
type WorkspaceKeeper interface {
	// ListWorkspaces returns the labels of all kept workspaces.
	ListWorkspaces(ctx context.Context) ([]Labels, error)
	// RemoveWorkspace removes a workspace. A workspace that does not exist is not an error.
	RemoveWorkspace(ctx context.Context, l Labels) error
}

// ServerHost is implemented by providers that run MCP servers in separate containers next to a sandbox. These
// containers are paused and terminated together with the sandbox.
type ServerHost interface {
	// StartServer ensures that server n of a sandbox runs; n counts from 0 and is less than Servers of its Spec. It
	// replaces a server that differs from s. It returns the path, inside the sandbox, of the Unix socket of the
	// server; the path changes when the container is replaced. It returns ErrNotFound if the sandbox does not exist
	// or has no room for the server.
	StartServer(ctx context.Context, id string, n int, s MCPServer) (socket string, err error)
}

// MCPServer is an MCP server that runs in a separate container and speaks stdio. Each connection sends its variables
// and the arguments that replace those of the image.
type MCPServer struct {
	Image  string
	Egress bool // it may use the sandbox's egress, restricted to allowed hosts
}

// WorkspaceReporter is implemented by sandboxes that report whether they were created with the workspace that their
// Spec requested. Sandboxes of providers that keep workspaces by session do not implement it.
type WorkspaceReporter interface {
	// HasWorkspace reports whether the workspace and the agent's records are the requested ones; otherwise they are new and
	// empty.
	HasWorkspace() bool
}

// Provider creates, finds and ends the sandboxes of one engine.
type Provider interface {
	// Create creates a sandbox, starts its runner and returns when the runner responds. The workspace is empty, or
	// the session's own if the provider keeps it.
	Create(ctx context.Context, spec Spec) (Sandbox, error)
	// Attach returns a running sandbox by id, or ErrNotFound if the sandbox or its runner has ended.
	Attach(ctx context.Context, id string) (Sandbox, error)
	// List returns every sandbox of the engine, including those whose runner has ended.
	List(ctx context.Context) ([]Info, error)
	// Terminate ends every process of the sandbox and removes it, with wipe also its workspace. A sandbox that does
	// not exist is not an error.
	Terminate(ctx context.Context, id string, wipe bool) error
}

// Sandbox is a running sandbox.
type Sandbox interface {
	ID() string
	// Secret returns the secret with which executors authenticate to the sandbox's runner (see runner.OpenSealedStream). Create
	// sends it to the runner before any agent runs. It is "" for a sandbox that an executor of a release without
	// secrets created.
	Secret() string
	// Exec starts a command inside the sandbox and returns at once. ctx limits only the start. Args[0] "runner"
	// means the runner's own binary.
	Exec(ctx context.Context, cmd Command) (Process, error)
	// Running reports whether the sandbox's runner is alive.
	Running(ctx context.Context) (bool, error)
	// Files returns the workspace.
	Files() Files
}

// Files reads and writes the files of a sandbox's workspace. Paths are relative and slash-separated.
type Files interface {
	// Put writes a file and creates its parent folders. It replaces an existing file atomically.
	Put(ctx context.Context, path string, content io.Reader) error
	// Get opens a file. It returns ErrNotFound if the file does not exist, fs.ErrPermission if its mode forbids
	// reading, and fs.ErrInvalid if it is not a regular file.
	Get(ctx context.Context, path string) (io.ReadCloser, error)
	// List returns the files below a folder ("" for all), sorted by path.
	List(ctx context.Context, dir string) ([]File, error)
	// Remove removes a file, or a folder with everything below it. It returns ErrNotFound if it does not exist.
	Remove(ctx context.Context, path string) error
}

// File is a file or a folder in a listing of a sandbox's workspace.
type File struct {
	Path    string
	Size    int64 // bytes
	ModTime time.Time
	Dir     bool
}

// Command is a program to run inside a sandbox.
type Command struct {
	Args []string
	Dir  string            // "" means the workspace
	Env  map[string]string // added to the sandbox's own variables
}

// Process is a running command in a sandbox.
type Process interface {
	Stdin() io.WriteCloser
	Stdout() io.Reader
	Stderr() io.Reader
	// Wait returns the exit code, or -1 if a signal ended the process.
	Wait() (int, error)
	// Kill ends the command at once and closes its streams.
	Kill() error
}
