package natsserver_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

func stream(t *testing.T, nc *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	_, err = js.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Storage: jetstream.FileStorage})
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func TestConnect_WorksInProcess(t *testing.T) {
	t.Parallel()
	srv := natstest.Run(t)
	js := stream(t, natstest.Conn(t, srv))
	ack, err := js.Publish(t.Context(), "s.a", []byte("hello"))
	if err != nil || ack.Sequence != 1 {
		t.Fatalf("publish: %+v %v", ack, err)
	}
	s, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	msg, err := s.GetLastMsgForSubject(t.Context(), "s.a")
	if err != nil || string(msg.Data) != "hello" {
		t.Fatalf("read back: %v %v", msg, err)
	}
	if srv.ClientURL() != "" || srv.Port() != 0 {
		t.Errorf("a server without a listener has the address %q, port %d", srv.ClientURL(), srv.Port())
	}
}

func TestStart_SyncsByDefault(t *testing.T) {
	t.Parallel()
	if !natstest.Run(t).SyncsWrites() {
		t.Error("the zero value does not sync")
	}
	if natstest.RunConfig(t, natsserver.Config{Relaxed: true}).SyncsWrites() {
		t.Error("Relaxed syncs")
	}
}

func TestStart_ListensOnTCP(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort})
	if want := fmt.Sprintf("nats://127.0.0.1:%d", srv.Port()); srv.Port() == 0 || srv.ClientURL() != want {
		t.Fatalf("ClientURL %q, want %q", srv.ClientURL(), want)
	}
	nc, err := nats.Connect(srv.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
}

func TestStart_SetsMaxPayload(t *testing.T) {
	t.Parallel()
	if got := natstest.Conn(t, natstest.Run(t)).MaxPayload(); got != natsserver.DefaultMaxPayload {
		t.Errorf("default %d, want %d", got, natsserver.DefaultMaxPayload)
	}
	if got := natstest.Conn(t, natstest.RunConfig(t, natsserver.Config{MaxPayload: 4096})).MaxPayload(); got != 4096 {
		t.Errorf("got %d, want 4096", got)
	}
}

func TestRestart_KeepsStreamsAndConnections(t *testing.T) {
	t.Parallel()
	r := natstest.RunRestartable(t)
	back := make(chan struct{}, 1)
	nc := r.Conn(nats.ReconnectHandler(func(*nats.Conn) { back <- struct{}{} }))
	js := stream(t, nc)
	if _, err := js.Publish(t.Context(), "s.a", []byte("kept")); err != nil {
		t.Fatal(err)
	}
	r.Stop()
	r.Start()
	select {
	case <-back:
	case <-time.After(20 * time.Second):
		t.Fatal("the connection did not come back")
	}
	s, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	if msg, err := s.GetMsg(t.Context(), 1); err != nil || string(msg.Data) != "kept" {
		t.Fatalf("after the restart: %v %v", msg, err)
	}
}

func TestConnect_FailsAfterShutdown(t *testing.T) {
	t.Parallel()
	srv := natstest.Run(t)
	srv.Shutdown()
	if _, err := srv.Connect(); err == nil || !strings.Contains(err.Error(), "shut down") {
		t.Fatalf("got %v", err)
	}
}

func TestStart_NamesTheInvalidSetting(t *testing.T) {
	t.Parallel()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	taken := l.Addr().(*net.TCPAddr).Port

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg  natsserver.Config
		want []string
	}{
		"no folder":           {natsserver.Config{}, []string{"StoreDir"}},
		"folder is a file":    {natsserver.Config{StoreDir: file}, []string{file, "data folder"}},
		"folder below a file": {natsserver.Config{StoreDir: filepath.Join(file, "x")}, []string{file, "data folder"}},
		"folder not writable": {natsserver.Config{StoreDir: "/proc/spool"}, []string{"/proc/spool", "data folder"}},
		"port in use":         {natsserver.Config{StoreDir: t.TempDir(), Port: taken}, []string{fmt.Sprint(taken), "in use", "another port"}},
		"port out of range":   {natsserver.Config{StoreDir: t.TempDir(), Port: 70000}, []string{"70000", "port"}},
		"payload negative":    {natsserver.Config{StoreDir: t.TempDir(), MaxPayload: -1}, []string{"MaxPayload"}},
		"host not ours":       {natsserver.Config{StoreDir: t.TempDir(), Host: "192.0.2.1", Port: 4222}, []string{"192.0.2.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv, err := natsserver.Start(c.cfg)
			if err == nil {
				srv.Shutdown()
				t.Fatal("no error")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not name %q", err, w)
				}
			}
			if strings.Count(err.Error(), "\n") > 0 {
				t.Errorf("more than one sentence: %q", err)
			}
		})
	}
}
