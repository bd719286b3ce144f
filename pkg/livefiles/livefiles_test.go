package livefiles_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/livefiles"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// source is a FileSource whose open function determines the content. It counts the bytes that are read.
type source struct {
	open func(livefiles.Request) (io.Reader, int64, error)

	mu     sync.Mutex
	read   int
	closed chan struct{}
}

func (s *source) Open(_ context.Context, r livefiles.Request) (io.ReadCloser, int64, error) {
	from, size, err := s.open(r)
	if err != nil {
		return nil, 0, err
	}
	return &countingReader{s, from}, size, nil
}

type countingReader struct {
	s    *source
	from io.Reader
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	c.s.mu.Lock()
	c.s.read += n
	c.s.mu.Unlock()
	return n, err
}

func (c *countingReader) Close() error { close(c.s.closed); return nil }

// connect returns a gateway's client of a server that an executor runs. Each is connected as its own NATS user.
func connect(t *testing.T, s *source) *livefiles.Client {
	t.Helper()
	s.closed = make(chan struct{})
	srv := natstest.RunConfig(t, natsserver.Config{Accounts: true})
	as := func(user string) *nats.Conn {
		nc, err := srv.ConnectAs(user)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	executor := as(topology.UserExecutor)
	server, err := livefiles.Serve(executor, "local", "host", s, natstest.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := executor.Flush(); err != nil {
		t.Fatal(err)
	}
	return livefiles.NewClient(as(topology.UserGateway))
}

func TestOpen_SendsFilesOfAnySize(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 1, 256 << 10, 256<<10 + 1, 20 << 20} {
		want := make([]byte, size)
		for i := range want {
			want[i] = byte(i * 7 / 3)
		}
		s := &source{open: func(r livefiles.Request) (io.Reader, int64, error) {
			if r.Tenant != "acme" || r.Path != "a/b" || r.Op != livefiles.OpGetFile {
				t.Errorf("the request is %+v", r)
			}
			return bytes.NewReader(want), int64(size), nil
		}}
		content, n, err := connect(t, s).Open(t.Context(), "local", "host", livefiles.Request{Op: livefiles.OpGetFile, Tenant: "acme", Session: "s", Path: "a/b"})
		if err != nil || n != int64(size) {
			t.Fatalf("%d bytes: %d, %v", size, n, err)
		}
		got, err := io.ReadAll(content)
		if err = errors.Join(err, content.Close()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes: got %d, %v", size, len(got), err)
		}
		<-s.closed
	}
}

func TestOpen_StoppedReaderCausesAtMostAWindowOfReads(t *testing.T) {
	t.Parallel()
	const size = 32 << 20
	s := &source{open: func(livefiles.Request) (io.Reader, int64, error) {
		return bytes.NewReader(make([]byte, size)), size, nil
	}}
	content, _, err := connect(t, s).Open(t.Context(), "local", "host", livefiles.Request{Op: livefiles.OpGetFile})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(content, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := content.Close(); err != nil {
		t.Fatal(err)
	}
	<-s.closed // Open closes the source when the receiver stops, without waiting for its time limit.
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.read > 4<<20 {
		t.Errorf("%d bytes were read after the receiver stopped", s.read)
	}
}

func TestOpen_ReturnsTheReasonOfARefusal(t *testing.T) {
	t.Parallel()
	s := &source{open: func(r livefiles.Request) (io.Reader, int64, error) {
		if r.Path == "short" {
			return bytes.NewReader(make([]byte, 10)), 20, nil
		}
		return nil, 0, &livefiles.Error{Code: livefiles.CodeNotFound, Detail: "no " + r.Path}
	}}
	c := connect(t, s)
	var refused *livefiles.Error
	if _, _, err := c.Open(t.Context(), "local", "host", livefiles.Request{Path: "x"}); !errors.As(err, &refused) || *refused != (livefiles.Error{Code: livefiles.CodeNotFound, Detail: "no x"}) {
		t.Errorf("got %v", err)
	}
	for _, engine := range []string{"another", "", "*"} {
		if _, _, err := c.Open(t.Context(), "local", engine, livefiles.Request{}); !errors.Is(err, livefiles.ErrNoExecutor) {
			t.Errorf("engine %q without executors: %v", engine, err)
		}
	}
	content, _, err := c.Open(t.Context(), "local", "host", livefiles.Request{Path: "short"})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(content); err == nil {
		t.Errorf("an aborted transfer returned %d bytes without an error", len(got))
	}
	if err := content.Close(); err != nil {
		t.Error(err)
	}
}
