package natsserver_test

import (
	"path/filepath"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestServer_AcceptsMessagesAfterTheDiskWasFull tests that every stream accepts messages again after the disk had no
// space, over the connections that were open before, and that no acknowledged message is lost.
func TestServer_AcceptsMessagesAfterTheDiskWasFull(t *testing.T) {
	t.Parallel()
	disk := natstest.MountSmallDisk(t)
	srv := natstest.RunConfig(t, natsserver.Config{StoreDir: filepath.Join(disk.Dir, "nats"), MaxStore: natsserver.MinStoreSize, Accounts: true, Port: natsserver.RandomPort})
	nc, err := srv.ConnectAs(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	url := srv.ClientURL()
	w := natstest.NewStreamWriter(t, js)
	for round := range 2 {
		if failed := w.Write(t); len(failed) > 0 {
			t.Fatalf("round %d: %q do not accept messages", round, failed)
		}
		disk.Fill()
		w.Write(t) // text in flight is acknowledged before it is written
		if failed := w.Write(t); len(failed) != w.Streams() {
			t.Errorf("round %d: only %q refuse messages on a full disk", round, failed)
		}
		disk.Free()
		w.AwaitWritable(t)
		w.CheckAcknowledged(t)
	}
	if srv.ClientURL() != url {
		t.Errorf("the server listens at %s, and at %s before", srv.ClientURL(), url)
	}
}
