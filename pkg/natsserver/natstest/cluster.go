package natstest

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/spoolhq/spool/pkg/daemon/porttest"
)

// clusterReadyTimeout is the maximum time that the servers of a cluster may take to find each other and to elect a
// leader.
const clusterReadyTimeout = 2 * time.Minute

// Cluster is three NATS servers of a test that replicate streams among each other.
type Cluster struct {
	URL  string   // addresses of all servers, for nats.Connect
	Dirs []string // the folder of each server
}

// RunCluster starts a cluster of three NATS servers that stop when the test ends. Unlike the servers of Run they do not
// sync writes and have no users.
func RunCluster(t *testing.T) Cluster {
	t.Helper()
	addrs := porttest.FreeAddrs(t, 3)
	var routes []*url.URL
	for _, a := range addrs {
		routes = append(routes, &url.URL{Scheme: "nats-route", Host: a})
	}
	var c Cluster
	var servers []*server.Server
	var urls []string
	for i, a := range addrs {
		port, err := strconv.Atoi(a[strings.LastIndexByte(a, ':')+1:])
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		s, err := server.NewServer(&server.Options{
			ServerName: fmt.Sprint("s", i), Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true,
			Cluster: server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: port}, Routes: routes,
		})
		if err != nil {
			t.Fatalf("configure a server of the cluster: %v", err)
		}
		s.Start()
		t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
		c.Dirs, servers = append(c.Dirs, dir), append(servers, s)
	}
	for _, s := range servers {
		if !s.ReadyForConnections(clusterReadyTimeout) {
			t.Fatal("a server of the cluster is not ready")
		}
		urls = append(urls, s.ClientURL())
	}
	for deadline := time.Now().Add(clusterReadyTimeout); ; time.Sleep(20 * time.Millisecond) {
		current := 0
		for _, s := range servers {
			if s.JetStreamIsLeader() {
				current = len(s.JetStreamClusterPeers())
			}
		}
		if current == len(servers) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d servers have joined the cluster", current, len(servers))
		}
	}
	c.URL = strings.Join(urls, ",")
	return c
}
