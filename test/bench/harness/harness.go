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

// Benchmark is a subcommand of bench that measures something. Its fields are its flags.
type Benchmark interface {
	// Measure runs the benchmark and reports its rows to b.
	Measure(ctx context.Context, b *Bench) error
}

// Bench is one execution of a benchmark, or of one part of it. It is not safe for concurrent use.
type Bench struct {
	Dir string // a folder of its own, which every user can enter; removed at the end

	name     string
	rows     io.Writer
	messages io.Writer
	cleanups []func() error
}

// Run runs a benchmark by its name, the name of its subcommand. It makes the scratch folder in dir, or in the system's
// temporary folder if dir is "". Rows go to rows as lines of JSON, messages for people to messages.
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
	return b.run(func(b *Bench) error { return m.Measure(ctx, b) })
}

// run calls f and then the cleanups of b, the last one first, also after a panic.
func (b *Bench) run(f func(*Bench) error) (err error) {
	defer func() {
		for _, cleanup := range slices.Backward(b.cleanups) {
			err = errors.Join(err, cleanup())
		}
	}()
	return f(b)
}

// Cleanup registers a function that is called at the end of the benchmark, or of the part that b is for. The functions
// are called in reverse order, also after an error.
func (b *Bench) Cleanup(f func() error) { b.cleanups = append(b.cleanups, f) }

// Part runs a part of a benchmark with a subfolder and cleanups of its own, so that its servers have stopped when the
// next part starts. Errors begin with the name, which is also the name of the subfolder.
func (b *Bench) Part(name string, f func(*Bench) error) error {
	part := &Bench{Dir: filepath.Join(b.Dir, name), name: b.name, rows: b.rows, messages: b.messages}
	err := os.Mkdir(part.Dir, 0o755) //nolint:gosec // like the folder of b
	if err == nil {
		err = errors.Join(part.run(f), os.RemoveAll(part.Dir))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Report writes a row. A row without a command gets the command that runs this benchmark.
func (b *Bench) Report(r row.Row) error {
	if r.Command == "" {
		r.Command = Command(b.name)
	}
	return row.Write(b.rows, r)
}

// Command returns the shell command that runs a subcommand with its arguments, from the root of the repository.
func Command(arguments string) string { return "cd test && go run ./bench " + arguments }

// Messages returns the writer of messages for people.
func (b *Bench) Messages() io.Writer { return b.messages }

// Skip prints that rows are left out, and why.
func (b *Bench) Skip(rows, reason any) {
	_, _ = fmt.Fprintf(b.messages, "%s: skipped %v: %v\n", b.name, rows, reason) // a message only
}

// Docker reports whether containers can be used. If not, it prints that the rows are left out.
func (b *Bench) Docker(ctx context.Context, rows string) bool {
	err := system.Docker(ctx)
	if err != nil {
		b.Skip(rows, err)
	}
	return err == nil
}

// Runner builds the runner and returns the path of the binary.
func (b *Bench) Runner(ctx context.Context) (path string, err error) {
	return system.Build(ctx, b.Dir, "runner")
}

// Model starts a scripted model server in this process and returns its URL, without /v1.
func (b *Bench) Model(script string) (url string, err error) {
	url, stop, err := system.Model(script)
	if err == nil {
		b.Cleanup(stop)
	}
	return url, err
}

// System starts all services of Spool in this process. Their data is in the folder of b.
func (b *Bench) System(ctx context.Context, cfg system.Config) (*system.System, error) {
	cfg.Dir = b.Dir
	s, err := system.Start(ctx, cfg)
	if err == nil {
		b.Cleanup(s.Close)
	}
	return s, err
}

// NATS starts a NATS server in this process. Its data is in the folder of b.
func (b *Bench) NATS(cfg natsserver.Config) (*natsserver.Server, error) {
	cfg.StoreDir = filepath.Join(b.Dir, "nats")
	s, err := natsserver.Start(cfg)
	if err == nil {
		b.Cleanup(func() error { s.Shutdown(); return nil })
	}
	return s, err
}
