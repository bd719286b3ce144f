package gateway_test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// messages returns the number of messages in an object bucket: chunks and names.
func (w *world) messages(bucket string) uint64 {
	w.t.Helper()
	s, err := w.js.Stream(w.t.Context(), "OBJ_"+bucket)
	must(w.t, err)
	info, err := s.Info(w.t.Context())
	must(w.t, err)
	return info.State.Msgs
}

// empty removes all content of an object bucket, like the janitor after the retention.
func (w *world) empty(bucket string) {
	w.t.Helper()
	s, err := w.js.Stream(w.t.Context(), "OBJ_"+bucket)
	must(w.t, err)
	must(w.t, s.Purge(w.t.Context()))
}

// addStoredBytes adds to the number of bytes that the read models count for a tenant.
func (w *world) addStoredBytes(tenant string, bytes int64) {
	w.t.Helper()
	tx, err := w.pool.Begin(w.t.Context())
	must(w.t, err)
	projection{w: w, tx: tx}.stored(tenant, bytes)
	must(w.t, tx.Commit(w.t.Context()))
}

func bytesOf(n int) string { return strings.Repeat("x", n) }

const chunked = "Transfer-Encoding: chunked"

// TestStorageLimit_RefusesAnUpload tests that a file or skill that does not fit is refused before any of it is
// stored, and one of unknown length when the remaining bytes are used up. The error names the stored bytes, the limit
// and the remedy. Other tenants are served.
func TestStorageLimit_RefusesAnUpload(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	w.serveSkills()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantStorage: 3 << 20})
	acme, other := g.withNewKey(root, "acme"), g.withNewKey(root, "other")
	id, theirs := w.session("acme"), w.session("other")
	path := "/api/sessions/" + id + "/files/"
	acme.do("PUT", path+"a", bytesOf(2<<20)).want(t, 202)
	before := w.messages(topology.BucketWorkspaces)
	a := acme.do("PUT", path+"b", bytesOf(1<<20+1)).wantProblem(t, 429, "TENANT_STORAGE", "")
	for _, part := range []string{"1048577", "2097152", "3145728", "delete sessions"} {
		if !strings.Contains(a.text("detail"), part) {
			t.Errorf("the refusal does not name %s: %s", part, a)
		}
	}
	acme.push("", skillZIP(t, "# PDF", 1<<20)).wantProblem(t, 429, "TENANT_STORAGE", "")
	_, err := spoolv1.NewSessionsClient(g.conn()).CreateSession(acme.context(t.Context()), &spoolv1.CreateSessionRequest{WorkspaceFiles: []*spoolv1.WorkspaceFile{
		{Path: "a", ContentBase64: ptr(base64.StdEncoding.EncodeToString([]byte(bytesOf(1<<20 + 1))))},
	}})
	wantCode(t, err, codes.ResourceExhausted, "TENANT_STORAGE", "")
	acme.do("POST", "/api/executions", `{"content":"go","workspaceFiles":[{"path":"a","content":"`+bytesOf(1<<20+1)+`"}]}`).wantProblem(t, 429, "TENANT_STORAGE", "")
	if now := w.messages(topology.BucketWorkspaces); now != before || w.messages(topology.BucketSkills) != 0 {
		t.Errorf("refused uploads left %d messages in the bucket of workspaces, %d in that of skills", now-before, w.messages(topology.BucketSkills))
	}

	cut, sent := acme.endless("PUT", path+"c", chunked+"\r\nAuthorization: Bearer "+acme.key)
	if cut.wantProblem(t, 429, "TENANT_STORAGE", ""); sent > 4<<20+inConnection(t) {
		t.Errorf("%d bytes were taken", sent)
	}
	// The bytes that were received count until the janitor has removed them.
	acme.do("PUT", path+"d", bytesOf(1<<20)).wantProblem(t, 429, "TENANT_STORAGE", "")
	w.empty(topology.BucketWorkspaces)
	acme.do("PUT", path+"d", bytesOf(1<<20)).want(t, 202)
	acme.do("PUT", path+"e", "x").wantProblem(t, 429, "TENANT_STORAGE", "")
	other.do("PUT", "/api/sessions/"+theirs+"/files/a", bytesOf(2<<20)).want(t, 202)
	if n := acme.get("/api/limits").want(t, 200).number("used", "storageBytes"); n != 3<<20 {
		t.Errorf("%v bytes are shown as used", n)
	}
}

func ptr[T any](v T) *T { return &v }

// TestStorageLimit_HoldsForUploadsAtOnce tests that concurrent uploads cannot exceed a tenant's limit.
func TestStorageLimit_HoldsForUploadsAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{MaxTenantStorage: 1 << 20})
	id := w.session("default")
	var wg sync.WaitGroup
	answers := make(chan answer, 30)
	for i := range cap(answers) {
		wg.Go(func() {
			answers <- g.do("PUT", fmt.Sprintf("/api/sessions/%s/files/%d", id, i), bytesOf(100<<10))
		})
	}
	wg.Wait()
	close(answers)
	taken := 0
	for a := range answers {
		if a.status == http.StatusAccepted {
			taken++
			continue
		}
		a.wantProblem(t, 429, "TENANT_STORAGE", "")
	}
	// An upload that was just folded may count twice for a moment, so that another one that would fit is refused.
	for g.do("PUT", "/api/sessions/"+id+"/files/more", bytesOf(100<<10)).status == http.StatusAccepted {
		taken++
	}
	if stored := g.get("/api/limits").want(t, 200).number("used", "storageBytes"); taken != 10 || stored != 1000<<10 {
		t.Errorf("%d uploads of 100 KiB were taken, %v bytes are stored", taken, stored)
	}
}

// TestStorageLimit_RefusesWork tests that above the limit all commands that store more are refused, while controls,
// deletions and reads are served, and that a change of the limit takes effect immediately.
func TestStorageLimit_RefusesWork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	acme := g.withNewKey(root, "acme")
	id := w.session("acme")
	path := "/api/sessions/" + id
	acme.do("POST", "/api/sessions", `{}`, header("Idempotency-Key", "first")).want(t, 201)
	run := acme.do("POST", path+"/messages", `{"content":"go"}`).want(t, 202).text("executionId")
	acme.do("PUT", path+"/files/a", bytesOf(1000)).want(t, 202)
	g.withKey(root).do("PUT", "/api/limits", `{"tenant":"acme","limits":{"storageBytes":1000}}`).want(t, 200)
	refused := func() bool { return acme.do("POST", "/api/sessions", `{}`).status == http.StatusTooManyRequests }
	for deadline := time.Now().Add(patience); !refused(); {
		if time.Now().After(deadline) {
			t.Fatal("no session is refused")
		}
	}
	for _, r := range [][3]string{
		{"POST", "/api/sessions", `{}`}, {"POST", "/api/executions", `{"content":"go"}`}, {"POST", path + "/messages", `{"content":"go"}`}, {"POST", path + "/sync", ""},
		{"PATCH", path, `{"metadata":1}`}, {"PUT", path + "/files/b", "x"}, {"PUT", path + "/files/b", ""},
	} {
		acme.do(r[0], r[1], r[2]).wantProblem(t, 429, "TENANT_STORAGE", "")
	}
	acme.push("", skillZIP(t, "# PDF", 10)).wantProblem(t, 429, "TENANT_STORAGE", "")
	_, err := spoolv1.NewSessionsClient(g.conn()).PostMessage(acme.context(t.Context()), &spoolv1.PostMessageRequest{SessionId: id, Content: "go"})
	wantCode(t, err, codes.ResourceExhausted, "TENANT_STORAGE", "")
	acme.do("POST", "/api/sessions", `{}`, header("Idempotency-Key", "first")).want(t, 201) // the session was created before
	for _, r := range [][2]string{{"POST", path + "/interrupt"}, {"POST", "/api/executions/" + run + "/cancel"}, {"DELETE", path + "/files/a"}, {"POST", path + "/environment/terminate"}} {
		acme.do(r[0], r[1], "").want(t, 202)
	}
	acme.get(path).want(t, 200)
	acme.get(path+"/events").want(t, 200)
	w.addStoredBytes("acme", -1) // like a removal by the janitor
	acme.do("POST", path+"/messages", `{"content":"go"}`).want(t, 202)
	w.addStoredBytes("acme", 1)
	acme.do("POST", path+"/messages", `{"content":"go"}`).wantProblem(t, 429, "TENANT_STORAGE", "")
	g.withKey(root).do("DELETE", "/api/limits?tenant=acme", "").want(t, 200)
	for deadline := time.Now().Add(patience); refused(); {
		if time.Now().After(deadline) {
			t.Fatal("sessions are refused for good")
		}
	}
	acme.do("DELETE", path, "").want(t, 200)
}

// TestStorageLimit_CountsUploadsThatWereAccepted tests that what this gateway has stored counts while the projector
// is behind, and counts only once when the read models contain it.
func TestStorageLimit_CountsUploadsThatWereAccepted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{MaxTenantStorage: 1000})
	id := w.session("default")
	path := "/api/sessions/" + id + "/files/"
	// The fake session service folds while it answers. Here the sum lacks the file, and the checkpoint is the former
	// one.
	_, err := w.pool.Exec(t.Context(), "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
	must(t, err)
	w.exec("CREATE TRIGGER held BEFORE UPDATE ON checkpoints FOR EACH ROW EXECUTE FUNCTION hold()")
	w.exec("CREATE TRIGGER held BEFORE INSERT ON tenant_usage FOR EACH ROW EXECUTE FUNCTION hold()")
	g.do("PUT", path+"a", bytesOf(600)).want(t, 202)
	g.do("PUT", path+"b", bytesOf(600)).wantProblem(t, 429, "TENANT_STORAGE", "")
	w.exec("DROP TRIGGER held ON tenant_usage")
	w.exec("DROP TRIGGER held ON checkpoints")
	w.addStoredBytes("default", 600)
	w.exec("UPDATE checkpoints SET position = 1000000")
	g.do("PUT", path+"b", bytesOf(400)).want(t, 202)
	g.do("PUT", path+"c", "x").wantProblem(t, 429, "TENANT_STORAGE", "")
}

// TestStorageLimit_AnswersAClientThatIsStillSending tests that the client receives the answer to an upload that is refused
// before any of it was read, even if the client has sent a large part of it.
func TestStorageLimit_AnswersAClientThatIsStillSending(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveSkills()
	g := w.gateway(gateway.Config{MaxTenantStorage: 1000})
	path := "/api/sessions/" + w.session("default") + "/files/a"
	zip := skillZIP(t, "# PDF", 8<<20)
	for range 10 {
		g.do("PUT", path, bytesOf(8<<20)).wantProblem(t, 429, "TENANT_STORAGE", "")
		g.push("", zip).wantProblem(t, 429, "TENANT_STORAGE", "")
	}
}

// TestStorageLimit_CountsSkillUploadsOnce tests that the upload of a skill that was only checked counts until it is removed, and
// that the upload of a stored skill does not count in addition to the skill while all such uploads are below the
// limit.
func TestStorageLimit_CountsSkillUploadsOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveSkills()
	g := w.gateway(gateway.Config{MaxTenantStorage: 1 << 20})
	zip := skillZIP(t, "# PDF", 600<<10)
	g.push("?dryRun=true", zip).want(t, 200)
	g.push("", zip).wantProblem(t, 429, "TENANT_STORAGE", "")
	w.empty(topology.BucketSkills)
	g.push("", zip).want(t, 201)
	// The fake does not count the skill, as if it had been removed immediately.
	g.push("", skillZIP(t, "# PDF 2", 600<<10)).wantProblem(t, 429, "TENANT_STORAGE", "")
	w.addStoredBytes("default", 400<<10)
	g.push("", skillZIP(t, "# PDF 2", 300<<10)).want(t, 201)
}
