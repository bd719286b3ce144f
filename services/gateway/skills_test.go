package gateway_test

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// skillZIP returns the ZIP of a skill, which has several chunks if it is large.
func skillZIP(t *testing.T, document string, size int) string {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, content := range map[string][]byte{"SKILL.md": []byte(document), "data.bin": randomBytes(size)} {
		f, err := z.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Store})
		must(t, err)
		_, err = f.Write(content)
		must(t, err)
	}
	must(t, z.Close())
	return b.String()
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b) // Read of ChaCha8 never fails
	return b
}

func (s *served) push(query, content string) answer {
	s.t.Helper()
	return s.do("POST", "/api/skills"+query, content, header("Content-Type", "application/zip"))
}

func TestSkills_LifeCycleOverREST(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveSkills()
	g := w.gateway(gateway.Config{})
	one, two := skillZIP(t, "# PDF", 3<<20), skillZIP(t, "# PDF 2", 10)
	const found = `"skill":{"name":"pdf","description":"reads PDFs","bytes":%d,"unpackedBytes":5,"files":2}`

	dry := g.push("?dryRun=true", one).want(t, 200)
	if want := fmt.Sprintf(`{"ref":{"scope":"organization","slug":"pdf","version":"%s"},"same":false,`+found+"}\n", sum(one), len(one)); string(dry.body) != want {
		t.Errorf("got  %s\nwant %s", dry.body, want)
	}
	if a := g.get("/api/skills").want(t, 200); string(a.body) != `{"skills":[],"nextPageToken":""}`+"\n" {
		t.Errorf("a dry run left %s", a)
	}
	first := g.push("?slug=pdf&tag=stable&tag=beta&sha256="+sum(one), one).want(t, 201)
	if first.text("position") == "" || first.text("ref", "version") != sum(one) {
		t.Errorf("got %s", first)
	}
	if again := g.push("", one).want(t, 200); again.field("same") != true {
		t.Errorf("got %s", again)
	}
	g.push("?slug=pdf", two).want(t, 201)

	commands := s.commands(t)
	for i, c := range commands {
		var b command.PushSkill
		must(t, json.Unmarshal(c.Body, &b))
		if c.Type != command.TypePushSkill || b.Object != command.SkillUpload("default", c.ID) || b.DryRun != (i == 0) {
			t.Errorf("command %d is %+v: %+v", i, c, b)
		}
	}
	var b command.PushSkill
	must(t, json.Unmarshal(commands[1].Body, &b))
	if fmt.Sprint(b.Tags) != "[stable beta]" || b.Ref != (events.Reference{Slug: "pdf"}) || b.SHA256 != sum(one) {
		t.Errorf("sent was %+v", b)
	}

	shown := g.get("/api/skills/pdf?version=stable").want(t, 200)
	if want := fmt.Sprintf(`{"ref":{"scope":"organization","slug":"pdf","version":"%s"},"tags":["beta","stable"],"name":"pdf","description":"reads PDFs","bytes":%d,"unpackedBytes":5,"files":2,"createdAt":"2026-02-03T04:05:06Z","document":"# PDF"}`+"\n",
		sum(one), len(one)); string(shown.body) != want {
		t.Errorf("got  %s\nwant %s", shown.body, want)
	}
	if a := g.get("/api/skills").want(t, 200); a.names("skills") != "organization//pdf [latest]" || strings.Contains(string(a.body), "document") {
		t.Errorf("got %s", a)
	}
	moved := g.do("POST", "/api/skills/pdf/tags", `{"tag":"stable","version":"latest"}`).want(t, 200)
	if moved.text("ref", "version") != sum(two) || g.get("/api/skills/pdf?version=stable&minPosition="+moved.text("position")).want(t, 200).text("ref", "version") != sum(two) {
		t.Errorf("got %s", moved)
	}
	g.do("DELETE", "/api/skills/pdf?version="+sum(two), "").want(t, 200)
	g.get("/api/skills/pdf?version="+sum(two)).wantProblem(t, 404, "SKILL_NOT_FOUND", "slug")
	if a := g.get("/api/skills/pdf").want(t, 200); a.text("ref", "version") != sum(one) {
		t.Errorf("the latest is %s", a)
	}
	g.do("DELETE", "/api/skills/pdf", "").want(t, 200)
	g.get("/api/skills/pdf").wantProblem(t, 404, "SKILL_NOT_FOUND", "slug")
}

// TestSkillArchive_ReturnsThePushedBytes tests that a ZIP is returned as it was pushed, whole or in part.
func TestSkillArchive_ReturnsThePushedBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveSkills()
	g := w.gateway(gateway.Config{})
	content := skillZIP(t, "# PDF", 2<<20)
	g.push("?tag=stable", content).want(t, 201)
	const at = "/api/skills/pdf/archive"
	got := g.get(at+"?version=stable").want(t, 200)
	if string(got.body) != content {
		t.Errorf("%d bytes came back, not as they were", len(got.body))
	}
	for name, want := range map[string]string{"Content-Type": "application/zip", "ETag": `"` + sum(content) + `"`, "Content-Disposition": `attachment; filename="pdf.zip"`,
		"Content-Length": fmt.Sprint(len(content)), "X-Content-Type-Options": "nosniff"} {
		if v := got.header.Get(name); v != want {
			t.Errorf("%s is %q, want %q", name, v, want)
		}
	}
	if a := g.get(at, header("If-None-Match", `"`+sum(content)+`"`)).want(t, 304); len(a.body) != 0 {
		t.Errorf("got %d bytes", len(a.body))
	}
	if a := g.get(at, header("Range", "bytes=1000000-1000009")).want(t, 206); string(a.body) != content[1000000:1000010] {
		t.Errorf("got %q", a.body)
	}
	if a := g.do("HEAD", at, "").want(t, 200); len(a.body) != 0 || a.header.Get("Content-Length") != fmt.Sprint(len(content)) {
		t.Errorf("got %v", a.header)
	}
	g.get(at+"?version=beta").wantProblem(t, 404, "SKILL_NOT_FOUND", "slug")
	g.do("PUT", at, "").wantProblem(t, 405, "METHOD_NOT_ALLOWED", "")
	g.get(at+"?tag=x").wantProblem(t, 400, "INVALID_REQUEST", "tag")
	g.get("/api/skills/P/archive").wantProblem(t, 400, "INVALID_REQUEST", "slug")
	bucket, err := w.js.ObjectStore(t.Context(), topology.BucketSkills)
	must(t, err)
	must(t, bucket.Delete(t.Context(), sum(content)))
	g.get(at).wantProblem(t, 500, "INTERNAL", "")
}

func TestSkills_BadInputNamesTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveSkills()
	g := w.gateway(gateway.Config{})
	content := skillZIP(t, "# PDF", 10)
	for query, field := range map[string]string{
		"?slug=A": "slug", "?scope=mine": "scope", "?org=*": "org", "?scope=identity_account": "org", "?tag=No": "tag[0]", "?tag=a&tag=": "tag[1]", "?dryRun=yes": "dryRun",
		"?sha256=x": "sha256", "?sha256=" + strings.ToUpper(sum(content)): "sha256", "?slug=a&slug=b": "slug", "?version=1": "version", "?%zz": "",
	} {
		g.push(query, content).wantProblem(t, 400, "INVALID_REQUEST", field)
	}
	g.do("POST", "/api/skills", content).wantProblem(t, 400, "INVALID_REQUEST", "Content-Type")
	g.do("POST", "/api/skills", content, header("Content-Type", "application/json")).wantProblem(t, 400, "INVALID_REQUEST", "Content-Type")
	g.push("?sha256="+sum("other"), content).wantProblem(t, 422, "SKILL_DIGEST_MISMATCH", "sha256")
	for _, c := range []struct{ method, path, body, field string }{
		{"POST", "/api/skills/pdf/tags", `{"version":"latest"}`, "tag"},
		{"POST", "/api/skills/pdf/tags", `{"tag":"stable"}`, "version"},
		{"POST", "/api/skills/pdf/tags", `{"tag":"stable","version":"!"}`, "version"},
		{"POST", "/api/skills/pdf/tags", `{"tag":"stable","versoin":"a"}`, "versoin"},
		{"POST", "/api/skills/pdf/tags", `{"slug":"x","tag":"stable","version":"a"}`, "slug"},
		{"DELETE", "/api/skills/pdf?version=stable", ``, "version"},
	} {
		g.do(c.method, c.path, c.body).wantProblem(t, 400, "INVALID_REQUEST", c.field)
	}
	if n := len(s.commands(t)); n != 0 {
		t.Errorf("%d commands were sent", n)
	}
	g.push("", "no ZIP").wantProblem(t, 422, "SKILL_ZIP_INVALID", "zip")
	_, err := spoolv1.NewSkillsClient(g.conn()).GetSkill(t.Context(), &spoolv1.GetSkillRequest{Slug: "none"})
	wantCode(t, err, codes.NotFound, "SKILL_NOT_FOUND", "slug")
	must(t, w.js.DeleteObjectStore(t.Context(), topology.BucketSkills))
	w.gateway(gateway.Config{}).push("", content).wantProblem(t, 503, "UNAVAILABLE", "")
}

// TestSkills_RefuseMoreThanTheLimit tests that a ZIP over 100 MiB is refused, and that not more than that is read.
func TestSkills_RefuseMoreThanTheLimit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveSkills()
	g := w.gateway(gateway.Config{})
	const path = "/api/skills?slug=large"
	for name, head := range map[string]string{"announced": "Content-Length: 5368709120", "not announced": "Transfer-Encoding: chunked"} {
		resp, sent := g.endless(http.MethodPost, path, head+"\r\nContent-Type: application/zip")
		a := resp.wantProblem(t, 413, "PAYLOAD_TOO_LARGE", "zip")
		if !strings.Contains(a.text("detail"), "104857600") {
			t.Errorf("%s: the limit is not named: %s", name, a)
		}
		if sent > 104<<20+inConnection(t) {
			t.Errorf("%s: %d bytes were taken", name, sent)
		}
	}
	if n := len(s.commands(t)); n != 0 {
		t.Errorf("%d commands were sent", n)
	}
}

// TestSkills_PlatformSkillsAreReadOnlyForTenants tests that platform skills are pushed with a key of tenant platform, and can be fetched by
// every tenant.
func TestSkills_PlatformSkillsAreReadOnlyForTenants(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	s := w.serveSkills()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	key := func(tenant string) *served {
		return g.withKey(g.withKey(root).do("POST", "/api/keys", fmt.Sprintf(`{"name":"x","tenant":%q}`, tenant)).want(t, 201).text("key"))
	}
	a, b := key("a"), key("b")
	content := skillZIP(t, "# PDF", 10)
	g.push("", content).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	g.get("/api/skills/pdf/archive").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	a.push("", content).want(t, 201)
	for _, path := range []string{"", "/archive"} {
		theirs, none := b.get("/api/skills/pdf"+path).wantProblem(t, 404, "SKILL_NOT_FOUND", "slug"), b.get("/api/skills/none"+path)
		if string(theirs.body) != string(none.body) {
			t.Errorf("another tenant's can be distinguished from a missing one: %s, %s", theirs, none)
		}
	}
	a.push("?scope=platform", content).wantProblem(t, 403, "FORBIDDEN", "scope")
	a.do("POST", "/api/skills/pdf/tags", `{"scope":"platform","tag":"x","version":"latest"}`).wantProblem(t, 403, "FORBIDDEN", "scope")
	a.do("DELETE", "/api/skills/pdf?scope=platform", "").wantProblem(t, 403, "FORBIDDEN", "scope")
	g.withKey(root).push("?scope=platform", content).wantProblem(t, 403, "FORBIDDEN", "Authorization")
	key("platform").push("?scope=platform", content).want(t, 201)
	if got := b.get("/api/skills/pdf/archive?scope=platform").want(t, 200); string(got.body) != content {
		t.Errorf("got %d bytes", len(got.body))
	}
	if got := b.get("/api/skills").want(t, 200).names("skills"); got != "platform//pdf [latest]" {
		t.Errorf("got %s", got)
	}
	for _, c := range s.commands(t) {
		if !strings.HasPrefix(command.SkillUpload(c.Tenant, c.ID), "upload/"+c.Tenant+"/") || c.Tenant == "default" {
			t.Errorf("got %+v", c)
		}
	}
}
