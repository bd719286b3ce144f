package builtin_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin/model"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/modelstreamtest"
	"github.com/spoolhq/spool/pkg/runner"
)

// FuzzStream answers the first request of a conversation with any bytes. The agent must not panic, and its later requests must be valid, also
// those of another process that resumes the conversation.
func FuzzStream(f *testing.F) {
	vectors, err := modelstreamtest.Load()
	if err != nil {
		f.Fatal(err)
	}
	for _, v := range vectors {
		for _, a := range v.Answers {
			f.Add([]byte(a.Bytes()))
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		server := modelstreamtest.StartServer(t, modelstreamtest.Answer{Body: string(body)})
		place := newPlace(t)
		s := startSpool(t, &endpoint{Server: server.Server}, place, "", nil)
		s.query.Tools = events.ToolChoice{Deny: []string{"run_code"}}
		session := agentSession(t, s.turn("go", nil))
		checkLaterTurn(t, server, s)
		s.close()
		s = startSpool(t, &endpoint{Server: server.Server}, place, session, nil)
		s.query.Tools = events.ToolChoice{Deny: []string{"run_code"}}
		checkLaterTurn(t, server, s)
		s.close()
	})
}

// FuzzHistory resumes a conversation whose stored answer is any JSON. The requests must be valid.
func FuzzHistory(f *testing.F) {
	vectors, err := modelstreamtest.Load()
	if err != nil {
		f.Fatal(err)
	}
	for _, v := range vectors {
		if v.Transcript != "" {
			f.Add(v.Transcript)
		}
	}
	f.Fuzz(func(t *testing.T, transcript string) {
		if !isTranscript(transcript) {
			t.Skip("no transcript that the agent could have stored")
		}
		server := modelstreamtest.StartServer(t)
		place := newPlace(t)
		writeTranscript(t, place, "agt-1", transcript)
		s := startSpool(t, &endpoint{Server: server.Server}, place, "agt-1", nil)
		checkLaterTurn(t, server, s)
		s.close()
	})
}

// checkLaterTurn runs a turn, which must be completed.
func checkLaterTurn(t *testing.T, server *modelstreamtest.Server, s *spool) {
	t.Helper()
	if end := ended(t, s.turn("again", nil)); end.Outcome != runner.OutcomeCompleted || end.Result != modelstreamtest.OK {
		t.Errorf("the next turn ended %+v", end)
	}
	for _, err := range server.Refused() {
		t.Errorf("the server refused a request: %v", err)
	}
}

// isTranscript reports whether each line of text is a message with a known role, in JSON.
func isTranscript(text string) bool {
	lines := strings.SplitAfter(text, "\n")
	for _, line := range lines[:len(lines)-1] {
		var m struct {
			Role string `json:"role"`
			model.Message
		}
		if json.Unmarshal([]byte(line), &m) != nil || m.Role != "user" && m.Role != "assistant" && m.Role != "tool" {
			return false
		}
	}
	return true
}
