package egress_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

func socket(path string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) { return api.DialSocket(path)(ctx) }
}

func code(err error) string {
	var e *api.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// Registrations, tokens, journals and their line numbers survive a restart.
func TestRestart_KeepsRegistrationsAndJournals(t *testing.T) {
	t.Parallel()
	change, _, _ := withPublicNetwork(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
	w := newWorld(t, change)
	b := w.box("ok.example")
	b.reg.Epoch = 7
	b.reg.Token = "" // keeps the registered one
	before, err := w.client.Register(t.Context(), b.id, b.reg)
	if err != nil {
		t.Fatal(err)
	}
	get := func(url string) int {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		status, _, _ := b.do(req)
		return status
	}
	if get("http://evil.example/") != http.StatusForbidden {
		t.Fatal("evil.example is allowed")
	}
	first := b.lines(0, 1)[0]

	if first.N != 1 || b.denied(first).Journal != before.Journal {
		t.Fatalf("%+v of journal %s", first, before.Journal)
	}
	w.stop()
	w.start()
	t.Cleanup(func() { w.stop() })

	after, err := w.client.State(t.Context(), b.id)
	if err != nil || after.Journal != before.Journal || after.Epoch != 7 || after.Session != b.reg.Session || after.Execution != b.reg.Execution || after.Last != 1 || !slices.Equal(after.Allow, []string{"ok.example"}) {
		t.Fatalf("%+v, %v", after, err)
	}
	b.http = w.clientOf(b.token)
	if get("http://ok.example/") != http.StatusOK || get("http://evil2.example/") != http.StatusForbidden {
		t.Error("the allowlist is another after the restart")
	}
	if l := b.lines(1, 1)[0]; l.N != 2 || b.denied(l).Host != "evil2.example" || b.denied(l).Journal != before.Journal {
		t.Errorf("after the restart: %+v", l)
	}
	raw, err := os.ReadFile(w.cfg.Data + "/sandboxes/" + b.id + "/registration.json")
	if err != nil || strings.Contains(string(raw), b.token) || !strings.Contains(string(raw), "tokenSha256") {
		t.Errorf("on disk: %s, %v", raw, err)
	}
}

func TestRegister_RefusesLowerEpochsAndReleasedSandboxes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	b := w.box()
	next := b.reg
	next.Epoch, next.Token, next.Execution = 2, "", mint(t, events.KindExecution)
	if _, err := w.client.Register(t.Context(), b.id, next); err != nil {
		t.Fatal(err)
	}
	if _, err := w.client.Register(t.Context(), b.id, b.reg); code(err) != api.CodeFenced {
		t.Errorf("a registration with a lower epoch: %v", err)
	}
	if s, err := w.client.State(t.Context(), b.id); err != nil || s.Epoch != 2 || s.Execution != next.Execution {
		t.Errorf("%+v, %v", s, err)
	}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://denied.example/", nil)
	b.do(req) // its line is not acknowledged, so the proxy keeps the released sandbox
	if s, err := w.client.Release(t.Context(), b.id); err != nil || !s.Released || s.Last != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	next.Epoch, next.Token = 3, b.token
	if _, err := w.client.Register(t.Context(), b.id, next); code(err) != api.CodeFenced {
		t.Errorf("a registration of a released sandbox: %v", err)
	}
}

func TestRelease_VoidsTheTokenAndKeepsTheJournal(t *testing.T) {
	t.Parallel()
	started, gone := make(chan struct{}), make(chan struct{})
	w := newWorld(t, models(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, startEvent)
		w.(http.Flusher).Flush()
		close(started)
		<-r.Context().Done()
		close(gone)
	}))
	b := w.box()
	res, err := b.http.Do(request(t, t.Context(), "/anthropic/v1/messages", "{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	<-started
	_, _ = io.ReadFull(res.Body, make([]byte, len(startEvent)))
	state, err := w.client.Release(t.Context(), b.id)
	if err != nil || state.Last != 1 || !state.Released || state.OpenModelRequests != 0 {
		t.Fatalf("%+v, %v", state, err)
	}
	<-gone
	// The usage is journaled although the call was canceled.
	lines, err := w.client.JournalLines(t.Context(), b.id, state.Journal, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	if len(lines) != 1 || b.called(lines[0]).Usage.InputTokens != 40 {
		t.Errorf("%+v", lines)
	}
	c, err := b.dialWith(b.token)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if w.issuer != nil {
		_ = c.SetDeadline(time.Now().Add(within))
		closedUnanswered(t, "with the void token", c)
	} else if answer, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || answer.StatusCode != http.StatusProxyAuthRequired {
		t.Errorf("with the void token: %v, %v", answer, err)
	}
	if err := w.client.AckLines(t.Context(), b.id, state.Journal, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := w.client.State(t.Context(), b.id); code(err) != api.CodeNotFound {
		t.Errorf("when all is acknowledged: %v", err)
	}
	if _, err := os.Stat(w.cfg.Data + "/sandboxes/" + b.id); !os.IsNotExist(err) {
		t.Errorf("its folder: %v", err)
	}
	if _, err := w.client.JournalLines(t.Context(), b.id, "", 0, false); code(err) != api.CodeNotFound {
		t.Errorf("the journal of a forgotten sandbox: %v", err)
	}
}

func TestTokens_IdentifyTheSandbox(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	b := w.box()
	for name, preamble := range map[string]string{
		"unknown": runner.EgressPreamble + "nobody-has-this-token-at-all\n", "empty": runner.EgressPreamble + "\n", "another's prefix": runner.EgressPreamble + b.token[:len(b.token)-1] + "\n",
		"none": "GET / HTTP/1.1\r\n\r\n", "another version": "SPOOL/2 " + b.token + "\n", "too long": strings.Repeat("x", 10_000), "its hash": runner.EgressPreamble + "0000\n",
	} {
		c, err := net.Dial("unix", w.cfg.ListenSandboxes)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(within))
		_, _ = io.WriteString(c, preamble+"GET http://ok.example/ HTTP/1.1\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want := http.StatusBadRequest
		if strings.HasPrefix(preamble, runner.EgressPreamble) {
			want = http.StatusProxyAuthRequired
		}
		if res.StatusCode != want || !res.Close {
			t.Errorf("%s: %s", name, res.Status)
		}
		if _, err := io.ReadAll(res.Body); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("%s: the connection stays open: %d", name, n)
		}
		c.Close()
	}
	metrics := w.metrics()
	if !strings.Contains(metrics, `spool_egress_denials_total{code="BAD_TOKEN"} 4`) || !strings.Contains(metrics, `spool_egress_denials_total{code="MALFORMED"} 3`) {
		t.Errorf("%s", metrics)
	}
	other := api.Registration{Token: b.token, Epoch: 1}
	if _, err := w.client.Register(t.Context(), mint(t, events.KindSandbox), other); code(err) != api.CodeTokenTaken {
		t.Errorf("a token twice: %v", err)
	}
	// A new token makes the old one invalid and closes its connections.
	c, err := b.dialWith(b.token)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	poll(t, "the connection is counted", func() bool {
		s, err := w.client.State(t.Context(), b.id)
		return err == nil && s.OpenConnections == 1
	})
	b.reg.Token = "another-token-0123456789"
	if _, err := w.client.Register(t.Context(), b.id, b.reg); err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(within))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the old connection: %v", err)
	}
	b.http = w.clientOf(b.reg.Token)
	if status, _, _ := b.post("/", ""); status != http.StatusNotFound {
		t.Errorf("with the new token: %d", status)
	}
}

func (w *world) metrics() string {
	w.t.Helper()
	res, err := (&http.Client{Transport: &http.Transport{DialContext: socket(w.cfg.ListenAdmin), DisableKeepAlives: true}}).Get("http://x/metrics")
	if err != nil {
		w.t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return string(raw)
}

func TestRegister_RefusesInvalidRegistrations(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	good := "a-token-of-some-length"
	for _, c := range []struct {
		name, id, field string
		reg             api.Registration
	}{
		{"no id", "sbx_1", "sandbox", api.Registration{Token: good}},
		{"an id that climbs", "../..", "sandbox", api.Registration{Token: good}},
		{"a short token", "", "token", api.Registration{Token: "short"}},
		{"a token with a space", "", "token", api.Registration{Token: "a token of some length"}},
		{"a token with a line's end", "", "token", api.Registration{Token: "a-token-of-some\nlength"}},
		{"a session that is none", "", "session", api.Registration{Token: good, Session: "ses_*"}},
		{"an execution that is none", "", "execution", api.Registration{Token: good, Execution: "exe"}},
		{"a long tenant", "", "tenant", api.Registration{Token: good, Tenant: strings.Repeat("t", 200)}},
		{"an allowlist entry that does not parse", "", "allow", api.Registration{Token: good, Allow: []string{"ok.example", "http://evil"}}},
		{"methods in lower case", "", "allow", api.Registration{Token: good, Allow: []string{"GET ok.example", "get http://evil"}}},
	} {
		id := c.id
		if id == "" {
			id = mint(t, events.KindSandbox)
		}
		_, err := w.client.Register(t.Context(), id, c.reg)
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.CodeInvalid || e.Field != c.field {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.field == "allow" && !strings.Contains(err.Error(), `allow[1]: "`+c.reg.Allow[1]+`"`) {
			t.Errorf("the entry is not named: %v", err)
		}
	}
	for path, body := range map[string]string{"/v1/sandboxes/" + mint(t, events.KindSandbox): `{"tokn":"x"}`, "/v1/sandboxes/x/journal?after=-1": "", "/v1/sandboxes/" + mint(t, events.KindSandbox) + "/": `{`} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://x"+path, strings.NewReader(body))
		res, err := (&http.Client{Transport: &http.Transport{DialContext: socket(w.cfg.ListenAdmin), DisableKeepAlives: true}}).Do(req)
		if err != nil || res.StatusCode < 400 || res.StatusCode >= 500 {
			t.Errorf("%s: %v, %v", path, res, err)
		}
		res.Body.Close()
	}
	list, err := os.ReadDir(w.cfg.Data + "/sandboxes")
	if err != nil || len(list) != 0 {
		t.Errorf("what was refused left %v, %v", list, err)
	}
}

func TestAck_DeletesLines(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	b := w.box()
	for _, host := range []string{"a", "b", "c"} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host+".example/", nil)
		b.do(req)
	}
	lines := b.lines(0, 3)
	name := b.denied(lines[0]).Journal
	if got := b.lines(1, 2); got[0].N != 2 {
		t.Errorf("after 1: %+v", got)
	}
	if err := w.client.AckLines(t.Context(), b.id, name, 4); code(err) != api.CodeInvalid {
		t.Errorf("ahead: %v", err)
	}
	// An acknowledgement of another journal deletes nothing, and its position returns all lines.
	other := mint(t, events.KindJournal)
	if err := w.client.AckLines(t.Context(), b.id, other, 2); err != nil {
		t.Error(err)
	}
	if list, err := w.client.JournalLines(t.Context(), b.id, other, 2, false); err != nil || len(list) != 3 || list[0].N != 1 {
		t.Errorf("after line 2 of another journal: %+v, %v", list, err)
	}
	if err := w.client.AckLines(t.Context(), b.id, name, 2); err != nil {
		t.Fatal(err)
	}
	if s, err := w.client.State(t.Context(), b.id); err != nil || s.First != 3 || s.Last != 3 {
		t.Errorf("%+v, %v", s, err)
	}
	if got := b.lines(0, 1); got[0].N != 3 {
		t.Errorf("%+v", got)
	}
}

// A proxy that shuts down completes open answers, and accepts no connection.
func TestDrain_OpenRequestsEnd(t *testing.T) {
	t.Parallel()
	next := make(chan string)
	w := newWorld(t, models(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for event := range next {
			_, _ = io.WriteString(w, event)
			w.(http.Flusher).Flush()
		}
	}))
	b := w.box()
	answered := make(chan *http.Response, 1)
	go func() {
		res, err := b.http.Do(request(t, t.Context(), "/anthropic/v1/messages", "{}"))
		if err != nil {
			t.Error(err)
		}
		answered <- res
	}()
	next <- startEvent
	res := <-answered
	defer res.Body.Close()
	stopped := make(chan struct{})
	go func() {
		w.stop()
		close(stopped)
	}()
	poll(t, "no more connections are accepted", func() bool {
		c, err := net.Dial("unix", w.cfg.ListenSandboxes)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	if err := w.client.Health(t.Context()); err == nil || !strings.Contains(err.Error(), "about to end") {
		t.Errorf("health: %v", err)
	}
	const end = "event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":9}}\n\n"
	next <- end
	close(next)
	if raw, err := io.ReadAll(res.Body); err != nil || string(raw) != startEvent+end {
		t.Errorf("%q, %v", raw, err)
	}
	<-stopped
	w.start()
	t.Cleanup(func() { w.stop() })
	if m := b.called(b.lines(0, 1)[0]); m.Usage.OutputTokens != 9 || m.Error != "" {
		t.Errorf("%+v", m)
	}
}

// After the drain time, or a second signal, open requests are canceled and journaled.
func TestDrain_IsBoundedByTimeAndSecondSignal(t *testing.T) {
	t.Parallel()
	change := models(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, startEvent)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	now := make(chan struct{})
	for name, drain := range map[string]time.Duration{"time is over": 50 * time.Millisecond, "a second signal": time.Hour} {
		w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
			change(c, d)
			c.Drain = drain
			if drain == time.Hour {
				d.Kill = now
			}
		})
		b := w.box()
		res, err := b.http.Do(request(t, t.Context(), "/anthropic/v1/messages", "{}"))
		if err != nil {
			t.Fatal(err)
		}
		if drain == time.Hour {
			close(now)
		}
		w.stop()
		if _, err := io.ReadAll(res.Body); err == nil {
			t.Errorf("%s: the answer ends as if it were whole", name)
		}
		res.Body.Close()
		w.start()
		if m := b.called(b.lines(0, 1)[0]); m.Usage.InputTokens != 40 || m.Error == "" {
			t.Errorf("%s: %+v", name, m)
		}
		w.stop()
	}
}

// A proxy refuses the folder and the socket of another proxy.
func TestNew_RefusesAFolderInUse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	if _, err := egress.New(w.cfg, egress.Deps{}); err == nil || !strings.Contains(err.Error(), "in use by another egress proxy") {
		t.Errorf("the same folder: %v", err)
	}
	cfg := w.cfg
	cfg.Data = t.TempDir()
	s, err := egress.New(cfg, egress.Deps{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "listen-sandboxes") {
		t.Errorf("the same socket: %v", err)
	}
}
