package acp_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// badPeer is the prefix of the kinds of agents that write their JSON-RPC lines by hand, to break the protocol.
const badPeer = "bad peer: "

// lateTail is the time after the answer to session/prompt at which the agent of kind "late tail" prints the last part of its text.
const lateTail = 100 * time.Millisecond

// fifoVariable names a pipe that the agent of kind "text between turns" reads after its turn.
const fifoVariable = "SPOOL_TEST_FIFO"

// runBadPeer runs an agent that answers requests as its kind says. $ID and $SESSION in a line stand for the id of the request and the session.
func runBadPeer(kind string) int {
	kind = strings.TrimPrefix(kind, badPeer)
	write := func(id json.RawMessage, lines ...string) {
		for _, line := range lines {
			if _, err := io.WriteString(os.Stdout, strings.NewReplacer("$ID", string(id), "$SESSION", "s1").Replace(line)+"\n"); err != nil {
				os.Exit(1)
			}
		}
	}
	const newSession = `{"jsonrpc":"2.0","id":$ID,"result":{"sessionId":"$SESSION"}}`
	const ended = `{"jsonrpc":"2.0","id":$ID,"result":{"stopReason":"end_turn"}}`
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var m struct {
			ID     json.RawMessage `json:"id"`
			Method string          `json:"method"`
		}
		if err := json.Unmarshal(in.Bytes(), &m); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		switch m.Method {
		case "initialize":
			if kind != "initialize is not answered" {
				write(m.ID, `{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":1,"agentCapabilities":{"loadSession":true}}}`)
			}
		case "session/load":
			write(m.ID, `{"jsonrpc":"2.0","id":$ID,"result":null}`, chunk("REPEATED "), chunk("after the answer"))
		case "_spool/ping":
			write(m.ID, `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"Method not found"}}`)
		case "session/new":
			switch kind {
			case "session/new is not answered":
			case "half a line":
				write(nil, `{"jsonrpc":"2.0","id":`)
			default:
				write(m.ID, newSession)
			}
		case "session/prompt":
			write(m.ID, chunk("begin"))
			switch kind {
			case "late tail":
				write(m.ID, ended, chunk(", at once"))
				time.Sleep(lateTail) // the agent is late; no test waits for this time
				write(m.ID, chunk(", late"))
			case "text between turns":
				write(m.ID, ended)
				if _, err := os.ReadFile(os.Getenv(fifoVariable)); err == nil { // until the test opens the pipe
					write(m.ID, chunk("between "), chunk("turns"))
					return 0
				}
			case "stdout is closed":
				_ = os.Stdout.Close()
			case "stdin is closed":
				_ = os.Stdin.Close()
				write(nil, `{"jsonrpc":"2.0","id":7,"method":"session/request_permission","params":{"sessionId":"s1"}}`)
				select {}
			case "update with an id":
				write(m.ID, `{"jsonrpc":"2.0","id":"u1",`+strings.TrimPrefix(chunk(", asked"), `{"jsonrpc":"2.0",`))
				if !in.Scan() || !strings.Contains(in.Text(), `"id":"u1","result"`) {
					write(nil, chunk(", not answered"))
				}
				write(m.ID, ended)
			case "id is a string":
				write([]byte(strings.Trim(string(m.ID), `"`)), strings.Replace(ended, "$ID", `"$ID"`, 1))
			case "id is a float":
				write(m.ID, strings.Replace(ended, "$ID", "$ID.0", 1))
			case "answered twice":
				write(m.ID, `{"jsonrpc":"2.0","id":1,"result":{}}`, ended)
			default:
				write(m.ID, promptAnswers[kind])
			}
		}
	}
	return 0
}

// chunk returns the notification with a piece of the agent's message.
func chunk(text string) string {
	return `{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"$SESSION","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"` + text + `"}}}}`
}

// promptAnswers are answers to session/prompt that break the protocol.
var promptAnswers = map[string]string{
	"id is null":                `{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Invalid Request"}}`,
	"id is missing":             `{"jsonrpc":"2.0","error":{"code":-32600,"message":"Invalid Request"}}`,
	"id is another string":      `{"jsonrpc":"2.0","id":"prompt-1","result":{"stopReason":"end_turn"}}`,
	"id is another number":      `{"jsonrpc":"2.0","id":4711,"result":{"stopReason":"end_turn"}}`,
	"error is a string":         `{"jsonrpc":"2.0","id":$ID,"error":"model is gone"}`,
	"error is a number":         `{"jsonrpc":"2.0","id":$ID,"error":500}`,
	"error is a list":           `{"jsonrpc":"2.0","id":$ID,"error":["model is gone"]}`,
	"code of error is a string": `{"jsonrpc":"2.0","id":$ID,"error":{"code":"EMODEL","message":"model is gone"}}`,
	"message is an object":      `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32603,"message":{"text":"model is gone"}}}`,
	"result is a string":        `{"jsonrpc":"2.0","id":$ID,"result":"done"}`,
	"result is null":            `{"jsonrpc":"2.0","id":$ID,"result":null}`,
	"result is missing":         `{"jsonrpc":"2.0","id":$ID}`,
	"stopReason is a number":    `{"jsonrpc":"2.0","id":$ID,"result":{"stopReason":7}}`,
}

// An agent may send the end of its text after the answer to session/prompt. The text belongs to the turn.
func TestLateText_BelongsToItsTurn(t *testing.T) {
	t.Parallel()
	x := newBench(t, badPeer+"late tail").RunTurnOK("hello", "begin, at once, late", nil)
	if b := x.FinishedBlocks(events.KindAssistantText); len(b) != 1 || b[0].Content != "begin, at once, late" || b[0].Status != events.StatusComplete {
		t.Errorf("blocks %+v", b)
	}
	if u := newBench(t, badPeer+"update with an id").RunTurn("hello", nil); u.Ended().Result != "begin, asked" || len(agenttest.DataOfType[events.Error](u, "error")) > 0 {
		t.Errorf("an update with an id: %s", u)
	}
}

// Text that the agent sends when no turn runs is journaled in the next turn.
func TestTextBetweenTurns_IsJournaledInTheNextTurn(t *testing.T) {
	t.Parallel()
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	b := newBench(t, badPeer+"text between turns")
	b.Query.Env[fifoVariable] = fifo
	b.RunTurnOK("hello", "begin", nil)
	if err := os.WriteFile(fifo, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	waits := time.NewTicker(time.Millisecond)
	defer waits.Stop()
	for warm := true; warm; _, warm = b.Supervisor.Busy() { // the agent ends after the text
		<-waits.C
	}
	x := b.RunTurn("hello", nil)
	if l := agenttest.DataOfType[events.Log](x, "log"); len(l) != 1 || !strings.Contains(l[0].Message, "between turns") {
		t.Errorf("logs %+v", l)
	}
}

// An agent may repeat the conversation after its answer to session/load. That is not a part of the turn.
func TestLoad_DropsWhatIsRepeatedAfterTheAnswer(t *testing.T) {
	t.Parallel()
	x := newBench(t, badPeer+"id is a string").RunTurnOK("hello", "begin", func(q *runner.Query) { q.Resume = "s1" })
	if strings.Contains(x.String(), "REPEATED") {
		t.Errorf("journaled again%s", x)
	}
}

// A malformed answer to session/prompt ends the turn.
func TestMalformedAnswer_FailsTheTurn(t *testing.T) {
	t.Parallel()
	for kind := range promptAnswers {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			x := newBench(t, badPeer+kind).RunTurn("hello", nil)
			if e := x.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_PROTOCOL" || e.Message == "" {
				t.Errorf("ended %+v", e)
			}
			if b := x.FinishedBlocks(events.KindAssistantText); len(b) != 1 || b[0].Content != "begin" {
				t.Errorf("blocks %+v", b)
			}
		})
	}
}

// An answer whose id is another form of the request's number, or that comes twice, does not end the turn.
func TestOddAnswer_IsAccepted(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"id is a string", "id is a float", "answered twice"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			newBench(t, badPeer+kind).RunTurnOK("hello", "begin", nil)
		})
	}
}

// A request of the handshake that the agent does not answer fails the turn.
func TestUnansweredHandshake_FailsTheTurn(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"initialize is not answered", "session/new is not answered", "half a line"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			s := subject(t, badPeer+kind)
			s.MuteKill = time.Second
			e := agenttest.NewHarness(t, s).RunTurn("hello", nil).Ended()
			if e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_PROTOCOL" || !strings.Contains(e.Message, "did not answer") {
				t.Errorf("ended %+v", e)
			}
		})
	}
}

// An agent that closes its stdout and stays alive cannot answer any more, and one that closes its stdin is not told anything.
func TestClosedPipe_FailsTheTurn(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"stdout is closed", "stdin is closed"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			x := newBench(t, badPeer+kind).RunTurn("hello", nil)
			if e := x.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_EXITED" || !strings.Contains(e.Message, "had closed its "+strings.Fields(kind)[0]) {
				t.Errorf("ended %+v", e)
			}
			if err := syscall.Kill(x.Started().PID, 0); !errors.Is(err, syscall.ESRCH) {
				t.Errorf("the agent's process is still there: %v", err)
			}
		})
	}
}
