package topology_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// writable holds a stream and a subject that a user may both write and read. With it the user determines the bytes of an
// answer.
var writable = map[string]struct{ stream, subject string }{
	topology.UserGateway:  {"KV_" + topology.BucketIdempotency, "$KV." + topology.BucketIdempotency + ".default.attack"},
	topology.UserSession:  {"KV_" + topology.BucketBudgets, "$KV." + topology.BucketBudgets + ".attack"},
	topology.UserExecutor: {"KV_" + topology.BucketLeases, "$KV." + topology.BucketLeases + ".attack"},
	topology.UserSkills:   {"OBJ_" + topology.BucketSkills, "$O." + topology.BucketSkills + ".C.attack"},
	topology.UserJanitor:  {"EVENTS-0", events.RunSubject("default", session).String()},
}

// attacker is a user who sends requests with a reply subject that the user may not publish to.
type attacker struct {
	t    *testing.T
	user string
	nc   *nats.Conn
	js   jetstream.JetStream
}

// request sends a request with the given reply subject. It then sends a second request, whose answer in the user's
// own inbox shows that the server has handled the first one.
func (a *attacker) request(subject, reply, body string) {
	a.t.Helper()
	if err := a.nc.PublishRequest(subject, reply, []byte(body)); err != nil {
		a.t.Fatal(err)
	}
	if _, err := a.nc.Request(subject, []byte(body), patience); err != nil {
		a.t.Fatalf("%s as a request that is allowed: %v", subject, err)
	}
}

const patience = 20 * time.Second

// store stores bytes under the user's own subject.
func (a *attacker) store(ctx context.Context, data string) {
	a.t.Helper()
	if _, err := a.js.Publish(ctx, writable[a.user].subject, []byte(data)); err != nil {
		a.t.Fatal(err)
	}
}

// consumer creates a consumer of the user's own stream.
func (a *attacker) consumer(ctx context.Context, ack jetstream.AckPolicy) jetstream.Consumer {
	a.t.Helper()
	c, err := a.js.CreateConsumer(ctx, writable[a.user].stream, jetstream.ConsumerConfig{
		AckPolicy: ack, DeliverPolicy: jetstream.DeliverLastPolicy, InactiveThreshold: time.Minute,
	})
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// replyTricks are requests whose answers JetStream publishes with the rights of the account.
var replyTricks = map[string]func(ctx context.Context, a *attacker, reply string){
	"direct get of nothing": func(_ context.Context, a *attacker, reply string) {
		a.request("$JS.API.DIRECT.GET."+writable[a.user].stream, reply, `{"last_by_subj":"nothing"}`)
	},
	"direct get of nothing by subject": func(_ context.Context, a *attacker, reply string) {
		a.request("$JS.API.DIRECT.GET."+writable[a.user].stream+".nothing", reply, ``)
	},
	"direct get of stored bytes": func(ctx context.Context, a *attacker, reply string) {
		a.store(ctx, `{"keep":1}`)
		a.request("$JS.API.DIRECT.GET."+writable[a.user].stream, reply, fmt.Sprintf(`{"last_by_subj":%q}`, writable[a.user].subject))
	},
	"direct get of several": func(ctx context.Context, a *attacker, reply string) {
		a.store(ctx, `{"keep":1}`)
		a.request("$JS.API.DIRECT.GET."+writable[a.user].stream, reply, fmt.Sprintf(`{"multi_last":[%q]}`, writable[a.user].subject))
	},
	"pull without a message": func(ctx context.Context, a *attacker, reply string) {
		c := a.consumer(ctx, jetstream.AckNonePolicy)
		next := "$JS.API.CONSUMER.MSG.NEXT." + writable[a.user].stream + "." + c.CachedInfo().Name
		a.request(next, reply, `{"no_wait":true,"batch":1000}`)
		a.request(next, reply, `{"no_wait":true}`)
	},
	"pull of a message": func(ctx context.Context, a *attacker, reply string) {
		a.store(ctx, `{"keep":1}`)
		c := a.consumer(ctx, jetstream.AckNonePolicy)
		a.request("$JS.API.CONSUMER.MSG.NEXT."+writable[a.user].stream+"."+c.CachedInfo().Name, reply, `{"no_wait":true}`)
	},
	"publish": func(_ context.Context, a *attacker, reply string) {
		a.request(writable[a.user].subject, reply, "x")
	},
	"acknowledgement": func(ctx context.Context, a *attacker, reply string) {
		if a.user == topology.UserJanitor {
			return // the user may not acknowledge messages of its stream
		}
		a.store(ctx, "x")
		m, err := a.consumer(ctx, jetstream.AckExplicitPolicy).Next(jetstream.FetchMaxWait(patience))
		if err != nil {
			a.t.Fatal(err)
		}
		if err := a.nc.PublishRequest(m.Reply(), reply, []byte("+ACK")); err != nil {
			a.t.Fatal(err)
		}
		if err := a.nc.Flush(); err != nil {
			a.t.Fatal(err)
		}
	},
	"description of a stream": func(_ context.Context, a *attacker, reply string) {
		a.request("$JS.API.STREAM.INFO."+writable[a.user].stream, reply, ``)
	},
	"description of a consumer": func(_ context.Context, a *attacker, reply string) {
		a.request("$JS.API.CONSUMER.INFO."+writable[a.user].stream+".nothing", reply, ``)
	},
	"get from the leader": func(_ context.Context, a *attacker, reply string) {
		a.request("$JS.API.STREAM.MSG.GET."+writable[a.user].stream, reply, `{"seq":1}`)
	},
	"making a consumer": func(_ context.Context, a *attacker, reply string) {
		a.request("$JS.API.CONSUMER.CREATE."+writable[a.user].stream+".x", reply, `{`)
	},
}

// victim is the log, which the attacker must not change.
type victim struct {
	t  *testing.T
	js jetstream.JetStream
}

func (v *victim) fill(ctx context.Context) {
	v.t.Helper()
	if err := topology.Provision(ctx, v.js, topology.ProvisionConfig{Shards: 1}); err != nil {
		v.t.Fatal(err)
	}
	if _, err := v.js.Publish(ctx, events.LifeSubject("default", session).String(), []byte("kept")); err != nil {
		v.t.Fatal(err)
	}
}

// changed describes what changed in the log outside of the subject that the user may write.
func (v *victim) changed(ctx context.Context) string {
	v.t.Helper()
	s, err := v.js.Stream(ctx, "EVENTS-0")
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return "the log is deleted"
	}
	if err != nil {
		v.t.Fatal(err)
	}
	m, err := s.GetLastMsgForSubject(ctx, events.LifeSubject("default", session).String())
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return "the log is deleted"
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return "the log is purged"
	case err != nil:
		v.t.Fatal(err)
	case string(m.Data) != "kept":
		return fmt.Sprintf("the life of a session has the commit %.40q", m.Data)
	}
	m, err = s.GetLastMsgForSubject(ctx, keySubject())
	switch {
	case err == nil:
		return fmt.Sprintf("a key has the commit %.40q", m.Data)
	case !errors.Is(err, jetstream.ErrMsgNotFound):
		v.t.Fatal(err)
	}
	return ""
}

func keySubject() string {
	return events.Subject{Tenant: "default", ID: events.CatalogueID(events.Key, "default", "", "", "k"), Aspect: events.Key}.String()
}

// TestReplySubjects_ReachNothingOutsideTheUsersRights lets each user attack the log. NATS does not check the reply
// subject of a request, and JetStream publishes its answer there with the rights of the account to which JetStream
// belongs.
func TestReplySubjects_ReachNothingOutsideTheUsersRights(t *testing.T) {
	t.Parallel()
	for user := range writable {
		t.Run(user, func(t *testing.T) {
			t.Parallel()
			attack(t, runServerWithUsers(t), user)
		})
	}
}

func attack(t *testing.T, ns *server.Server, user string) {
	t.Helper()
	ctx := t.Context()
	_, admin := connectAs(t, ns, topology.UserAdmin)
	v := &victim{t: t, js: admin}
	v.fill(ctx)
	nc, js := connectAs(t, ns, user)
	a := &attacker{t: t, user: user, nc: nc, js: js}
	targets := []string{"$JS.API.STREAM.PURGE.EVENTS-0", "$JS.API.STREAM.DELETE.EVENTS-0"}
	if user != topology.UserSession { // the session service may write these subjects
		targets = append(targets, keySubject(), events.LifeSubject("default", session).String())
	}
	for name, trick := range replyTricks {
		for _, reply := range targets {
			trick(ctx, a, reply)
			if what := v.changed(ctx); what != "" {
				t.Errorf("%s with the reply subject %s: %s", name, reply, what)
				if err := admin.DeleteStream(ctx, "EVENTS-0"); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
					t.Fatal(err)
				}
				v.fill(ctx)
			}
		}
	}
	// Messages of the attacks may still be in transit.
	if what := v.changed(ctx); what != "" {
		t.Error(what)
	}
}

// TestConsumers_DeliverToTheirOwnersInboxOnly sends request bodies that JetStream would read as a delivery subject of
// another user.
func TestConsumers_DeliverToTheirOwnersInboxOnly(t *testing.T) {
	t.Parallel()
	ns := runServerWithUsers(t)
	adminNC, _ := connectAs(t, ns, topology.UserAdmin)
	for user := range writable {
		t.Run(user, func(t *testing.T) {
			stolen := "ctl." + user
			got, err := adminNC.SubscribeSync(stolen)
			if err != nil {
				t.Fatal(err)
			}
			if err := adminNC.Flush(); err != nil {
				t.Fatal(err)
			}
			nc, js := connectAs(t, ns, user)
			a := &attacker{t: t, user: user, nc: nc, js: js}
			a.store(t.Context(), "x")
			stream := writable[user].stream
			rest := `"ack_policy":"none","deliver_policy":"all","replay_policy":"instant"`
			for i, body := range []string{
				`{"stream_name":%[1]q,"config":{"name":%[2]q,"deliver_subject":%[3]q,` + rest + `}}`,
				`{"stream_name":%[1]q,"config":{"name":%[2]q,"Deliver_Subject":%[3]q,` + rest + `}}`,
				`{"stream_name":%[1]q,"config":{"name":%[2]q,"deliver_subject":"","deliver_subject":%[3]q,` + rest + `}}`,
				`{"stream_name":%[1]q,"config":{"name":%[2]q,"deliver_subject":%[3]q,"DELIVER_SUBJECT":%[3]q,` + rest + `}}`,
				`{"stream_name":%[1]q,"CONFIG":{"name":%[2]q,"deliver_subject":%[3]q,` + rest + `}}`,
			} {
				name := fmt.Sprint("attack-", i)
				answer, err := nc.Request("$JS.API.CONSUMER.CREATE."+stream+"."+name, fmt.Appendf(nil, body, stream, name, stolen), patience)
				if err != nil {
					t.Fatal(err)
				}
				if !isAPIError(t, answer) {
					t.Errorf("%s was accepted", fmt.Sprintf(body, stream, name, stolen))
				}
			}
			if m, err := got.NextMsg(100 * time.Millisecond); err == nil {
				t.Errorf("%s reached %s: %.40q", user, stolen, m.Data)
			}
		})
	}
}

// isAPIError reports whether the answer of the JetStream API is an error.
func isAPIError(t *testing.T, m *nats.Msg) bool {
	t.Helper()
	var answer struct {
		Error *struct{ Code int } `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		t.Fatalf("%q: %v", m.Data, err)
	}
	return answer.Error != nil
}

// TestConsumers_CannotBeChangedByOtherServices tests that no service can change the durable of another.
func TestConsumers_CannotBeChangedByOtherServices(t *testing.T) {
	t.Parallel()
	ns := runServerWithUsers(t)
	_, sess := connectAs(t, ns, topology.UserSession)
	d := topology.ReactorConsumer(0, topology.DefaultPartitions)
	if _, err := sess.CreateOrUpdateConsumer(t.Context(), d.Stream, d.Config); err != nil {
		t.Fatal(err)
	}
	for user := range writable {
		if user == topology.UserSession || user == topology.UserGateway { // the gateway does not read shards with consumers
			continue
		}
		nc, _ := connectAs(t, ns, user)
		for _, durable := range []string{`"durable_name":"reactor-0",`, ``} {
			body := `{"stream_name":"EVENTS-0","config":{"name":"reactor-0",` + durable + `"ack_policy":"explicit","filter_subject":"ev.nothing"}}`
			for _, subject := range []string{"$JS.API.CONSUMER.CREATE.EVENTS-0.reactor-0", "$JS.API.CONSUMER.CREATE.EVENTS-0.reactor-0.ev.nothing"} {
				answer, err := nc.Request(subject, []byte(body), patience)
				if err != nil {
					t.Fatal(err)
				}
				if !isAPIError(t, answer) {
					t.Errorf("%s changed the session service's durable: %s", user, strings.TrimSpace(body))
				}
			}
		}
	}
}
