package gateway_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/daemon/porttest"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

const (
	attackers    = 320
	attackBytes  = 16 << 20
	attackMemory = 600 << 20 // largest memory of the process
)

// process is a gateway with API keys in its own process.
type process struct {
	*served
	t    *testing.T
	pid  int
	root string
}

func (w *world) process(srv *natsserver.Server, env ...string) *process {
	t := w.t
	t.Helper()
	binary := filepath.Join(t.TempDir(), "gateway")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./cmd/gateway").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	addrs := porttest.FreeAddrs(t, 2)
	p := &process{t: t, root: rootKey(), served: &served{t: t, url: "http://" + addrs[0], grpc: addrs[1]}}
	var log bytes.Buffer
	serve := exec.CommandContext(context.Background(), binary)
	serve.Stderr = &log
	serve.Env = append(append(os.Environ(), "SPOOL_DATABASE_URL="+w.url, "SPOOL_LISTEN="+addrs[0], "SPOOL_GRPC_LISTEN="+addrs[1], "SPOOL_NATS_URL="+srv.ClientURL(),
		"SPOOL_AUTH=keys", "SPOOL_ROOT_KEY="+p.root), env...)
	must(t, serve.Start())
	p.pid = serve.Process.Pid
	t.Cleanup(func() {
		_ = serve.Process.Kill() // connections of an attack may still be open
		_ = serve.Wait()
		if t.Failed() {
			t.Logf("the gateway's log:\n%.4000s", log.String())
		}
	})
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if c, err := net.Dial("tcp", p.grpc); err == nil {
			_ = c.Close()
			return p
		}
		if time.Now().After(deadline) {
			t.Fatal("gRPC does not listen")
		}
	}
}

// tenant returns a client of the gateway with a new key of the tenant.
func (p *process) tenant(name string) *served {
	p.t.Helper()
	return p.withKey(p.withKey(p.root).do("POST", "/api/keys", fmt.Sprintf(`{"name":"x","tenant":%q}`, name)).want(p.t, 201).text("key"))
}

// peak returns the peak memory of the process, in bytes.
func (p *process) peak() int64 {
	p.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid))
	must(p.t, err)
	for line := range strings.Lines(string(status)) {
		if kib, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(kib), " kB"), 10, 64)
			must(p.t, err)
			return n << 10
		}
	}
	p.t.Fatal("the process has no VmHWM")
	return 0
}

// stalledMessage is a message that never ends.
type stalledMessage struct {
	io.Reader
	end <-chan struct{}
}

func (s stalledMessage) Read(b []byte) (int, error) {
	if n, err := s.Reader.Read(b); err == nil {
		return n, nil
	}
	<-s.end
	return 0, io.ErrUnexpectedEOF
}

// sendStalledMessages sends many messages with an announced size of 16 MiB and without their last byte. The counter has the number
// of answers.
func sendStalledMessages(t *testing.T, addr, key, method string) (answered *atomic.Int64) {
	t.Helper()
	answered = &atomic.Int64{}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	content := make([]byte, attackBytes)
	binary.BigEndian.PutUint32(content[1:], attackBytes-4)
	for range attackers {
		wg.Go(func() {
			tr := &http.Transport{Protocols: new(http.Protocols)}
			tr.Protocols.SetUnencryptedHTTP2(true)
			defer tr.CloseIdleConnections()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+method, stalledMessage{bytes.NewReader(content), ctx.Done()})
			if err != nil {
				return
			}
			req.Header.Set("Content-Type", "application/grpc")
			req.Header.Set("Te", "trailers")
			if key != "" {
				req.Header.Set("Authorization", "Bearer "+key)
			}
			resp, err := tr.RoundTrip(req)
			if err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
			if ctx.Err() == nil {
				answered.Add(1)
			}
		})
	}
	return answered
}

// requireServed makes requests of a client until all messages of a storm were answered, and fails if the process used too
// much memory.
func (p *process) requireServed(client *served, answered *atomic.Int64) {
	t := p.t
	t.Helper()
	sessions := spoolv1.NewSessionsClient(client.conn())
	calls := 0
	for deadline := time.Now().Add(4 * patience); answered.Load() < attackers; calls++ {
		if peak := p.peak(); peak > attackMemory {
			t.Fatalf("the process had %d MiB in memory, %d of %d messages answered", peak>>20, answered.Load(), attackers)
		}
		if time.Now().After(deadline) {
			t.Fatalf("only %d of %d messages were answered", answered.Load(), attackers)
		}
		if _, err := sessions.CreateSession(client.context(t.Context()), &spoolv1.CreateSessionRequest{}); err != nil {
			t.Fatalf("gRPC of another tenant: %v", err)
		}
		client.do("POST", "/api/sessions", `{}`).want(t, 201)
		time.Sleep(20 * time.Millisecond)
	}
	if peak := p.peak(); peak > attackMemory {
		t.Fatalf("the process had %d MiB in memory", peak>>20)
	} else {
		t.Logf("the process had at most %d MiB in memory; %d rounds of other clients' calls were served", peak>>20, calls)
	}
}

// TestAttack_StalledMessagesUseLittleMemory tests that 320 messages of 16 MiB that stop one byte before their end, with and without
// a key, leave the process small and other tenants served.
func TestAttack_StalledMessagesUseLittleMemory(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Relaxed: true, Port: natsserver.RandomPort})
	w := newWorldOn(t, natstest.Conn(t, srv))
	w.serveCommands()
	const files, small = "/spool.v1.Sessions/CreateSession", "/spool.v1.Sessions/GetSession"
	for _, attack := range []struct {
		name, method string
		tenant       string // tenant whose key is sent
		malformed    bool   // sends a key that does not exist
	}{
		{"without a key", files, "", false},
		{"health without a key", "/grpc.health.v1.Health/Check", "", false},
		{"a key that was never made", files, "", true},
		{"a key, a method that takes files", files, "attacker", false},
		{"a key, a method that takes none", small, "attacker", false},
	} {
		t.Run(attack.name, func(t *testing.T) {
			p := (&world{t: t, url: w.url}).process(srv, "SPOOL_READ_TIMEOUT=3s")
			client, key := p.tenant("client"), ""
			if attack.tenant != "" {
				key = p.tenant(attack.tenant).key
			}
			if attack.malformed {
				key = "spool_sk_" + strings.Repeat("0", 38)
			}
			p.requireServed(client, sendStalledMessages(t, p.grpc, key, attack.method))
		})
	}
}
