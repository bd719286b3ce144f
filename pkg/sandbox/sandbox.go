// Package sandbox is what an executor asks of a place where agents run. The
// suite in sandboxtest holds every provider to it.
package sandbox

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spoolhq/spool/pkg/dependency"
)

// Errors that a caller may branch on.
var (
	// ErrNotFound is a sandbox or file that is not there.
	ErrNotFound = errors.New("not found in the sandbox provider")
	// ErrOutside is a path that leaves the workspace, by .., by a symlink or as a sibling.
	ErrOutside = errors.New("path is outside the workspace")
)

// Error is a failure with a code that ends up in sandbox_failed.
type Error struct {
	Code    string // see the codes
	Message string // one sentence with the remedy
	Err     error  // the cause, may be nil
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.Err }

// The codes of errors.
const (
	CodeEngineUnavailable  = "ENGINE_UNAVAILABLE"  // there is no engine, or it went away
	CodeEgressUnavailable  = "EGRESS_UNAVAILABLE"  // the engine's egress proxy does not answer: there is no way out
	CodeImageNotFound      = "IMAGE_NOT_FOUND"     // the image is not there and cannot be pulled
	CodeImageNotAllowed    = "IMAGE_NOT_ALLOWED"   // the operator's list does not have the image
	CodeImageUnsupported   = "IMAGE_UNSUPPORTED"   // its architecture is one for which there is no runner
	CodeDiskFull           = "DISK_FULL"           // the engine has no room
	CodeRunnerSilent       = "RUNNER_SILENT"       // the sandbox was made, its runner does not answer
	CodeServerFailed       = "MCP_SERVER_FAILED"   // a container beside the sandbox was made, its MCP server does not start
	CodeHostPath           = "HOST_PATH_REFUSED"   // the folder in which the session works is gone, or is not allowed
	CodeQuotaExceeded      = "QUOTA_EXCEEDED"      // the account with the provider has no room for another sandbox
	CodeCredentialsRefused = "CREDENTIALS_REFUSED" // the provider does not accept the installation's token
	CodeRegionUnknown      = "REGION_UNKNOWN"      // the provider has no such region
	CodeSandboxFailed      = "SANDBOX_FAILED"      // anything else

	CodeDependenciesFailed      = "DEPENDENCIES_FAILED"      // what an agent depends on could not be installed
	CodeDependenciesUnavailable = "DEPENDENCIES_UNAVAILABLE" // nothing can be installed here
)

// Labels say whose a sandbox is; the sweep compares them with the log. A sandbox
// of the warm pool has no tenant and no session until it is adopted.
type Labels struct {
	Tenant   string `json:"tenant"`
	Session  string `json:"session"`
	Engine   string `json:"engine"`
	Epoch    uint64 `json:"epoch"`
	Executor string `json:"executor,omitempty"` // of a pooled one: whose pool it is in
}

// Limits of a sandbox; 0 means the provider's default.
type Limits struct {
	MemoryBytes int64   // resident, of all its processes together
	CPUs        float64 // as many processors' worth of time
	PIDs        int64   // processes and threads
	DiskBytes   int64   // workspace and the agent's records; the runner watches it
}

// Spec is what a sandbox is made from.
type Spec struct {
	ID     string // sbx_…, minted by the caller: creating it again finds the first, and starts its runner should it have ended
	Labels Labels
	Image  string // "" for the provider's default; providers without images ignore it
	Limits Limits
	// Workspace is the id of a sandbox that was lost, whose workspace and agent's
	// records this one takes over if they are still there; "" for new ones.
	// Providers that keep them by session ignore it.
	Workspace string
	// HostPath is a folder of the provider's machine that is the workspace; "" for
	// a workspace of the sandbox's own. The provider never removes it. Only local
	// sandboxes have one; others refuse it.
	HostPath string
	// Servers is how many containers of MCP servers the sandbox can have beside it; see Companion.
	Servers int
	// EgressToken is what the sandbox names itself by at the egress proxy; "" for no way out.
	EgressToken string
	// Layer is of packages that the sandbox sees and cannot change, as a Layerer
	// gave it; "" for none.
	Layer string
	// Fills is a layer that the sandbox is made for, to put packages into; "" for
	// none. Only a Layerer asks for it.
	Fills string
}

// Info is a sandbox as its provider lists it.
type Info struct {
	ID      string
	Labels  Labels
	Created time.Time
	Running bool // its runner lives
	Paused  bool
}

// Pauser is a provider whose sandboxes can be stopped for a while with all they have in memory.
type Pauser interface {
	Pause(ctx context.Context, id string) error  // pausing a paused one is no error
	Resume(ctx context.Context, id string) error // so with one that runs
}

// Adopter is a provider whose sandboxes can be made before it is known for whom.
type Adopter interface {
	// Adopt gives a pooled sandbox to a session: from now on List names it so.
	Adopt(ctx context.Context, id string, labels Labels) error
}

// Layerer is a provider that can install packages once for many sandboxes.
type Layerer interface {
	// Layer makes sure that a layer of these packages is there, and gives it for
	// Spec.Layer. One that is there is used without asking anybody. Those who want
	// the same one at once, by other executors too, wait for the one that makes it.
	// An *Error with CodeDependenciesFailed has the installer's last words.
	Layer(ctx context.Context, want Packages, use Workshop) (string, error)
}

// Packages are what a layer holds.
type Packages struct {
	dependency.Set
	Image string // of the sandboxes that see it; "" for the provider's default
}

// Workshop is what a Layerer needs to make a layer.
type Workshop struct {
	// Begun is called at most once, from any goroutine, when the layer is not there:
	// it is made now, or waited for. It may be nil.
	Begun func()
	// Build makes a sandbox as the spec says, whose ID, labels and way out it fills
	// in: nobody's, that reaches the registries of packages alone. It gives the sandbox
	// to work, and has ended it when it returns. nil where there is no way out.
	Build func(ctx context.Context, spec Spec, work func(context.Context, Sandbox) error) error
}

// Keeper is a provider that keeps something of a session beyond its sandboxes.
type Keeper interface {
	// Kept lists whose workspaces there are.
	Kept(ctx context.Context) ([]Labels, error)
	// Wipe removes a workspace; one that is gone is no error.
	Wipe(ctx context.Context, l Labels) error
}

// Companion is a provider that runs MCP servers in containers of their own
// beside a sandbox, with which they are paused and end.
type Companion interface {
	// Serve makes sure that the n-th server of a sandbox runs, from 0 on, below the
	// Servers of its Spec; one that differs is replaced. It gives the path of the
	// Unix socket by which it is joined inside the sandbox, which is another one
	// when the container is. ErrNotFound when the sandbox is gone, or has no room for it.
	Serve(ctx context.Context, id string, n int, s Server) (socket string, err error)
}

// Server is an MCP server that speaks over stdio in a container of its own. Its
// variables, and arguments that replace the image's, come with each connection.
type Server struct {
	Image  string
	Egress bool // it has the sandbox's way out, to hosts alone
}

// Restorer tells whether a sandbox came with the workspace that its Spec asked
// for; providers that keep workspaces by session need no such word.
type Restorer interface {
	// Kept is false when the workspace and the agent's records are new and empty.
	Kept() bool
}

// Provider makes and finds the sandboxes of one engine.
type Provider interface {
	// Create makes a sandbox with its runner started and an empty workspace, or
	// the session's own where the provider keeps it. It returns when the runner answers.
	Create(ctx context.Context, spec Spec) (Sandbox, error)
	// Attach finds a running sandbox by id; ErrNotFound when it or its runner is gone.
	Attach(ctx context.Context, id string) (Sandbox, error)
	// List gives every sandbox of the engine, also those whose runner is gone.
	List(ctx context.Context) ([]Info, error)
	// Terminate ends every process of the sandbox and forgets it; with wipe the
	// workspace goes too. Ending one that is gone is no error.
	Terminate(ctx context.Context, id string, wipe bool) error
}

// Sandbox is a running sandbox.
type Sandbox interface {
	ID() string
	// Secret is what executors prove to the sandbox's runner (see runner.Seal). Create gives it to the runner, before
	// any agent runs. It is "" for a sandbox that an executor of a release without secrets created.
	Secret() string
	// Exec starts a command inside and returns at once; ctx bounds only the start.
	// Args[0] "runner" is the runner's own binary.
	Exec(ctx context.Context, cmd Command) (Process, error)
	// Running tells whether the sandbox's runner lives.
	Running(ctx context.Context) (bool, error)
	// Files is the workspace.
	Files() Files
}

// Files reads and writes the workspace by slash-separated relative paths.
type Files interface {
	// Put writes a file, making folders as needed, and replaces it in one step.
	Put(ctx context.Context, path string, content io.Reader) error
	// Get opens a file; ErrNotFound if there is none, fs.ErrPermission if its mode
	// does not let it be read, fs.ErrInvalid if it is no regular file.
	Get(ctx context.Context, path string) (io.ReadCloser, error)
	// List gives the files below a folder ("" for all), sorted by path.
	List(ctx context.Context, dir string) ([]File, error)
	// Remove removes a file, or a folder with all below it; ErrNotFound if there is none.
	Remove(ctx context.Context, path string) error
}

// File is an entry of a listing.
type File struct {
	Path    string
	Size    int64 // bytes
	ModTime time.Time
	Dir     bool
}

// Command is a program to run inside a sandbox.
type Command struct {
	Args []string
	Dir  string            // "" for the workspace
	Env  map[string]string // added to the sandbox's own
}

// Process is a running command.
type Process interface {
	Stdin() io.WriteCloser
	Stdout() io.Reader
	Stderr() io.Reader
	// Wait gives the exit code; a process ended by a signal has -1.
	Wait() (int, error)
	// Kill ends the command at once; its streams close.
	Kill() error
}
