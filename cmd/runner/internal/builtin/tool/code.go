package tool

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

const (
	// DefaultCodeLimit is the default of the time limit for a program that the model runs.
	DefaultCodeLimit = 60 * time.Second
	// maxCodeBytes is the maximum size in bytes of a program that the model runs; the kernel accepts no longer
	// argument.
	maxCodeBytes = 100 << 10
	// keptOutputBytes is the number of bytes that are kept of the beginning, and of the end, of a program's output.
	keptOutputBytes = 32 << 10
)

// RunCode is the tool run_code, which runs programs in the workspace.
type RunCode struct {
	Dir     string        // the workspace, absolute
	Environ []string      // for the programs
	Limit   time.Duration // 0 for DefaultCodeLimit
}

// codeArguments are the arguments of run_code.
type codeArguments struct {
	Language string `json:"language"`
	Code     string `json:"code"`
}

// interpreters maps each language of run_code to the program that runs code and its flag for code.
var interpreters = map[string][]string{"python": {"python3", "-c"}, "bash": {"bash", "-c"}}

// Name returns run_code.
func (RunCode) Name() string { return "run_code" }

// Description returns the description of run_code for the model.
func (c RunCode) Description() string {
	return fmt.Sprintf("Runs a Python 3 or bash program with the workspace as its current folder and gives what it prints and its exit code. "+
		"It may run for %s; processes it leaves in the background are ended with it.", c.timeLimit())
}

// Schema returns the JSON schema of the arguments of run_code: language and code.
func (RunCode) Schema() json.RawMessage {
	return json.RawMessage(`{"type":"object","additionalProperties":false,"required":["language","code"],"properties":{
		"language":{"type":"string","enum":["python","bash"]},
		"code":{"type":"string","description":"the whole program"}}}`)
}

// timeLimit returns the time limit for a program.
func (c RunCode) timeLimit() time.Duration { return cmp.Or(c.Limit, DefaultCodeLimit) }

// arguments decodes and checks the arguments of a call of run_code.
func (RunCode) arguments(raw json.RawMessage) (codeArguments, error) {
	var a codeArguments
	if err := decodeArguments(raw, &a); err != nil {
		return a, err
	}
	switch {
	case interpreters[a.Language] == nil:
		return a, fmt.Errorf("language: %q is not python or bash", a.Language)
	case a.Code == "":
		return a, errors.New("code: is empty")
	case len(a.Code) > maxCodeBytes:
		return a, fmt.Errorf("code: %d bytes, at most %d: write it to a file and run that", len(a.Code), maxCodeBytes)
	case strings.ContainsRune(a.Code, 0):
		return a, errors.New("code: has a NUL")
	}
	return a, nil
}

// Paths returns no path, because the sandbox limits the files that a program can use.
func (c RunCode) Paths(raw json.RawMessage) ([]string, error) {
	_, err := c.arguments(raw)
	return nil, err
}

// Effect describes the program that a call runs. The command of a Python program is the shell command that runs it.
func (c RunCode) Effect(raw json.RawMessage) CallEffect {
	a, err := c.arguments(raw)
	if err != nil {
		return CallEffect{}
	}
	e := CallEffect{Kind: permission.KindShell, Command: a.Code, Title: "Run a bash program", Preview: events.ApprovalPreview{Command: a.Code}}
	if a.Language != "bash" {
		run := interpreters[a.Language]
		e.Command = strings.Join(run, " ") + " '" + strings.ReplaceAll(a.Code, "'", `'\''`) + "'"
		e.Title, e.Preview = "Run a Python program", events.ApprovalPreview{Command: e.Command}
	}
	return e
}

// Run runs the program. When ctx ends, the time limit is reached, or the program has ended, Run kills its whole process
// group.
func (c RunCode) Run(ctx context.Context, raw json.RawMessage) Result {
	a, err := c.arguments(raw)
	if err != nil {
		return Result{Code: ExecutionError, Output: err.Error()}
	}
	limited, cancel := context.WithTimeout(ctx, c.timeLimit())
	defer cancel()
	run := interpreters[a.Language]
	cmd := exec.CommandContext(limited, run[0], append(slices.Clone(run[1:]), a.Code)...) //nolint:gosec // running the model's program is the purpose
	cmd.Dir, cmd.Env = c.Dir, c.Environ
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 300 * time.Millisecond // a background process may keep the pipes open
	var out, errs outputHeadAndTail
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		return Result{Code: ExecutionError, Output: fmt.Sprintf("%s is not in the sandbox: %v", run[0], err)}
	}
	err = cmd.Wait()
	killProcessGroup(cmd.Process.Pid)
	text := joinOutput(out.String(), errs.String())
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return Result{Code: ExecutionError, Output: text + "[interrupted; the program was ended]"}
	case limited.Err() != nil:
		return Result{Code: Timeout, Output: text + fmt.Sprintf("[still running after %s; the program was ended]", c.timeLimit())}
	case errors.As(err, &exit):
		return Result{Code: ExecutionError, Output: text + fmt.Sprintf("[%s]", exit.ProcessState)}
	case err != nil && !errors.Is(err, exec.ErrWaitDelay):
		return Result{Code: ExecutionError, Output: text + fmt.Sprintf("[%v]", err)}
	}
	return Result{Output: text + "[exit status 0]"}
}

// killProcessGroup kills the processes in the group of pid that the program left behind, if there are any.
func killProcessGroup(pid int) { _ = syscall.Kill(-pid, syscall.SIGKILL) }

// joinOutput joins the standard output and the standard error of a program to one text.
func joinOutput(out, errs string) string {
	var b strings.Builder
	if out != "" {
		b.WriteString(strings.TrimSuffix(out, "\n") + "\n")
	}
	if errs != "" {
		b.WriteString("[standard error]\n" + strings.TrimSuffix(errs, "\n") + "\n")
	}
	return b.String()
}

// outputHeadAndTail is an io.Writer that keeps only the beginning and the end of the data.
type outputHeadAndTail struct {
	mu         sync.Mutex
	head, tail []byte
	size       int
}

func (e *outputHeadAndTail) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := len(p)
	e.size += n
	if room := keptOutputBytes - len(e.head); room > 0 {
		room = min(room, n)
		e.head, p = append(e.head, p[:room]...), p[room:]
	}
	p = p[max(0, len(p)-keptOutputBytes):]
	e.tail = append(e.tail, p...)
	e.tail = e.tail[max(0, len(e.tail)-keptOutputBytes):]
	return n, nil
}

// String returns the kept data as valid UTF-8, with a note about the part that was cut.
func (e *outputHeadAndTail) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if cut := e.size - len(e.head) - len(e.tail); cut > 0 {
		return strings.ToValidUTF8(string(e.head), "\uFFFD") + fmt.Sprintf("\n[… %d bytes cut …]\n", cut) + strings.ToValidUTF8(string(e.tail), "\uFFFD")
	}
	return strings.ToValidUTF8(string(append(slices.Clone(e.head), e.tail...)), "\uFFFD")
}
