package serve

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
)

// A connection that was accepted just before the listener closed does not keep Run from returning.
func TestServe_ClosesConnectionAfterDismissal(t *testing.T) {
	t.Parallel()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: t.TempDir() + "/s", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	client, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	accepted, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{cfg: Config{Log: slog.New(slog.DiscardHandler)}, listener: l, conns: map[net.Conn]bool{}}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	s.closeConnections()
	s.serveConnection(accepted)
	s.wg.Wait() // as Run does
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the late connection is not closed: %v", err)
	}
}
