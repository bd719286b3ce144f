package layer

import "sync"

// Tail is an io.Writer that keeps only the end of what is written to it. It is safe for concurrent use.
type Tail struct {
	mu  sync.Mutex
	buf []byte
}

func (t *Tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b[max(0, len(b)-maxTailBytes):]...)
	if over := len(t.buf) - maxTailBytes; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(b), nil
}

// String returns the kept end of what was written.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
