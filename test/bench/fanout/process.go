package fanout

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"

	"github.com/spoolhq/spool/test/bench/harness"
)

// jsonProcess is a child process of the benchmark that exchanges lines of JSON with it.
type jsonProcess struct {
	pid int
	in  *json.Encoder
	out *json.Decoder
}

// startProcess starts this program again, as a child process that runs a subcommand. The child must exit at the end of
// its input, which is closed when the benchmark ends.
func startProcess(ctx context.Context, b *harness.Bench, subcommand string) (*jsonProcess, error) {
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
	return &jsonProcess{pid: cmd.Process.Pid, in: json.NewEncoder(in), out: json.NewDecoder(out)}, nil
}
