package egress_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spoolhq/spool/pkg/runner"
)

// attackMemory is the limit of the proxy's memory under attack. docs/security.md states it; it is the limit of the container in compose.
const attackMemory = 512 << 20

// limitMemory makes the allocations of the proxy process fail above a limit, so that a proxy that takes more ends.
func (r *remote) limitMemory(bytes uint64) {
	r.t.Helper()
	limit := unix.Rlimit{Cur: bytes, Max: bytes}
	if err := unix.Prlimit(r.pid, unix.RLIMIT_DATA, &limit, nil); err != nil {
		r.t.Fatal(err)
	}
}

// sandboxOf registers a sandbox of a tenant that connects to the Unix socket.
func (r *remote) sandboxOf(tenant string) *box {
	r.t.Helper()
	w := &world{t: r.t, cfg: r.cfg, client: r.client, log: r.log}
	b := w.box()
	b.reg.Tenant = tenant
	if _, err := r.client.Register(r.t.Context(), b.id, b.reg); err != nil {
		r.t.Fatal(err)
	}
	return b
}

// hugeBody returns a body of nearly 32 MiB: a beginning, parts until it is full, and an end.
func hugeBody(begin string, part func(i int) string, end string) []byte {
	const size = 32<<20 - 1<<10
	out := bytes.NewBuffer(make([]byte, 0, size+1<<10))
	out.WriteString(begin)
	for i := 0; out.Len() < size-len(end); i++ {
		out.WriteString(part(i))
	}
	out.WriteString(end)
	return out.Bytes()
}

// hostileRequests returns requests that cost a proxy as much memory as possible. Each is sent over and over again.
func hostileRequests() map[string][]byte {
	post := func(body []byte) []byte {
		return append(fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n", messages, runner.EgressAddress, len(body)), body...)
	}
	filler := func(text string) func(int) string { return func(int) string { return text } }
	var headers strings.Builder
	for i := range 8000 {
		fmt.Fprintf(&headers, "%x:\r\n", i+4096)
	}
	return map[string][]byte{
		"millions of keys": post(hugeBody(`{"model":"m","metadata":{`, func(i int) string { return fmt.Sprintf(`"%x":0,`, i) }, `"z":0}}`)),
		"many keys in many objects": post(hugeBody(`{"model":"m","metadata":[`, func(i int) string {
			if i%50_000 == 0 {
				return `{"x":0},{"y":0`
			}
			if i%50_000 == 49_999 {
				return `},`
			}
			return fmt.Sprintf(`,"%x":0`, i)
		}, `}]}`)),
		"deep nesting":      post([]byte(`{"model":"m","metadata":` + strings.Repeat(`{"a":[`, 250) + strings.Repeat(`]}`, 250) + `}`)),
		"a huge string":     post(hugeBody(`{"model":"m","system":"`, filler(strings.Repeat("x", 1<<10)), `"}`)),
		"a huge key":        post(hugeBody(`{"model":"m","metadata":{"`, filler(strings.Repeat(`\u0041`, 100)), `":0}}`)),
		"a huge model":      post(hugeBody(`{"model":"`, filler(strings.Repeat(`\u0041`, 100)), `"}`)),
		"of unknown length": append([]byte("POST "+messages+" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1ffffff\r\n"), bytes.Repeat([]byte(" "), 1<<25-1)...),
		"a slow body":       append([]byte("POST "+messages+" HTTP/1.1\r\nHost: x\r\nContent-Length: 33000000\r\n\r\n"), bytes.Repeat([]byte(" "), 17<<20)...),
		"a slow head":       []byte("GET /anthropic/v1/models HTTP/1.1\r\nHost: x\r\n" + headers.String()),
	}
}

// attacker sends hostile requests of one sandbox until its context ends, and counts the answers by status.
type attacker struct {
	*box
	full, answers atomic.Int64
}

func (a *attacker) attack(ctx context.Context, request []byte) {
	for ctx.Err() == nil {
		a.send(ctx, request)
	}
}

// send sends one request and waits for the answer, which a request without an end gets after the proxy's timeout, or at the end of ctx.
func (a *attacker) send(ctx context.Context, request []byte) {
	c, err := a.dialWith(a.token)
	if err != nil {
		return
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	go func() {
		_, _ = c.Write(request) // the proxy may refuse it before its end
	}()
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return
	}
	a.answers.Add(1)
	if res.StatusCode == http.StatusServiceUnavailable {
		a.full.Add(1)
	}
}

// A tenant that sends the worst bodies that there are, from several sandboxes at once, neither ends the proxy nor keeps another tenant's
// requests from it.
func TestAttack_BodiesOfOneTenantNeitherEndTheProxyNorStopAnother(t *testing.T) { //nolint:paralleltest // it needs the machine's memory
	r := newRemote(t, func(w http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		_, _ = io.WriteString(w, `{"model":"m","usage":{"input_tokens":1,"output_tokens":1}}`)
	}, "SPOOL_LOG_LEVEL=error")
	r.limitMemory(attackMemory + 256<<20) // address space that the Go runtime has reserved and not used counts as well
	victim := r.sandboxOf("victim")
	turn := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 200<<10) + `"}]}`
	const turns = 60
	alone := victim.timeRequests(turns, turn)

	ctx, stop := context.WithCancel(t.Context())
	var attacking sync.WaitGroup
	t.Cleanup(attacking.Wait)
	defer stop()
	requests := hostileRequests()
	var attackers []*attacker
	for range 5 {
		a := &attacker{box: r.sandboxOf("hostile")}
		attackers = append(attackers, a)
		for name, request := range requests {
			n := 1
			if strings.Contains(name, "slow") {
				n = 8
			}
			for range n {
				attacking.Go(func() { a.attack(ctx, request) })
			}
		}
	}
	full := func() (n int64) {
		for _, a := range attackers {
			n += a.full.Load()
		}
		return n
	}
	poll(t, "the hostile tenant has all the memory that it can get", func() bool { return full() > 0 })
	under := victim.timeRequests(turns, turn)
	poll(t, "each hostile sandbox is answered", func() bool {
		return !slices.ContainsFunc(attackers, func(a *attacker) bool { return a.answers.Load() == 0 })
	})
	r.checkPeak(attackMemory)
	t.Logf("requests of another tenant: p99 %s alone, %s under attack", alone[len(alone)*99/100], under[len(under)*99/100])
	stop()
	attacking.Wait()
	poll(t, "the hostile tenant's memory is free again", func() bool {
		status, _, _ := attackers[0].post(messages, `{"model":"m"}`)
		return status == http.StatusOK
	})
}

// timeRequests sends requests one after the other, which must all succeed, and returns their durations in ascending order.
func (b *box) timeRequests(n int, body string) []time.Duration {
	b.t.Helper()
	var out []time.Duration
	for range n {
		began := time.Now()
		if status, _, answer := b.post(messages, body); status != http.StatusOK {
			b.t.Fatalf("%d %s", status, answer)
		}
		out = append(out, time.Since(began))
	}
	slices.Sort(out)
	return out
}
