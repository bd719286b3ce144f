package daemon

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestCheckNATS_NamesStreamsThatCannotBeWritten tests that every user of NATS can read that streams cannot be written
// after the disk was full, and that the check succeeds again when they can.
func TestCheckNATS_NamesStreamsThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	disk := natstest.MountSmallDisk(t)
	srv := natstest.RunConfig(t, natsserver.Config{StoreDir: filepath.Join(disk.Dir, "nats"), MaxStore: natsserver.MinStoreSize, Accounts: true})
	admin, err := srv.ConnectAs(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(admin.Close)
	js, err := jetstream.New(admin)
	if err != nil {
		t.Fatal(err)
	}
	w := natstest.NewStreamWriter(t, js)
	// check calls CheckNATS as every user that services have, and passes the result to is.
	check := func(state string, is func(error) bool) {
		t.Helper()
		for _, u := range topology.Users() {
			if u.Name == topology.UserGate {
				continue // the gate only forwards requests
			}
			nc, err := srv.ConnectAs(u.Name)
			if err != nil {
				t.Fatal(err)
			}
			if err := CheckNATS(t.Context(), nc); !is(err) {
				t.Errorf("%s: user %s reads: %v", state, u.Name, err)
			}
			nc.Close()
		}
	}
	well := func(err error) bool { return err == nil }
	check("before", well)
	disk.Fill()
	w.Write(t)
	check("on a full disk", func(err error) bool {
		return err != nil && strings.Contains(err.Error(), "COMMANDS, ") && strings.Contains(err.Error(), "no space left")
	})
	disk.Free()
	w.AwaitWritable(t)
	check("after", well)
}

// TestCheckNATS_AcceptsServersThatDoNotReportTheirHealth tests a server without accounts.
func TestCheckNATS_AcceptsServersThatDoNotReportTheirHealth(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	if err := CheckNATS(t.Context(), nc); err != nil {
		t.Error(err)
	}
	nc.Close()
	if err := CheckNATS(t.Context(), nc); err == nil {
		t.Error("a closed connection passes")
	}
}
