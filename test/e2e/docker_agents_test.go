package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

const (
	credential = "kestrel-7731-credential" // a secret that a tool uses
	planted    = "planted-control-5150"    // not a secret: the scan must find it
)

// checker is a program with a server that accepts only the credential, and a client of the server.
const checker = `
import hashlib, http.server, os, threading, urllib.request
class Door(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("X-Credential", "") == os.environ["DOOR_TOKEN"] and len(os.environ["DOOR_TOKEN"]) == %d
        self.send_response(200 if known else 403); self.end_headers()
        self.wfile.write(b"the door is open" if known else b"the door is shut")
    def log_message(self, *a): pass
door = http.server.HTTPServer(("127.0.0.1", 0), Door)
threading.Thread(target=door.serve_forever, daemon=True).start()
ask = urllib.request.Request("http://127.0.0.1:%%d/" %% door.server_port, headers={"X-Credential": os.environ["DOOR_TOKEN"]})
print(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask).read().decode())
`

// greet returns the archive of a skill with a script.
func greet(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{
		"SKILL.md":         "---\nname: greet\ndescription: Greets people by name.\n---\n# Greeting\nRun scripts/greet.sh in this folder.\n",
		"scripts/greet.sh": "#!/bin/sh\necho \"greetings to $WHOM from $(dirname \"$0\")\"\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o700); err != nil { //nolint:gosec // the file is a script
			t.Fatal(err)
		}
	}
	var z bytes.Buffer
	if err := skill.PackFolder(dir, &z, ""); err != nil {
		t.Fatal(err)
	}
	return z.Bytes()
}

// apply applies a definition and returns its version.
func apply(c *harness.Cluster, kind, slug string, spec any) string {
	c.T.Helper()
	var answer json.RawMessage
	code := c.Call(0, "POST", "/api/"+kind, map[string]any{"ref": map[string]any{"slug": slug}, "spec": spec}, &answer)
	var applied struct{ Ref events.Reference }
	if err := json.Unmarshal(answer, &applied); err != nil || code != http.StatusOK {
		c.T.Fatalf("%s %s: answered %d %s, %v", kind, slug, code, answer, err)
	}
	return applied.Ref.Version
}

// TestDockerAgents_HaveTheirDefinition tests that every real agent in a container has everything that its definition
// names: instructions, memory, a skill's script at its versioned path, files, variables, and a secret that a tool
// uses and that is found nowhere else.
func TestDockerAgents_HaveTheirDefinition(t *testing.T) {
	c := newDockerCluster(t, harness.Options{Executor: executor.Config{Slots: 4}, KeepLogs: true})
	code, raw := c.PushSkill(greet(t), "slug=greet&tag=stable")
	var pushed struct{ Ref events.Reference }
	if err := json.Unmarshal(raw, &pushed); err != nil || code != http.StatusCreated {
		t.Fatalf("pushed: %d %s %v", code, raw, err)
	}
	dir := "/bin/skills/" + pushed.Ref.Version
	apply(c, "environments", "street", map[string]any{"variables": map[string]any{
		"WHOM": map[string]any{"value": "Ada"}, "PLAIN": map[string]any{"value": planted}, "DOOR_TOKEN": map[string]any{"value": credential, "secret": true},
	}, "egress": []string{"HEAD,GET docs.example.com"}}) // with this rule agents trust the egress proxy's certificate; it does not affect model requests
	t.Run("agents", func(t *testing.T) {
		for architecture, more := range architectures() {
			if architecture == "acp" {
				continue // uses the same program as opencode
			}
			t.Run(architecture, func(t *testing.T) {
				t.Parallel()
				c := c.ForSubtest(t)
				apply(c, "agents", architecture+"-porter", map[string]any{
					"architecture": architecture, "model": more["model"], "instructions": "You are the porter of " + architecture + " street.", "memoryFile": "The heron remembers " + architecture + ".",
					"skills": []string{"greet@stable"}, "files": []map[string]any{{"path": "door.py", "content": fmt.Sprintf(checker, len(credential))}},
				})
				agentTalk(t, c, architecture, dir)
			})
		}
	})
	scan(t, c)
}

func agentTalk(t *testing.T, c *harness.Cluster, architecture, dir string) {
	k := newTalkWith(t, c, "", map[string]any{"agent": architecture + "-porter", "environments": []string{"street"}})
	k.mustComplete("run the command "+dir+"/scripts/greet.sh", "greetings to Ada from "+dir+"/scripts")
	k.mustComplete("run the command python3 door.py", "the door is open")
	k.mustComplete("run the command tail -n 1 $SSL_CERT_FILE; ls $NODE_EXTRA_CA_CERTS", "launch/authorities.pem")
	if want := map[string]string{"claude-code": "greet", "opencode": dir + "/scripts/greet.sh"}[architecture]; want != "" {
		k.mustComplete("use the skill greet", want) // with the tool of the agent's command line
	}
	var seen string
	for _, r := range c.Model.Requests() {
		if strings.Contains(string(r.Body), "porter of "+architecture+" street") {
			seen = string(r.Body)
		}
	}
	for _, want := range []string{"You are the porter of " + architecture + " street.", "The heron remembers " + architecture + ".", "greet"} {
		if !strings.Contains(seen, want) {
			t.Errorf("the model did not receive %q", want)
		}
	}
	if !strings.Contains(seen, "Greets people by name.") && !strings.Contains(seen, "Run scripts/greet.sh in this folder.") {
		t.Error("the model did not receive the skill's description")
	}
	container := k.c.SandboxContainer(k.session)
	inspected, listed := harness.RunDocker(t, "inspect", container), harness.RunDocker(t, "top", container, "-eo", "pid,args")
	if strings.Contains(inspected, credential) || strings.Contains(listed, credential) {
		t.Error("docker inspect or the process list shows the secret")
	}
	var shown struct {
		Executions []struct{ Resolved json.RawMessage }
	}
	k.c.Call(0, "GET", "/api/sessions/"+k.session+"/executions", nil, &shown)
	if !strings.Contains(string(shown.Executions[0].Resolved), `"GET,HEAD docs.example.com"`) {
		t.Errorf("the allowed hosts are shown as %s", shown.Executions[0].Resolved)
	}
	if len(shown.Executions) < 3 || !strings.Contains(string(shown.Executions[0].Resolved), dir[len("/bin/skills/"):]) || !strings.Contains(string(shown.Executions[0].Resolved), planted) {
		t.Errorf("the resolution is shown as %s", shown.Executions)
	}
}

// scan searches all written data for the secret, and for a text that is not secret, to show that the search works.
func scan(t *testing.T, c *harness.Cluster) {
	t.Helper()
	written := c.WrittenData()
	written["Postgres"] = dump(t, c.Servers.DatabaseURL)
	found := map[string]bool{}
	for where, content := range written {
		if bytes.Contains(content, []byte(credential)) {
			t.Errorf("%s holds the secret", where)
		}
		if bytes.Contains(content, []byte(planted)) {
			found[filepath.Base(where)] = true
		}
	}
	if !found["Postgres"] || len(found) < 2 {
		t.Errorf("the planted text was found only in %v: the scan does not search everywhere", found)
	}
	t.Logf("searched %d places and found the planted text in %d of them", len(written), len(found))
}

// dump returns all rows of all tables as text.
func dump(t *testing.T, url string) []byte {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context()) //nolint:errcheck // the connection only reads
	rows, err := conn.Query(t.Context(), `SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')`)
	if err != nil {
		t.Fatal(err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(tables) < 5 {
		t.Fatalf("tables %v, %v", tables, err)
	}
	var out bytes.Buffer
	for _, table := range tables {
		rows, err := conn.Query(t.Context(), "SELECT t::text FROM "+table+" t")
		if err != nil {
			t.Fatal(err)
		}
		list, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		out.WriteString(strings.Join(list, "\n"))
	}
	return out.Bytes()
}

// TestDocker_RedactsSecrets tests that a secret that an agent prints is not shown, in any form in which the agent
// prints it.
func TestDocker_RedactsSecrets(t *testing.T) {
	c := newDockerCluster(t, harness.Options{})
	apply(c, "environments", "street", map[string]any{"variables": map[string]any{"DOOR_TOKEN": map[string]any{"value": credential, "secret": true}}})
	for _, architecture := range []string{"claude-code", "spool"} {
		t.Run(architecture, func(t *testing.T) {
			t.Parallel()
			k := newTalkWith(t, c, architecture, map[string]any{"model": "known-model", "environments": []string{"street"}})
			encoded := base64.StdEncoding.EncodeToString([]byte(credential))
			for _, command := range []string{"echo $DOOR_TOKEN", "echo -n $DOOR_TOKEN | base64", "echo '{\"key\":\"'$DOOR_TOKEN'\"}'"} {
				x := k.mustComplete("run the command "+command, "[redacted]")
				for _, w := range x.events {
					if bytes.Contains(w.Data, []byte(credential)) || bytes.Contains(w.Data, []byte(encoded[:len(encoded)-4])) {
						t.Errorf("%s: %s shows the secret: %s", command, w.Type, w.Data)
					}
				}
			}
		})
	}
}

// everything is the reference MCP server from npm, installed in the image of sandboxes.
const everything = "@modelcontextprotocol/server-everything@2026.8.31"

// withServer builds an image of sandboxes that has the server.
func withServer(t *testing.T) string {
	t.Helper()
	harness.NeedDocker(t)
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "npm", "install", "--prefix", dir, "--no-audit", "--no-fund", everything).CombinedOutput(); err != nil {
		t.Fatalf("npm install %s: %v: %s", everything, err, out)
	}
	file := "FROM " + harness.SandboxImage + "\nCOPY node_modules /opt/server/node_modules\nENV PATH=/opt/server/node_modules/.bin:$PATH\n"
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	const image = "spool-test/server-everything:latest"
	out, err := exec.CommandContext(ctx, "docker", "build", "--quiet", "--tag", image, dir).CombinedOutput()
	if err != nil {
		t.Fatalf("build %s: %v: %s", image, err, out)
	}
	return image
}

// serveEverything runs the server over streamable HTTP in a separate container, behind a proxy that requires a
// credential, and returns the proxy's address.
func serveEverything(t *testing.T, image string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	behind := &url.URL{Scheme: "http", Host: l.Addr().String()}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	id := harness.RunDocker(t, "run", "--detach", "--rm", "--network", "host", "--env", "NODE_OPTIONS=--experimental-global-webcrypto", "--entrypoint", "sh", image, "-c", "PORT="+behind.Port()+" exec mcp-server-everything streamableHttp") // Node 18 has no global crypto without the option
	t.Cleanup(func() { harness.RunDocker(t, "rm", "--force", id) })
	harness.Eventually(t, "the MCP server listens", func() bool {
		c, err := net.Dial("tcp", behind.Host)
		return err == nil && c.Close() == nil
	})
	forward := httputil.NewSingleHostReverseProxy(behind)
	forward.FlushInterval = -1
	door := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+credential {
			http.Error(w, "the door is shut", http.StatusUnauthorized)
			return
		}
		forwardWhole(forward, w, r)
	}))
	t.Cleanup(func() { door.CloseClientConnections(); door.Close() })
	return door.Listener.Addr().String()
}

// TestDocker_UsesMCPServers tests that Claude Code uses an MCP server from npm over stdio in its sandbox, and over
// HTTP on another machine. The sandbox does not have the credential of the latter.
func TestDocker_UsesMCPServers(t *testing.T) {
	image := withServer(t)
	address := serveEverything(t, image)
	c := newDockerCluster(t, harness.Options{EgressOpen: address, KeepLogs: true})
	apply(c, "environments", "street", map[string]any{"variables": map[string]any{"MCP_CREDENTIAL": map[string]any{"value": credential, "secret": true}}})
	apply(c, "agents", "caller", map[string]any{
		"architecture": "claude-code", "model": "known-model", "instructions": "You call servers of tools.", "image": image,
		"mcpServers": []map[string]any{
			{"name": "inside", "type": "stdio", "command": []string{"mcp-server-everything", "stdio"}},
			{"name": "outside", "type": "http", "url": "http://" + address + "/mcp", "headers": map[string]string{"Authorization": "Bearer ${MCP_CREDENTIAL}"}},
		},
	})
	k := newTalkWith(t, c, "", map[string]any{"agent": "caller", "environments": []string{"street"}})
	for _, server := range []string{"inside", "outside"} {
		x := k.mustComplete("call the server "+server+" with heron", "Echo: heron")
		if calls := x.kind(events.KindToolUse); len(calls) != 1 || calls[0].ToolName != "mcp__"+server+"__echo" {
			t.Errorf("%s: the tools that were used are %+v", server, calls)
		}
	}
	container := k.c.SandboxContainer(k.session)
	out := harness.RunDocker(t, "exec", container, "sh", "-c", "cat /spool/state/launch/* 2>/dev/null; find / -xdev -type f -newer /etc/hostname -not -path '/proc/*' 2>/dev/null | head -500 | xargs cat 2>/dev/null | tr -d '\\0'")
	if strings.Contains(out, credential) {
		t.Error("a file of the sandbox holds the credential")
	}
	if !strings.Contains(out, "127.0.0.1:7070/mcp/outside") {
		t.Error("the files of the sandbox were not searched")
	}
	for where, content := range c.WrittenData() {
		if bytes.Contains(content, []byte(credential)) {
			t.Errorf("%s holds the credential", where)
		}
	}
}
