package bareagent

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"
)

// oneShot is a conversation in which every turn starts a process. It implements Conversation.
type oneShot struct {
	dir     string
	command func(text, session string) *exec.Cmd      // session is "" in the first turn
	read    func(line []byte, session *string) output // sets the id of the session when a line has it
	session string
}

// Close implements Conversation. No process runs between turns.
func (o *oneShot) Close() error { return nil }

// Turn implements Conversation.
func (o *oneShot) Turn(ctx context.Context, text string) (first time.Duration, err error) {
	cmd := o.command(text, o.session)
	if err := prepare(o.dir, cmd); err != nil {
		return 0, err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	first, err = follow(bufio.NewReaderSize(out, 1<<20), start, func(line []byte) output { return o.read(line, &o.session) })
	if err != nil {
		_ = cmd.Process.Kill()
		return 0, errors.Join(err, ignoreExit(cmd.Wait()), fmt.Errorf("standard error: %s", stderr.String()))
	}
	if o.session == "" {
		err = errors.New("the output has no session id")
	}
	return first, errors.Join(err, cmd.Wait())
}
