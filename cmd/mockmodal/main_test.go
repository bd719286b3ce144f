package main_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	modal "github.com/modal-labs/modal-client/go"
)

const testImage = "debian:bookworm-slim"

// within bounds what a test waits for.
const within = 3 * time.Minute

var program string

func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "mockmodal-test-")
	if err != nil {
		panic(err)
	}
	program = filepath.Join(folder, "mockmodal")
	build := exec.Command("go", "build", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		panic(fmt.Sprintf("build mockmodal: %v\n%s", err, out))
	}
	code := m.Run()
	_ = os.RemoveAll(folder)
	os.Exit(code)
}

// instance is a running mockmodal.
type instance struct {
	URL     string `json:"url"`
	Control string `json:"control"`
	Gateway string `json:"gateway"`
	data    string
	command *exec.Cmd
	t       *testing.T
}

// serve starts a mockmodal that ends with the test.
func serve(t *testing.T, args ...string) *instance {
	t.Helper()
	return serveIn(t, t.TempDir(), args...)
}

func serveIn(t *testing.T, data string, args ...string) *instance {
	t.Helper()
	i := &instance{data: data, t: t}
	i.command = exec.Command(program, append([]string{"serve", "--until-parent-ends", "--data", data}, args...)...)
	i.command.Stderr = os.Stderr
	out, err := i.command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := i.command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(i.stop)
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatalf("mockmodal did not start: %v", err)
	}
	if err := json.Unmarshal(line, i); err != nil {
		t.Fatal(err)
	}
	return i
}

// stop ends the program as a service manager does.
func (i *instance) stop() {
	if i.command.ProcessState != nil {
		return
	}
	_ = i.command.Process.Signal(syscall.SIGTERM)
	if err := i.command.Wait(); err != nil {
		i.t.Errorf("mockmodal ended with %v", err)
	}
}

// client returns the real SDK's client for a server.
func (i *instance) client(t *testing.T) *modal.Client {
	t.Helper()
	return i.clientWith(t, "ak-test", "as-test")
}

func (i *instance) clientWith(t *testing.T, id, secret string) *modal.Client {
	t.Helper()
	t.Setenv("MODAL_SERVER_URL", i.URL)
	t.Setenv("MODAL_CONFIG_PATH", filepath.Join(t.TempDir(), "none"))
	client, err := modal.NewClientWithOptions(&modal.ClientParams{
		TokenID: id, TokenSecret: secret, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

// post calls the control API.
func (i *instance) post(t *testing.T, path string, body any) {
	t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.Post(i.Control+path, "application/json", bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		text, _ := io.ReadAll(response.Body)
		t.Fatalf("POST %s: %s: %s", path, response.Status, text)
	}
}

// get reads from the control API.
func (i *instance) get(t *testing.T, path string, into any) {
	t.Helper()
	response, err := http.Get(i.Control + path)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(into); err != nil {
		t.Fatal(err)
	}
}

type object = map[string]any

func (i *instance) violations(t *testing.T) []object {
	t.Helper()
	var list []object
	i.get(t, "/violations", &list)
	return list
}

func (i *instance) calls(t *testing.T) map[string]int {
	t.Helper()
	counts := map[string]int{}
	i.get(t, "/calls", &counts)
	return counts
}

// bed is a client with an app.
type bed struct {
	*instance
	client *modal.Client
	app    *modal.App
	ctx    context.Context
	t      *testing.T
}

func newBed(t *testing.T, args ...string) *bed {
	t.Helper()
	i := serve(t, args...)
	ctx, cancel := context.WithTimeout(t.Context(), within)
	t.Cleanup(cancel)
	b := &bed{instance: i, client: i.client(t), ctx: ctx, t: t}
	app, err := b.client.Apps.FromName(ctx, "spool", &modal.AppFromNameParams{CreateIfMissing: true})
	if err != nil {
		t.Fatal(err)
	}
	b.app = app
	return b
}

// create makes a sandbox of the test image. Without another policy it has no
// network.
func (b *bed) create(params *modal.SandboxCreateParams) *modal.Sandbox {
	b.t.Helper()
	return b.createFrom(b.client.Images.FromRegistry(testImage, nil), params)
}

func (b *bed) createFrom(image *modal.Image, params *modal.SandboxCreateParams) *modal.Sandbox {
	b.t.Helper()
	if params == nil {
		params = &modal.SandboxCreateParams{BlockNetwork: true}
	}
	sb, err := b.client.Sandboxes.Create(b.ctx, b.app, image, params)
	if err != nil {
		b.t.Fatal(err)
	}
	return sb
}

// run executes a shell command with an input and returns its output, its
// standard error and its code.
func (b *bed) run(sb *modal.Sandbox, script, input string) (string, string, int) {
	b.t.Helper()
	p, err := sb.Exec(b.ctx, []string{"sh", "-c", script}, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	if input != "" {
		if _, err := io.WriteString(p.Stdin, input); err != nil {
			b.t.Fatal(err)
		}
	}
	if err := p.Stdin.Close(); err != nil {
		b.t.Fatal(err)
	}
	out, err := io.ReadAll(p.Stdout)
	if err != nil {
		b.t.Fatal(err)
	}
	errors, err := io.ReadAll(p.Stderr)
	if err != nil {
		b.t.Fatal(err)
	}
	code, err := p.Wait(b.ctx, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return string(out), string(errors), code
}

// expect runs a shell command that must print the given text and succeed.
func (b *bed) expect(sb *modal.Sandbox, script, want string) {
	b.t.Helper()
	out, errors, code := b.run(sb, script, "")
	if strings.TrimSpace(out) != want || code != 0 {
		b.t.Fatalf("%s: printed %q and %q, code %d; want %q", script, out, errors, code, want)
	}
}

// noViolations fails the test if a request was not as Modal's are.
func (b *bed) noViolations() {
	b.t.Helper()
	if list := b.violations(b.t); len(list) > 0 {
		b.t.Errorf("violations: %v", list)
	}
}
