// Package sandbox is what an executor asks of a place where agents run. The
// suite in sandboxtest holds every provider to it.
package sandbox

import (
	"context"
	"errors"
	"io"
	"time"
)

// Errors that a caller may branch on.
var (
	// ErrNotFound is a sandbox or file that is not there.
	ErrNotFound = errors.New("not found in the sandbox provider")
	// ErrOutside is a path that leaves the workspace, by .., by a symlink or as a sibling.
	ErrOutside = errors.New("path is outside the workspace")
)

// Labels say whose a sandbox is; the sweep compares them with the log.
type Labels struct {
	Tenant  string `json:"tenant"`
	Session string `json:"session"`
	Engine  string `json:"engine"`
	Epoch   uint64 `json:"epoch"`
}

// Spec is what a sandbox is made from.
type Spec struct {
	ID     string // sbx_…, minted by the caller: creating it again finds the first
	Labels Labels
}

// Info is a sandbox as its provider lists it.
type Info struct {
	ID      string
	Labels  Labels
	Created time.Time
	Running bool // its runner lives
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
	// Get opens a file; ErrNotFound if there is none.
	Get(ctx context.Context, path string) (io.ReadCloser, error)
	// List gives the files below a folder ("" for all), sorted by path.
	List(ctx context.Context, dir string) ([]File, error)
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
