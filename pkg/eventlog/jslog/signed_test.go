package jslog_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// secret returns a signing key for tests.
func secret(name string) string { return strings.Repeat(name+"-", 32/(len(name)+1)+1) }

// installation is a log with signed commits, with the keys of all services.
type installation struct {
	nc   *nats.Conn
	js   jetstream.JetStream
	keys string
}

// newInstallation provisions one shard with a key for each role.
func newInstallation(t *testing.T) *installation {
	t.Helper()
	i := &installation{nc: natstest.Conn(t, natstest.Run(t))}
	var err error
	if i.js, err = jetstream.New(i.nc); err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, role := range eventlog.WriterRoles() {
		list = append(list, role+":"+secret(role))
	}
	i.provision(t, strings.Join(list, ","))
	return i
}

// provision replaces the keys of the installation.
func (i *installation) provision(t *testing.T, keys string) {
	t.Helper()
	i.keys = keys
	if err := topology.Provision(t.Context(), i.js, topology.ProvisionConfig{KeyIDs: parse(t, keys, "").KeyIDs()}); err != nil {
		t.Fatal(err)
	}
}

func parse(t *testing.T, keys, role string) eventlog.Keys {
	t.Helper()
	k, err := eventlog.ParseKeys(keys, role)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// asRole opens the log with the keys of a role.
func (i *installation) asRole(t *testing.T, role string) *jslog.Log {
	t.Helper()
	return i.withKeys(t, parse(t, i.keys, role))
}

func (i *installation) withKeys(t *testing.T, keys eventlog.Keys) *jslog.Log {
	t.Helper()
	signing, err := topology.ReadSigning(t.Context(), i.js, 1)
	if err != nil {
		t.Fatal(err)
	}
	return openConfig(t, jslog.Config{JetStream: i.js, Keys: keys, Signing: signing})
}

// storedMessage returns a message of the log as the server stores it.
func (i *installation) storedMessage(t *testing.T, seq uint64) *jetstream.RawStreamMsg {
	t.Helper()
	s, err := i.js.Stream(t.Context(), topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.GetMsg(t.Context(), seq)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// publishForeign publishes a message like an attacker who may publish to the log's subjects, and returns its sequence.
func (i *installation) publishForeign(t *testing.T, subject string, header nats.Header, data []byte) uint64 {
	t.Helper()
	ack, err := i.js.PublishMsg(t.Context(), &nats.Msg{Subject: subject, Header: header, Data: data})
	if err != nil {
		t.Fatal(err)
	}
	return ack.Sequence
}

func TestLog_PassesTheConformanceSuiteSigned(t *testing.T) {
	t.Parallel()
	eventlogtest.Exercise(t, func(t *testing.T) eventlog.Log { return newInstallation(t).asRole(t, "session") })
}

// TestSigned_ForeignMessagesAreLeftOut publishes every kind of message that a stolen connection could publish to a
// session's subject. Readers leave these messages out, the session continues, and verify reports each of them.
func TestSigned_ForeignMessagesAreLeftOut(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	i := newInstallation(t)
	session, skills := i.asRole(t, "session"), i.asRole(t, "skills")
	life := eventlogtest.SessionSubject(0, 1, "attacked")
	heads := eventlogtest.AppendCommits(t, session, life, "honest", 2)
	last := heads[len(heads)-1]
	honest := i.storedMessage(t, last.Seq)
	signature := honest.Header.Get(topology.HeaderSignature)

	forged := func(change func(*events.Commit)) (events.Commit, []byte) {
		c, err := eventlogtest.Draft("forged", "pay me").Seal(life, last.Hash)
		if err != nil {
			t.Fatal(err)
		}
		change(&c)
		return c, mustEncode(t, c)
	}
	signed := func(value string) nats.Header { return nats.Header{topology.HeaderSignature: {value}} }
	_, connectWithoutJetStream := forged(func(*events.Commit) {})
	c, state := forged(func(c *events.Commit) { c.State = []byte(`{"v":1}`) })
	_, stale := forged(func(c *events.Commit) { c.Hash = last.Hash })
	// The gateway has no signing key. The key of the skills service is not valid for the subjects of sessions.
	bySkills := parse(t, i.keys, "skills").Sign(life, c)
	stolen, err := eventlog.ParseKeys("session:"+secret("guessed"), "session")
	if err != nil {
		t.Fatal(err)
	}
	replayed := signed(signature)
	replayed.Set(jetstream.StreamHeader, topology.EventsStreamName(0))
	attacks := []struct {
		name   string
		header nats.Header
		data   []byte
		why    string
	}{
		{"no signature", nil, connectWithoutJetStream, "signature is missing"},
		{"not a commit", nil, []byte(`{"stream":"EVENTS-0","seq":1}`), "has version 0"},
		{"empty", nil, nil, "decode commit"},
		{"another commit's signature", signed(signature), connectWithoutJetStream, "signature is invalid"},
		{"another commit's signature and hash", signed(signature), stale, "signature is invalid"},
		{"another role's signature", signed(bySkills), state, `"skills" does not write life`},
		{"a key that was guessed", signed(stolen.Sign(life, c)), state, "does not know"},
		{"a role that does not exist", signed("gateway/0/0"), connectWithoutJetStream, `"gateway" does not write life`},
		{"stored by the server from elsewhere", replayed, honest.Data, "copied it from stream"},
	}
	for _, a := range attacks {
		i.publishForeign(t, life.String(), a.header, a.data)
	}

	// The head is still the last commit, with any freshness, and the next append follows it.
	for _, freshness := range []eventlog.Freshness{eventlog.AnyReplica, eventlog.LeaderOnly} {
		head, err := session.Last(ctx, life, freshness)
		if err != nil || head.Seq != last.Seq || head.Hash != last.Hash {
			t.Fatalf("head is %d %s (%v), want %d %s", head.Seq, head.Hash, err, last.Seq, last.Hash)
		}
		last.Guard = head.Guard
	}
	// A writer with the earlier head receives a conflict. It does not receive the attacker's commit as the result of
	// its own append.
	old := last
	old.Guard = 0
	var conflict *eventlog.ConflictError
	if _, err := session.Append(ctx, old, eventlogtest.Draft("next", "go on")); !errors.As(err, &conflict) {
		t.Fatalf("append to the old head: %v, want a conflict", err)
	}
	next, err := session.Append(ctx, last, eventlogtest.Draft("next", "go on"))
	if err != nil {
		t.Fatal(err)
	}
	var read []uint64
	for rec, err := range session.Read(ctx, eventlog.Position{}, eventlog.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		read = append(read, rec.Position.Seq)
	}
	if len(read) != len(heads)+1 || read[len(read)-1] != next.Seq {
		t.Errorf("read the commits at %v, want the %d honest ones and %d", read, len(heads), next.Seq)
	}
	var foreign *eventlog.ForeignError
	if _, err := session.CommitAt(ctx, eventlog.Position{Seq: heads[1].Seq + 1}); !errors.As(err, &foreign) {
		t.Errorf("the attack at %d is read: %v", heads[1].Seq+1, err)
	}

	report, err := eventlog.Verify(ctx, session, eventlog.VerifyScope{})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Problems) != len(attacks) || report.Commits != len(heads)+1 {
		t.Fatalf("verify found %d commits and %d problems, want %d and %d: %v", report.Commits, len(report.Problems), len(heads)+1, len(attacks), report.Problems)
	}
	for n, a := range attacks {
		if p := report.Problems[n]; !strings.Contains(p.Why, a.why) || p.Position.Seq != heads[1].Seq+1+uint64(n) {
			t.Errorf("%s: verify reports %q at %s, want %q", a.name, p.Why, p.Position, a.why)
		}
	}
	// A contributor has no key to verify a session with. It still accepts the commit, because the server copied it.
	if _, err := skills.Last(ctx, life, eventlog.LeaderOnly); err != nil {
		t.Error(err)
	}
}

// TestSigned_StateIsCovered tests that the signature covers the state of a commit. The hash does not cover the state,
// and writers load it.
func TestSigned_StateIsCovered(t *testing.T) {
	t.Parallel()
	i := newInstallation(t)
	session := i.asRole(t, "session")
	life := eventlogtest.SessionSubject(0, 1, "state")
	head := eventlogtest.AppendCommits(t, session, life, "honest", 1)[0]
	c := head.Commit
	c.State = []byte(`{"v":1,"status":"deleted"}`)
	header := nats.Header{topology.HeaderSignature: {i.storedMessage(t, head.Seq).Header.Get(topology.HeaderSignature)}}
	at := i.publishForeign(t, life.String(), header, mustEncode(t, c))
	var foreign *eventlog.ForeignError
	if _, err := session.CommitAt(t.Context(), eventlog.Position{Seq: at}); !errors.As(err, &foreign) || !strings.Contains(foreign.Reason, "signature is invalid") {
		t.Errorf("a commit with another state is read: %v", err)
	}
}

// TestSigned_LogFromBefore tests that commits from before the installation had keys are read, and that later commits
// must be signed.
func TestSigned_LogFromBefore(t *testing.T) {
	t.Parallel()
	i := &installation{nc: natstest.Conn(t, natstest.Run(t))}
	before := open(t, i.nc, 1)
	var err error
	if i.js, err = jetstream.New(i.nc); err != nil {
		t.Fatal(err)
	}
	life := eventlogtest.SessionSubject(0, 1, "before")
	heads := eventlogtest.AppendCommits(t, before, life, "unsigned", 3)
	var list []string
	for _, role := range eventlog.WriterRoles() {
		list = append(list, role+":"+secret(role))
	}
	i.provision(t, strings.Join(list, "\n"))
	i.provision(t, i.keys) // every start of an installation provisions
	session := i.asRole(t, "session")
	head, err := session.Last(t.Context(), life, eventlog.LeaderOnly)
	if err != nil || head.Seq != heads[2].Seq {
		t.Fatalf("head at %d: %v", head.Seq, err)
	}
	if head, err = session.Append(t.Context(), head, eventlogtest.Draft("signed", "text")); err != nil {
		t.Fatal(err)
	}
	// A service of the earlier release is still running.
	if _, err := before.Append(t.Context(), head, eventlogtest.Draft("late", "text")); err != nil {
		t.Fatal(err)
	}
	report, err := eventlog.Verify(t.Context(), session, eventlog.VerifyScope{})
	if err != nil || report.Commits != 4 || len(report.Problems) != 1 || !strings.Contains(report.Problem.Why, "signature is missing") {
		t.Errorf("verify: %+v, %v; want four commits, and the fifth refused", report, err)
	}
}

// TestSigned_Rotation tests that, after a new key was added, commits signed with the old key are read. A process
// without the new key stops before the first commit that is signed with it, and loses nothing.
func TestSigned_Rotation(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	i := newInstallation(t)
	late := i.asRole(t, "executor")
	life := eventlogtest.SessionSubject(0, 1, "rotation")
	heads := eventlogtest.AppendCommits(t, i.asRole(t, "session"), life, "old", 2)
	old := i.keys
	i.provision(t, strings.Replace(old, "session:", "session:"+secret("another")+"+", 1))
	session := i.asRole(t, "session")
	head, err := session.Append(ctx, heads[1], eventlogtest.Draft("new", "text"))
	if err != nil {
		t.Fatal(err)
	}
	if got := i.storedMessage(t, head.Seq).Header.Get(topology.HeaderSignature); strings.HasPrefix(got, parse(t, old, "session").SigningKey()) {
		t.Errorf("signed by the old key: %s", got)
	}
	if report, err := eventlog.Verify(ctx, session, eventlog.VerifyScope{}); err != nil || report.Problem != nil || report.Commits != 3 {
		t.Errorf("verify: %+v, %v", report, err)
	}
	var unknown *eventlog.UnknownKeyError
	if _, err := late.Last(ctx, life, eventlog.LeaderOnly); !errors.Is(err, eventlog.ErrUnavailable) || !errors.As(err, &unknown) {
		t.Errorf("a process without the new key: %v, want that the key is missing", err)
	}
	// A process whose first key is not known to the installation must not write.
	for name, keys := range map[string]string{
		"another key": strings.Replace(old, "session:", "session:"+secret("unheard")+"+", 1), "none": "", "no key of its own": "executor:" + secret("executor"),
		"not all": "session:" + secret("session"),
	} {
		if _, err := jslog.CheckSigning(ctx, i.js, 1, parse(t, keys, "session"), jslog.RoleWriter); err == nil || !strings.HasPrefix(err.Error(), "log-keys: ") {
			t.Errorf("%s: %v, want a refusal that names log-keys", name, err)
		}
	}
	if _, err := jslog.CheckSigning(ctx, i.js, 1, parse(t, "skills:"+secret("skills"), "skills"), jslog.RoleContributor); err != nil {
		t.Errorf("a contributor with its own key: %v", err)
	}
}

// TestSigned_KeysLost tests that an installation whose keys were lost continues with new keys, and that the earlier
// commits are read without verification.
func TestSigned_KeysLost(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	i := newInstallation(t)
	life := eventlogtest.SessionSubject(0, 1, "lost")
	heads := eventlogtest.AppendCommits(t, i.asRole(t, "session"), life, "old", 2)
	var list []string
	for _, role := range eventlog.WriterRoles() {
		list = append(list, role+":"+secret("new"+role))
	}
	i.keys = strings.Join(list, ",")
	if _, err := i.asRole(t, "session").Last(ctx, life, eventlog.LeaderOnly); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("without the old keys: %v", err)
	}
	if err := topology.Provision(ctx, i.js, topology.ProvisionConfig{KeyIDs: parse(t, i.keys, "").KeyIDs(), KeysLost: true}); err != nil {
		t.Fatal(err)
	}
	session := i.asRole(t, "session")
	head, err := session.Last(ctx, life, eventlog.LeaderOnly)
	if err != nil || head.Seq != heads[1].Seq {
		t.Fatalf("head at %d: %v", head.Seq, err)
	}
	if _, err := session.Append(ctx, head, eventlogtest.Draft("new", "text")); err != nil {
		t.Fatal(err)
	}
	if report, err := eventlog.Verify(ctx, session, eventlog.VerifyScope{}); err != nil || report.Problem != nil || report.Commits != 3 {
		t.Errorf("verify: %+v, %v", report, err)
	}
}
