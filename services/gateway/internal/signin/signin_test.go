package signin

import (
	"crypto/rand"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
)

// TestEndSession_IsNotUndoneByARenewal tests that a renewal that began before the session was ended does not store the
// session again.
func TestEndSession_IsNotUndoneByARenewal(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{Partitions: topology.DefaultPartitions}); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	s := New(Config{JetStream: js, Now: func() time.Time { return now }, Entropy: rand.Reader, Logger: slog.New(slog.DiscardHandler), CookieLifetime: 100 * time.Hour})
	value, _, err := s.CreateCookie(t.Context(), auth.Grant{Tenant: "default"})
	if err != nil {
		t.Fatal(err)
	}
	hash := auth.HashKey(value)
	r, revision, ok, err := s.sessions.find(t.Context(), hash)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	if err := s.EndSession(t.Context(), hash); err != nil {
		t.Fatal(err)
	}
	if err := s.renew(t.Context(), r, revision, now.Add(2*renewAfter)); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := s.Session(t.Context(), hash); ok || err != nil {
		t.Errorf("the session is there: %v, %v", ok, err)
	}
}
