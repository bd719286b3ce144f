package bareagent

import (
	"context"
	"errors"
	"os/exec"
	"time"
)

// oneShotConversation is a Conversation that starts a new process of the agent's CLI for every turn.
type oneShotConversation struct {
	dir     string
	command func(text, session string) *exec.Cmd          // session is "" in the first turn
	read    func(line []byte, session *string) lineResult // sets the id of the session when a line has it
	session string
}

// Close implements Conversation. It does nothing, because no process runs between turns.
func (o *oneShotConversation) Close() error { return nil }

// Turn implements Conversation.
func (o *oneShotConversation) Turn(ctx context.Context, text string) (time.Duration, error) {
	p := &agentProcess{read: func(line []byte) lineResult { return o.read(line, &o.session) }}
	start := time.Now()
	if err := p.start(o.dir, o.command(text, o.session)); err != nil {
		return 0, err
	}
	err := p.in.Close() // the text is an argument
	t, followErr := p.readTurn(ctx)
	if err = errors.Join(err, followErr); err != nil {
		_ = p.cmd.Process.Kill()
		return 0, errors.Join(err, ignoreExitError(p.cmd.Wait()))
	}
	if o.session == "" {
		err = errors.New("the output has no session id")
	}
	return t.text.Sub(start), errors.Join(err, p.cmd.Wait())
}
