package bare

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"
)

// OneShot is the form of a CLI that starts a process for every turn. The
// session that the first one makes is gone on with by the others.
type OneShot struct {
	dir     string
	command func(text, session string) *exec.Cmd
	read    func(line []byte, session *string) said
	session string
}

// Close implements Talker; nothing runs between turns.
func (o *OneShot) Close() error { return nil }

// Turn implements Talker.
func (o *OneShot) Turn(ctx context.Context, text string) (first time.Duration, err error) {
	cmd := o.command(text, o.session)
	if err := prepare(o.dir, cmd); err != nil {
		return 0, err
	}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	first, err = follow(bufio.NewReaderSize(out, 1<<20), began, func(line []byte) said { return o.read(line, &o.session) })
	if err != nil {
		_ = cmd.Process.Kill()
		return 0, errors.Join(err, ignoreExit(cmd.Wait()), fmt.Errorf("it printed as errors: %s", errs.String()))
	}
	if o.session == "" {
		err = errors.New("it did not tell its session's id")
	}
	return first, errors.Join(err, cmd.Wait())
}
