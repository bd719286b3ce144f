package command

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestUp_ReadsEachVariable tests that each variable of spool up changes the options of the stack.
func TestUp_ReadsEachVariable(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script.yaml")
	if err := os.WriteFile(script, []byte("rules: []"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"SPOOL_DATA_DIR": "/d", "SPOOL_LISTEN": "127.0.0.1:1", "SPOOL_GRPC_LISTEN": "127.0.0.1:2", "SPOOL_DATABASE_URL": "postgres://h/n", "SPOOL_AUTH": "keys", "SPOOL_ROOT_KEY": "k",
		"SPOOL_SANDBOX": "docker", "SPOOL_MOCK_LLM": "true", "SPOOL_MOCKLLM_SCRIPT": script, "SPOOL_LOG_LEVEL": "error", "SPOOL_MAX_STORE": "700000000", "SPOOL_TEXT_AGE": "2h", "SPOOL_TLS_CERT": "/c", "SPOOL_TLS_KEY": "/k", "SPOOL_BEHIND_TLS_PROXY": "true",
		"SPOOL_PATH_PREFIX": "/p", "SPOOL_NO_WEB": "true",
	} {
		t.Setenv(name, value)
	}
	stack, signals := newFakeStack("http://127.0.0.1:7"), make(chan os.Signal)
	l := &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) { return stack, nil }}
	w, out := testIO(t), &watched{lines: 1, full: make(chan struct{})}
	var text bytes.Buffer
	w.Local, w.Signals, w.Out, w.Err = l, signals, io.MultiWriter(&text, out), &bytes.Buffer{}
	var sending sync.WaitGroup
	sending.Go(func() { <-out.full; signals <- syscall.SIGTERM })
	if code := Run(t.Context(), []string{"up"}, w); code != ExitDone {
		t.Errorf("it ended with %d", code)
	}
	sending.Wait()
	o := l.started[0]
	if o.Logger.Enabled(context.Background(), slog.LevelWarn) || !o.Logger.Enabled(context.Background(), slog.LevelError) {
		t.Error("SPOOL_LOG_LEVEL has no effect")
	}
	o.Logger = nil
	want := StackOptions{
		DataDir: "/d", Listen: "127.0.0.1:1", GRPCListen: "127.0.0.1:2", DatabaseURL: "postgres://h/n", Auth: "keys", RootKey: "k",
		Sandbox: "docker", MockLLM: true, MockScript: script, MaxStore: 700_000_000, TextAge: 2 * time.Hour, TLSCert: "/c", TLSKey: "/k", TLSProxy: true, PathPrefix: "/p", NoWeb: true,
	}
	if o != want {
		t.Errorf("started with %+v\nwant         %+v", o, want)
	}
}
