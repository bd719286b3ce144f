package builtin_test

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// A conversation that is too long stays so. A fork before the large message goes on.
func TestContextExceeded_AForkBeforeTheLargeMessageGoesOn(t *testing.T) {
	t.Parallel()
	const window = 16 << 10
	var e *endpoint
	e = newEndpoint(t, func(w http.ResponseWriter, r *http.Request) {
		seen := e.seen()
		size := 0
		for _, m := range seen[len(seen)-1].Messages {
			size += len(m.Content.(string))
		}
		if size > window {
			fails(http.StatusBadRequest, "context_length_exceeded", "the maximum context length is 16384")(w, r)
			return
		}
		says("ok")(w, r)
	})
	parent := newPlace(t)
	s := startSpool(t, e, parent, "", nil)
	first := s.turn("a short message", nil)
	for _, content := range []string{strings.Repeat("long ", window), "a short message again", "and another"} {
		end := ended(t, s.turn(content, nil))
		if end.Outcome != runner.OutcomeFailed || end.Code != "MODEL_CONTEXT_EXCEEDED" || !strings.Contains(end.Message, "fork the session") || !strings.Contains(end.Message, "16384") {
			t.Errorf("%.20s: ended %+v", content, end)
		}
	}
	s.close()
	place := newPlace(t)
	if err := os.CopyFS(place.State, os.DirFS(parent.State)); err != nil {
		t.Fatal(err)
	}
	anchor := completed(t, first, events.KindAssistantText)[0].Anchor
	f := startLaunch(t, e, agent.Launch{Folders: place, SessionID: "ses_fork", Resume: agentSession(t, first), Fork: &runner.Fork{Anchor: anchor}}, nil)
	if end := ended(t, f.turn("a short message instead", nil)); end.Outcome != runner.OutcomeCompleted {
		t.Errorf("the fork ended %+v", end)
	}
}
