package compose

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// kill kills an executor while a model's answer streams through its sandbox. The whole answer arrives, from the same
// process of the agent, and the client receives no event twice and misses none.
func (p *project) kill(gateways []server) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 3*time.Minute)
	defer cancel()
	var words strings.Builder
	for i := range 3000 { // the scripted model repeats the text, a few letters at a time
		fmt.Fprintf(&words, "w%d ", i)
	}
	text := strings.TrimSpace(words.String())
	var made struct{ SessionID string }
	if err := gateways[0].call(ctx, "POST", "/api/sessions", map[string]any{"architecture": "spool"}, http.StatusCreated, &made); err != nil {
		p.t.Fatal(err)
	}
	s := newStream(made.SessionID)
	if err := s.join(ctx, gateways[1]); err != nil {
		p.t.Fatal(err)
	}
	defer s.leave()
	var accepted struct{ ExecutionID string }
	if err := gateways[0].call(ctx, "POST", "/api/sessions/"+made.SessionID+"/messages", map[string]any{"content": text}, http.StatusAccepted, &accepted); err != nil {
		p.t.Fatal(err)
	}
	for pieces := 0; pieces < 20; {
		w, err := s.next(ctx)
		if err != nil {
			p.t.Fatal(err)
		}
		if events.IsTerminal(w.Type) {
			p.t.Fatalf("the turn ended before the executor was killed: %s %s", w.Type, w.Data)
		}
		if w.Type == events.TextDelta {
			pieces++
		}
	}
	var shown struct{ Executor string }
	if err := gateways[0].call(ctx, "GET", "/api/executions/"+accepted.ExecutionID, nil, http.StatusOK, &shown); err != nil {
		p.t.Fatal(err)
	}
	victim := p.executor(shown.Executor)
	p.run(time.Minute, "docker", "kill", "--signal", "KILL", victim)
	end, err := s.until(ctx, accepted.ExecutionID)
	if err != nil {
		p.t.Fatal(err)
	}
	var done events.ExecutionCompleted
	if err := json.Unmarshal(end.Data, &done); err != nil || end.Type != done.EventType() || !strings.Contains(done.Result, text) {
		p.t.Errorf("after the kill of %s the turn ended with %s %.300s", victim, end.Type, end.Data)
	}
	log, err := gateways[0].events(ctx, made.SessionID)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := errors.Join(s.catchUp(ctx, len(log)), s.compareWithLog(log)); err != nil {
		p.t.Error(err)
	}
	claims, starts := 0, 0
	for _, w := range log {
		switch w.Type {
		case (events.ExecutionClaimed{}).EventType():
			claims++
		case (events.ExecutionStarted{}).EventType():
			starts++
		}
	}
	if claims < 2 || starts != 1 {
		p.t.Errorf("%d claims and %d starts of the agent, want another claim and the same agent", claims, starts)
	}
	p.t.Logf("%s was killed during an answer of %d bytes, which arrived; claims: %d, starts of the agent: 1", victim, len(text), claims)
}

// executor returns the container of an executor.
func (p *project) executor(id string) string {
	p.t.Helper()
	for _, c := range p.containers() {
		if c.Service != "executor" {
			continue
		}
		logs := p.run(time.Minute, p.compose("logs", "--no-log-prefix", "--no-color", "--index", c.Name[strings.LastIndex(c.Name, "-")+1:], "executor")...)
		if m := executorID.FindStringSubmatch(logs); m != nil && m[1] == id {
			return c.Name
		}
	}
	p.t.Fatalf("no container is executor %s", id)
	return ""
}
