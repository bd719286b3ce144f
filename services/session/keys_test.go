package session_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session"
)

// sendAs sends a command in the name of a key; with "" the local user sends it.
func (s *stack) sendAs(key string, agents []string, typ command.Type, sid, exe string, body any) (command.Answer, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return command.Answer{}, err
	}
	actor := events.Actor{Kind: "user", ID: "local"}
	if key != "" {
		actor = events.Actor{Kind: "key", ID: key}
	}
	target := sid
	if target == "" {
		target = "key"
	}
	return s.request(command.Command{Type: typ, ID: id(events.KindCommand), Tenant: "default", SessionID: sid, ExecutionID: exe, Actor: actor, Agents: agents, Body: raw}, target)
}

// newKey requests a key, and returns its id and the answer.
func (s *stack) newKey(maker string, rights events.KeyRights) (string, command.Answer, error) {
	key := id(events.KindKey)
	a, err := s.sendAs(maker, nil, command.TypeCreateKey, "", "", command.CreateKey{KeyID: key, Name: "x", SHA256: strings.Repeat("a", 64), Rights: rights})
	return key, a, err
}

func (s *stack) mustKey(maker string, rights events.KeyRights) string {
	s.t.Helper()
	key, a, err := s.newKey(maker, rights)
	must(s.t, err)
	if a.Error != nil {
		s.t.Fatal(a.Error)
	}
	return key
}

func (s *stack) revoke(key string) command.Answer {
	s.t.Helper()
	a, err := s.sendAs("", nil, command.TypeRevokeKey, "", "", command.RevokeKey{KeyID: key})
	must(s.t, err)
	if a.Error != nil {
		s.t.Fatal(a.Error)
	}
	return a
}

// keyEvents returns the events of all keys in the log: key_created, and key_revoked of the revoked keys.
func (s *stack) keyEvents() (created map[string]events.KeyCreated, revoked map[string]events.KeyRevoked) {
	s.t.Helper()
	created, revoked = map[string]events.KeyCreated{}, map[string]events.KeyRevoked{}
	for rec, err := range s.log.Read(s.t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		must(s.t, err)
		for _, e := range rec.Events {
			switch d := e.Data.(type) {
			case events.KeyCreated:
				created[d.KeyID] = d
			case events.KeyRevoked:
				if _, twice := revoked[d.KeyID]; twice {
					s.t.Errorf("key %s is revoked twice", d.KeyID)
				}
				revoked[d.KeyID] = d
			}
		}
	}
	return created, revoked
}

// TestKeys_RevocationRevokesDescendants tests that a revocation is one event for each key that descends from the
// named key, and for no other key.
func TestKeys_RevocationRevokesDescendants(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	parent, other := s.mustKey("", events.KeyRights{}), s.mustKey("", events.KeyRights{})
	child := s.mustKey(parent, events.KeyRights{})
	grandchild := s.mustKey(child, events.KeyRights{})
	others := s.mustKey(other, events.KeyRights{})
	before := s.oldKey(parent) // created by a release that did not record the maker
	a := s.revoke(parent)
	var list []string
	for _, r := range a.Revoked {
		list = append(list, r.KeyID)
		if r.Position == "" {
			t.Errorf("%+v has no position", r)
		}
	}
	slices.Sort(list)
	want := []string{child, grandchild, before}
	slices.Sort(want)
	if !slices.Equal(list, want) {
		t.Errorf("the answer names %v, want %v", list, want)
	}
	_, revoked := s.keyEvents()
	if got := revoked[parent]; got != (events.KeyRevoked{KeyID: parent}) {
		t.Errorf("got %+v", got)
	}
	for _, key := range want {
		if got := revoked[key]; got != (events.KeyRevoked{KeyID: key, Reason: events.KeyRevokedWithMaker, Cause: parent}) {
			t.Errorf("got %+v for %s", got, key)
		}
	}
	for _, key := range []string{other, others} {
		if got, ok := revoked[key]; ok {
			t.Errorf("%+v was revoked", got)
		}
	}
	if again := s.revoke(parent); len(again.Revoked) != 0 {
		t.Errorf("the second revocation revoked %v", again.Revoked)
	}
	if _, a, err := s.newKey(parent, events.KeyRights{}); err != nil || a.Error == nil || a.Error.Code != "UNAUTHENTICATED" {
		t.Errorf("a revoked key created a key: %+v, %v", a, err)
	}
}

// oldKey writes key_created like releases without rights and makers.
func (s *stack) oldKey(maker string) string {
	s.t.Helper()
	key := id(events.KindKey)
	m := events.NewEventList(events.CommandMeta{CommandID: id(events.KindCommand), Now: time.Now()})
	m.Add("", events.KeyCreated{KeyID: key, Name: "old", SHA256: strings.Repeat("b", 64)})
	head := eventlog.Head{Subject: events.Subject{Tenant: "default", ID: events.CatalogueID(events.Key, "default", "", "", key), Aspect: events.Key}}
	_, err := s.log.Append(s.t.Context(), head, events.Draft{ID: id(events.KindCommit), Actor: events.Actor{Kind: "key", ID: maker}, Events: m.Events()})
	must(s.t, err)
	return key
}

// TestKeys_RevocationDuringCreation tests that a key that was created while its maker, or the maker's maker, was
// being revoked is revoked too, with several copies of the service.
func TestKeys_RevocationDuringCreation(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	s.startCopy("two", session.Config{})
	refused, given := 0, 0
	for round := range 20 {
		top := s.mustKey("", events.KeyRights{})
		maker := s.mustKey(top, events.KeyRights{})
		target := []string{top, maker}[round%2]
		var mu sync.Mutex
		var made []string
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for {
					key, a, err := s.newKey(maker, events.KeyRights{})
					mu.Lock()
					switch {
					case err != nil:
						t.Error(err)
					case a.Error == nil:
						made = append(made, key)
					case a.Error.Code == "UNAUTHENTICATED":
						refused++
						err = a.Error
					default:
						t.Error(a.Error)
						err = a.Error
					}
					mu.Unlock()
					if err != nil {
						return
					}
				}
			})
		}
		wg.Go(func() { s.revoke(target) })
		wg.Wait()
		given += len(made)
		created, revoked := s.keyEvents()
		for _, key := range made {
			if _, ok := revoked[key]; !ok {
				t.Errorf("round %d: key %s works after the revocation of %s", round, key, target)
			}
		}
		for key, d := range created {
			if _, ok := revoked[key]; !ok && d.CreatedBy == maker {
				t.Errorf("round %d: key %s of %s is not revoked", round, key, maker)
			}
		}
	}
	if refused == 0 || given == 0 {
		t.Errorf("%d keys were refused and %d created: there was no race", refused, given)
	}
}

// TestKeys_RightsAreLimitedToThoseOfTheMaker tests that the session service, and not only the gateway, refuses a key
// with more rights than its maker.
func TestKeys_RightsAreLimitedToThoseOfTheMaker(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	at := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	limited := events.KeyRights{Role: events.RoleAdmin, Agents: []string{"a", "b"}, ExpiresAt: at}
	maker := s.mustKey("", limited)
	for field, rights := range map[string]events.KeyRights{
		"agents":  {Agents: []string{"a", "c"}},
		"expires": {ExpiresAt: at.Add(time.Second)},
	} {
		if _, a, err := s.newKey(maker, rights); err != nil || a.Error == nil || a.Error.Code != "FORBIDDEN" || a.Error.Field != field {
			t.Errorf("%s: %+v, %v", field, a.Error, err)
		}
	}
	operator := s.mustKey("", events.KeyRights{Role: events.RoleOperate})
	if _, a, err := s.newKey(operator, events.KeyRights{Role: events.RoleAdmin}); err != nil || a.Error == nil || a.Error.Code != "FORBIDDEN" || a.Error.Field != "role" {
		t.Errorf("role: %+v, %v", a.Error, err)
	}
	for field, rights := range map[string]events.KeyRights{
		"role": {Role: "owner"}, "agents": {Agents: []string{"A B"}},
	} {
		if _, a, err := s.newKey("", rights); err != nil || a.Error == nil || a.Error.Code != "INVALID_REQUEST" || a.Error.Field != field {
			t.Errorf("%s: %+v, %v", field, a.Error, err)
		}
	}
	inherits := s.mustKey(maker, events.KeyRights{})
	less := s.mustKey(maker, events.KeyRights{Role: events.RoleUse, Agents: []string{"b", "b"}, ExpiresAt: at.Add(-time.Hour)})
	old := s.oldKey("")
	fromOld := s.mustKey(old, events.KeyRights{})
	created, _ := s.keyEvents()
	for key, want := range map[string]events.KeyRights{
		inherits: limited,
		less:     {Role: events.RoleUse, Agents: []string{"b"}, ExpiresAt: at.Add(-time.Hour)},
		fromOld:  {Role: events.RoleAdmin},
	} {
		if got := created[key].Rights; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if got := created[less].CreatedBy; got != maker {
		t.Errorf("created by %q, want %q", got, maker)
	}
}

// TestKeys_LimitedToAgents tests that, for a key that is limited to agents, sessions of other agents do not exist,
// for every command.
func TestKeys_LimitedToAgents(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	theirs := s.create(events.Options{})
	exe := s.post(theirs)
	spec := events.AgentSpec{Architecture: "claude-code", Instructions: "You review code with care."}
	for _, slug := range []string{"mine", "other"} {
		if a := s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: events.Reference{Slug: slug}, Spec: spec}); a.Error != nil {
			t.Fatal(a.Error)
		}
		if a := s.send(command.TypeApplyInstance, "", "", command.ApplyInstance{Ref: events.Reference{Slug: slug + "s"}, Spec: events.InstanceSpec{Agent: events.Reference{Slug: slug}}}); a.Error != nil {
			t.Fatal(a.Error)
		}
	}
	limited := func(typ command.Type, sid, exe string, body any) command.Answer {
		a, err := s.sendAs(id(events.KindKey), []string{"mine"}, typ, sid, exe, body)
		must(t, err)
		return a
	}
	before := len(s.history(theirs))
	for typ, body := range map[command.Type]any{
		command.TypeUpdateSession: command.UpdateSession{Metadata: json.RawMessage(`1`)}, command.TypePostMessage: command.PostMessage{Content: "x"},
		command.TypeRecoverExecution: command.RecoverExecution{ExecutionID: exe},
		command.TypeInterrupt:        nil, command.TypeCancel: nil, command.TypePause: nil, command.TypeResume: nil, command.TypeTerminate: nil, command.TypeSyncWorkspace: nil,
		command.TypePutFile: command.PutFile{File: command.File{Path: "a", SHA256: strings.Repeat("a", 64)}}, command.TypeRemoveFile: command.RemoveFile{Path: "a"},
		command.TypeDeleteSession: nil, command.TypeCreateSession: command.CreateSession{Agent: "mine"},
		command.TypeStartExecution: command.StartExecution{Create: command.CreateSession{Agent: "mine"}, Post: command.PostMessage{Content: "x"}},
	} {
		a, none := limited(typ, theirs, exe, body), command.Answer{}
		if a.Error == nil || a.Error.Code != "SESSION_NOT_FOUND" {
			t.Errorf("%s: %+v", typ, a)
			continue
		}
		if typ == command.TypeCreateSession || typ == command.TypeStartExecution {
			continue
		}
		if none = limited(typ, id(events.KindSession), exe, body); none.Error == nil || *none.Error != *a.Error {
			t.Errorf("%s: the answers for another agent's session and for no session differ: %+v, %+v", typ, a.Error, none.Error)
		}
	}
	if after := len(s.history(theirs)); after != before {
		t.Errorf("%d events were written", after-before)
	}
	for name, c := range map[string]struct {
		body command.CreateSession
		code string
	}{
		"its agent":                {command.CreateSession{Agent: "mine"}, ""},
		"its agent's instance":     {command.CreateSession{Instance: "mines"}, ""},
		"another agent":            {command.CreateSession{Agent: "other"}, "FORBIDDEN"},
		"an agent of nobody":       {command.CreateSession{Agent: "none"}, "FORBIDDEN"},
		"the built-in agent":       {command.CreateSession{}, "FORBIDDEN"},
		"another agent's instance": {command.CreateSession{Instance: "others"}, "INSTANCE_NOT_FOUND"},
	} {
		a := limited(command.TypeCreateSession, id(events.KindSession), "", c.body)
		if code := codeOf(a); code != c.code {
			t.Errorf("%s: got %q, want %q", name, code, c.code)
		}
		a = limited(command.TypeStartExecution, id(events.KindSession), id(events.KindExecution), command.StartExecution{Create: c.body, Post: command.PostMessage{Content: "x"}})
		if code := codeOf(a); code != c.code {
			t.Errorf("start with %s: got %q, want %q", name, code, c.code)
		}
	}
}

func codeOf(a command.Answer) string {
	if a.Error == nil {
		return ""
	}
	return a.Error.Code
}

// TestKeys_LimitedAdminRevokesWithinItsAgents tests that an admin key that is limited to agents revokes only keys
// within its limits.
func TestKeys_LimitedAdminRevokesWithinItsAgents(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	all, within := s.mustKey("", events.KeyRights{}), s.mustKey("", events.KeyRights{Agents: []string{"a"}})
	for key, want := range map[string]string{all: "KEY_NOT_FOUND", within: ""} {
		a, err := s.sendAs(id(events.KindKey), []string{"a", "b"}, command.TypeRevokeKey, "", "", command.RevokeKey{KeyID: key})
		must(t, err)
		if got := codeOf(a); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestSettingMaxKeys tests that a tenant can have as many keys as the setting allows. Revoked keys do not count, and
// keys that expired a day ago are revoked to make room.
func TestSettingMaxKeys(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{MaxKeys: 3})
	first := s.mustKey("", events.KeyRights{})
	s.mustKey("", events.KeyRights{ExpiresAt: time.Now().Add(-time.Hour)}) // expired less than a day ago
	s.mustKey("", events.KeyRights{})
	full := func() {
		t.Helper()
		if _, a, err := s.newKey("", events.KeyRights{}); err != nil || codeOf(a) != "TOO_MANY_KEYS" {
			t.Errorf("a key too many: %+v, %v", a, err)
		}
	}
	full()
	s.revoke(first)
	expired := s.mustKey("", events.KeyRights{ExpiresAt: time.Now().Add(-25 * time.Hour)})
	s.mustKey("", events.KeyRights{})
	full()
	_, revoked := s.keyEvents()
	if got := revoked[expired]; len(revoked) != 2 || got.Reason != events.KeyRevokedExpired {
		t.Errorf("revoked are %+v", revoked)
	}
}

// TestKeys_LimitOfTenant tests that a tenant's own limit replaces the setting.
func TestKeys_LimitOfTenant(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	if a := s.send(command.TypeSetLimits, "", "", command.SetLimits{Limits: events.TenantLimits{Keys: 1}}); a.Error != nil {
		t.Fatal(a.Error)
	}
	s.mustKey("", events.KeyRights{})
	for deadline := time.Now().Add(within); ; time.Sleep(pause) { // until the service has read the bucket
		_, a, err := s.newKey("", events.KeyRights{})
		must(t, err)
		if codeOf(a) == "TOO_MANY_KEYS" && strings.Contains(a.Error.Detail, "may have 1:") {
			return
		}
		if a.Error != nil || time.Now().After(deadline) {
			t.Fatalf("got %+v", a.Error)
		}
	}
}

// TestKeys_LimitHoldsForConcurrentRequests tests that concurrent requests for keys are counted one after the other.
func TestKeys_LimitHoldsForConcurrentRequests(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{MaxKeys: 5})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, a, err := s.newKey("", events.KeyRights{}); err != nil || codeOf(a) != "" && codeOf(a) != "TOO_MANY_KEYS" {
				t.Errorf("%+v, %v", a, err)
			}
		})
	}
	wg.Wait()
	if created, _ := s.keyEvents(); len(created) != 5 {
		t.Errorf("there are %d keys, want 5", len(created))
	}
}
