package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestSecretsKeygen_KeepsAnExistingKey(t *testing.T) {
	t.Parallel()
	printed := spool(t, testIO(t), "secrets", "keygen")
	lines := strings.Split(printed.out, "\n")
	keys, err := secret.ParseIdentities(printed.out)
	if printed.code != ExitDone || err != nil || len(keys) != 1 {
		t.Fatalf("it printed %d lines, %v, %d", len(lines), err, printed.code)
	}
	if public, err := secret.PublicKey(keys); err != nil || lines[0] != "# public key: "+public {
		t.Errorf("the printed public key is %q, %v", lines[0], err)
	}
	dir := t.TempDir()
	key, recipient := filepath.Join(dir, "secrets.key"), filepath.Join(dir, "secrets.pub")
	var first string
	for range 2 { // the second call keeps the key
		got := spool(t, testIO(t), "secrets", "keygen", "--key", key, "--recipient", recipient)
		public, err := os.ReadFile(recipient)
		if got.code != ExitDone || err != nil || string(public) != got.out || !strings.HasPrefix(got.out, "age1") || first != "" && got.out != first {
			t.Errorf("it printed %q, the file has %q, %v", got.out, public, err)
		}
		first = got.out
	}
	if info, err := os.Stat(key); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the private key's file: %v, %v", info.Mode(), err)
	}
	if got := spool(t, testIO(t), "secrets", "keygen", "--recipient", recipient); got.code != ExitUsage || !strings.Contains(got.err, "--key") {
		t.Errorf("a recipient alone: %+v", got)
	}
}

func TestSecretsRotate_EncryptsEachSecretForTheNewKey(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	kv, err := secret.OpenBucket(ctx, js)
	if err != nil {
		t.Fatal(err)
	}
	before, _, err := secret.GenerateKeyPair()
	if err != nil {
		t.Fatal(err)
	}
	after, _, err := secret.GenerateKeyPair()
	if err != nil {
		t.Fatal(err)
	}
	opens := func(text, key string) bool {
		keys, err := secret.ParseIdentities(text)
		if err != nil {
			t.Fatal(err)
		}
		o, err := secret.NewOpener(kv, keys...)
		if err != nil {
			t.Fatal(err)
		}
		value, err := o.Open(ctx, "acme", key)
		return err == nil && value == "some-value"
	}
	old, err := secret.ParseIdentities(before)
	if err != nil {
		t.Fatal(err)
	}
	recipients, err := secret.RecipientsOf(old)
	if err != nil {
		t.Fatal(err)
	}
	sealer, err := secret.NewSealer(kv, recipients...)
	if err != nil {
		t.Fatal(err)
	}
	var sealed []string
	for range 3 {
		key, err := sealer.Seal(ctx, "acme", "", []byte("some-value"))
		if err != nil {
			t.Fatal(err)
		}
		sealed = append(sealed, key)
	}
	file := filepath.Join(t.TempDir(), "keys")
	run := func(text string) result {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		w := testIO(t)
		w.Local = &fakeLocal{dir: "/d", open: func() (Installation, error) {
			return Installation{NATS: js.Conn(), Close: func() error { return nil }}, nil
		}}
		return spool(t, w, "secrets", "rotate", "--key", file)
	}
	if got := run(after); got.code != ExitFailed || !strings.Contains(got.err, "a key that this service does not have") {
		t.Errorf("without the old key: %+v", got)
	}
	for range 2 { // the second call changes nothing
		if got := run(after + "\n" + before); got.code != ExitDone || got.out != "encrypted 3 secrets again\n" {
			t.Errorf("rotated: %+v", got)
		}
	}
	for _, key := range sealed {
		if !opens(after, key) || opens(before, key) {
			t.Errorf("%s: the new key opens it %v, the old one %v", key, opens(after, key), opens(before, key))
		}
	}
}
