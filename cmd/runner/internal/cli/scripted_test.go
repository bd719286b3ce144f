package cli_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// scripted is an architecture whose queries are scripts: a verb and its argument on each line.
type scripted struct{}

func (scripted) Command(l agent.Launch) (agent.Command, error) {
	if l.Model == "missing" {
		return agent.Command{}, &runner.CommandError{Code: "AGENT_NOT_FOUND", Message: "script is not installed: install it"}
	}
	path := l.Executable
	if l.Model == "gone" {
		path = "/no/such/agent"
	}
	args := []string{l.Model, l.Resume}
	if l.Fork != nil {
		args = append(args, l.Fork.Anchor)
	}
	return agent.Command{Path: path, Args: args, Env: l.Environment(map[string]string{"RUNNER_TEST_AS": "agent"})}, nil
}

func (scripted) OpenSession(_ agent.Launch, in agent.Stdin) agent.Session {
	return &scriptedSession{in: in}
}

func (scripted) TranscriptPath(p agent.Folders, id string) (string, error) {
	return filepath.Join(p.State, "script-"+id), nil
}

type scriptedSession struct {
	in   agent.Stdin
	text string
}

func (s *scriptedSession) BeginTurn(q runner.Query, _ *agent.Turn) error {
	return s.in.Send(map[string]string{"script": q.Content})
}

func (s *scriptedSession) Interrupt() error { return s.in.Send(map[string]string{"interrupt": "now"}) }

func (s *scriptedSession) HandleLine(line []byte, t *agent.Turn) error {
	var l struct{ Say, Open, End, Panic, Session *string }
	if err := json.Unmarshal(line, &l); err != nil {
		return err
	}
	switch {
	case l.Say != nil:
		t.AddBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText, Content: *l.Say})
	case l.Open != nil:
		s.text = t.OpenBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText})
		t.AppendText(s.text, *l.Open)
	case l.Session != nil:
		t.Emit(events.MainConversation, events.TranscriptWritten{AgentSessionID: *l.Session})
	case l.Panic != nil:
		panic(*l.Panic)
	case l.End != nil:
		t.End(runner.TurnEnd{Outcome: runner.Outcome(*l.End)})
	}
	return nil
}

// scriptedAgent is the process of the architecture script.
func scriptedAgent() int {
	p := performer{in: bufio.NewReader(os.Stdin), out: bufio.NewWriter(os.Stdout)}
	for {
		raw, err := p.in.ReadBytes('\n')
		if err != nil {
			return 0
		}
		var order map[string]string
		if err := json.Unmarshal(raw, &order); err != nil {
			return 9
		}
		if order["interrupt"] != "" {
			continue
		}
		p.end = "completed"
		for line := range strings.SplitSeq(order["script"], "\n") {
			verb, arg, _ := strings.Cut(line, " ")
			if code, exit := p.perform(verb, arg); exit {
				return code
			}
		}
		p.say("end", p.end)
		p.out.Flush()
	}
}

// performer runs a script.
type performer struct {
	in  *bufio.Reader
	out *bufio.Writer
	end string
}

func (p *performer) say(key, value string) {
	raw, err := json.Marshal(map[string]string{key: value})
	if err != nil {
		panic(err)
	}
	fmt.Fprintf(p.out, "%s\n", raw)
}

func (p *performer) perform(verb, arg string) (code int, exit bool) {
	n, _ := strconv.Atoi(arg)
	switch verb {
	case "say", "open", "panic", "session":
		p.say(verb, arg)
	case "args":
		p.say("say", strings.Join(os.Args[1:], ","))
	case "raw":
		s, err := strconv.Unquote(arg)
		if err != nil {
			panic(err)
		}
		fmt.Fprint(p.out, s)
	case "big":
		fmt.Fprintf(p.out, "%s\n", strings.Repeat("x", n))
	case "flood":
		for i := range n {
			p.say("say", fmt.Sprintf("%d %s", i, strings.Repeat("f", 900)))
		}
	case "stderr":
		fmt.Fprintln(os.Stderr, arg)
	case "exit":
		p.out.Flush()
		return n, true
	case "spawn": // a child, a grandchild in its own session, and a process whose parent is gone
		if err := exec.Command("sh", "-c", "sleep 601 & setsid sleep 602 & (setsid sleep 603 &) ; wait").Start(); err != nil {
			panic(err)
		}
	case "orphan": // a process that dies after its parent
		if err := exec.Command("sh", "-c", "(setsid sleep 0.05 &)").Run(); err != nil {
			panic(err)
		}
	case "shell":
		out, err := exec.Command("sh", "-c", arg).CombinedOutput()
		p.say("say", fmt.Sprintf("%s%v", out, err))
	case "takeover":
		p.say("say", takeover(arg))
	case "wait":
		p.out.Flush()
		if _, err := p.in.ReadBytes('\n'); err != nil {
			return 0, true
		}
		p.end = "interrupted"
	case "hang":
		p.out.Flush()
		select {}
	case "deaf":
		p.say("end", p.end)
		p.out.Flush()
		select {}
	}
	return 0, false
}
