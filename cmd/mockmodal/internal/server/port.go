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

// port is a listener that can be switched off and on again, and whose
// connections can be slowed down. While it is off, connections are refused.
type port struct {
	address  netip.AddrPort
	reserved int // socket that is bound to the port and never listens, so that nothing else takes the port

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced when listener changes
	listener net.Listener  // nil while off
	conns    map[net.Conn]struct{}
	oneWay   time.Duration
	closed   bool
}

// openPort reserves an address and listens on it. Port 0 means any free one.
func openPort(address netip.AddrPort) (*port, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("reserve the port: %w", err)
	}
	p := &port{reserved: fd, changed: make(chan struct{}), conns: map[net.Conn]struct{}{}}
	if err := p.reserve(address); err != nil {
		return nil, errors.Join(fmt.Errorf("reserve %s: %w", address, err), unix.Close(fd))
	}
	if err := p.turnOn(); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return p, nil
}

// reserve binds a socket that never listens to the address, and sets address to the one that was bound.
func (p *port) reserve(address netip.AddrPort) error {
	if err := sharePort(p.reserved); err != nil {
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

// sharePort makes the kernel allow several sockets on the port of a socket.
func sharePort(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }

// turnOn makes the port listen again. It does nothing if the port listens already or is closed.
func (p *port) turnOn() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil || p.closed {
		return nil
	}
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var failed error
		err := raw.Control(func(fd uintptr) { failed = sharePort(int(fd)) })
		return errors.Join(err, failed)
	}}
	listener, err := config.Listen(context.Background(), "tcp", p.address.String())
	if err != nil {
		return fmt.Errorf("listen on %s: %w", p.address, err)
	}
	p.listener = listener
	p.notify()
	return nil
}

// turnOff stops listening and cuts all connections.
func (p *port) turnOff() {
	p.mu.Lock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
		p.notify()
	}
	conns := slices.Collect(maps.Keys(p.conns))
	p.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close()
	}
}

// notify wakes the callers that wait for a change. The caller holds mu.
func (p *port) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Accept implements net.Listener. While the port is off, Accept waits.
func (p *port) Accept() (net.Conn, error) {
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
			return p.track(conn), nil
		}
		if !errors.Is(err, net.ErrClosed) {
			return nil, err
		}
	}
}

// Close implements net.Listener. It may be called more than once.
func (p *port) Close() error {
	p.turnOff()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	p.notify()
	return unix.Close(p.reserved)
}

// Addr implements net.Listener.
func (p *port) Addr() net.Addr { return net.TCPAddrFromAddrPort(p.address) }

// setLatency delays every byte in each direction, in order.
func (p *port) setLatency(oneWay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.oneWay = oneWay
}

// latency returns the present delay of each direction.
func (p *port) latency() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.oneWay
}

// track wraps an accepted connection, so that the port's latency applies to it and turnOff closes it.
func (p *port) track(raw net.Conn) net.Conn {
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

// forget removes a connection that was closed.
func (p *port) forget(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, conn)
}
