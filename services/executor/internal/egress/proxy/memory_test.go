package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// reserveAll reserves memory for new sandboxes of a tenant until it gets no more, and returns the number of bytes.
func reserveAll(m *memoryBudget, tenant string, each int) (total int) {
	for m.reserve(memoryOwner{new(registry.Sandbox), tenant}, each) {
		total += each
	}
	return total
}

// Tenants that take all the memory that they can get, from any number of sandboxes, leave some for each further tenant.
func TestMemoryBudget_LeavesMemoryForFurtherTenants(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	m := newMemoryBudget(limit)
	for n := 1; n <= 10; n++ {
		share := reserveAll(m, fmt.Sprint("tenant ", n), 1<<10)
		if want := limit >> n; share < want-1<<10 || share > want {
			t.Errorf("tenant %d gets %d bytes, want %d", n, share, want)
		}
		if n < 10 && m.all >= limit {
			t.Errorf("%d tenants take all the memory", n)
		}
	}
}

func TestMemoryBudget_LimitsEachSandbox(t *testing.T) {
	t.Parallel()
	m := newMemoryBudget(maxMemoryBytes)
	mine := memoryOwner{new(registry.Sandbox), "acme"}
	if !m.reserve(mine, maxSandboxMemoryBytes) || m.reserve(mine, 1) {
		t.Errorf("the sandbox has %d bytes", m.sandboxes[mine.sandbox])
	}
	if !m.reserve(memoryOwner{new(registry.Sandbox), "acme"}, 1<<20) {
		t.Error("another sandbox of the tenant gets nothing")
	}
	m.release(mine, maxSandboxMemoryBytes)
	if !m.reserve(mine, 1) {
		t.Error("released memory cannot be reserved")
	}
}

// While a buffer grows, the former one exists as well. Both are counted.
func TestBufferedBody_CountsBothBuffersWhileItGrows(t *testing.T) {
	t.Parallel()
	owner := memoryOwner{new(registry.Sandbox), "acme"}
	// The tenant may take half: 3 buffers of the first size, and the growth to the second size needs 1 + 2 of them.
	for limit, fits := range map[int]bool{6 * modelBodyBufferBytes: true, 6*modelBodyBufferBytes - 1: false} {
		m := newMemoryBudget(limit)
		b := &bufferedBody{memory: m, owner: owner}
		err := b.fill(io.LimitReader(zeroReader{}, modelBodyBufferBytes+1), -1)
		if fits != (err == nil) || !fits && !errors.Is(err, errMemoryFull) {
			t.Errorf("of %d bytes: %v", limit, err)
		}
		b.Close()
		if m.all != 0 || len(m.sandboxes) != 0 || len(m.tenants) != 0 {
			t.Errorf("%d bytes stay counted", m.all)
		}
	}
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A body frees its memory when it was read to its end or is closed, not only when the answer has ended.
func TestBufferedBody_FreesItsMemoryAtItsEnd(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("text", 10_000)
	body := func(length int64) (*bufferedBody, *memoryBudget) {
		m := newMemoryBudget(maxMemoryBytes)
		b := &bufferedBody{memory: m, owner: memoryOwner{new(registry.Sandbox), "acme"}}
		if err := b.fill(strings.NewReader(text), length); err != nil {
			t.Fatal(err)
		}
		return b, m
	}
	for _, length := range []int64{-1, int64(len(text))} {
		b, m := body(length)
		if want := len(text) + 1; length > 0 && m.all != want {
			t.Errorf("%d bytes are counted, want %d", m.all, want)
		}
		if got, err := io.ReadAll(b); err != nil || string(got) != text {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		if m.all != 0 || b.raw != nil {
			t.Errorf("after its end %d bytes are counted", m.all)
		}
		if n, err := b.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("once more: %d, %v", n, err)
		}
	}
	b, m := body(-1)
	b.Close()
	b.Close()
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, errBodyClosed) || m.all != 0 || b.raw != nil {
		t.Errorf("after Close: %v, %d bytes are counted", err, m.all)
	}
}

// One tenant's checks run one after the other, and do not delay another tenant's.
func TestCheckQueue_RunsOneCheckOfEachTenant(t *testing.T) {
	t.Parallel()
	q := newCheckQueue(2)
	running, end := make(chan string), make(chan struct{})
	results := make(chan error, 3)
	start := func(ctx context.Context, tenant string) {
		go func() {
			results <- q.run(ctx, tenant, func() {
				running <- tenant
				<-end
			})
		}()
	}
	start(t.Context(), "hostile")
	if got := <-running; got != "hostile" {
		t.Fatal(got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	start(ctx, "hostile") // waits
	start(t.Context(), "other")
	if got := <-running; got != "other" { // the tenant's second check would take the only free slot
		t.Fatal(got)
	}
	cancel()
	if err := <-results; !errors.Is(err, context.Canceled) {
		t.Errorf("a check whose sandbox went away: %v", err)
	}
	close(end)
	for range 2 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	if len(q.tenants) != 0 || len(q.slots) != 0 {
		t.Errorf("%d tenants and %d slots are in use", len(q.tenants), len(q.slots))
	}
}

// A check that panics ends the request alone, as a handler that panics does.
func TestCheckQueue_PassesOnAPanic(t *testing.T) {
	t.Parallel()
	q := newCheckQueue(1)
	func() {
		defer func() {
			if p := recover(); p != "broken" {
				t.Errorf("recovered %v", p)
			}
		}()
		_ = q.run(t.Context(), "acme", func() { panic("broken") })
	}()
	if err := q.run(t.Context(), "acme", func() {}); err != nil || len(q.slots) != 0 {
		t.Errorf("the next check: %v", err)
	}
}

// The head of a request counts while it arrives, then with its headers, until the next request or the end of the connection.
func TestIdentifiedConn_CountsTheHeadOfARequest(t *testing.T) {
	t.Parallel()
	here, there := net.Pipe()
	defer there.Close()
	m := newMemoryBudget(2*requestMemoryBytes + 4096)
	closed := false
	c := &identifiedConn{Conn: here, memory: m, owner: memoryOwner{new(registry.Sandbox), "acme"}, onClose: func() { closed = true }}
	read := func(n int) error {
		go there.Write(make([]byte, n)) //nolint:errcheck // the read below has it
		_, err := io.ReadFull(c, make([]byte, n))
		return err
	}
	if err := read(100); err != nil || m.all != 100*headMemoryFactor {
		t.Errorf("%v, %d bytes are counted", err, m.all)
	}
	r := &http.Request{RequestURI: "/x", Header: http.Header{}}
	if !c.setHandled(r) || m.all != requestMemory(r) {
		t.Errorf("with a handler %d bytes are counted", m.all)
	}
	if err := read(100); err != nil || m.all != requestMemory(r) { // of the body
		t.Errorf("%v, %d bytes are counted", err, m.all)
	}
	c.expectRequest()
	if m.all != 0 {
		t.Errorf("between two requests %d bytes are counted", m.all)
	}
	var full *net.OpError
	if err := read(4 << 10); !errors.As(err, &full) || !errors.Is(err, errMemoryFull) {
		t.Errorf("a head without memory: %v", err)
	}
	if err := read(100); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := c.Close(); err != nil || !closed || m.all != 0 || len(m.tenants) != 0 {
			t.Errorf("%v, %t, after the end %d bytes are counted", err, closed, m.all)
		}
	}
}

// A head counts with its size as Go values: the shortest headers take the most.
func TestRequestMemory_CountsHeaders(t *testing.T) {
	t.Parallel()
	r := &http.Request{RequestURI: "/x", Header: http.Header{}}
	small := requestMemory(r)
	for i := range 1000 {
		r.Header.Set(fmt.Sprint("H", i), "")
	}
	if n := requestMemory(r) - small; n < 1000*headerMemoryBytes {
		t.Errorf("1000 headers count as %d bytes", n)
	}
	r.Header = http.Header{"X": {string(bytes.Repeat([]byte("x"), 1000))}}
	if n := requestMemory(r) - small; n < 2000 {
		t.Errorf("a header of 1000 bytes counts as %d", n)
	}
}
