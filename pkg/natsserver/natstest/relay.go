package natstest

import (
	"bufio"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Relay forwards the connections of clients to a NATS server, and leaves out chosen requests, as a server does that
// stalls for longer than the requests wait.
type Relay struct {
	URL string // of the relay's listener

	server string
	lose   func(subject string) bool
	mu     sync.Mutex
	open   []net.Conn // nil after the test
	all    sync.WaitGroup
}

// RunRelay starts a relay to the server at the address server, such as 127.0.0.1:4222, that runs until the test ends.
// lose is called, one call at a time, for each message with a reply subject that a client sends, and with "PING" for each
// ping. The relay does not forward a message for which lose returns true.
func RunRelay(t testing.TB, server string, lose func(subject string) bool) *Relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // ends with the test
	if err != nil {
		t.Fatal(err)
	}
	r := &Relay{URL: "nats://" + l.Addr().String(), server: server, lose: lose, open: []net.Conn{}}
	r.all.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			r.all.Go(func() { r.forwardConn(client) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		r.mu.Lock()
		for _, c := range r.open {
			_ = c.Close()
		}
		r.open = nil
		r.mu.Unlock()
		r.all.Wait()
	})
	return r
}

// forwardConn forwards one connection until one of its sides closes it.
func (r *Relay) forwardConn(client net.Conn) {
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp", r.server) //nolint:noctx // see RunRelay
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	r.mu.Lock()
	ended := r.open == nil
	r.open = append(r.open, client, server)
	r.mu.Unlock()
	if ended {
		return
	}
	r.all.Go(func() {
		_, _ = io.Copy(client, server) // ends when a side closes its connection
		_ = client.Close()
	})
	_ = r.forwardRequests(client, server) // ends when a side closes its connection
}

// forwardRequests forwards what a client sends, except the messages that the relay leaves out.
func (r *Relay) forwardRequests(client io.Reader, server io.Writer) error {
	in := bufio.NewReader(client)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		message := []byte(line)
		fields := strings.Fields(line)
		request := "" // subject of a message that asks for a reply
		switch verb := strings.ToUpper(fields[0]); verb {
		case "PING":
			request = verb
		case "PUB", "HPUB":
			size, err := strconv.Atoi(fields[len(fields)-1])
			if err != nil {
				return errors.Join(errors.New("the size of a message is not a number: "+line), err)
			}
			body := make([]byte, size+len("\r\n"))
			if _, err := io.ReadFull(in, body); err != nil {
				return err
			}
			message = append(message, body...)
			if verb == "PUB" && len(fields) == 4 || verb == "HPUB" && len(fields) == 5 {
				request = fields[1]
			}
		}
		if request != "" && r.losesRequest(request) {
			continue
		}
		if _, err := server.Write(message); err != nil {
			return err
		}
	}
}

func (r *Relay) losesRequest(subject string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lose(subject)
}
