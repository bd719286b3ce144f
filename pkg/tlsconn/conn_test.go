package tlsconn_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/tlsconn"
)

// configs returns the configurations of a server and of a client that trusts it.
func configs(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	dir := t.TempDir()
	a, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: 100 * 365 * 24 * time.Hour}, time.Now())
	if err == nil {
		err = a.WriteTrustFile(filepath.Join(dir, "ca.pem"))
	}
	if err == nil {
		_, err = a.Issue(dir, []string{"proxy"})
	}
	if err != nil {
		t.Fatal(err)
	}
	pair, err := certificate.OpenPair(filepath.Join(dir, certificate.CertificateFile), filepath.Join(dir, certificate.KeyFile), nil)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := certificate.ReadCertPool(filepath.Join(dir, "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now() // synctest's clock differs from the wall clock
	server, client = pair.TLSConfig(), &tls.Config{RootCAs: pool, ServerName: "proxy", MinVersion: tls.VersionTLS13}
	server.Time, client.Time = func() time.Time { return now }, func() time.Time { return now }
	server.SessionTicketsDisabled = true // a pipe has no buffer for a session ticket
	return server, client
}

// pipe returns both ends of an unbuffered connection.
func pipe(t *testing.T, server, client *tls.Config) (s, c *tlsconn.Conn) {
	t.Helper()
	a, b := net.Pipe()
	served := make(chan error, 1)
	go func() {
		var err error
		s, err = tlsconn.Server(context.Background(), a, server)
		served <- err
	}()
	c, err := tlsconn.Client(context.Background(), b, client)
	if err := errors.Join(err, <-served); err != nil {
		t.Fatal(err)
	}
	return s, c
}

// TestConn_CloseWriteWaitsForASlowPeer tests that CloseWrite waits longer than the 5 s after which crypto/tls gives
// up. With that limit the peer would never read the end of the stream.
func TestConn_CloseWriteWaitsForASlowPeer(t *testing.T) {
	t.Parallel()
	server, client := configs(t)
	synctest.Test(t, func(t *testing.T) {
		s, c := pipe(t, server, client)
		ended := make(chan error, 1)
		go func() { ended <- c.CloseWrite() }()
		time.Sleep(time.Minute) // passes in synctest's clock
		if got, err := io.ReadAll(s); err != nil || len(got) > 0 {
			t.Errorf("the peer read %q, %v", got, err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		// The other direction is still open.
		go func() { _, _ = io.WriteString(s, "answer"); _ = s.Close() }()
		if got, err := io.ReadAll(c); err != nil || string(got) != "answer" {
			t.Errorf("read %q, %v", got, err)
		}
		_ = c.Close()
	})
}

func TestConn_CloseWriteEndsAtTheWriteDeadline(t *testing.T) {
	t.Parallel()
	server, client := configs(t)
	synctest.Test(t, func(t *testing.T) {
		s, c := pipe(t, server, client)
		began := time.Now()
		if err := c.SetWriteDeadline(began.Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if err := c.CloseWrite(); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != time.Minute {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		_, _ = c.Close(), s.Close()
	})
}

// TestConn_CloseDoesNotWaitForAPeerThatDoesNotRead tests that Close returns at once. crypto/tls would wait up to 5 s
// for the peer to read close_notify.
func TestConn_CloseDoesNotWaitForAPeerThatDoesNotRead(t *testing.T) {
	t.Parallel()
	server, client := configs(t)
	synctest.Test(t, func(t *testing.T) {
		s, c := pipe(t, server, client)
		began := time.Now()
		if err := c.Close(); err != nil || time.Since(began) != 0 {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		if _, err := s.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("the peer reads %v", err)
		}
		_ = s.Close()
	})
}

// TestHandshake_ClosesTheConnectionWhenItFails tests that a failed handshake closes the underlying connection.
func TestHandshake_ClosesTheConnectionWhenItFails(t *testing.T) {
	t.Parallel()
	server, client := configs(t)
	client.RootCAs = x509.NewCertPool()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	dialed, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() {
		_, err := tlsconn.Server(context.Background(), accepted, server)
		served <- err
	}()
	if _, err := tlsconn.Client(t.Context(), dialed, client); err == nil {
		t.Error("a certificate of an unknown authority is accepted")
	}
	if err := <-served; err == nil {
		t.Error("the server's handshake is complete")
	}
	for _, c := range []net.Conn{accepted, dialed} {
		if _, err := c.Write([]byte{0}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("the connection is open: %v", err)
		}
	}
}
