package gateway_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

const topSecret = "hunter2-é"

// requireNoSecret fails the test if the answer contains topSecret.
func (a answer) requireNoSecret(t *testing.T) answer {
	t.Helper()
	if strings.Contains(string(a.body), "hunter2") {
		t.Errorf("the answer contains the secret: %s", a)
	}
	return a
}

func environment(variables string) string { return `{"variables":{` + variables + `}}` }

func TestEnvironments_KeepSecretsBetweenVersions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	sealed := w.newSealer()
	g := w.gateway(gateway.Config{})
	const path = "/api/environments"
	at := path + "/base"
	first := g.apply(path, "base", environment(`"REGION":{"value":"eu"},"TOKEN":{"value":"`+topSecret+`","secret":true,"description":"of the API"}`)).requireNoSecret(t)
	if fmt.Sprint(sealed.values) != "map[default.e.0:"+topSecret+"]" {
		t.Errorf("sealed are %v", sealed.values)
	}
	const stored = `{"variables":{"REGION":{"value":"eu"},"TOKEN":{"secret":true,"sealed":"default.e.0","description":"of the API"}}}`
	shown := g.get(at).want(t, 200).requireNoSecret(t)
	if !strings.Contains(string(shown.body), `"spec":`+stored+`,`) {
		t.Errorf("got %s", shown)
	}
	for _, c := range s.commands(t) {
		if strings.Contains(string(c.Body), "hunter2") {
			t.Errorf("the secret was sent: %s", c.Body)
		}
	}
	// A returned definition can be applied again, with or without the keys of its secrets, and is the same version.
	for _, spec := range []string{stored, environment(`"REGION":{"value":"eu"},"TOKEN":{"secret":true,"description":"of the API"}`)} {
		if a := g.apply(path, "base", spec); a.field("same") != true || a.text("ref", "version") != first.text("ref", "version") {
			t.Errorf("%s: got %s", spec, a)
		}
	}
	// A new value creates a new version; the former value can be restored by its key.
	second := g.apply(path, "base", environment(`"TOKEN":{"value":"another-one","secret":true}`))
	if second.field("same") != false {
		t.Errorf("got %s", second)
	}
	if back := g.apply(path, "base", stored); back.text("ref", "version") != first.text("ref", "version") {
		t.Errorf("got %s", back)
	}
	if a := g.get(path).want(t, 200).requireNoSecret(t); a.names("environments") != "organization//base [latest]" {
		t.Errorf("got %s", a)
	}
	g.do("POST", path, `{"ref":{"scope":"platform","slug":"net"},"spec":`+environment(`"P":{"value":"`+topSecret+`","secret":true}`)+`}`).want(t, 200)
	if sealed.values["platform.e.2"] != topSecret {
		t.Errorf("the platform's secret lies under none of its keys: %v", sealed.values)
	}
	g.do("DELETE", at, "").want(t, 200)
	g.get(at).wantProblem(t, 404, "ENVIRONMENT_NOT_FOUND", "slug")
}

func TestEnvironments_BadInputNamesTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	sealed := w.newSealer()
	g := w.gateway(gateway.Config{})
	g.apply("/api/environments", "a", environment(`"PLAIN":{"value":"x"},"TOKEN":{"value":"`+topSecret+`","secret":true}`))
	g.apply("/api/environments", "b", environment(`"TOKEN":{"value":"of another","secret":true}`))
	before := len(s.commands(t))
	long := `"` + strings.Repeat("hunter2.", 8<<10+1) + `"`
	for name, c := range map[string]struct{ variables, field string }{
		"a name":                       {`"1A":{"value":"x"}`, "spec.variables.1A"},
		"a reserved name":              {`"PATH":{"value":"x"}`, "spec.variables.PATH"},
		"a number for a secret":        {`"T":{"value":12345678,"secret":true}`, "spec.variables.T.value"},
		"too short":                    {`"T":{"value":"hu2","secret":true}`, "spec.variables.T.value"},
		"too long":                     {`"T":{"value":` + long + `,"secret":true}`, "spec.variables.T.value"},
		"NUL":                          {`"T":{"value":"hunter2\u0000","secret":true}`, "spec.variables.T.value"},
		"a field":                      {`"T":{"value":"hunter2","secrte":true}`, "spec.variables.T.secrte"},
		"a secret that is not there":   {`"NEW":{"secret":true}`, "spec.variables.NEW.value"},
		"plain before":                 {`"PLAIN":{"secret":true}`, "spec.variables.PLAIN.value"},
		"a key of nobody":              {`"TOKEN":{"secret":true,"sealed":"default.e.99"}`, "spec.variables.TOKEN.sealed"},
		"a key of another environment": {`"TOKEN":{"secret":true,"sealed":"default.e.1"}`, "spec.variables.TOKEN.sealed"},
		"a key of another variable":    {`"OTHER":{"secret":true,"sealed":"default.e.0"}`, "spec.variables.OTHER.sealed"},
		"a key of no secret":           {`"TOKEN":{"value":"x","sealed":"default.e.0"}`, "spec.variables.TOKEN.sealed"},
	} {
		t.Run(name, func(t *testing.T) {
			a := g.do("POST", "/api/environments", `{"ref":{"slug":"a"},"spec":`+environment(c.variables)+`}`).wantProblem(t, 400, "INVALID_REQUEST", c.field).requireNoSecret(t)
			if strings.Contains(a.text("detail"), "12345678") {
				t.Errorf("the answer contains the value: %s", a)
			}
		})
	}
	if n := len(s.commands(t)); n != before || len(sealed.values) != 2 {
		t.Errorf("%d commands were sent, sealed are %v", n-before, sealed.values)
	}
	sealed.fail = errors.New("no bucket")
	g.do("POST", "/api/environments", `{"ref":{"slug":"a"},"spec":`+environment(`"T":{"value":"hunter2","secret":true}`)+`}`).wantProblem(t, 503, "UNAVAILABLE", "").requireNoSecret(t)
}

// TestNoSealer_RefusesSecrets tests that secrets are refused if there is no public key, and that the answer names the setting.
func TestNoSealer_RefusesSecrets(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	for path, c := range map[string]struct{ body, field string }{
		"/api/environments":                 {`{"ref":{"slug":"a"},"spec":` + environment(`"T":{"value":"hunter2","secret":true}`) + `}`, "spec.variables.T"},
		"/api/sessions/" + id + "/messages": {`{"content":"x","environment":{"T":{"value":"hunter2","secret":true}}}`, "environment.T"},
		"/api/executions":                   {`{"content":"x","environment":{"T":{"value":"hunter2","secret":true}}}`, "environment.T"},
	} {
		a := g.do("POST", path, c.body).wantProblem(t, 503, "SECRETS_UNAVAILABLE", c.field).requireNoSecret(t)
		if !strings.Contains(a.text("detail"), "SPOOL_SECRETS_RECIPIENT") {
			t.Errorf("no setting is named: %s", a)
		}
	}
	g.apply("/api/environments", "a", environment(`"REGION":{"value":"eu"}`))
	g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"x","environment":{"REGION":{"value":"eu"}}}`).want(t, 202)
	if n := len(s.commands(t)); n != 2 {
		t.Errorf("%d commands were sent", n)
	}
}

// TestSecretsRecipient_SealsToThePublicKey tests that a secret is encrypted to the public key of SPOOL_SECRETS_RECIPIENT, so that only
// the private key opens it.
func TestSecretsRecipient_SealsToThePublicKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	identity, recipient, err := secret.GenerateKeyPair()
	must(t, err)
	file := filepath.Join(t.TempDir(), "secrets.pub")
	must(t, os.WriteFile(file, []byte(recipient+"\n"), 0o600))
	kv, err := w.js.KeyValue(t.Context(), topology.BucketSecrets)
	must(t, err)
	keys, err := secret.ParseIdentities(identity)
	must(t, err)
	opener, err := secret.NewOpener(kv, keys...)
	must(t, err)
	for _, cfg := range []gateway.Config{{SecretsRecipient: recipient}, {SecretsRecipientFile: file}} {
		g := w.gateway(cfg)
		g.apply("/api/environments", "a", environment(`"T":{"value":"`+topSecret+`","secret":true}`))
		var b command.ApplyEnvironment
		s.bodyOf(command.TypeApplyEnvironment, &b)
		if got, err := opener.Open(t.Context(), "default", b.Spec.Variables["T"].Sealed); err != nil || got != topSecret {
			t.Errorf("opened %q, %v", got, err)
		}
		entry, err := kv.Get(t.Context(), b.Spec.Variables["T"].Sealed)
		if err != nil || strings.Contains(string(entry.Value()), "hunter2") {
			t.Errorf("stored is %s, %v", entry.Value(), err)
		}
	}
	if _, err := gateway.New(gateway.Config{SecretsRecipient: "nonsense"}, gateway.Deps{NATS: w.nc, Pool: w.pool}); err == nil || !strings.HasPrefix(err.Error(), "gateway: secrets-recipient: ") {
		t.Errorf("got %v", err)
	}
}

// TestRunVariables_SendSecretsSealed tests that plain variables of an execution are sent as they are, and secrets only as the key of
// the sealed value, which names the execution.
func TestRunVariables_SendSecretsSealed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	sealed := w.newSealer()
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	const vars = `"environment":{"REGION":{"value":"eu"},"TOKEN":{"value":"` + topSecret + `","secret":true}}`
	posted := g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"x",`+vars+`}`).want(t, 202)
	started := g.do("POST", "/api/executions", `{"content":"x","agent":"default",`+vars+`}`).want(t, 202)
	var post command.PostMessage
	s.bodyOf(command.TypePostMessage, &post)
	var start command.StartExecution
	s.bodyOf(command.TypeStartExecution, &start)
	for execution, got := range map[string]map[string]events.Variable{posted.text("executionId"): post.Environment, started.text("executionId"): start.Post.Environment} {
		key := got["TOKEN"].Sealed
		if len(got) != 2 || got["REGION"] != (events.Variable{Value: "eu"}) || got["TOKEN"] != (events.Variable{Secret: true, Sealed: key}) ||
			!strings.HasPrefix(key, "default.x."+execution+".") || sealed.values[key] != topSecret {
			t.Errorf("%s was sent %+v; sealed are %v", execution, got, sealed.values)
		}
	}
	g.get("/api/sessions/"+id+"/events").want(t, 200).requireNoSecret(t)

	// A repeat under an Idempotency-Key is the same request only if its secrets are equal; the record contains no
	// hash from which they can be guessed quickly.
	body := `{"content":"again",` + vars + `}`
	first := g.do("POST", "/api/sessions/"+id+"/messages", body, header("Idempotency-Key", "k")).want(t, 202)
	n := len(sealed.values)
	if again := g.do("POST", "/api/sessions/"+id+"/messages", body, header("Idempotency-Key", "k")).want(t, 202); again.text("executionId") != first.text("executionId") || len(sealed.values) != n {
		t.Errorf("got %s, want %s; %d secrets more", again, first, len(sealed.values)-n)
	}
	g.do("POST", "/api/sessions/"+id+"/messages", strings.Replace(body, "hunter2", "hunter3", 1), header("Idempotency-Key", "k")).wantProblem(t, 409, "IDEMPOTENCY_MISMATCH", "Idempotency-Key")
	// Over gRPC the repeat is the same request too.
	ctx := metadata.AppendToOutgoingContext(t.Context(), "idempotency-key", "k")
	over, err := spoolv1.NewSessionsClient(g.conn()).PostMessage(ctx, &spoolv1.PostMessageRequest{SessionId: id, Content: "again", Environment: map[string]*spoolv1.RunVariable{
		"REGION": {Value: "eu"}, "TOKEN": {Value: topSecret, Secret: true}}})
	if err != nil || over.GetExecutionId() != first.text("executionId") {
		t.Errorf("got %v, %v", over, err)
	}

	many := make([]string, 257)
	for i := range many {
		many[i] = fmt.Sprintf(`"V%d":{"value":"x"}`, i)
	}
	for name, c := range map[string]struct{ variables, field, code string }{
		"a name":       {`"a b":{"value":"hunter2"}`, "environment.a b", "INVALID_REQUEST"},
		"Spool's own":  {`"SPOOL_X":{"value":"hunter2"}`, "environment.SPOOL_X", "INVALID_REQUEST"},
		"no text":      {`"A":{"value":12345678,"secret":true}`, "environment.A.value", "INVALID_REQUEST"},
		"NUL":          {`"A":{"value":"hunter2\u0000"}`, "environment.A.value", "INVALID_REQUEST"},
		"empty secret": {`"A":{"secret":true}`, "environment.A.value", "INVALID_REQUEST"},
		"too many":     {strings.Join(many, ","), "environment", "INVALID_REQUEST"},
		"too long":     {`"A":{"value":"` + strings.Repeat("hunter2.", 15<<10+1) + `"}`, "environment.A.value", "INVALID_REQUEST"},
		"too much":     {strings.Join(slices.Collect(large(6)), ","), "environment", "PAYLOAD_TOO_LARGE"},
	} {
		t.Run(name, func(t *testing.T) {
			status := 400
			if c.code == "PAYLOAD_TOO_LARGE" {
				status = 413
			}
			a := g.do("POST", "/api/executions", `{"content":"x","environment":{`+c.variables+`}}`).wantProblem(t, status, c.code, c.field).requireNoSecret(t)
			if strings.Contains(a.text("detail"), "12345678") {
				t.Errorf("the answer contains the value: %s", a)
			}
		})
	}
	sealed.fail = errors.New("no bucket")
	g.do("POST", "/api/executions", `{"content":"x",`+vars+`}`, header("Idempotency-Key", "later")).wantProblem(t, 503, "UNAVAILABLE", "").requireNoSecret(t)
	sealed.fail = nil
	g.do("POST", "/api/executions", `{"content":"without"}`, header("Idempotency-Key", "later")).want(t, 202)
	// Nothing is sealed for a session that does not exist.
	n = len(sealed.values)
	g.do("POST", "/api/sessions/"+oldID(t, events.KindSession)+"/messages", body).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	if len(sealed.values) != n {
		t.Error("a secret was sealed for no session")
	}
}

func large(n int) func(func(string) bool) {
	return func(yield func(string) bool) {
		for i := range n {
			if !yield(fmt.Sprintf(`"L%d":{"value":"%s"}`, i, strings.Repeat("x", 100<<10))) {
				return
			}
		}
	}
}

// TestSession_ShowsInstanceAndEnvironments tests that sessions and executions show the instance and environments that they were
// created with.
func TestSession_ShowsInstanceAndEnvironments(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	const refs = `"instance":"team/prod@stable","environments":["base","platform/net@latest"]`
	made := g.do("POST", "/api/sessions", `{`+refs+`}`).want(t, 201)
	started := g.do("POST", "/api/executions", `{"content":"x",`+refs+`}`).want(t, 202)
	var create command.CreateSession
	s.bodyOf(command.TypeCreateSession, &create)
	var start command.StartExecution
	s.bodyOf(command.TypeStartExecution, &start)
	for _, got := range []command.CreateSession{create, start.Create} {
		if got.Instance != "team/prod@stable" || fmt.Sprint(got.Environments) != "[base platform/net@latest]" || got.Agent != "" {
			t.Errorf("sent was %+v", got)
		}
	}
	g.do("POST", "/api/sessions", `{"agent":"platform/reviewer@stable"}`).want(t, 201)
	s.bodyOf(command.TypeCreateSession, &create)
	if create.Agent != "platform/reviewer@stable" {
		t.Errorf("sent was %+v", create)
	}
	one := g.get("/api/sessions/"+made.text("sessionId")).want(t, 200)
	if one.text("instance") != "team/prod@stable" || fmt.Sprint(one.field("environments")) != "[base platform/net@latest]" || one.field("agentRef") != nil {
		t.Errorf("got %s", one)
	}
	plain := g.get("/api/sessions/"+w.session("default")).want(t, 200)
	if fmt.Sprint(plain.field("environments")) != "[]" || plain.field("instance") != nil {
		t.Errorf("got %s", plain)
	}
	exe := started.text("executionId")
	if a := g.get("/api/executions/"+exe).want(t, 200); a.field("resolved") != nil || a.text("instance") != "team/prod@stable" || a.text("agent") != "default" ||
		a.field("agentRef") != nil {
		t.Errorf("got %s", a)
	}
	for _, path := range []string{"/api/executions?pageSize=1", "/api/sessions/" + started.text("sessionId") + "/executions"} {
		if a := g.get(path).want(t, 200); a.text("executions", "0", "instance") != "team/prod@stable" {
			t.Errorf("%s: got %s", path, a)
		}
	}
	resolved := events.ExecutionResolved{Agent: events.Reference{Slug: "reviewer", Version: "v"}, Variables: []events.Provenance{{Name: "A", From: "agent", Value: "1"}, {Name: "S", From: "run", Secret: true, Sealed: "k"}}}
	w.emit("default", started.text("sessionId"), events.Event{ExecutionID: exe, Data: resolved})
	if a := g.get("/api/executions/"+exe).want(t, 200); !strings.Contains(string(a.body), `"resolved":`+string(encode(t, resolved))) {
		t.Errorf("got %s", a)
	}
}

func TestExplainEnvironment_NamesTheOriginOfVariables(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	w.newSealer()
	g := w.gateway(gateway.Config{})
	const path = "/api/environments/explain"
	g.apply("/api/agents", "reviewer", `{"architecture":"spool","instructions":"Review it, please.","environment":{"MODE":{"value":"fast"},"TOKEN":{"secret":true,"required":true}},"egress":["pypi.org"]}`)
	base := g.apply("/api/environments", "base", `{"variables":{"TOKEN":{"value":"`+topSecret+`","secret":true},"REGION":{"value":"eu"}},"egress":["HEAD,GET Api.example.com","PYPI.org."]}`).text("ref", "version")
	g.do("POST", "/api/environments", `{"ref":{"scope":"platform","slug":"net"},"tags":["stable"],"spec":`+environment(`"REGION":{"value":"us"},"MODE":{"value":"slow"}`)+`}`).want(t, 200)
	net := g.get("/api/environments/net?scope=platform").want(t, 200).text("ref", "version")
	g.apply("/api/instances", "prod", `{"agent":"reviewer","environments":["base"]}`)

	want := `{"variables":[{"name":"MODE","from":"platform/net@` + net + `","secret":false,"value":"slow"},{"name":"REGION","from":"platform/net@` + net + `","secret":false,"value":"us"},` +
		`{"name":"TOKEN","from":"base@` + base + `","secret":true}],"egress":[{"entry":"pypi.org","from":"agent"},{"entry":"GET,HEAD api.example.com","from":"base@` + base + `"}]}` + "\n"
	for _, body := range []string{`{"agent":"reviewer","environments":["base","platform/net@stable"]}`, `{"instance":"prod","environments":["platform/net"]}`} {
		if a := g.do("POST", path, body).want(t, 200); string(a.body) != want {
			t.Errorf("%s: got  %s\nwant %s", body, a.body, want)
		}
	}
	if a := g.do("POST", path, `{"agent":"default"}`).want(t, 200); string(a.body) != `{"variables":[],"egress":[]}`+"\n" {
		t.Errorf("got %s", a)
	}
	for i := range 3 {
		list := make([]string, 100)
		for j := range list {
			list[j] = fmt.Sprintf("%q", fmt.Sprintf("h%d-%d.example.com", i, j))
		}
		g.apply("/api/environments", fmt.Sprintf("hosts%d", i), `{"variables":{},"egress":[`+strings.Join(list, ",")+`]}`)
	}
	many := g.do("POST", path, `{"environments":["hosts0","hosts1","hosts2"]}`).wantProblem(t, 422, "EGRESS_INVALID", "")
	if !strings.Contains(many.text("detail"), "egress of hosts2@") {
		t.Errorf("got %s", many)
	}
	missing := g.do("POST", path, `{"agent":"reviewer"}`).wantProblem(t, 422, "ENVIRONMENT_MISSING", "")
	if !strings.Contains(missing.text("detail"), "TOKEN") {
		t.Errorf("got %s", missing)
	}
	g.apply("/api/environments", "base", environment(`"REGION":{"value":"eu"}`))
	two := g.do("POST", path, `{"agent":"reviewer","environments":["base","base@`+base+`","platform/net@stable"]}`).wantProblem(t, 422, "ENVIRONMENT_CONFLICT", "")
	if !strings.Contains(two.text("detail"), "two versions") {
		t.Errorf("got %s", two)
	}
	both := g.do("POST", path, `{"agent":"reviewer","environments":["platform/net","platform/net@stable","base"]}`).wantProblem(t, 422, "ENVIRONMENT_MISSING", "")
	if !strings.Contains(both.text("detail"), "TOKEN") {
		t.Errorf("got %s", both)
	}
	_, err := spoolv1.NewEnvironmentsClient(g.conn()).ExplainEnvironment(t.Context(), &spoolv1.ExplainEnvironmentRequest{Agent: "reviewer"})
	wantCode(t, err, codes.FailedPrecondition, "ENVIRONMENT_MISSING", "")
	out, err := spoolv1.NewEnvironmentsClient(g.conn()).ExplainEnvironment(t.Context(), &spoolv1.ExplainEnvironmentRequest{Environments: []string{"platform/net"}})
	if err != nil || len(out.GetVariables()) != 2 || out.GetVariables()[0].GetValue() != "slow" {
		t.Errorf("got %v, %v", out, err)
	}
	var all struct{ Spec json.RawMessage }
	must(t, json.Unmarshal(g.get("/api/environments/base?version="+base).want(t, 200).requireNoSecret(t).body, &all))
}
