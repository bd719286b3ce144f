package gateway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// sessionChange is a change of a tenant's sessions as a client receives it.
type sessionChange struct {
	cursor, session, title string
	tip                    uint32
	deleted                bool
}

// changesFrom follows the changes after a cursor over SSE ("sse"), WebSocket ("ws") or gRPC ("rpc"). next returns the next change, without a session for
// the beginning of the stream.
func (s *served) changesFrom(transport, cursor string) (next func() (sessionChange, error), end func()) {
	s.t.Helper()
	switch transport {
	case "ws":
		c := s.dial()
		c.send(string(encode(s.t, map[string]string{"type": "sessions:join", "cursor": cursor})))
		return func() (sessionChange, error) {
			var m struct {
				Type, Cursor, Code, Field, Message string
				Session                            struct {
					SessionID, Title string
					Tip              uint32
				}
				Deleted struct{ SessionID string }
			}
			_, b, err := c.conn.Read(c.ctx)
			if err == nil {
				err = json.Unmarshal(b, &m)
			}
			if err != nil {
				return sessionChange{}, err
			}
			if m.Type == "error" {
				return sessionChange{}, errProblem{m.Code, m.Field, m.Message}
			}
			return sessionChange{m.Cursor, m.Session.SessionID + m.Deleted.SessionID, m.Session.Title, m.Session.Tip, m.Type == "sessions:deleted"}, nil
		}, c.close
	case "rpc":
		ctx, cancel := context.WithTimeout(s.t.Context(), patience)
		stream, err := spoolv1.NewSessionsClient(s.conn()).StreamSessions(s.context(ctx), &spoolv1.StreamSessionsRequest{After: cursor})
		must(s.t, err)
		return func() (sessionChange, error) {
			m, err := stream.Recv()
			if err != nil {
				return sessionChange{}, problemOf(err)
			}
			return sessionChange{m.GetCursor(), m.GetSession().GetSessionId() + m.GetDeleted().GetSessionId(), m.GetSession().GetTitle(), m.GetSession().GetTip(), m.GetDeleted() != nil}, nil
		}, cancel
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"/api/sessions/stream?after="+url.QueryEscape(cursor), nil)
	must(s.t, err)
	if s.key != "" {
		req.Header.Set("Authorization", "Bearer "+s.key)
	}
	resp, err := s.client().Do(req)
	must(s.t, err)
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(resp.Body)
		s.t.Fatalf("SSE: %d %s", resp.StatusCode, b)
	}
	lines := bufio.NewReader(resp.Body)
	return func() (sessionChange, error) {
		var c sessionChange
		kind := ""
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return c, err
			}
			name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
			switch name {
			case "id":
				c.cursor = value
			case "event":
				kind = value
			case "data":
				if kind == "problem" {
					a := answer{body: []byte(value)}
					return c, errProblem{a.text("code"), a.text("field"), a.text("detail")}
				}
				var m struct {
					SessionID, Title string
					Tip              uint32
				}
				c.deleted = kind == "session_deleted"
				err := json.Unmarshal([]byte(value), &m)
				c.session, c.title, c.tip = m.SessionID, m.Title, m.Tip
				return c, err
			}
		}
	}, func() { cancel(); _ = resp.Body.Close() }
}

// join returns a stream whose first message, with the cursor, was read.
func (s *served) join(transport, cursor string) (next func() (sessionChange, error), end func(), at string) {
	s.t.Helper()
	next, end = s.changesFrom(transport, cursor)
	c, err := next()
	if err != nil || c.session != "" || c.cursor == "" {
		s.t.Fatalf("the stream begins with %+v, %v", c, err)
	}
	return next, end, c.cursor
}

var changeTransports = []string{"sse", "ws", "rpc"}

// TestChanges_ExactResume tests, with two gateways in turn and connections that end after a few changes, that a client receives the last state of every
// session, no state twice, and none after a newer one.
func TestChanges_ExactResume(t *testing.T) {
	t.Parallel()
	for _, transport := range changeTransports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			gateways := []*served{w.gateway(gateway.Config{}), w.gateway(gateway.Config{})}
			_, end, cursor := gateways[0].join(transport, "")
			end()
			const sessions, rounds = 40, 5
			var writer sync.WaitGroup
			writer.Go(func() {
				var ids []string
				for range sessions {
					ids = append(ids, w.session("default"))
				}
				for round := range rounds {
					for i, id := range ids {
						if i%10 == 9 && round == rounds-1 {
							w.emit("default", id, events.Event{Data: events.SessionDeleted{}})
							continue
						}
						w.emit("default", id, events.Event{Data: events.SessionOptionsUpdated{Metadata: json.RawMessage(fmt.Sprintf(`{"round":%d}`, round))}})
					}
				}
			})
			seen, gone := map[string]uint32{}, map[string]bool{}
			complete := func() bool {
				n := 0
				for id, tip := range seen {
					if gone[id] || tip == rounds+1 {
						n++
					}
				}
				return n == sessions
			}
			for cut := 0; !complete(); cut++ {
				next, end, _ := gateways[cut%2].join(transport, cursor)
				for range 1 + cut%7 {
					c, err := next()
					must(t, err)
					if !c.deleted && c.tip <= seen[c.session] || gone[c.session] {
						t.Fatalf("%+v came after tip %d", c, seen[c.session])
					}
					cursor, seen[c.session], gone[c.session] = c.cursor, max(c.tip, seen[c.session]), c.deleted
					if complete() {
						break
					}
				}
				end()
			}
			writer.Wait()
			deleted := 0
			for id := range maps.Keys(seen) {
				if gone[id] {
					deleted++
				}
			}
			if len(seen) != sessions || deleted != sessions/10 {
				t.Errorf("%d sessions, %d of them deleted", len(seen), deleted)
			}
		})
	}
}

// TestChanges_PageWhatIsMissed tests that a client that was away receives more changes than one read returns, of sessions and of deleted ones, each once.
func TestChanges_PageWhatIsMissed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	_, end, cursor := g.join("sse", "")
	end()
	w.exec(`INSERT INTO sessions (tenant, id, grp, status, agent, agent_version, architecture, provider, options, created_at, updated_at, tip, tip_position, changed_at)
		SELECT 'default', 'ses_' || lpad(n::text, 26, '0'), n % 8, 'open', 'default', '1', 'spool', 'local', '{}', now(), now(), 1, '0-1', n FROM generate_series(1, 1000) n`)
	w.exec(`INSERT INTO deleted_sessions (tenant, id, grp, deleted_at, changed_at) SELECT 'default', 'ses_' || lpad(n::text, 26, '0'), n % 8, now(), n FROM generate_series(1001, 1700) n`)
	w.exec("UPDATE checkpoints SET position = 2000")
	next, end, _ := g.join("sse", cursor)
	defer end()
	seen := map[string]bool{}
	for len(seen) < 1700 {
		c, err := next()
		must(t, err)
		if seen[c.session] || c.deleted != (c.session > "ses_"+strings.Repeat("0", 22)+"1000") {
			t.Fatalf("%+v", c)
		}
		seen[c.session] = true
	}
}

// TestChanges_ArriveWithoutAnnouncements tests that a change whose announcement was lost arrives.
func TestChanges_ArriveWithoutAnnouncements(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.unannounced = true
	next, end, _ := w.gateway(gateway.Config{}).join("sse", "")
	defer end()
	id := w.session("default")
	if c, err := next(); err != nil || c.session != id {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestChanges_OfTheCallerOnly tests that a stream has the sessions of the key's tenant and agents only, deleted ones too.
func TestChanges_OfTheCallerOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	newKey := func(body string) *served {
		return g.withKey(g.withKey(root).do("POST", "/api/keys", body).want(t, 201).text("key"))
	}
	for _, transport := range changeTransports {
		all, some := newKey(`{"name":"all","tenant":"acme"}`), newKey(`{"name":"some","tenant":"acme","agents":["helper"]}`)
		nextOfAll, endOfAll, _ := all.join(transport, "")
		nextOfSome, endOfSome, _ := some.join(transport, "")
		w.session("other")
		other, mine := w.sessionOf("acme", "default"), w.sessionOf("acme", "helper")
		for _, id := range []string{other, mine} {
			w.emit("acme", id, events.Event{Data: events.SessionDeleted{}})
		}
		last := w.sessionOf("acme", "helper")
		// The order of changes in different projector groups may vary.
		for _, one := range []struct {
			next func() (sessionChange, error)
			want []string
		}{{nextOfAll, []string{other, mine, last}}, {nextOfSome, []string{mine, last}}} {
			left := slices.Clone(one.want)
			for len(left) > 0 {
				c, err := one.next()
				must(t, err)
				if !slices.Contains(one.want, c.session) {
					t.Fatalf("%s: got %+v, want %q", transport, c, one.want)
				}
				left = slices.DeleteFunc(left, func(id string) bool { return id == c.session && (c.deleted || id == last) })
			}
		}
		endOfAll()
		endOfSome()
	}
}

// TestChanges_BadCursors tests that a cursor that is none, is of another installation, or is ahead is refused by a problem that names the field.
func TestChanges_BadCursors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	for cursor, code := range map[string]string{
		"12": "INVALID_REQUEST", "0.0.0.0.0.0.0.-1": "INVALID_REQUEST", "0.0.0.0.0.0.0.00": "INVALID_REQUEST", "0.0.0.0.0.0.0.": "INVALID_REQUEST", "x\n": "INVALID_REQUEST",
		strings.Repeat("0.", 63) + "0": "INVALID_REQUEST", "0.0.0.0.0.0.0.zzzzzzzzzzzzzzzz": "INVALID_REQUEST", "0.0.0.0.0.0.0.zz": "CURSOR_AHEAD",
	} {
		a := g.get("/api/sessions/stream?after=" + url.QueryEscape(cursor))
		if a.text("code") != code || a.text("field") != "after" {
			t.Errorf("after=%q: %d %s", cursor, a.status, a.body)
		}
		next, end := g.changesFrom("ws", cursor)
		if _, err := next(); err == nil || !strings.HasPrefix(err.Error(), code+" cursor ") {
			t.Errorf("WebSocket, %q: %v", cursor, err)
		}
		end()
		next, end = g.changesFrom("rpc", cursor)
		if _, err := next(); err == nil || !strings.Contains(err.Error(), "cursor") {
			t.Errorf("gRPC, %q: %v", cursor, err)
		}
		end()
	}
	if a := g.get("/api/sessions/stream?from=1"); a.text("field") != "from" {
		t.Errorf("an unknown parameter: %s", a.body)
	}
	w.exec("UPDATE checkpoints SET caught_up = false")
	if a := g.get("/api/sessions/stream?after=0.0.0.0.0.0.0.zz"); a.text("code") != "UNAVAILABLE" {
		t.Errorf("while the read models are folded: %s", a.body)
	}
}

// TestChanges_EndWithAReason tests that a stream ends with a reason when its key is revoked and when the gateway stops.
func TestChanges_EndWithAReason(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	var stays []func() (sessionChange, error)
	for _, transport := range changeTransports {
		made := g.withKey(root).do("POST", "/api/keys", `{"name":"x"}`).want(t, 201)
		next, end, _ := g.withKey(made.text("key")).join(transport, "")
		g.withKey(root).do("DELETE", "/api/keys/"+made.text("keyId"), "").want(t, 200)
		if _, err := next(); err == nil || !strings.HasPrefix(err.Error(), "UNAUTHENTICATED") {
			t.Errorf("%s: revoked: %v", transport, err)
		}
		end()
		next, end, _ = g.withKey(g.withKey(root).do("POST", "/api/keys", `{"name":"y"}`).want(t, 201).text("key")).join(transport, "")
		defer end()
		stays = append(stays, next)
	}
	go g.stop()
	for i, next := range stays {
		if _, err := next(); err == nil || !strings.Contains(err.Error(), "stopping") {
			t.Errorf("%s: stopped: %v", changeTransports[i], err)
		}
	}
}
