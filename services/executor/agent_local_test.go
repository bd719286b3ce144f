package executor_test

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/services/executor"
)

// pushSkill stores a skill whose script prints a greeting, as the skills service does.
func (b *bench) pushSkill(slug string) events.Reference {
	b.t.Helper()
	const document = "---\nname: greet\ndescription: Greets.\n---\nRun greet.sh.\n"
	var z bytes.Buffer
	out := zip.NewWriter(&z)
	for name, content := range map[string]string{"SKILL.md": document, "greet.sh": "#!/bin/sh\necho greetings to $WHOM\n"} {
		h := &zip.FileHeader{Name: name, Method: zip.Deflate}
		h.SetMode(fs.FileMode(0o755))
		w, err := out.CreateHeader(h)
		if err == nil {
			_, err = w.Write([]byte(content))
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
	if err := out.Close(); err != nil {
		b.t.Fatal(err)
	}
	store, err := natsstore.Open(b.ctx, b.js, topology.BucketSkills)
	if err != nil {
		b.t.Fatal(err)
	}
	sum := sha256.Sum256(z.Bytes())
	digest := hex.EncodeToString(sum[:])
	if err := store.Put(b.ctx, digest, &z); err != nil {
		b.t.Fatal(err)
	}
	ref := events.Reference{Slug: slug, Version: digest}
	b.defineAt(events.Skill, ref, events.SkillPushed{Ref: ref, Name: "greet", Description: "Greets.", Document: document})
	return ref
}

// seal stores a secret as a gateway does.
func (b *bench) seal(k *age.X25519Identity, value string) string {
	b.t.Helper()
	kv, err := secret.OpenBucket(b.ctx, b.js)
	if err != nil {
		b.t.Fatal(err)
	}
	s, err := secret.NewSealer(kv, k.Recipient())
	if err != nil {
		b.t.Fatal(err)
	}
	key, err := s.Seal(b.ctx, tenant, "", []byte(value))
	if err != nil {
		b.t.Fatal(err)
	}
	return key
}

// useAll is the model's script: it runs the skill's script and prints a variable of the environment and a file of the
// agent.
const useAll = `
rules:
  - name: use
    match: {tools: [run_code]}
    steps:
      - tool: {name: run_code, input: {language: bash, code: "cat notes/todo.md; ./tool.sh; DATA/skills/*/greet.sh; printf %s \"$CREDENTIAL\" | sha256sum"}}
      - text: "{{result | trim}}"
`

// An agent's files, the script of its skill, and the variables of its environment, a secret included, are present in
// its sandbox.
func TestAgent_HasItsFilesSkillsAndVariables(t *testing.T) {
	t.Parallel()
	k, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	keyFile := filepath.Join(t.TempDir(), "secrets.key")
	if err := os.WriteFile(keyFile, []byte("# ours\n"+k.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, set := range map[string]func(*executor.Config){
		"the key in the environment": func(c *executor.Config) { c.SecretsKey = k.String() },
		"the key in a file":          func(c *executor.Config) { c.SecretsKeyFile = keyFile },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newLocalBench(t, useAll)
			skill := b.pushSkill("greet")
			env := b.environment("e", 1, map[string]events.Variable{"WHOM": {Value: "Ada"}, "CREDENTIAL": {Secret: true, Sealed: b.seal(k, "a-secret-value")}})
			agent := b.agent("a", 2, events.AgentSpec{
				Architecture: "spool", Instructions: "You do things.", Skills: []events.Reference{skill.WithoutVersion()},
				Files: []events.FileSpec{
					{Path: "notes/todo.md", Content: "buy milk\n"},
					{Path: "tool.sh", ContentBase64: "IyEvYmluL3NoCmVjaG8gaXQgcnVucwo=", Mode: 0o755},
				},
			})
			e := b.run(set)
			s := b.session(of1(agent, env), func(c *events.SessionCreated) { c.Architecture = "spool" })
			first := s.post("go")
			if l := s.untilEnded(first); l.Run.Phase != run.Completed {
				t.Fatalf("end: %+v\n%s", s.last(first), types(s.events()))
			}
			sum := sha256.Sum256([]byte("a-secret-value"))
			done, _ := s.last(first).(events.ExecutionCompleted)
			for _, want := range []string{"buy milk", "it runs", "greetings to Ada", hex.EncodeToString(sum[:])} {
				if !strings.Contains(done.Result, want) {
					t.Errorf("the result lacks %q: %s", want, done.Result)
				}
			}
			// The files are written once, so the agent's own changes stay.
			if err := os.WriteFile(filepath.Join(e.WorkspacesDir(), s.id, "notes", "todo.md"), []byte("done\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			second := s.post("again")
			s.untilEnded(second)
			if done, _ := s.last(second).(events.ExecutionCompleted); !strings.Contains(done.Result, "done") || strings.Contains(done.Result, "buy milk") {
				t.Errorf("the second result: %s", done.Result)
			}
			if n := len(of[events.WorkspaceRestored](s)); n != 1 {
				t.Errorf("the files were written %d times", n)
			}
			s.removeAll(e)
		})
	}
}
