package harness

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// StartChild starts this program again, as a child process that runs a subcommand with arguments. It writes lines to
// the child's input, and returns the one line that the child prints and its process id. The child must exit at the end
// of its input, which is closed when the benchmark ends.
func (b *Bench) StartChild(lines []string, subcommand string, arguments ...string) (printed string, pid int, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", 0, err
	}
	cmd := exec.Command(self, append([]string{subcommand}, arguments...)...) //nolint:gosec // this program
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", 0, err
	}
	if err := cmd.Start(); err != nil {
		return "", 0, err
	}
	b.Cleanup(func() error { return errors.Join(in.Close(), cmd.Wait()) })
	if len(lines) > 0 {
		_, err = io.WriteString(in, strings.Join(lines, "\n")+"\n\n")
	}
	if err == nil {
		printed, err = bufio.NewReader(out).ReadString('\n')
	}
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", subcommand, err)
	}
	return strings.TrimSpace(printed), cmd.Process.Pid, nil
}
