package profile_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/profile"
)

func TestSaveAndLoad(t *testing.T) {
	t.Parallel()
	state := t.TempDir() + "/state"
	if p, err := profile.Load(state); err != nil || !reflect.DeepEqual(p, profile.Profile{}) {
		t.Fatalf("no profile yet: %+v, %v", p, err)
	}
	for _, in := range []string{`{"systemPrompt":"be brief"}`, `{"memoryFile":"# M","model":"m1"}`,
		`{"tools":{"allow":["Read"]},"mcpServers":[{"name":"s","type":"stdio","command":["s"],"timeoutMs":1}],"maxTurns":3}`,
	} {
		want, err := profile.Read(strings.NewReader(in))
		if err != nil {
			t.Fatal(err)
		}
		if err := profile.Save(state, want); err != nil {
			t.Fatal(err)
		}
		if got, err := profile.Load(state); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("loaded %+v, %v; want %+v", got, err, want)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		`{"systemprompt2":"x"}`:                `"systemprompt2"`,
		``:                                     "profile",
		`[]`:                                   "profile",
		`{} {}`:                                "more than one",
		`"` + strings.Repeat("x", 5<<20) + `"`: "longer",
	} {
		if _, err := profile.Read(strings.NewReader(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: error %v, want one with %s", in, err, want)
		}
	}
}
