// Package harness runs a benchmark: it makes its scratch folder, starts the servers that it asks for, writes its rows
// and stops everything at the end.
package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// Benchmark is a subcommand of the benchmark program that measures something. The fields of its type are its flags.
type Benchmark interface {
	// Measure runs the benchmark and reports its rows to b.
	Measure(ctx context.Context, b *Bench) error
}

// Bench is one run of a benchmark, or of one part of it: its scratch folder, its output and its cleanups. It is not
// safe for concurrent use.
type Bench struct {
	Dir string // a folder of its own, which every user can enter; removed at the end

	name     string
	rows     io.Writer
	messages io.Writer
	cleanups []func() error
}

// Run runs the benchmark m, whose subcommand is name. It creates a scratch folder in dir, or in the system's temporary
// folder if dir is "". It writes rows of docs/performance.md to rows, as lines of JSON, and messages for people to
// messages.
func Run(ctx context.Context, name string, m Benchmark, dir string, rows, messages io.Writer) (err error) {
	tmp, err := os.MkdirTemp(dir, "spool-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	// Postgres may run as another user than this process.
	if err := os.Chmod(tmp, 0o755); err != nil { //nolint:gosec // see above
		return err
	}
	b := &Bench{Dir: tmp, name: name, rows: rows, messages: messages}
	return b.runWithCleanups(func(b *Bench) error { return m.Measure(ctx, b) })
}

// runWithCleanups calls f, and then the functions that were registered with Cleanup, the last one first, also after a
// panic.
func (b *Bench) runWithCleanups(f func(*Bench) error) (err error) {
	defer func() {
		for _, cleanup := range slices.Backward(b.cleanups) {
			err = errors.Join(err, cleanup())
		}
	}()
	return f(b)
}

// Cleanup registers a function that is called when the benchmark, or the part that b is for, has ended. The functions
// are called in reverse order, also after an error.
func (b *Bench) Cleanup(f func() error) { b.cleanups = append(b.cleanups, f) }

// RunPart runs f as a part of the benchmark, with a subfolder and cleanups of its own, so that the servers of a part have
// stopped when the next part starts. name is the name of the subfolder; errors begin with it.
func (b *Bench) RunPart(name string, f func(*Bench) error) error {
	part := &Bench{Dir: filepath.Join(b.Dir, name), name: b.name, rows: b.rows, messages: b.messages}
	err := os.Mkdir(part.Dir, 0o755) //nolint:gosec // like the folder of b
	if err == nil {
		err = errors.Join(part.runWithCleanups(f), os.RemoveAll(part.Dir))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// ReportRow writes a row of docs/performance.md to the benchmark's output. If the row has no command, ReportRow adds the
// command that runs this benchmark.
func (b *Bench) ReportRow(r row.Row) error {
	if r.Command == "" {
		r.Command = ShellCommand(b.name)
	}
	return row.Write(b.rows, r)
}

// ShellCommand returns the shell command that runs the benchmark program with the given arguments, from the root of the
// repository.
func ShellCommand(arguments string) string { return "cd test && go run ./bench " + arguments }

// MessageWriter returns the writer for messages that people read. They are not part of the measurements.
func (b *Bench) MessageWriter() io.Writer { return b.messages }

// PrintSkipped prints a message that the benchmark leaves out some rows of docs/performance.md, and why.
func (b *Bench) PrintSkipped(rows, reason any) {
	_, _ = fmt.Fprintf(b.messages, "%s: skipped %v: %v\n", b.name, rows, reason) // a message only
}

// CanUseDocker reports whether the benchmark can start Docker sandboxes. If not, it prints that some rows of
// docs/performance.md are left out.
func (b *Bench) CanUseDocker(ctx context.Context, rows string) bool {
	err := system.CheckDocker(ctx)
	if err != nil {
		b.PrintSkipped(rows, err)
	}
	return err == nil
}

// BuildRunner builds cmd/runner and returns the path of the program.
func (b *Bench) BuildRunner(ctx context.Context) (path string, err error) {
	return system.BuildCommand(ctx, b.Dir, "runner")
}

// StartModel starts a scripted model server in this process and returns its URL, without /v1. The server stops when the
// benchmark ends. script is in mockllm's format.
func (b *Bench) StartModel(script string) (url string, err error) {
	url, stop, err := system.StartModel(script)
	if err == nil {
		b.Cleanup(stop)
	}
	return url, err
}

// StartSystem starts all services of Spool in this process, with their data in the folder of b. They stop when the
// benchmark, or its part, ends.
func (b *Bench) StartSystem(ctx context.Context, cfg system.Config) (*system.System, error) {
	cfg.Dir = b.Dir
	s, err := system.Start(ctx, cfg)
	if err == nil {
		b.Cleanup(s.Close)
	}
	return s, err
}

// StartNATSServer starts a NATS server in this process, with its data in the folder of b. It stops when the benchmark,
// or its part, ends.
func (b *Bench) StartNATSServer(cfg natsserver.Config) (*natsserver.Server, error) {
	cfg.StoreDir = filepath.Join(b.Dir, "nats")
	s, err := natsserver.Start(cfg)
	if err == nil {
		b.Cleanup(func() error { s.Shutdown(); return nil })
	}
	return s, err
}
