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
	// DefaultCodeLimit is the maximum time that a program may run.
	DefaultCodeLimit = 60 * time.Second
	// maxCode is the longest program in bytes; the kernel accepts no longer argument.
	maxCode = 100 << 10
	// keepOutput is the number of bytes that are kept of the beginning and of the end of an output.
	keepOutput = 32 << 10
)

// RunCode runs programs in the workspace.
type RunCode struct {
	Dir     string        // the workspace, absolute
	Environ []string      // for the programs
	Limit   time.Duration // 0 for DefaultCodeLimit
}

type codeArguments struct {
	Language string `json:"language"`
	Code     string `json:"code"`
}

// interpreters has the program and its flag for code, by language.
var interpreters = map[string][]string{"python": {"python3", "-c"}, "bash": {"bash", "-c"}}

// Name returns run_code.
func (RunCode) Name() string { return "run_code" }

// Description returns the description for the model.
func (c RunCode) Description() string {
	return fmt.Sprintf("Runs a Python 3 or bash program with the workspace as its current folder and gives what it prints and its exit code. "+
		"It may run for %s; processes it leaves in the background are ended with it.", c.limit())
}

// Schema returns the schema of language and code.
func (RunCode) Schema() json.RawMessage {
	return json.RawMessage(`{"type":"object","additionalProperties":false,"required":["language","code"],"properties":{
		"language":{"type":"string","enum":["python","bash"]},
		"code":{"type":"string","description":"the whole program"}}}`)
}

func (c RunCode) limit() time.Duration { return cmp.Or(c.Limit, DefaultCodeLimit) }

// arguments decodes and checks the arguments of a call.
func (RunCode) arguments(raw json.RawMessage) (codeArguments, error) {
	var a codeArguments
	if err := decode(raw, &a); err != nil {
		return a, err
	}
	switch {
	case interpreters[a.Language] == nil:
		return a, fmt.Errorf("language: %q is not python or bash", a.Language)
	case a.Code == "":
		return a, errors.New("code: is empty")
	case len(a.Code) > maxCode:
		return a, fmt.Errorf("code: %d bytes, at most %d: write it to a file and run that", len(a.Code), maxCode)
	case strings.ContainsRune(a.Code, 0):
		return a, errors.New("code: has a NUL")
	}
	return a, nil
}

// Paths returns none: the sandbox limits the files that a program can use.
func (c RunCode) Paths(raw json.RawMessage) ([]string, error) {
	_, err := c.arguments(raw)
	return nil, err
}

// Effect describes the program. The command of a Python program is the shell command that runs it.
func (c RunCode) Effect(raw json.RawMessage) Effect {
	a, err := c.arguments(raw)
	if err != nil {
		return Effect{}
	}
	e := Effect{Kind: permission.KindShell, Command: a.Code, Title: "Run a bash program", Preview: events.ApprovalPreview{Command: a.Code}}
	if a.Language != "bash" {
		run := interpreters[a.Language]
		e.Command = strings.Join(run, " ") + " '" + strings.ReplaceAll(a.Code, "'", `'\''`) + "'"
		e.Title, e.Preview = "Run a Python program", events.ApprovalPreview{Text: a.Code}
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
	limited, cancel := context.WithTimeout(ctx, c.limit())
	defer cancel()
	run := interpreters[a.Language]
	cmd := exec.CommandContext(limited, run[0], append(slices.Clone(run[1:]), a.Code)...) //nolint:gosec // running the model's program is the purpose
	cmd.Dir, cmd.Env = c.Dir, c.Environ
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 300 * time.Millisecond // a background process may keep the pipes open
	var out, errs outputEnds
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		return Result{Code: ExecutionError, Output: fmt.Sprintf("%s is not in the sandbox: %v", run[0], err)}
	}
	err = cmd.Wait()
	killGroup(cmd.Process.Pid)
	text := output(out.String(), errs.String())
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return Result{Code: ExecutionError, Output: text + "[interrupted; the program was ended]"}
	case limited.Err() != nil:
		return Result{Code: Timeout, Output: text + fmt.Sprintf("[still running after %s; the program was ended]", c.limit())}
	case errors.As(err, &exit):
		return Result{Code: ExecutionError, Output: text + fmt.Sprintf("[%s]", exit.ProcessState)}
	case err != nil && !errors.Is(err, exec.ErrWaitDelay):
		return Result{Code: ExecutionError, Output: text + fmt.Sprintf("[%v]", err)}
	}
	return Result{Output: text + "[exit status 0]"}
}

// killGroup kills the processes that the program left, if there are any.
func killGroup(pid int) { _ = syscall.Kill(-pid, syscall.SIGKILL) }

// output joins both streams.
func output(out, errs string) string {
	var b strings.Builder
	if out != "" {
		b.WriteString(strings.TrimSuffix(out, "\n") + "\n")
	}
	if errs != "" {
		b.WriteString("[standard error]\n" + strings.TrimSuffix(errs, "\n") + "\n")
	}
	return b.String()
}

// outputEnds keeps the beginning and the end of the data that is written to it.
type outputEnds struct {
	mu         sync.Mutex
	head, tail []byte
	size       int
}

func (e *outputEnds) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := len(p)
	e.size += n
	if room := keepOutput - len(e.head); room > 0 {
		room = min(room, n)
		e.head, p = append(e.head, p[:room]...), p[room:]
	}
	p = p[max(0, len(p)-keepOutput):]
	e.tail = append(e.tail, p...)
	e.tail = e.tail[max(0, len(e.tail)-keepOutput):]
	return n, nil
}

// String returns valid UTF-8, with a note about the part that was cut.
func (e *outputEnds) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if cut := e.size - len(e.head) - len(e.tail); cut > 0 {
		return strings.ToValidUTF8(string(e.head), "\uFFFD") + fmt.Sprintf("\n[… %d bytes cut …]\n", cut) + strings.ToValidUTF8(string(e.tail), "\uFFFD")
	}
	return strings.ToValidUTF8(string(append(slices.Clone(e.head), e.tail...)), "\uFFFD")
}
