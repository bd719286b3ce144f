package definition_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"testing"

	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
)

// vector is an entry of testdata/digests.json: a spec as a client may send it, its canonical form, and the SHA-256 of
// the canonical form.
type vector struct {
	Kind      definition.Kind `json:"kind"`
	Spec      json.RawMessage `json:"spec"`
	Canonical string          `json:"canonical"`
	Digest    string          `json:"digest"`
}

// TestDigest_FixedVectors tests that digests do not change between releases: sessions refer to definitions by their
// digest.
func TestDigest_FixedVectors(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("testdata/digests.json")
	if err != nil {
		t.Fatal(err)
	}
	var list []vector
	if err := json.Unmarshal(b, &list); err != nil || len(list) < 6 {
		t.Fatalf("%d vectors, %v", len(list), err)
	}
	for i, v := range list {
		spec := map[definition.Kind]any{definition.KindAgent: &events.AgentSpec{}, definition.KindInstance: &events.InstanceSpec{}, definition.KindEnvironment: &events.EnvironmentSpec{}}[v.Kind]
		if err := json.Unmarshal(v.Spec, spec); err != nil {
			t.Fatal(err)
		}
		canonical, err := definition.CanonicalJSON(spec)
		if err != nil || string(canonical) != v.Canonical {
			t.Errorf("vector %d: %s, %v\nwant %s", i, canonical, err, v.Canonical)
		}
		if got, err := definition.Digest(spec); err != nil || got != v.Digest || !events.IsDigest(got) {
			t.Errorf("vector %d: %s, %v, want %s", i, got, err, v.Digest)
		}
	}
}

func TestDigest_DependsOnTheValueOnly(t *testing.T) {
	t.Parallel()
	spec := events.EnvironmentSpec{Variables: map[string]events.Variable{"A": {Value: "1"}, "B": {Value: "2"}}}
	byValue, err := definition.Digest(spec)
	if err != nil {
		t.Fatal(err)
	}
	if byPointer, err := definition.Digest(&spec); err != nil || byPointer != byValue {
		t.Errorf("a pointer has the digest %s, %v", byPointer, err)
	}
	spec.Variables["B"] = events.Variable{Value: "3"}
	if other, err := definition.Digest(spec); err != nil || other == byValue {
		t.Errorf("another value has the same digest, %v", err)
	}
	if _, err := definition.Digest(events.AgentSpec{Limits: events.Limits{BudgetUSD: math.NaN()}}); err == nil {
		t.Error("Digest accepted NaN")
	}
}

func ExampleDigest() {
	digest, err := definition.Digest(events.InstanceSpec{Agent: events.Reference{Slug: "reviewer"}})
	if err != nil {
		panic(err)
	}
	fmt.Println(digest)
	// Output: 8f260211b4dd049fcd7b507950a60a985be866ac3d8353aae47c6890a0828edd
}

func ExampleParse() {
	_, err := definition.Parse("agent.yaml", []byte(`
kind: agent
slug: reviewer
spec:
  architecture: codecs
  instructions: Review what you are given.
  egress: [https://example.com]
`))
	fmt.Println(err)
	// Output:
	// agent.yaml:5:17: spec.architecture: unknown architecture "codecs"; must be one of claude-code (alias claude-sdk), codex, opencode, acp, spool
	// agent.yaml:7:12: spec.egress[0]: must be a host, not a URL or a network; an entry is host, host:port or *.host, optionally after methods and a space: GET,HEAD api.example.com
}
