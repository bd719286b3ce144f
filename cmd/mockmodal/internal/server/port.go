package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// switchablePort is a net.Listener that tests can turn off and on again, and whose connections they can slow down.
// While it is off, connections are refused.
type switchablePort struct {
	address  netip.AddrPort
	reserved int // socket that is bound to the port and never listens, so that nothing else takes the port

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced when listener changes
	listener net.Listener  // nil while the port is off
	conns    map[net.Conn]struct{}
	oneWay   time.Duration
	closed   bool
}

// openPort binds an address and listens on it. Port 0 means any free port.
func openPort(address netip.AddrPort) (*switchablePort, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("reserve the port: %w", err)
	}
	p := &switchablePort{reserved: fd, changed: make(chan struct{}), conns: map[net.Conn]struct{}{}}
	if err := p.bindAddress(address); err != nil {
		return nil, errors.Join(fmt.Errorf("reserve %s: %w", address, err), unix.Close(fd))
	}
	if err := p.turnOn(); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return p, nil
}

// bindAddress binds a socket that never listens to the address, so that no other process takes the port while it is
// off. It sets p.address to the bound address.
func (p *switchablePort) bindAddress(address netip.AddrPort) error {
	if err := enablePortSharing(p.reserved); err != nil {
		return err
	}
	var want unix.Sockaddr = &unix.SockaddrInet4{Port: int(address.Port()), Addr: address.Addr().As4()}
	if err := unix.Bind(p.reserved, want); err != nil {
		return err
	}
	got, err := unix.Getsockname(p.reserved)
	if err != nil {
		return err
	}
	p.address = netip.AddrPortFrom(address.Addr(), uint16(got.(*unix.SockaddrInet4).Port))
	return nil
}

// enablePortSharing lets several sockets bind to the port of the socket fd.
func enablePortSharing(fd int) error {
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
}

// turnOn makes the port listen again. It does nothing if the port already listens or is closed.
func (p *switchablePort) turnOn() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil || p.closed {
		return nil
	}
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var failed error
		err := raw.Control(func(fd uintptr) { failed = enablePortSharing(int(fd)) })
		return errors.Join(err, failed)
	}}
	listener, err := config.Listen(context.Background(), "tcp", p.address.String())
	if err != nil {
		return fmt.Errorf("listen on %s: %w", p.address, err)
	}
	p.listener = listener
	p.wakeWaiters()
	return nil
}

// turnOff stops listening and closes all connections.
func (p *switchablePort) turnOff() {
	p.mu.Lock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
		p.wakeWaiters()
	}
	conns := slices.Collect(maps.Keys(p.conns))
	p.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close()
	}
}

// wakeWaiters wakes the calls of Accept that wait until the port is turned on or closed. The caller must hold mu.
func (p *switchablePort) wakeWaiters() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Accept implements net.Listener. While the port is off, Accept waits.
func (p *switchablePort) Accept() (net.Conn, error) {
	for {
		p.mu.Lock()
		listener, changed, closed := p.listener, p.changed, p.closed
		p.mu.Unlock()
		if closed {
			return nil, net.ErrClosed
		}
		if listener == nil {
			<-changed
			continue
		}
		conn, err := listener.Accept()
		if err == nil {
			return p.wrapConn(conn), nil
		}
		if !errors.Is(err, net.ErrClosed) {
			return nil, err
		}
	}
}

// Close implements net.Listener. It may be called more than once.
func (p *switchablePort) Close() error {
	p.turnOff()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	p.wakeWaiters()
	return unix.Close(p.reserved)
}

// Addr implements net.Listener.
func (p *switchablePort) Addr() net.Addr { return net.TCPAddrFromAddrPort(p.address) }

// setLatency sets the time by which each direction of every connection delays data.
func (p *switchablePort) setLatency(oneWay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.oneWay = oneWay
}

// latency returns the time by which each direction of a connection delays data.
func (p *switchablePort) latency() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.oneWay
}

// wrapConn returns an accepted connection with the latency of the port. turnOff closes the connection.
func (p *switchablePort) wrapConn(raw net.Conn) net.Conn {
	conn := newSlowConn(raw, p)
	p.mu.Lock()
	isOff := p.listener == nil // switched off meanwhile
	p.conns[conn] = struct{}{}
	p.mu.Unlock()
	if isOff {
		_ = conn.Close()
	}
	return conn
}

// forgetConn removes a closed connection from the list of open ones.
func (p *switchablePort) forgetConn(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, conn)
}
