package gateway_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/livefiles"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// liveSource serves the files of an executor with the function open, and counts the requests in asked.
type liveSource struct {
	asked atomic.Int32
	open  func(livefiles.Request) (io.Reader, int64, error)
}

func (s *liveSource) Open(_ context.Context, r livefiles.Request) (io.ReadCloser, int64, error) {
	s.asked.Add(1)
	from, size, err := s.open(r)
	if err != nil {
		return nil, 0, err
	}
	return io.NopCloser(from), size, nil
}

// serveLive answers as the executor of engine "host", until the test ends.
func (w *world) serveLive(open func(livefiles.Request) (io.Reader, int64, error)) *liveSource {
	w.t.Helper()
	nc, err := w.nats.ConnectAs(topology.UserExecutor)
	must(w.t, err)
	w.t.Cleanup(nc.Close)
	s := &liveSource{open: open}
	server, err := livefiles.Serve(nc, "local", "host", s, natstest.Logger(w.t))
	must(w.t, err)
	w.t.Cleanup(func() { must(w.t, server.Close()) })
	must(w.t, nc.Flush())
	return s
}

// sandbox creates a session with a sandbox, like the projector.
func (w *world) sandbox(tenant, engine, status string) (session string) {
	w.t.Helper()
	session = w.session(tenant)
	w.exec("INSERT INTO sandboxes (tenant, session, id, provider, engine, status, created_at) VALUES ($1, $2, $3, 'local', $4, $5, now())",
		tenant, session, newID(w.t, events.KindSandbox), engine, status)
	return session
}

// TestLiveFiles_AnotherTenantFindsNone tests that for another tenant a session does not exist, and that no
// executor is asked.
func TestLiveFiles_AnotherTenantFindsNone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	key := func(tenant string) *served {
		return g.withKey(g.withKey(root).do("POST", "/api/keys", fmt.Sprintf(`{"name":"x","tenant":%q}`, tenant)).want(t, 201).text("key"))
	}
	a, b := key("a"), key("b")
	theirs, none := w.sandbox("a", "host", "ready"), oldID(t, events.KindSession)
	source := w.serveLive(func(r livefiles.Request) (io.Reader, int64, error) {
		if r.Tenant != "a" || r.Session != theirs {
			t.Errorf("asked for %+v", r)
		}
		if r.Op == livefiles.OpListFiles {
			return strings.NewReader("[]"), 2, nil
		}
		return strings.NewReader("content"), 7, nil
	})
	for _, path := range []string{"/files?live=1", "/files/a.txt?live=1"} {
		got := b.get("/api/sessions/"+theirs+path).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
		if want := b.get("/api/sessions/" + none + path); string(got.body) != string(want.body) {
			t.Errorf("%s: another tenant's can be distinguished from a missing one: %s, %s", path, got, want)
		}
		g.get("/api/sessions/"+theirs+path).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	}
	if n := source.asked.Load(); n != 0 {
		t.Errorf("an executor was asked %d times for another tenant", n)
	}
	if got := a.get("/api/sessions/"+theirs+"/files/a.txt?live=1").want(t, 200); string(got.body) != "content" {
		t.Errorf("the tenant itself got %s", got)
	}
	if got := a.get("/api/sessions/"+theirs+"/files?live=1").want(t, 200); got.field("live") != true {
		t.Errorf("the tenant itself got %s", got)
	}
}

// TestLiveFiles_RefusalsNameTheirField tests that refusals of an executor have the API's code and the invalid request
// field.
func TestLiveFiles_RefusalsNameTheirField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.sandbox("default", "host", "ready")
	source := w.serveLive(func(r livefiles.Request) (io.Reader, int64, error) {
		return nil, 0, &livefiles.Error{Code: livefiles.ErrorCode(r.Path), Detail: "because"}
	})
	for refusal, want := range map[livefiles.ErrorCode]struct {
		status int
		code   string
		file   string // the field on the route of a file
		list   string // the field on the route of a listing
	}{
		livefiles.CodeNoSandbox:        {409, "NO_LIVE_SANDBOX", "live", "live"},
		livefiles.CodeNotFound:         {404, "FILE_NOT_FOUND", "path", "dir"},
		livefiles.CodeOutsideWorkspace: {400, "INVALID_REQUEST", "path", "dir"},
		livefiles.CodeUnreadable:       {403, "FORBIDDEN", "path", "dir"},
		livefiles.CodeTooLarge:         {422, "FILE_TOO_LARGE", "path", "dir"},
		livefiles.CodeBusy:             {503, "UNAVAILABLE", "", ""},
		livefiles.CodeFailed:           {503, "UNAVAILABLE", "", ""},
		"OF_A_NEWER_BUILD":             {503, "UNAVAILABLE", "", ""},
	} {
		g.get("/api/sessions/"+id+"/files/"+string(refusal)+"?live=1").wantProblem(t, want.status, want.code, want.file)
		g.get("/api/sessions/"+id+"/files?live=1&dir="+string(refusal)).wantProblem(t, want.status, want.code, want.list)
	}
	asked := source.asked.Load()
	for _, path := range []string{"/..%2Fx?live=1", "/a%2F..%2F..%2Fx?live=1", "/%2Fetc%2Fpasswd?live=1", "/a%00?live=1", "/a%5Cb?live=1"} {
		g.get("/api/sessions/"+id+"/files"+path).wantProblem(t, 400, "INVALID_REQUEST", "path")
	}
	for _, dir := range []string{"..", "a/../../x", "/etc", "a%00"} {
		g.get("/api/sessions/"+id+"/files?live=1&dir="+dir).wantProblem(t, 400, "INVALID_REQUEST", "dir")
	}
	if n := source.asked.Load() - asked; n != 0 {
		t.Errorf("an executor was asked %d times for paths that leave the workspace", n)
	}
	// Without a running sandbox, or without an executor of its engine, there are no live files.
	for what, session := range map[string]string{
		"no sandbox": w.session("default"), "ended": w.sandbox("default", "host", "terminated"), "paused": w.sandbox("default", "host", "paused"),
		"engine without executors": w.sandbox("default", "gone", "ready"), "no engine": w.sandbox("default", "", "ready"),
	} {
		t.Log(what)
		g.get("/api/sessions/"+session+"/files/a?live=1").wantProblem(t, 409, "NO_LIVE_SANDBOX", "live")
	}
}

// TestLiveFiles_AbortedTransferAbortsTheResponse tests that an aborted transfer does not look like a complete file.
func TestLiveFiles_AbortedTransferAbortsTheResponse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.sandbox("default", "host", "ready")
	w.serveLive(func(livefiles.Request) (io.Reader, int64, error) {
		return bytes.NewReader(make([]byte, 1<<20)), 2 << 20, nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, g.url+"/api/sessions/"+id+"/files/a?live=1", nil)
	must(t, err)
	resp, err := client.Do(req)
	must(t, err)
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %d bytes and %v", len(got), err)
	}
}
