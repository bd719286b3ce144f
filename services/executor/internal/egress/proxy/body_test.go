package proxy

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
)

// closable fails once it is closed, as a server's request body does.
type closable struct {
	io.Reader
	closed bool
}

func (c *closable) Read(p []byte) (int, error) {
	if c.closed {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := c.Reader.Read(p)
	if n > 0 {
		err = io.EOF // together with the last bytes, as net/http returns it
	}
	return n, err
}

func (c *closable) Close() error { c.closed = true; return nil }

// TestStickyEOF_SurvivesClose: a body that is closed after its end still returns io.EOF. One that is
// closed before its end returns the error of the closed body.
func TestStickyEOF_SurvivesClose(t *testing.T) {
	t.Parallel()
	b := &closable{Reader: strings.NewReader("all of it")}
	e := &stickyEOF{ReadCloser: b}
	got, err := io.ReadAll(e)
	if err != nil || string(got) != "all of it" {
		t.Fatalf("%q, %v", got, err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := e.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %d, %v", n, err)
	}
	b = &closable{Reader: strings.NewReader("never read"), closed: true}
	if _, err := (&stickyEOF{ReadCloser: b}).Read(make([]byte, 1)); !errors.Is(err, http.ErrBodyReadAfterClose) {
		t.Errorf("closed too early: %v", err)
	}
}
