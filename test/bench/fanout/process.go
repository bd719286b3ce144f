package fanout

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"

	"github.com/spoolhq/spool/test/bench/harness"
)

// process is a process of this program that exchanges lines of JSON with the benchmark.
type process struct {
	pid int
	in  *json.Encoder
	out *json.Decoder
}

// startProcess starts this program with a subcommand. The process must stop at the end of its input, which ends with the
// benchmark.
func startProcess(ctx context.Context, b *harness.Bench, subcommand string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, subcommand) //nolint:gosec // this program
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b.Cleanup(func() error { return errors.Join(in.Close(), cmd.Wait()) })
	return &process{pid: cmd.Process.Pid, in: json.NewEncoder(in), out: json.NewDecoder(out)}, nil
}
