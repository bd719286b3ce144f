package compose

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// natsContainer runs the program of compose's NATS container, with its scripts and its configuration, on this machine.
// Like the container's restart policy it starts the program again whenever it ends.
type natsContainer struct {
	URL    string
	starts atomic.Int32
	limits string // file with the limit of the store of each start, one per line
}

// runNATSContainer starts the program on a folder until the test ends.
func runNATSContainer(t *testing.T, folder string) *natsContainer {
	t.Helper()
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "server"), "github.com/nats-io/nats-server/v2")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	client, health := freeAddress(t), freeAddress(t)
	c := &natsContainer{URL: "nats://" + client, limits: filepath.Join(dir, "limits")}
	write := func(name string, replace ...string) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(root, "deploy", name))
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(replace); i += 2 {
			if strings.Count(string(text), replace[i]) != 1 {
				t.Fatalf("deploy/%s does not contain %q once", name, replace[i])
			}
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.NewReplacer(replace...).Replace(string(text))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("nats-start")
	write("nats-watch", "127.0.0.1:8222", health)
	write("nats.conf", "0.0.0.0:4222", client, "127.0.0.1:8222", health, "store_dir: /data", fmt.Sprintf("store_dir: %q", folder),
		"tls {\n  cert_file: $"+topology.TLSCertificateVariable+"\n  key_file: $"+topology.TLSKeyVariable+"\n  min_version: \"1.2\"\n}\n", "")
	wrapper := "#!/bin/sh\nprintf '%s\\n' \"$SPOOL_NATS_MAX_STORE\" >>" + c.limits + "\nexec " + filepath.Join(dir, "server") + " \"$@\"\n"
	if err := os.WriteFile(filepath.Join(dir, "nats-server"), []byte(wrapper), 0o700); err != nil { //nolint:gosec // the file is executed
		t.Fatal(err)
	}
	env := append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	for _, u := range topology.Users() {
		env = append(env, topology.PasswordVariable(u.Name)+"=pw")
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			c.starts.Add(1)
			cmd := exec.CommandContext(ctx, "/bin/sh", filepath.Join(dir, "nats-start"), folder, "--config", filepath.Join(dir, "nats.conf"))
			cmd.Env = env
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // nats-watch too
			var said strings.Builder
			cmd.Stdout, cmd.Stderr = &said, &said
			if err := cmd.Run(); err != nil && ctx.Err() == nil && !errors.As(err, new(*exec.ExitError)) {
				t.Errorf("%v: %s", err, said.String())
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return c
}

// freeAddress returns an address of loopback on which nothing listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // ends at once
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // the listener had no connection
	return l.Addr().String()
}

// TestNATSContainer_AcceptsMessagesAfterTheDiskWasFull tests that every stream accepts messages within 30 s after the
// disk of NATS has space again, over the connection that was open before, that no acknowledged message is lost, and
// that the store's limit stays the same.
func TestNATSContainer_AcceptsMessagesAfterTheDiskWasFull(t *testing.T) {
	t.Parallel()
	disk := natstest.MountSmallDisk(t)
	c := runNATSContainer(t, disk.Dir)
	options := append(bus.ConnOptions(natstest.Logger(t)), nats.RetryOnFailedConnect(true), nats.UserInfo(topology.UserAdmin, "pw"), nats.CustomInboxPrefix(topology.InboxPrefix(topology.UserAdmin)))
	nc, err := nats.Connect(c.URL, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	for deadline := time.Now().Add(time.Minute); !nc.IsConnected(); {
		if time.Now().After(deadline) {
			t.Fatal("the server does not start")
		}
		if err := nc.FlushTimeout(time.Second); err != nil && nc.IsClosed() {
			t.Fatal(err)
		}
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	w := natstest.NewStreamWriter(t, js)
	if failed := w.Write(t); len(failed) > 0 {
		t.Fatalf("%q do not accept messages", failed)
	}
	disk.Fill()
	w.Write(t) // text in flight is acknowledged before it is written
	if failed := w.Write(t); len(failed) != w.Streams() {
		t.Errorf("only %q refuse messages on a full disk", failed)
	}
	if n := c.starts.Load(); n != 1 {
		t.Errorf("the server was started %d times while the disk was full, want once", n)
	}
	disk.Free()
	w.AwaitWritable(t)
	w.CheckAcknowledged(t)
	limits, err := os.ReadFile(c.limits)
	if list := strings.Fields(string(limits)); err != nil || len(list) != 2 || list[0] != list[1] {
		t.Errorf("the limits of the store at each start are %q, %v; want two equal limits", list, err)
	}
}
