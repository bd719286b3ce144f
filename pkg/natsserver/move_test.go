package natsserver_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// createFormerFolder creates a folder as a release without accounts left it: a stream with one message, and a durable that has
// acknowledged the message.
func createFormerFolder(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	srv, err := natsserver.Start(natsserver.Config{StoreDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Shutdown()
	nc, err := srv.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js := stream(t, nc)
	if _, err := js.Publish(t.Context(), "s.a", []byte("kept"), jetstream.WithMsgID("1")); err != nil {
		t.Fatal(err)
	}
	c, err := js.CreateConsumer(t.Context(), "S", jetstream.ConsumerConfig{Durable: "d", AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.Next()
	if err == nil {
		err = m.DoubleAck(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// checkMoved opens the folder with accounts twice. It checks that the message and the acknowledgement are there, and
// that no stream exists in both places.
func checkMoved(t *testing.T, dir string) {
	t.Helper()
	for range 2 {
		srv, err := natsserver.Start(natsserver.Config{StoreDir: dir, Accounts: true})
		if err != nil {
			t.Fatal(err)
		}
		defer srv.Shutdown()
		nc, err := srv.ConnectAs(topology.UserAdmin)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		checkKept(t, nc)
		nc.Close()
		srv.Shutdown()
	}
	if _, err := os.Lstat(filepath.Join(dir, "jetstream", "$G")); !os.IsNotExist(err) {
		t.Errorf("the streams are in the old place too: %v", err)
	}
}

func checkKept(t *testing.T, nc *nats.Conn) {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	if m, err := s.GetMsg(t.Context(), 1); err != nil || string(m.Data) != "kept" {
		t.Errorf("the message is %+v, %v", m, err)
	}
	c, err := s.Consumer(t.Context(), "d")
	if err != nil {
		t.Fatal(err)
	}
	if at := c.CachedInfo().AckFloor.Stream; at != 1 {
		t.Errorf("the durable has acknowledged up to %d", at)
	}
}

func TestAccounts_FindTheStreamsOfAFormerVersion(t *testing.T) {
	t.Parallel()
	checkMoved(t, createFormerFolder(t))
}

func TestAccounts_RefuseTwoStores(t *testing.T) {
	t.Parallel()
	dir := createFormerFolder(t)
	for _, account := range []string{"$G", "LOG"} {
		if err := os.MkdirAll(filepath.Join(dir, "jetstream", account, "streams"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	srv, err := natsserver.Start(natsserver.Config{StoreDir: dir, Accounts: true})
	if err == nil {
		srv.Shutdown()
	}
	if err == nil || !strings.Contains(err.Error(), "$G") || !strings.Contains(err.Error(), "elsewhere") {
		t.Errorf("got %v", err)
	}
	if out, err := start(t, dir); err == nil || !strings.Contains(out, "$G") || !strings.Contains(out, "elsewhere") {
		t.Errorf("deploy/nats-start: %v: %s", err, out)
	}
}

// start runs the script that starts NATS in a container. A program that prints its arguments replaces the server.
func start(t *testing.T, dir string) (string, error) {
	t.Helper()
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "nats-server"), []byte("#!/bin/sh\necho \"$@\"\n"), 0o700); err != nil { //nolint:gosec // the script executes it
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "../../deploy/nats-start", dir, "--config", "x")
	cmd.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestNATSStart_MovesTheStreamsOfAFormerVersion(t *testing.T) {
	t.Parallel()
	dir := createFormerFolder(t)
	for range 2 {
		if out, err := start(t, dir); err != nil || out != "--config x\n" {
			t.Fatalf("%v: %s", err, out)
		}
	}
	checkMoved(t, dir)
	if out, err := start(t, t.TempDir()); err != nil || out != "--config x\n" {
		t.Errorf("in a new folder: %v: %s", err, out)
	}
}

func TestConnectAs_NeedsAccounts(t *testing.T) {
	t.Parallel()
	if _, err := natstest.Run(t).ConnectAs(topology.UserAdmin); err == nil {
		t.Error("ConnectAs succeeded on a server without accounts")
	}
}
