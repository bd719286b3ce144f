package gateway_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// method is a method of spool.v1.
type method struct {
	name string // Sessions/GetSession
	protoreflect.MethodDescriptor
}

func methods() (list []method) {
	services := spoolv1.File_spool_v1_spool_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			m := services.Get(i).Methods().Get(j)
			list = append(list, method{fmt.Sprintf("%s/%s", services.Get(i).Name(), m.Name()), m})
		}
	}
	return list
}

// binding returns the HTTP method and pattern of the method's route, or "" for none.
func (m method) binding() (verb, pattern string) {
	rule, ok := proto.GetExtension(m.Options(), annotations.E_Http).(*annotations.HttpRule)
	if !ok || rule == nil {
		return "", ""
	}
	for verb, pattern := range map[string]string{"GET": rule.GetGet(), "POST": rule.GetPost(), "PUT": rule.GetPut(), "PATCH": rule.GetPatch(), "DELETE": rule.GetDelete()} {
		if pattern != "" {
			return verb, pattern
		}
	}
	return "", ""
}

// call calls the method over gRPC, and returns the first answer as JSON.
func (m method) call(s *served, conn *grpc.ClientConn, fill func(protoreflect.Message)) (string, error) {
	s.t.Helper()
	in, out := dynamicpb.NewMessage(m.Input()), dynamicpb.NewMessage(m.Output())
	fill(in)
	stream, err := conn.NewStream(s.context(s.t.Context()), &grpc.StreamDesc{ServerStreams: true}, "/spool.v1."+m.name)
	must(s.t, err)
	if err := errors.Join(stream.SendMsg(in), stream.CloseSend()); err != nil {
		s.t.Fatal(err)
	}
	err = stream.RecvMsg(out)
	return protojson.Format(out), err
}

// The roles above use that methods require. All other methods require use, so a new method that is in neither list
// would be open to every key.
var (
	forOperators = []string{
		"Sessions/DeleteSession", "Agents/ApplyAgent", "Agents/RemoveAgent", "Instances/ApplyInstance", "Instances/RemoveInstance",
		"Environments/ApplyEnvironment", "Environments/RemoveEnvironment", "Skills/TagSkill", "Skills/RemoveSkill",
		"DeadLetters/ListDeadLetters", "DeadLetters/GetDeadLetter", "DeadLetters/RetryDeadLetter", "DeadLetters/DropDeadLetter",
		"Budgets/ListBudgets", "Limits/GetLimits",
	}
	forAdmins = []string{"Keys/CreateKey", "Keys/ListKeys", "Keys/RevokeKey", "Audit/ListAudit"}
	// These require the root key, so no role can call them.
	rootOnlyMethods = []string{"Budgets/SetBudget", "Budgets/RemoveBudget", "Limits/SetLimits", "Limits/RemoveLimits"}
)

func roleOf(name string) string {
	switch {
	case slices.Contains(forOperators, name):
		return "operate"
	case slices.Contains(forAdmins, name), slices.Contains(rootOnlyMethods, name):
		return "admin"
	}
	return "use"
}

// TestRoles_EveryMethodAndRouteRefusesLowerRoles tests that every method and route, over gRPC and REST, is refused for keys with a
// lower role, with the name of the required role, and for no other keys.
func TestRoles_EveryMethodAndRouteRefusesLowerRoles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	w.serveSkills()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	conn := g.conn()
	order := []string{"use", "operate", "admin"}
	none := strings.NewReplacer("{session_id}", oldID(t, events.KindSession), "{execution_id}", oldID(t, events.KindExecution), "{approval_id}", oldID(t, events.KindApproval), "{slug}", "nobody",
		"{key_id}", oldID(t, events.KindKey), "{period}", "day", "{id}", "7", "{block_id}", "q", "{path}", "a.txt")
	for i, role := range order {
		key := g.withKey(g.withKey(root).do("POST", "/api/keys", fmt.Sprintf(`{"name":%q,"role":%q}`, role, role)).want(t, 201).text("key"))
		want := func(what, needed string, forbidden bool, detail string) {
			t.Helper()
			lower := i < slices.Index(order, needed)
			if forbidden != lower || lower && detail != fmt.Sprintf("this needs a key with role %s; the key has role %s", needed, role) {
				t.Errorf("%s with role %s: forbidden %v (%s), want %v", what, role, forbidden, detail, lower)
			}
		}
		for _, m := range methods() {
			_, err := m.call(key, conn, func(protoreflect.Message) {})
			root := slices.Contains(rootOnlyMethods, m.name)
			if !root || role != "admin" {
				want(m.name, roleOf(m.name), status.Code(err) == codes.PermissionDenied, status.Convert(err).Message())
			}
			verb, pattern := m.binding()
			if pattern == "" {
				continue
			}
			body := ""
			if verb == "POST" || verb == "PUT" || verb == "PATCH" {
				body = "{}"
			}
			a := key.do(verb, none.Replace(pattern), body)
			if strings.Contains(none.Replace(pattern), "{") {
				t.Fatalf("%s has a parameter that this test does not know", pattern)
			}
			if !root || role != "admin" {
				want(verb+" "+pattern, roleOf(m.name), a.status == 403, a.text("detail"))
			}
		}
		for route, needed := range map[string]string{
			"GET /api/ws": "use", "GET /api/sessions/{session_id}/events/stream": "use", "GET /api/sessions/{session_id}/files": "use",
			"PUT /api/sessions/{session_id}/files": "use", "HEAD /api/sessions/{session_id}/files/{path}": "use", "GET /api/sessions/{session_id}/files/{path}": "use",
			"PUT /api/sessions/{session_id}/files/{path}": "use", "DELETE /api/sessions/{session_id}/files/{path}": "use",
			"POST /api/skills": "operate", "GET /api/skills/{slug}/archive": "use",
		} {
			verb, pattern, _ := strings.Cut(route, " ")
			a := key.do(verb, none.Replace(pattern), "")
			want(route, needed, a.status == 403, a.text("detail"))
			if a.status >= 500 {
				t.Errorf("%s: %s", route, a)
			}
		}
	}
}

// otherAgentMark is contained in everything that belongs to the agent that the limited key may not use.
const otherAgentMark = "zq9"

// TestLimitedKey_EveryMethodHidesOtherAgents tests that every method answers a key that is limited to agents in the same way for
// another agent's data as for data that does not exist. The methods and fields are taken from spool.v1.
func TestLimitedKey_EveryMethodHidesOtherAgents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	conn := g.conn()
	all := g.withKey(g.withKey(root).do("POST", "/api/keys", `{"name":"`+otherAgentMark+`"}`).want(t, 201).text("key"))
	foreignKey := all.get("/api/keys").text("keys", "0", "keyId")
	const spec = `{"architecture":"spool","instructions":"Do what is asked of you."}`
	for _, slug := range []string{otherAgentMark, "mine"} {
		all.do("POST", "/api/agents", `{"ref":{"slug":"`+slug+`"},"spec":{"architecture":"spool","instructions":"Do what is asked of `+slug+`."}}`).want(t, 200)
		all.do("POST", "/api/instances", `{"ref":{"slug":"`+slug+`-instance"},"spec":{"agent":"`+slug+`"}}`).want(t, 200)
	}
	theirs, exe := w.sessionOf("default", otherAgentMark), newID(t, events.KindExecution)
	w.emit("default", theirs, events.Event{ExecutionID: exe, Data: events.MessageAccepted{BlockID: "b", Content: otherAgentMark, Metadata: []byte(`"` + otherAgentMark + `"`)}})
	approval := newID(t, events.KindApproval)
	w.emit("default", theirs, events.Event{ExecutionID: exe, Data: events.ApprovalRequested{ApprovalID: approval, Kind: events.ApprovalTool, Title: otherAgentMark}})
	mine := w.sessionOf("default", "mine")
	key := g.withKey(g.withKey(root).do("POST", "/api/keys", `{"name":"x","agents":["mine"]}`).want(t, 201).text("key"))
	before := len(s.commands(t))
	fill := func(ids map[string]string) func(protoreflect.Message) {
		return func(m protoreflect.Message) {
			fields := m.Descriptor().Fields()
			for i := range fields.Len() {
				f := fields.Get(i)
				switch v, known := ids[string(f.Name())]; {
				case f.Name() == "agent" && strings.HasPrefix(string(m.Descriptor().Name()), "List"): // lists everything that the key may see
				case known && f.Kind() == protoreflect.StringKind:
					m.Set(f, protoreflect.ValueOfString(v))
				case f.Message() != nil && f.Message().Name() == "Json" && !f.IsList():
					j := m.Mutable(f).Message()
					j.Set(f.Message().Fields().ByName("text"), protoreflect.ValueOfString(spec))
				case f.Name() == "ref":
					m.Mutable(f).Message().Set(f.Message().Fields().ByName("slug"), protoreflect.ValueOfString(ids["slug"]))
				}
			}
		}
	}
	foreign := map[string]string{"session_id": theirs, "execution_id": exe, "approval_id": approval, "slug": otherAgentMark, "agent": otherAgentMark, "key_id": foreignKey, "id": "1", "period": "day", "content": "x", "name": "x", "tag": "t"}
	absent := map[string]string{"session_id": oldID(t, events.KindSession), "execution_id": oldID(t, events.KindExecution), "approval_id": oldID(t, events.KindApproval), "slug": "nobody", "agent": "nobody", "key_id": oldID(t, events.KindKey),
		"id": "1", "period": "day", "content": "x", "name": "x", "tag": "t"}
	refused := 0
	for _, m := range methods() {
		got, err := m.call(key, conn, fill(foreign))
		_, missing := m.call(key, conn, fill(absent))
		if strings.Contains(got, otherAgentMark) || strings.Contains(got, theirs) || strings.Contains(got, exe) || strings.Contains(got, foreignKey) {
			t.Errorf("%s returns data of another agent: %s", m.name, got)
		}
		if fmt.Sprint(problemOf(err)) != fmt.Sprint(problemOf(missing)) || status.Code(err) != status.Code(missing) {
			t.Errorf("%s: another agent's can be distinguished from a missing one: %v, %v", m.name, err, missing)
		}
		for _, field := range []string{"session_id", "execution_id", "approval_id", "slug", "ref", "key_id", "agent"} {
			if m.Input().Fields().ByName(protoreflect.Name(field)) == nil || strings.Contains(m.name, "/List") && field == "agent" {
				continue
			}
			if code := status.Code(err); code != codes.NotFound && code != codes.PermissionDenied && !strings.HasPrefix(m.name, "Environments/") && !strings.HasPrefix(m.name, "Skills/") {
				t.Errorf("%s with %s of another agent: %v", m.name, field, err)
			}
			refused++
			break
		}
	}
	if refused < 30 {
		t.Errorf("only %d methods take a name of another agent's data", refused)
	}
	for _, c := range s.commands(t)[before:] {
		if !slices.Equal(c.Agents, []string{"mine"}) {
			t.Errorf("command %s is limited to %v", c.Type, c.Agents)
		}
	}
	// The key can see the data of its own agent.
	for path, want := range map[string]string{"/api/sessions": mine, "/api/sessions/" + mine: mine, "/api/agents": `"mine"`, "/api/instances": "mine-instance", "/api/instances/mine-instance": "mine-instance"} {
		if a := key.get(path).want(t, 200); !strings.Contains(string(a.body), want) || strings.Contains(string(a.body), theirs) {
			t.Errorf("%s: %s", path, a)
		}
	}
	key.get("/api/instances/"+otherAgentMark+"-instance").wantProblem(t, 404, "INSTANCE_NOT_FOUND", "slug")
	key.do("POST", "/api/environments/explain", `{"instance":"`+otherAgentMark+`-instance"}`).wantProblem(t, 404, "INSTANCE_NOT_FOUND", "instance")
	key.do("POST", "/api/sessions", `{"agent":"mine"}`).want(t, 201)
	key.do("POST", "/api/sessions", `{"agent":"`+otherAgentMark+`"}`).wantProblem(t, 403, "FORBIDDEN", "agent")
	if a := key.get("/api/executions").want(t, 200); strings.Contains(string(a.body), exe) {
		t.Errorf("executions: %s", a)
	}
	// The routes that are not generated from spool.v1.
	none := oldID(t, events.KindSession)
	for _, route := range []struct{ method, path, body string }{
		{"GET", "/events/stream?after=999", ""}, {"GET", "/files", ""}, {"GET", "/files?live=1", ""}, {"GET", "/files/a", ""}, {"GET", "/files/a?live=1", ""},
		{"GET", "/files?at=1", ""}, {"GET", "/files/a?at=1", ""}, {"GET", "/state?at=1", ""}, {"GET", "/diff?from=1&to=1", ""}, {"GET", "/compare?with=" + mine, ""},
		{"PUT", "/files/a", "x"}, {"DELETE", "/files/a", ""},
	} {
		got := key.do(route.method, "/api/sessions/"+theirs+route.path, route.body).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
		if want := key.do(route.method, "/api/sessions/"+none+route.path, route.body); string(got.body) != string(want.body) {
			t.Errorf("%s %s: another agent's can be distinguished from a missing one: %s, %s", route.method, route.path, got, want)
		}
	}
	key.get("/api/sessions/"+mine+"/compare?with="+theirs).wantProblem(t, 404, "SESSION_NOT_FOUND", "with")
	c := key.dial()
	c.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q}`, theirs))
	c.wantError("SESSION_NOT_FOUND", "sessionId")
	// An answer stored for another key's Idempotency-Key is not returned to this key.
	again := header("Idempotency-Key", "k")
	all.do("POST", "/api/sessions", `{"agent":"`+otherAgentMark+`"}`, again).want(t, 201)
	key.do("POST", "/api/sessions", `{"agent":"`+otherAgentMark+`"}`, again).wantProblem(t, 403, "FORBIDDEN", "agent")
}

// TestExpiringKey_IsRefusedByTheDatabaseClock tests that a key is refused and its streams end when it expires by the clock of Postgres, even if
// the gateway's clock is an hour off.
func TestExpiringKey_IsRefusedByTheDatabaseClock(t *testing.T) {
	t.Parallel()
	for name, off := range map[string]time.Duration{"the clocks agree": 0, "the gateway is an hour ahead": time.Hour, "the gateway is an hour behind": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.serveCommands()
			w.now = func() time.Time { return time.Now().Add(off) }
			root := rootKey()
			g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
			made := g.withKey(root).do("POST", "/api/keys", `{"name":"x","expires":"30m"}`).want(t, 201)
			var left float64
			must(t, w.pool.QueryRow(t.Context(), "SELECT extract(epoch FROM $1::timestamptz - now())", made.text("expiresAt")).Scan(&left))
			if left < 1 || left > 1800 {
				t.Errorf("the key expires in %v s by the clock of Postgres", left)
			}
			mine := g.withKey(made.text("key"))
			child := mine.do("POST", "/api/keys", `{"name":"y"}`).want(t, 201)
			id := w.session("default")
			list := map[string]stream{"ws": mine.ws(id, 0), "sse": mine.sse(id, 0), "rpc": mine.rpc(id, 0), "child": g.withKey(child.text("key")).sse(id, 0)}
			for _, one := range list {
				_, err := one.next()
				must(t, err)
			}
			w.exec("UPDATE keys SET expires_at = now() WHERE id = $1", made.text("keyId")) // simulates that half an hour has passed
			for way, one := range list {
				var p errProblem
				if _, err := one.next(); !errors.As(err, &p) || p.code != "UNAUTHENTICATED" || p.message != "the API key has expired" {
					t.Errorf("%s ended with %v", way, err)
				}
			}
			mine.get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
			// A database clock that was ahead does no lasting harm: the key is accepted again after the clock was
			// corrected.
			w.exec("UPDATE keys SET expires_at = now() + interval '1 hour' WHERE id = $1", made.text("keyId"))
			mine.get("/api/sessions").want(t, 200)
		})
	}
}

func TestCreateKey_SetsTheExpiry(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	for _, wrong := range []string{"0s", "-1h", "tomorrow", "2001-01-01T00:00:00Z", "720"} {
		g.do("POST", "/api/keys", fmt.Sprintf(`{"name":"x","expires":%q}`, wrong)).wantProblem(t, 400, "INVALID_REQUEST", "expires")
	}
	a := g.do("POST", "/api/keys", `{"name":"x","role":"use","agents":["a","b"],"expires":"2100-01-02T03:04:05Z"}`).want(t, 201)
	if a.text("role") != "use" || a.text("agents", "1") != "b" || a.text("expiresAt") != "2100-01-02T03:04:05Z" {
		t.Errorf("got %s", a)
	}
	list := g.get("/api/keys").want(t, 200)
	if list.text("keys", "0", "role") != "use" || list.text("keys", "0", "agents", "0") != "a" || list.text("keys", "0", "expiresAt") != "2100-01-02T03:04:05Z" {
		t.Errorf("got %s", list)
	}
}

// TestRevokedKey_RefusesTheKeysItMade tests that, when a revocation is answered, the key's descendants are refused,
// even if the projector has not folded their own revocations.
func TestRevokedKey_RefusesTheKeysItMade(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands() // revokes only the named key
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	made := g.withKey(root).do("POST", "/api/keys", `{"name":"x"}`).want(t, 201)
	child := g.withKey(made.text("key")).do("POST", "/api/keys", `{"name":"y"}`).want(t, 201)
	id := w.session("default")
	open := g.withKey(child.text("key")).sse(id, 1)
	defer open.close()
	g.withKey(root).do("DELETE", "/api/keys/"+made.text("keyId"), "").want(t, 200)
	g.withKey(child.text("key")).get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	var p errProblem
	if _, err := open.next(); !errors.As(err, &p) || p.code != "UNAUTHENTICATED" {
		t.Errorf("got %v", err)
	}
}
