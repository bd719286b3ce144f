package server_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/mockllm/server"
)

// An empty setting selects the built-in script: compose passes an empty value if the variable is not set.
func TestSettings_EmptyScriptIsTheBuiltInOne(t *testing.T) {
	t.Setenv("SPOOL_MOCKLLM_SCRIPT", "")
	var s server.Settings
	parser, err := kong.New(&s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parser.Parse(nil); err != nil || s.Script != "" {
		t.Errorf("the script is %q, %v", s.Script, err)
	}
}

// The server listens at the configured address with the configured script.
func TestSettings(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	s := server.Settings{Listen: l.Addr().String(), Script: filepath.Join(t.TempDir(), "script.yaml")}
	if err := os.WriteFile(s.Script, []byte("rules:\n  - name: all\n    steps:\n      - text: from the file of the settings\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.ServeScript(ctx, s.Listen, s.Script, slog.New(slog.DiscardHandler)) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		resp, err := client.Post("http://"+s.Listen+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m","messages":[{"role":"user","content":"hi"}]}`))
		if err != nil {
			if time.Now().After(deadline) {
				t.Fatal(err)
			}
			continue
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || !strings.Contains(string(body), "from the file of the settings") {
			t.Errorf("%s, %v", body, err)
		}
		return
	}
}
