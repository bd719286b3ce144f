package runner

import (
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"
)

// The parties that share a secret.
const (
	executorPartyName = "spool executor"
	runnerPartyName   = "spool runner"
)

// NewSecret returns a random secret for a new sandbox. The provider sends it to the runner once, with OpClaim, before
// any agent runs. From then on the runner accepts only executors that prove the secret.
func NewSecret() string { return rand.Text() }

// ExecutorTLS returns the TLS configuration of the executor's end of a stream to the runner that was claimed with the
// secret.
func ExecutorTLS(secret string) (*tls.Config, error) {
	return mutualTLS(secret, executorPartyName, runnerPartyName)
}

// RunnerTLS returns the TLS configuration of the runner's end of a stream from an executor that knows the secret.
func RunnerTLS(secret string) (*tls.Config, error) {
	return mutualTLS(secret, runnerPartyName, executorPartyName)
}

// mutualTLS returns a configuration in which each party has a key that is derived from the secret, and accepts only
// the key of the other party. The secret itself is never sent. A process between the parties, for example one that
// listens in place of the runner, can neither read nor modify the stream.
func mutualTLS(secret, own, peer string) (*tls.Config, error) {
	key, err := derivePartyKey(secret, own)
	if err != nil {
		return nil, err
	}
	peerKey, err := derivePartyKey(secret, peer)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<32, 0)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("create the certificate of the %s: %w", own, err)
	}
	want := peerKey.Public()
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		ClientAuth:   tls.RequireAnyClientCert, MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection compares the key, there is no name to verify
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) != 1 {
				return errSecretNotProven
			}
			got, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
			if !ok || !got.Equal(want) {
				return errSecretNotProven
			}
			return nil
		},
	}, nil
}

// errSecretNotProven is returned for a peer whose key is not derived from the sandbox's secret.
var errSecretNotProven = errors.New("the peer does not prove the sandbox's secret")

// derivePartyKey derives the key of a party from the secret, so that both parties can compute both keys.
func derivePartyKey(secret, party string) (ed25519.PrivateKey, error) {
	if secret == "" {
		return nil, errors.New("the sandbox's secret is empty")
	}
	seed, err := hkdf.Key(sha256.New, []byte(secret), nil, party, ed25519.SeedSize)
	if err != nil {
		return nil, fmt.Errorf("derive the key of the %s: %w", party, err)
	}
	return ed25519.NewKeyFromSeed(seed), nil
}

// SendSecret sends the sandbox's secret to the runner at the other end of a new connection, which claims the runner.
// The caller closes the connection.
func SendSecret(c io.ReadWriter, secret string) error {
	if err := json.NewEncoder(c).Encode(Claim{ID: 1, Op: OpClaim, Secret: secret}); err != nil {
		return fmt.Errorf("%s: %w", OpClaim, err)
	}
	var m Message
	if err := json.NewDecoder(c).Decode(&m); err != nil {
		return fmt.Errorf("%s: read the runner's reply: %w", OpClaim, err)
	}
	switch {
	case m.Reply == nil:
		return fmt.Errorf("%s: the runner sent no reply", OpClaim)
	case m.Reply.Error != nil:
		return fmt.Errorf("%s: %w", OpClaim, m.Reply.Error)
	}
	return nil
}

// OpenSealedStream proves the sandbox's secret to the runner at the other end of "runner attach --sealed" and returns
// the TLS stream to the runner. stdout and stdin are the streams of that command. OpenSealedStream blocks until the
// runner has responded or the streams end.
func OpenSealedStream(secret string, stdout io.Reader, stdin io.WriteCloser) (net.Conn, error) {
	config, err := ExecutorTLS(secret)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(stdioConn{stdout, stdin}, config)
	if err := conn.HandshakeContext(context.Background()); err != nil { // the caller closes the streams to stop it
		return nil, fmt.Errorf("prove the sandbox's secret to its runner: %w", err)
	}
	return tlsStream{conn, stdin}, nil
}

// tlsStream is a TLS stream whose Close does not wait for a peer that has stopped reading.
type tlsStream struct {
	*tls.Conn
	under io.Closer
}

func (s tlsStream) Close() error { return s.under.Close() }

// AcceptSealedStream accepts the TLS stream of an executor on c and returns the stream after the executor has proved
// the secret of config. peeked has the bytes of c that were already read, followed by c itself.
func AcceptSealedStream(c net.Conn, peeked io.Reader, config *tls.Config) (net.Conn, error) {
	conn := tls.Server(bufferedConn{c, peeked}, config)
	if err := conn.HandshakeContext(context.Background()); err != nil { // the connection's deadline stops it
		return nil, err
	}
	return tlsStream{conn, c}, nil
}

// StartsTLSStream reports whether a connection whose first byte is b is a TLS stream. The alternative is JSON, which
// starts with a brace.
func StartsTLSStream(b byte) bool { return b == tlsHandshakeRecord }

// tlsHandshakeRecord is the type of the first record of a TLS stream (RFC 8446, section 5.1).
const tlsHandshakeRecord = 22

// bufferedConn is a connection some of whose bytes were already read into in: Read reads from in.
type bufferedConn struct {
	net.Conn
	in io.Reader
}

func (b bufferedConn) Read(p []byte) (int, error) { return b.in.Read(p) }

// stdioConn presents the standard streams of a command as a net.Conn without deadlines.
type stdioConn struct {
	io.Reader
	io.WriteCloser
}

func (stdioConn) LocalAddr() net.Addr              { return &net.UnixAddr{Net: "unix"} }
func (stdioConn) RemoteAddr() net.Addr             { return &net.UnixAddr{Net: "unix"} }
func (stdioConn) SetDeadline(time.Time) error      { return nil }
func (stdioConn) SetReadDeadline(time.Time) error  { return nil }
func (stdioConn) SetWriteDeadline(time.Time) error { return nil }
