package command

import (
	"net"
	"os"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestProvision_CreatesStreams(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort, Relaxed: true, Accounts: true})
	url := srv.ClientURL()
	as := []string{"provision", "--nats-url", url, "--nats-user", "admin", "--nats-password", srv.Password(topology.UserAdmin)}
	for _, c := range []struct {
		name string
		args []string
		code int
		out  string
		err  string
	}{
		{"usage of shards", []string{"--shards", "3"}, ExitUsage, "", "shards: 3 must be 1, 2, 4 or 8"},
		{"usage of replicas", []string{"--replicas", "6"}, ExitUsage, "", "replicas: 6 must be 1 to 5"},
		{"usage of wait", []string{"--wait=-1s"}, ExitUsage, "", "wait: -1s is negative"},
		{"refused", []string{"--nats-password", "wrong"}, ExitFailed, "", `nats-user: NATS rejects user "admin"`},
		{"new", []string{"--shards", "2"}, ExitDone, "provisioned " + url + ": the log has 2 streams and 8 partitions\n", ""},
		{"again", nil, ExitDone, "provisioned " + url + ": the log has 2 streams and 8 partitions\n", ""},
		{"as JSON", []string{"--json"}, ExitDone, `{"natsUrl":"` + url + `","partitions":8,"shards":2}` + "\n", ""},
		{"another number", []string{"--shards", "4"}, ExitFailed, "", "shards: the log is installed with 2, not 4"},
	} {
		got := spool(t, testIO(t), append(as, c.args...)...)
		if got.code != c.code || got.out != c.out || !strings.Contains(got.err, c.err) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}

	// A setting that cannot be changed is an error that names the stream.
	nc, err := srv.ConnectAs(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), topology.StreamDead); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: topology.StreamDead, Subjects: []string{"dead.>"}, Storage: jetstream.MemoryStorage}); err != nil {
		t.Fatal(err)
	}
	got := spool(t, testIO(t), as...)
	if got.code != ExitFailed || !strings.Contains(got.err, "provision stream DEAD: storage is Memory and must be File") {
		t.Errorf("a stream that is in the way: %+v", got)
	}
}

func TestProvision_CreatesFourShardsByDefault(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort, Relaxed: true})
	got := spool(t, testIO(t), "provision", "--nats-url", srv.ClientURL())
	if got.code != ExitDone || !strings.Contains(got.out, "has 4 streams") {
		t.Fatalf("%+v", got)
	}
	js, err := jetstream.New(natstest.Conn(t, srv))
	if err != nil {
		t.Fatal(err)
	}
	if l, err := topology.ReadLayout(t.Context(), js); l != (topology.Layout{Shards: 4, Partitions: 8}) || err != nil {
		t.Errorf("installed are %s, %v", l, err)
	}
}

func TestProvision_CommitVersion(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort, Relaxed: true})
	js, err := jetstream.New(natstest.Conn(t, srv))
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		arg        string
		code, want int
		says       string
	}{{"1", ExitDone, 1, ""}, {"1", ExitDone, 1, ""}, {"3", ExitUsage, 1, "commit-version: 3 must be 1 to 2"}, {"0", ExitDone, 2, ""}, {"1", ExitFailed, 2, "cannot go back to 1"}, {"2", ExitDone, 2, ""}} {
		got := spool(t, testIO(t), "provision", "--nats-url", srv.ClientURL(), "--shards", "1", "--commit-version", step.arg)
		if got.code != step.code || !strings.Contains(got.err, step.says) {
			t.Errorf("--commit-version %s: %+v", step.arg, got)
		}
		if s, err := topology.ReadSigning(t.Context(), js, 1); err != nil || s.CommitVersion != step.want {
			t.Errorf("after --commit-version %s the log has commits of version %d, %v; want %d", step.arg, s.CommitVersion, err, step.want)
		}
	}
}

func TestProvision_WaitsForNATS(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	got := spool(t, testIO(t), "provision", "--nats-url", "nats://"+addr, "--wait", "300ms")
	if got.code != ExitFailed || !strings.Contains(got.err, "NATS did not respond within 300ms") {
		t.Errorf("nobody listens: %+v", got)
	}

	// The wait ends with the context.
	signals := make(chan os.Signal, 1)
	signals <- os.Interrupt
	w := testIO(t)
	w.Signals = signals
	if got := spool(t, w, "provision", "--nats-url", "nats://"+addr); got.code != ExitCancelled {
		t.Errorf("interrupted: %+v", got)
	}
}

func TestSettingPartitions_AreFixedAtTheInstallation(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort, Relaxed: true})
	js, err := jetstream.New(natstest.Conn(t, srv))
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		arg  string
		code int
		says string
	}{
		{"3", ExitUsage, "partitions: 3 must be 1, 2, 4, 8, 16, 32 or 64"}, {"128", ExitUsage, "partitions: 128 must be"}, {"-1", ExitUsage, "partitions: -1 must be"},
		{"2", ExitDone, "has 2 streams and 2 partitions"}, {"2", ExitDone, "2 partitions"}, {"0", ExitDone, "2 partitions"},
		{"8", ExitFailed, "partitions: the log is installed with 2, not 8"},
	} {
		got := spool(t, testIO(t), "provision", "--nats-url", srv.ClientURL(), "--partitions="+step.arg)
		if got.code != step.code || !strings.Contains(got.out+got.err, step.says) {
			t.Errorf("--partitions %s: %+v", step.arg, got)
		}
	}
	if l, err := topology.ReadLayout(t.Context(), js); err != nil || l != (topology.Layout{Shards: 2, Partitions: 2}) {
		t.Errorf("installed are %s, %v", l, err)
	}
}
