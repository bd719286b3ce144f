package skills_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/skill/skilltest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/services/skills"
)

// TestMain fails if a test leaves a goroutine running.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func id(kind events.IDKind) string { return events.DeriveID(kind, fmt.Sprint(rand.Uint64())) }

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// fixture is an installation with its users, and a gateway's connection to it.
type fixture struct {
	t       *testing.T
	srv     *natsserver.Server
	gateway jetstream.JetStream
	uploads *natsstore.Store   // with the rights of the gateway
	entries eventlog.Catalogue // with the rights of admin
	admin   jetstream.JetStream
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	b := &fixture{t: t, srv: natstest.RunConfig(t, natsserver.Config{Accounts: true})}
	b.admin, b.gateway = b.connectAs(topology.UserAdmin), b.connectAs(topology.UserGateway)
	must(t, topology.Provision(t.Context(), b.admin, topology.ProvisionConfig{}))
	log, err := jslog.New(jslog.Config{JetStream: b.admin})
	must(t, err)
	b.entries = eventlog.Catalogue{Log: log}
	b.uploads, err = natsstore.Open(t.Context(), b.gateway, topology.BucketSkills)
	must(t, err)
	return b
}

// conn returns a connection with a user's rights. The test fails if the user does something that it may not.
func (b *fixture) conn(user string) *nats.Conn {
	b.t.Helper()
	nc, err := b.srv.ConnectAs(user, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		if errors.Is(err, nats.ErrPermissionViolation) {
			b.t.Errorf("%s: %v", user, err)
		}
	}))
	must(b.t, err)
	b.t.Cleanup(nc.Close)
	return nc
}

func (b *fixture) connectAs(user string) jetstream.JetStream {
	b.t.Helper()
	js, err := jetstream.New(b.conn(user))
	must(b.t, err)
	return js
}

// startCopy starts a copy of the service, with only the rights of its NATS user.
func (b *fixture) startCopy(cfg skills.Config) {
	b.t.Helper()
	b.run(cfg, skills.Deps{})
}

func (b *fixture) run(cfg skills.Config, deps skills.Deps) (stop func()) {
	b.t.Helper()
	nc := b.conn(topology.UserSkills)
	js, err := jetstream.New(nc)
	must(b.t, err)
	deps.NATS = nc
	if deps.Log == nil {
		deps.Log, err = jslog.New(jslog.Config{JetStream: js, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}})
		must(b.t, err)
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	svc, err := skills.New(cfg, deps)
	must(b.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	select {
	case <-svc.Ready():
	case err := <-done:
		b.t.Fatalf("the service ended with %v", err)
	}
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Errorf("a copy ended with %v", err)
		}
	})
	b.t.Cleanup(stop)
	return stop
}

const tenant = "acme"

// send sends a command like a gateway.
func (b *fixture) send(typ command.Type, cmd string, body any) command.Answer {
	b.t.Helper()
	raw, err := json.Marshal(body)
	must(b.t, err)
	payload, err := json.Marshal(command.Command{Type: typ, ID: cmd, Tenant: tenant, Actor: events.Actor{Kind: "user", ID: "u1"}, Body: raw})
	must(b.t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	reply, err := bus.Request(ctx, b.gateway, bus.Command{
		Subject: topology.CommandSubject(topology.ServiceSkills, tenant, id("cat")), ID: cmd, Payload: payload,
	})
	must(b.t, err)
	var a command.Answer
	must(b.t, json.Unmarshal(reply.Payload, &a))
	return a
}

// push uploads a ZIP and sends push_skill; change may modify the command.
func (b *fixture) push(zip []byte, change ...func(*command.PushSkill)) command.Answer {
	b.t.Helper()
	return b.pushAs(id(events.KindCommand), zip, change...)
}

func (b *fixture) pushAs(cmd string, zip []byte, change ...func(*command.PushSkill)) command.Answer {
	b.t.Helper()
	body := command.PushSkill{Object: command.SkillUpload(tenant, cmd), SHA256: sum(zip)}
	for _, f := range change {
		f(&body)
	}
	must(b.t, b.uploads.Put(b.t.Context(), command.SkillUpload(tenant, cmd), bytes.NewReader(zip)))
	return b.send(command.TypePushSkill, cmd, body)
}

func tags(list ...string) func(*command.PushSkill) {
	return func(p *command.PushSkill) { p.Tags = list }
}

func dry(p *command.PushSkill) { p.DryRun = true }

// ok fails the test if a command was refused.
func (b *fixture) ok(a command.Answer) command.Answer {
	b.t.Helper()
	if a.Error != nil {
		b.t.Fatalf("refused: %+v", a.Error)
	}
	return a
}

// history returns all events of the log.
func (b *fixture) history() (list []events.Payload) {
	b.t.Helper()
	for rec, err := range b.entries.Log.Read(b.t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		must(b.t, err)
		for _, e := range rec.Events {
			list = append(list, e.Data)
		}
	}
	return list
}

// storedObjects returns the names of the bucket's objects that are not uploads.
func (b *fixture) storedObjects() (names []string) {
	b.t.Helper()
	bucket, err := b.admin.ObjectStore(b.t.Context(), topology.BucketSkills)
	must(b.t, err)
	list, err := bucket.List(b.t.Context())
	if errors.Is(err, jetstream.ErrNoObjectsFound) {
		return nil
	}
	must(b.t, err)
	for _, o := range list {
		if !strings.HasPrefix(o.Name, "upload/") {
			names = append(names, o.Name)
		}
	}
	return names
}

// version returns a ZIP of the skill pdf-tools that is different for each n.
func version(n int) []byte {
	return skilltest.BuildZIP(skilltest.DocumentEntry(), skilltest.FileEntry("n", fmt.Sprint(n)))
}

var ref = events.Reference{Slug: "pdf-tools"}

func at(v string) events.Reference { return events.Reference{Slug: "pdf-tools", Version: v} }

func TestPush_StoresTheZIPAndItsVersion(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.startCopy(skills.Config{})
	z := version(1)
	a := b.ok(b.push(z, tags("stable")))
	want := events.SkillPushed{
		Ref: at(sum(z)), Tags: []string{"stable"}, Name: "pdf-tools", Description: "Reads and fills PDF forms.",
		Bytes: uint64(len(z)), UnpackedBytes: uint64(len(skilltest.ValidDocument) + 1), Files: 2,
	}
	if a.Ref == nil || *a.Ref != at(sum(z)) || a.Same || !reflect.DeepEqual(*a.Pushed, want) || a.Position == "" {
		t.Errorf("answer %+v, %+v", a, a.Pushed)
	}
	want.Document = skilltest.ValidDocument
	if h := b.history(); len(h) != 1 || !reflect.DeepEqual(h[0], want) {
		t.Errorf("log %+v", h)
	}
	head, err := b.entries.Log.Last(t.Context(), at("").Subject(events.Skill, tenant), eventlog.LeaderOnly)
	must(t, err)
	if actor := head.Commit.Actor; actor.ID != "u1" || !strings.HasPrefix(actor.Service, "skills/") {
		t.Errorf("pushed by %+v", actor)
	}
	got, err := b.entries.Resolve(t.Context(), events.Skill, tenant, at("stable"))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("stable is %+v, %v", got, err)
	}
	stored, err := b.uploads.Get(t.Context(), sum(z))
	must(t, err)
	defer stored.Close() //nolint:errcheck // Close never fails
	if content, err := io.ReadAll(stored); err != nil || !bytes.Equal(content, z) {
		t.Errorf("stored are %d bytes, %v", len(content), err)
	}
	// A second push of the same ZIP adds no version. With a new tag, only the tag moves.
	if again := b.ok(b.push(z, tags("stable"))); !again.Same || again.Position != a.Position {
		t.Errorf("again: %+v", again)
	}
	if tagged := b.ok(b.push(z, tags("v1"))); !tagged.Same || tagged.Position == a.Position {
		t.Errorf("with a tag: %+v", tagged)
	}
	if h := b.history(); len(h) != 2 {
		t.Errorf("%d events", len(h))
	}
}

// TestPush_ScopesAndOrganizationsAreSeparate tests that the same slug in another scope or organization is another
// skill.
func TestPush_ScopesAndOrganizationsAreSeparate(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.startCopy(skills.Config{})
	for _, r := range []events.Reference{
		{Scope: events.ScopePlatform, Slug: "pdf-tools"}, {Scope: events.ScopeAccount, Org: "ann", Slug: "pdf-tools"}, {Org: "team", Slug: "pdf-tools"}, {Org: "other"},
	} {
		a := b.ok(b.push(version(1), func(p *command.PushSkill) { p.Ref = r }))
		r.Slug, r.Version = "pdf-tools", sum(version(1))
		if a.Same || *a.Ref != r {
			t.Errorf("%s: %+v", r, a)
		}
		if p, err := b.entries.Resolve(t.Context(), events.Skill, tenant, r); err != nil || p.(events.SkillPushed).Ref != r {
			t.Errorf("%s: %+v, %v", r, p, err)
		}
	}
	if names := b.storedObjects(); len(names) != 1 {
		t.Errorf("kept %q", names)
	}
}

func TestPush_DryRunStoresNothing(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.startCopy(skills.Config{})
	z := version(1)
	a := b.ok(b.push(z, dry, tags("x")))
	if a.Same || a.Position != "" || *a.Ref != at(sum(z)) || a.Pushed.Name != "pdf-tools" {
		t.Errorf("%+v", a)
	}
	if h, k := b.history(), b.storedObjects(); len(h) != 0 || len(k) != 0 {
		t.Errorf("%d events, kept %q", len(h), k)
	}
	b.ok(b.push(z))
	if a := b.ok(b.push(z, dry)); !a.Same {
		t.Errorf("dry run of an existing version: %+v", a)
	}
	bad := skilltest.BuildZIP(skilltest.FileEntry("README.md", "x"))
	if a := b.push(bad, dry); a.Error == nil || a.Error.Code != "SKILL_DOCUMENT_INVALID" {
		t.Errorf("dry run of an invalid ZIP: %+v", a)
	}
}

// TestPush_RedeliveredCommandChangesNothing tests that a command that is delivered again changes nothing and has the
// same answer, whatever happened meanwhile.
func TestPush_RedeliveredCommandChangesNothing(t *testing.T) {
	t.Parallel()
	for name, slug := range map[string]string{"slug": "pdf-tools", "no slug": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newFixture(t)
			b.startCopy(skills.Config{})
			named := func(p *command.PushSkill) { p.Ref.Slug = slug }
			first, second, tag, rm := id(events.KindCommand), id(events.KindCommand), id(events.KindCommand), id(events.KindCommand)
			one := b.ok(b.pushAs(first, version(1), named, tags("a")))
			two := b.ok(b.pushAs(second, version(2), named))
			tagged := b.ok(b.send(command.TypeTagSkill, tag, command.TagSkill{Ref: at("a"), Tag: "b"}))
			b.ok(b.send(command.TypeRemoveSkill, rm, command.RemoveEntry{Ref: at("b")}))
			before := len(b.history())
			again := b.ok(b.pushAs(second, version(2), named))
			if again.Same != two.Same || *again.Ref != *two.Ref || !reflect.DeepEqual(again.Pushed, two.Pushed) {
				t.Errorf("again %+v, first %+v", again, two)
			}
			// The version of the command was removed meanwhile and must not come back.
			again = b.ok(b.pushAs(first, version(1), named, tags("a")))
			if *again.Ref != *one.Ref || !reflect.DeepEqual(again.Pushed, one.Pushed) {
				t.Errorf("again %+v, first %+v", again, one)
			}
			if a := b.send(command.TypeTagSkill, tag, command.TagSkill{Ref: at("a"), Tag: "b"}); a.Error != nil || a.Same != tagged.Same {
				t.Errorf("tag again: %+v", a)
			}
			b.ok(b.send(command.TypeRemoveSkill, rm, command.RemoveEntry{Ref: at("b")}))
			if after := len(b.history()); after != before {
				t.Errorf("%d events more", after-before)
			}
		})
	}
}

func TestTagAndRemove_ChangeWhatReferencesMean(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.startCopy(skills.Config{})
	one, two := version(1), version(2)
	b.ok(b.push(one))
	b.ok(b.push(two, tags("stable")))
	tag := func(version, tag string) command.Answer {
		return b.send(command.TypeTagSkill, id(events.KindCommand), command.TagSkill{Ref: at(version), Tag: tag})
	}
	remove := func(version string) command.Answer {
		return b.send(command.TypeRemoveSkill, id(events.KindCommand), command.RemoveEntry{Ref: at(version)})
	}
	means := func(version, want string) {
		t.Helper()
		got, err := b.entries.Resolve(t.Context(), events.Skill, tenant, at(version))
		p, _ := got.(events.SkillPushed)
		if want == "" && err == nil || want != "" && (err != nil || p.Ref.Version != want) {
			t.Errorf("%q is %q, %v; want %q", version, p.Ref.Version, err, want)
		}
	}
	if a := b.ok(tag(sum(one), "stable")); *a.Ref != at(sum(one)) || a.Same || a.Position == "" {
		t.Errorf("%+v", a)
	}
	means("stable", sum(one))
	if a := b.ok(tag("stable", "old")); *a.Ref != at(sum(one)) || a.Same {
		t.Errorf("by tag: %+v", a)
	}
	if a := b.ok(tag("old", "stable")); !a.Same {
		t.Errorf("the same: %+v", a)
	}
	if a := b.ok(tag("", "newest")); *a.Ref != at(sum(two)) {
		t.Errorf("latest: %+v", a)
	}
	b.ok(tag(sum(one), events.LatestTag)) // latest is moved back
	means("", sum(one))
	b.ok(remove("old"))
	means(sum(one), "")
	means("stable", "")
	means("", sum(two))
	b.ok(remove(""))
	means("", "")
	means(sum(two), sum(two)) // sessions that pinned the version can still load it
	b.ok(b.push(one))
	means("", sum(one))
	for name, a := range map[string]command.Answer{
		"tag of none":      tag("nothing", "x"),
		"tag of a digest":  tag(strings.Repeat("a", 64), "x"),
		"remove none":      remove("nothing"),
		"another skill":    b.send(command.TypeRemoveSkill, id(events.KindCommand), command.RemoveEntry{Ref: events.Reference{Slug: "none"}}),
		"tag of no skill":  b.send(command.TypeTagSkill, id(events.KindCommand), command.TagSkill{Ref: events.Reference{Slug: "none"}, Tag: "x"}),
		"platform's, none": b.send(command.TypeRemoveSkill, id(events.KindCommand), command.RemoveEntry{Ref: events.Reference{Scope: events.ScopePlatform, Slug: "pdf-tools"}}),
	} {
		if a.Error == nil || a.Error.Code != "SKILL_NOT_FOUND" || a.Error.Field == "" || a.Error.Detail == "" {
			t.Errorf("%s: %+v", name, a.Error)
		}
	}
}

// TestCommands_RefusedNameTheirField tests that a refused command names its field and writes nothing.
func TestCommands_RefusedNameTheirField(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.startCopy(skills.Config{})
	z := version(1)
	b.ok(b.push(z))
	before := len(b.history())
	push := func(change func(*command.PushSkill)) command.Answer { return b.push(version(2), change) }
	send := func(typ command.Type, body any) command.Answer { return b.send(typ, id(events.KindCommand), body) }
	for _, c := range []struct {
		name, code, field string
		answer            command.Answer
	}{
		{"another slug", "SKILL_DOCUMENT_INVALID", "SKILL.md: name", push(func(p *command.PushSkill) { p.Ref.Slug = "xls" })},
		{"an invalid slug", "INVALID_REQUEST", "slug", push(func(p *command.PushSkill) { p.Ref.Slug = "A b" })},
		{"a version", "INVALID_REQUEST", "version", push(func(p *command.PushSkill) { p.Ref.Version = "v1" })},
		{"an invalid scope", "INVALID_REQUEST", "scope", push(func(p *command.PushSkill) { p.Ref.Scope = "world" })},
		{"no digest", "INVALID_REQUEST", "sha256", push(func(p *command.PushSkill) { p.SHA256 = "abc" })},
		{"another's upload", "INVALID_REQUEST", "object", push(func(p *command.PushSkill) { p.Object = command.SkillUpload("other", id(events.KindCommand)) })},
		{"a kept ZIP for an upload", "INVALID_REQUEST", "object", push(func(p *command.PushSkill) { p.Object = sum(z) })},
		{"an invalid tag", "INVALID_REQUEST", "tag[1]", push(tags("ok", "No"))},
		{"too many tags", "TOO_MANY_TAGS", "tags", push(tags(manyTags(65)...))},
		{"tag without a name", "INVALID_REQUEST", "tag", send(command.TypeTagSkill, command.TagSkill{Ref: ref})},
		{"tag of what is no reference", "INVALID_REQUEST", "slug", send(command.TypeTagSkill, command.TagSkill{Tag: "x"})},
		{"remove nothing", "INVALID_REQUEST", "slug", send(command.TypeRemoveSkill, command.RemoveEntry{})},
		{"no body", "INVALID_REQUEST", "body", send(command.TypePushSkill, 1)},
		{"a reference that does not decode", "INVALID_REQUEST", "slug", send(command.TypeRemoveSkill, map[string]string{"ref": "A B"})},
		{"another service's", "INVALID_REQUEST", "type", send(command.TypeCreateSession, nil)},
	} {
		if e := c.answer.Error; e == nil || e.Code != c.code || e.Field != c.field || e.Detail == "" {
			t.Errorf("%s: %+v, want %s on %s", c.name, e, c.code, c.field)
		}
	}
	// No object has the name of this command.
	cmd := id(events.KindCommand)
	a := b.send(command.TypePushSkill, cmd, command.PushSkill{Object: command.SkillUpload(tenant, cmd), SHA256: sum(z)})
	if a.Error == nil || a.Error.Code != "SKILL_UPLOAD_MISSING" || a.Error.Field != "object" {
		t.Errorf("no upload: %+v", a.Error)
	}
	if after := len(b.history()); after != before {
		t.Errorf("%d events were written", after-before)
	}
	if names := b.storedObjects(); len(names) != 1 {
		t.Errorf("kept %q", names)
	}
}

// TestPush_StoresAgainWhatMayBeRemoved tests that a ZIP that was stored a while ago, and that is not a version of the
// skill, is stored again: the janitor may be removing it. The ZIP of an existing version is not stored again.
func TestPush_StoresAgainWhatMayBeRemoved(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	z := version(1)
	must(t, b.uploads.Put(t.Context(), sum(z), bytes.NewReader(z)))
	left, err := b.uploads.StoredAt(t.Context(), sum(z))
	must(t, err)
	stop := b.run(skills.Config{}, skills.Deps{Now: func() time.Time { return time.Now().Add(10 * time.Minute) }})
	b.ok(b.push(z))
	pushed, err := b.uploads.StoredAt(t.Context(), sum(z))
	if err != nil || !pushed.After(left) {
		t.Errorf("the ZIP was stored at %s, before the push at %s: %v", pushed, left, err)
	}
	b.ok(b.push(z))
	if again, err := b.uploads.StoredAt(t.Context(), sum(z)); err != nil || !again.Equal(pushed) {
		t.Errorf("the ZIP of an existing version was stored again: %v", err)
	}
	stop()
}

// manyTags returns n tags.
func manyTags(n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprint("t", i))
	}
	return list
}

// TestOldVersions_BeyondTheState tests a version that the state no longer holds: references to it work, it cannot be
// tagged, and it is stored again when it is pushed.
func TestOldVersions_BeyondTheState(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.startCopy(skills.Config{})
	oldest := sum(version(0))
	e, err := b.entries.Load(t.Context(), ref.Subject(events.Skill, tenant), eventlog.LeaderOnly)
	must(t, err)
	for i := range versions.MaxVersions + 2 {
		cmd, v := id(events.KindCommand), at(sum(version(i)))
		list, err := versions.Decide(e.State, versions.ApplyVersion{CommandMeta: events.CommandMeta{CommandID: cmd}, Version: v.Version, Data: events.SkillPushed{Ref: v}})
		must(t, err)
		must(t, b.entries.Append(t.Context(), &e, events.Actor{Kind: "user"}, cmd, list))
	}
	if e.State.CommitSeqOf(oldest) != 0 {
		t.Fatal("the state still holds the oldest version")
	}
	if _, err := b.entries.Resolve(t.Context(), events.Skill, tenant, at(oldest)); err != nil {
		t.Errorf("the reference does not resolve: %v", err)
	}
	tag := func(version string) command.Answer {
		return b.send(command.TypeTagSkill, id(events.KindCommand), command.TagSkill{Ref: at(version), Tag: "old"})
	}
	for _, v := range []string{oldest, strings.Repeat("0", 64)} {
		if a := tag(v); a.Error == nil || a.Error.Code != "SKILL_NOT_FOUND" {
			t.Errorf("%s: %+v", v, a)
		}
	}
	b.ok(b.push(version(0)))
	if a := b.ok(tag(oldest)); *a.Ref != at(oldest) {
		t.Errorf("%+v", a)
	}
}
