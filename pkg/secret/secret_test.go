package secret_test

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"filippo.io/age"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/topology"
)

// buckets returns the bucket with the NATS rights of the gateway, of an executor and of the session service.
func buckets(t *testing.T) (gateway, executor, session jetstream.KeyValue) {
	t.Helper()
	srv := natstest.RunConfig(t, natsserver.Config{Accounts: true})
	as := func(user string) jetstream.JetStream {
		nc, err := srv.ConnectAs(user)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		return js
	}
	for _, kv := range topology.KeyValueBuckets() {
		if kv.Config.Bucket == topology.BucketSecrets {
			if _, err := as(topology.UserAdmin).CreateKeyValue(t.Context(), kv.Config); err != nil {
				t.Fatal(err)
			}
		}
	}
	open := func(user string) jetstream.KeyValue {
		kv, err := secret.OpenBucket(t.Context(), as(user))
		if err != nil {
			t.Fatal(err)
		}
		return kv
	}
	return open(topology.UserGateway), open(topology.UserExecutor), open(topology.UserSession)
}

func pair(t *testing.T) *age.X25519Identity {
	t.Helper()
	k, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

type sealerAndOpener struct {
	*secret.Sealer
	*secret.Opener
}

func newSealerAndOpener(t *testing.T, in, out secret.KV, r age.Recipient, identities ...age.Identity) sealerAndOpener {
	t.Helper()
	s, err := secret.NewSealer(in, r)
	if err != nil {
		t.Fatal(err)
	}
	o, err := secret.NewOpener(out, identities...)
	if err != nil {
		t.Fatal(err)
	}
	return sealerAndOpener{s, o}
}

const value = "correct horse battery staple"

func TestOpen_ReturnsTheSealedValueToItsTenantOnly(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	in, out, _ := buckets(t)
	k := pair(t)
	s := newSealerAndOpener(t, in, out, k.Recipient(), k)
	execution := events.DeriveID(events.KindExecution, "one")
	keys := map[string]bool{}
	for _, x := range []string{"", "", execution} {
		key, err := s.Seal(ctx, "acme", x, []byte(value))
		if err != nil || keys[key] || !strings.HasPrefix(key, "acme.") || strings.Contains(key, execution) != (x != "") {
			t.Fatalf("sealed under %q, %v", key, err)
		}
		keys[key] = true
		entry, err := out.Get(ctx, key)
		if err != nil || bytes.Contains(entry.Value(), []byte("horse")) || bytes.Contains(entry.Value(), []byte("Y29ycmVjdC")) {
			t.Fatalf("the stored value is %q, %v", entry.Value(), err)
		}
		if got, err := s.Open(ctx, "acme", key); err != nil || got != value {
			t.Errorf("opened %q, %v", got, err)
		}
		if _, err := s.Open(ctx, "acm", key); !errors.Is(err, secret.ErrKeyMismatch) {
			t.Errorf("another tenant: %v", err)
		}
	}
}

func TestForget_PurgesTheSecretsOfOneExecution(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	in, out, session := buckets(t)
	k := pair(t)
	s := newSealerAndOpener(t, in, out, k.Recipient(), k)
	one, two := events.DeriveID(events.KindExecution, "one"), events.DeriveID(events.KindExecution, "two")
	keys := map[string][]string{}
	for _, x := range []string{one, one, two, ""} {
		key, err := s.Seal(ctx, "acme", x, []byte(value))
		if err != nil {
			t.Fatal(err)
		}
		keys[x] = append(keys[x], key)
	}
	for range 2 { // the second call finds nothing to remove
		if err := secret.RemoveExecutionSecrets(ctx, session, "acme", one); err != nil {
			t.Fatal(err)
		}
	}
	for x, list := range keys {
		for _, key := range list {
			if _, err := s.Open(ctx, "acme", key); errors.Is(err, secret.ErrNotFound) != (x == one) {
				t.Errorf("a secret of %q: %v", x, err)
			}
			if history, err := session.History(ctx, key); err == nil && x == one {
				for _, h := range history {
					if len(h.Value()) > 0 {
						t.Error("a forgotten value is still in the bucket")
					}
				}
			}
		}
	}
	for _, bad := range [][2]string{{"*", one}, {"acme", "*"}, {"acme", ""}, {"acme", ">"}} {
		if err := secret.RemoveExecutionSecrets(ctx, session, bad[0], bad[1]); err == nil {
			t.Errorf("forgot %q", bad)
		}
	}
}

func TestSealAndOpen_RefuseInvalidValuesAndForeignKeys(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	in, out, _ := buckets(t)
	k := pair(t)
	s := newSealerAndOpener(t, in, out, k.Recipient(), k)
	var size *secret.SizeError
	for _, v := range []string{"", "abc", strings.Repeat("x", secret.MaxValueSize+1)} {
		if _, err := s.Seal(ctx, "acme", "", []byte(v)); !errors.As(err, &size) {
			t.Errorf("%d bytes: %v", len(v), err)
		}
	}
	for _, bad := range [][2]string{{"", ""}, {"a.b", ""}, {"acme", "exe_*"}, {">", ""}} {
		if _, err := s.Seal(ctx, bad[0], bad[1], []byte(value)); err == nil {
			t.Errorf("sealed for %q", bad)
		}
	}
	key, err := s.Seal(ctx, "acme", "", []byte(value))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newSealerAndOpener(t, in, out, k.Recipient(), pair(t)).Open(ctx, "acme", key); !errors.Is(err, secret.ErrNoKey) || strings.Contains(err.Error(), "horse") {
		t.Errorf("another key: %v", err)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := newSealerAndOpener(t, in, out, k.Recipient(), k).Open(gone, "acme", key); !errors.Is(err, secret.ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("a bucket that does not answer: %v", err)
	}
	// A value that was moved to another key, or written by somebody else, is detected.
	entry, err := out.Get(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.Create(ctx, "acme.e.moved", entry.Value()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Open(ctx, "acme", "acme.e.moved"); !errors.Is(err, secret.ErrKeyMismatch) {
		t.Errorf("moved: %v", err)
	}
	for i, planted := range [][]byte{nil, []byte("plain"), entry.Value()[:len(entry.Value())-1]} {
		at := "acme.e.planted" + string(rune('a'+i))
		if _, err := in.Create(ctx, at, planted); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Open(ctx, "acme", at); err == nil {
			t.Errorf("planted value %d can be opened", i)
		}
	}
	if _, err := s.Open(ctx, "acme", "acme.e.*"); !errors.Is(err, secret.ErrNotFound) {
		t.Errorf("a wildcard: %v", err)
	}
}

// TestReseal_MovesSecretsToANewKey seals to a new key, opens secrets of both keys, and then reseals the old secrets.
func TestReseal_MovesSecretsToANewKey(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	in, out, _ := buckets(t)
	before, after := pair(t), pair(t)
	key, err := newSealerAndOpener(t, in, out, before.Recipient(), before).Seal(ctx, "acme", "", []byte(value))
	if err != nil {
		t.Fatal(err)
	}
	both := newSealerAndOpener(t, in, out, after.Recipient(), after, before)
	if got, err := both.Open(ctx, "acme", key); err != nil || got != value {
		t.Errorf("with both keys: %q, %v", got, err)
	}
	admin, err := secret.NewOpener(in, after, before)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := admin.Reseal(ctx, key, after.Recipient()); err != nil {
			t.Fatal(err)
		}
	}
	if err := admin.Reseal(ctx, "acme.e.none", after.Recipient()); err != nil {
		t.Errorf("secret that was removed: %v", err)
	}
	if got, err := newSealerAndOpener(t, in, out, after.Recipient(), after).Open(ctx, "acme", key); err != nil || got != value {
		t.Errorf("with the new key alone: %q, %v", got, err)
	}
	if _, err := newSealerAndOpener(t, in, out, after.Recipient(), before).Open(ctx, "acme", key); !errors.Is(err, secret.ErrNoKey) {
		t.Errorf("with the old key alone: %v", err)
	}
}

// vault is a key management service in memory.
type vault struct {
	mu   sync.Mutex
	keys map[string]cipher.AEAD
	down error
}

func (v *vault) Wrap(_ context.Context, key []byte) (string, []byte, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	nonce := make([]byte, 12)
	_, _ = rand.Read(nonce) // crypto/rand.Read never fails
	return "k1", v.keys["k1"].Seal(nonce, nonce, key, nil), v.down
}

func (v *vault) Unwrap(_ context.Context, id string, wrapped []byte) ([]byte, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.down != nil || v.keys[id] == nil {
		return nil, errors.Join(v.down, errors.New("no key "+id))
	}
	return v.keys[id].Open(nil, wrapped[:12], wrapped[12:], nil)
}

func TestFromKMS_SealsAndOpens(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	in, out, _ := buckets(t)
	block, err := aes.NewCipher(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		t.Fatal(err)
	}
	v := &vault{keys: map[string]cipher.AEAD{"k1": aead}}
	kms := secret.KeyFromKMS(ctx, v)
	s := newSealerAndOpener(t, in, out, kms, pair(t), kms)
	key, err := s.Seal(ctx, "acme", "", []byte(value))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := s.Open(ctx, "acme", key); err != nil || got != value {
		t.Errorf("opened %q, %v", got, err)
	}
	v.mu.Lock()
	v.down = errors.New("the vault is down")
	v.mu.Unlock()
	if _, err := s.Open(ctx, "acme", key); err == nil || !strings.Contains(err.Error(), "the vault is down") {
		t.Errorf("without the vault: %v", err)
	}
	if _, err := s.Seal(ctx, "acme", "", []byte(value)); err == nil {
		t.Error("sealed without the vault")
	}
}

func TestFile_CreatesOneKeyAndParsesIt(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "new", "secrets.key")
	var group sync.WaitGroup
	got := make([]string, 8)
	for i := range got {
		group.Go(func() {
			list, err := secret.ReadKeyFile(path)
			if err != nil {
				t.Error(err)
				return
			}
			got[i] = list[0].(*age.X25519Identity).String()
		})
	}
	group.Wait()
	for _, k := range got {
		if k != got[0] || k == "" {
			t.Errorf("several processes have %d keys", len(got))
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key's file is %v, %v", info.Mode(), err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("other files in the folder: %v, %v", left, err)
	}
	identity, recipient, err := secret.GenerateKeyPair()
	if err != nil {
		t.Fatal(err)
	}
	list, err := secret.ParseIdentities("# old ones follow\n" + identity + "\n" + got[0])
	if err != nil || len(list) != 2 {
		t.Fatalf("%v, %v", list, err)
	}
	of, err := secret.RecipientsOf(list)
	if err != nil || len(of) != 1 || of[0].(*age.X25519Recipient).String() != recipient {
		t.Errorf("the public key is %v, %v", of, err)
	}
	if public, err := secret.PublicKey(list); err != nil || public != recipient {
		t.Errorf("the public key is %q, %v", public, err)
	}
	if two, err := secret.ParseRecipients(recipient + "," + recipient); err != nil || len(two) != 2 {
		t.Errorf("%v, %v", two, err)
	}
	for _, bad := range []string{"", "AGE-SECRET-KEY-1XXXX", identity[:len(identity)-1]} {
		if _, err := secret.ParseIdentities(bad); err == nil || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("%d characters: %v", len(bad), err)
		}
	}
}
