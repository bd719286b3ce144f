package command

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/events"
)

// fakeServer is a fake gateway with one session.
type fakeServer struct {
	*httptest.Server
	t        *testing.T
	begin    []events.Payload            // events that follow the query
	controls map[string][]events.Payload // events that follow a control, by its request
	// execution is the response to a request for the execution with minPosition.
	execution string
	sessions  bool              // whether there is the session ses
	approvals map[string]string // responses to requests for approval requests, by id

	mu       sync.Mutex
	requests []string // method and URI of each request except streams
	bodies   []string
	more     chan []events.Payload
	gone     chan struct{} // ends the streams
}

func serve(t *testing.T, begin ...events.Payload) *fakeServer {
	t.Helper()
	f := &fakeServer{t: t, begin: begin, controls: map[string][]events.Payload{}, more: make(chan []events.Payload, 10), gone: make(chan struct{})}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

func (f *fakeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/api/ws" {
		f.stream(w, r)
		return
	}
	var body bytes.Buffer
	if _, err := body.ReadFrom(r.Body); err != nil {
		f.t.Error(err)
	}
	what := r.Method + " " + r.URL.RequestURI()
	f.mu.Lock()
	f.requests, f.bodies = append(f.requests, what), append(f.bodies, body.String())
	f.mu.Unlock()
	if happens, ok := f.controls[what]; ok {
		f.more <- happens
	}
	w.Header().Set("Content-Type", "application/json")
	switch {
	case what == "GET /health":
		fmt.Fprint(w, `{"status":"ok"}`)
	case what == "GET /api/dead?pageToken=7":
		fmt.Fprint(w, `{"deadLetters":[]}`)
	case what == "GET /api/dead":
		fmt.Fprintf(w, `{"deadLetters":[{"id":"7","time":"2026-01-02T03:04:05Z","subject":"job.local.any","reason":"no use","sessionId":%q,"retryable":true}],"nextPageToken":"7"}`, ses)
	case what == "GET /api/dead/7":
		fmt.Fprintf(w, `{"id":"7","time":"2026-01-02T03:04:05Z","subject":"job.local.any","reason":"no use","handler":"jobs","delivered":3,"sessionId":%q,"message":"{}"}`, ses)
	case what == "POST /api/dead/7/retry", what == "DELETE /api/dead/7":
		fmt.Fprint(w, `{"id":"7"}`)
	case what == "POST /api/dead/8/retry":
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"code":"SESSION_NOT_FOUND","field":"sessionId","detail":"the session was deleted; drop the letter"}`)
	case what == "POST /api/keys":
		fmt.Fprint(w, `{"keyId":"key_x","key":"spool_sk_x","tenant":"acme"}`)
	case what == "GET /api/keys", what == "GET /api/keys?tenant=acme":
		fmt.Fprint(w, `{"keys":[{"keyId":"key_x","name":"ci","role":"use","agents":["a","b"],"createdAt":"2026-01-02T03:04:05Z","expiresAt":"2027-01-02T03:04:05Z","createdBy":"key_maker"}]}`)
	case what == "GET /readyz":
		fmt.Fprint(w, `{"ready":true,"checks":{"nats":"ok","postgres":"ok"}}`)
	case what == "POST /api/executions/"+completedExe+"/recover":
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
		fmt.Fprint(w, `{"code":"EXECUTION_NOT_FAILED","field":"executionId","detail":"the execution has completed"}`)
	case what == "POST /api/executions", strings.HasSuffix(what, "/messages"), strings.HasSuffix(what, "/recover"):
		if strings.Contains(body.String(), `"architecture":"nonsense"`) {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, `{"code":"INVALID_REQUEST","field":"architecture","detail":"\"nonsense\" is none of claude-code, spool"}`)
			return
		}
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprintf(w, `{"sessionId":%q,"executionId":%q,"position":"0-3"}`, ses, exe)
	case what == "GET /api/sessions/"+ses:
		fmt.Fprintf(w, `{"sessionId":%q,"status":"open","architecture":"spool","sandbox":"local","tip":0,"currentSandbox":{"sandboxId":"sbx_1","state":"paused","health":"unhealthy","reason":"no\u001b[2J answer"},"snapshot":"m-1","snapshotAt":"2026-01-02T03:04:05Z","workspaceFiles":3,"workspaceBytes":5368709120,"sandboxMs":61500,"sandboxCostUsd":0.25}`, ses)
	case what == "GET /api/executions/"+failedExe, what == "GET /api/executions/"+completedExe:
		fmt.Fprintf(w, `{"executionId":%q,"sessionId":%q,"phase":"failed","recoveredFrom":"exe_earlier"}`, failedExe, ses)
	case strings.HasPrefix(what, "GET /api/executions/"+exe+"?minPosition="):
		fmt.Fprint(w, f.execution)
	case what == "GET /api/executions/"+exe:
		fmt.Fprintf(w, `{"executionId":%q,"sessionId":%q,"phase":"paused","usage":{},"metered":[{"provider":"anthropic","model":"m","requests":3,"failed":1,"usage":{"inputTokens":10,"cacheReadTokens":5,"outputTokens":2},"costUsd":0.5,"prices":"1"}],"meteredCostUsd":0.5,"sandboxMs":1500}`, exe, ses)
	case what == "GET /api/sessions/"+ses && f.sessions:
		fmt.Fprintf(w, `{"sessionId":%q,"status":"open"}`, ses)
	case strings.HasPrefix(what, "GET /api/sessions?"), what == "GET /api/sessions":
		fmt.Fprintf(w, `{"sessions":[{"sessionId":%q,"status":"open","architecture":"spool\u001b[2J","extra":7}],"nextPageToken":""}`, ses)
	case strings.HasPrefix(what, "GET /api/executions?"), what == "GET /api/executions", what == "GET /api/sessions/"+ses+"/executions":
		fmt.Fprint(w, `{"executions":[],"nextPageToken":""}`)
	case r.Method == http.MethodGet && r.URL.Path == "/api/approvals":
		list := slices.Collect(maps.Values(f.approvals))
		fmt.Fprintf(w, `{"approvals":[%s]}`, strings.Join(list, ","))
	case r.Method == http.MethodGet && f.approvals[strings.TrimPrefix(r.URL.Path, "/api/approvals/")] != "":
		fmt.Fprint(w, f.approvals[strings.TrimPrefix(r.URL.Path, "/api/approvals/")])
	case r.Method == http.MethodPost, r.Method == http.MethodDelete:
		fmt.Fprint(w, `{"position":"0-9"}`)
	default:
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"code":"SESSION_NOT_FOUND","field":"sessionId","detail":"there is no such session"}`)
	}
}

func (f *fakeServer) stream(w http.ResponseWriter, r *http.Request) {
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		f.t.Error(err)
		return
	}
	defer func() { _ = conn.CloseNow() }()
	if _, _, err := conn.Read(r.Context()); err != nil {
		return
	}
	ctx := conn.CloseRead(r.Context())
	if err := conn.Write(ctx, websocket.MessageText, []byte(`{"type":"session:joined","seq":0}`)); err != nil {
		return
	}
	var seq uint32
	send := func(list []events.Payload) bool {
		for _, p := range list {
			seq++
			e := events.Event{ID: fmt.Sprint("evt_", seq), Time: time.Unix(0, 0), ExecutionID: exe, ConversationID: "main", Source: events.FromServer, Data: p}
			wire, err := e.ToWire(ses, seq, fmt.Sprint("0-", seq))
			if err != nil {
				f.t.Error(err)
				return false
			}
			m, err := json.Marshal(map[string]any{"type": "session:event", "event": wire})
			if err != nil || conn.Write(ctx, websocket.MessageText, m) != nil {
				return false
			}
		}
		return true
	}
	if !send(f.begin) {
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.gone:
			return
		case list := <-f.more:
			if !send(list) {
				return
			}
		}
	}
}

// count returns the number of requests.
func (f *fakeServer) count(what string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.requests {
		if a == what {
			n++
		}
	}
	return n
}

// wasSent reports whether a request had the body.
func (f *fakeServer) wasSent(body string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.bodies, func(b string) bool { return strings.TrimSpace(b) == body })
}

func (f *fakeServer) wasRequested(what string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.requests {
		if a == what {
			return true
		}
	}
	return false
}

// fakeLocal is a fake machine on which a stack runs or can be started.
type fakeLocal struct {
	dir     string
	mu      sync.Mutex
	found   *StackConnection
	start   func(StackOptions) (Stack, error)
	open    func() (Installation, error)
	started []StackOptions
}

func (l *fakeLocal) DefaultDir() (string, error) { return l.dir, nil }
func (l *fakeLocal) Find(string) (StackConnection, bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.found == nil {
		return StackConnection{}, false, nil
	}
	return *l.found, true, nil
}
func (l *fakeLocal) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.found = nil
}
func (l *fakeLocal) Start(_ context.Context, o StackOptions) (Stack, error) {
	l.started = append(l.started, o)
	return l.start(o)
}
func (l *fakeLocal) Open(context.Context, StackOptions) (Installation, error) { return l.open() }

// fakeLocalKey is the local key of a fakeStack.
const fakeLocalKey = "spool_sk_local"

// fakeStack is a fake stack, whose gateway is a fakeServer.
type fakeStack struct {
	url    string
	done   chan struct{}
	closed int
	err    error
}

func newFakeStack(url string) *fakeStack { return &fakeStack{url: url, done: make(chan struct{})} }

func (s *fakeStack) URL() string           { return s.url }
func (s *fakeStack) LocalKey() string      { return fakeLocalKey }
func (s *fakeStack) Done() <-chan struct{} { return s.done }
func (s *fakeStack) Err() error            { return s.err }
func (s *fakeStack) Close() error {
	if s.closed++; s.closed == 1 {
		close(s.done)
	}
	return nil
}

// nowhere is an address that refuses connections.
const nowhere = "http://127.0.0.1:1"

// watched is an output that closes full when it has received a number of lines.
type watched struct {
	lines int
	full  chan struct{}
}

func (w *watched) Write(p []byte) (int, error) {
	for range bytes.Count(p, []byte("\n")) {
		if w.lines--; w.lines == 0 {
			close(w.full)
		}
	}
	return len(p), nil
}
