// Package workspacetest contains a store in memory, the conformance suite for stores, and a sandbox whose files are a
// map.
package workspacetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/workspace"
)

// MemoryStore is a workspace.Store in memory for tests. Its zero value is empty.
type MemoryStore struct {
	// Fail, if set, is called before each call with its kind (put, get, has) and the object's name. The call returns
	// the error of Fail.
	Fail func(call, name string) error

	mu      sync.Mutex
	objects map[string][]byte
	gets    int
}

func (m *MemoryStore) injectedError(call, name string) error {
	if m.Fail == nil {
		return nil
	}
	return m.Fail(call, name)
}

// Put stores an object.
func (m *MemoryStore) Put(ctx context.Context, name string, r io.Reader) error {
	content, err := io.ReadAll(r)
	if err = errors.Join(err, ctx.Err(), m.injectedError("put", name)); err != nil {
		return err
	}
	m.SetObject(name, content)
	return nil
}

// Get opens an object, or returns workspace.ErrNotFound.
func (m *MemoryStore) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	if err := errors.Join(ctx.Err(), m.injectedError("get", name)); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gets++
	content, ok := m.objects[name]
	if !ok {
		return nil, fmt.Errorf("%s: %w", name, workspace.ErrNotFound)
	}
	return io.NopCloser(bytes.NewReader(content)), nil
}

// Has reports whether the object exists.
func (m *MemoryStore) Has(ctx context.Context, name string) (bool, error) {
	if err := errors.Join(ctx.Err(), m.injectedError("has", name)); err != nil {
		return false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.objects[name]
	return ok, nil
}

// SetObject replaces the content of an object without any check; nil removes the object.
func (m *MemoryStore) SetObject(name string, content []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects == nil {
		m.objects = map[string][]byte{}
	}
	if m.objects[name] = content; content == nil {
		delete(m.objects, name)
	}
}

// GetObject returns the content of a stored object, or nil if it does not exist.
func (m *MemoryStore) GetObject(name string) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.objects[name]
}

// ObjectNames returns the names of the stored objects, sorted.
func (m *MemoryStore) ObjectNames() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for name := range m.objects {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// GetCount returns the number of calls of Get that opened an object.
func (m *MemoryStore) GetCount() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gets
}

// Exercise runs the conformance suite of implementations of workspace.Store. Its subtests use different object names,
// so open may return the same store for each.
func Exercise(t *testing.T, open func(t *testing.T) workspace.Store) {
	t.Run("Get returns what Put stored, for any size", func(t *testing.T) {
		t.Parallel()
		s, ctx := open(t), t.Context()
		for _, size := range []int{0, 1, 512 << 10, 3<<20 + 7} {
			name := fmt.Sprintf("acme/ses_1/p-%d", size)
			content := bytes.Repeat([]byte("spool"), size/5+1)[:size]
			// The reader returns single bytes, as some readers do.
			if err := s.Put(ctx, name, &shortReader{content}); err != nil {
				t.Fatal(err)
			}
			if has, err := s.Has(ctx, name); err != nil || !has {
				t.Errorf("has %s: %v %v", name, has, err)
			}
			if got := readObject(t, s, name); !bytes.Equal(got, content) {
				t.Errorf("%s: got %d bytes, put %d", name, len(got), size)
			}
		}
	})
	t.Run("a missing object is not found", func(t *testing.T) {
		t.Parallel()
		s, ctx := open(t), t.Context()
		if r, err := s.Get(ctx, "acme/ses_1/none"); !errors.Is(err, workspace.ErrNotFound) {
			t.Errorf("get: %v %v", r, err)
		}
		if has, err := s.Has(ctx, "acme/ses_1/none"); err != nil || has {
			t.Errorf("has: %v %v", has, err)
		}
	})
	t.Run("a reader that fails leaves no object", func(t *testing.T) {
		t.Parallel()
		s, ctx := open(t), t.Context()
		broken := errors.New("broken")
		err := s.Put(ctx, "acme/ses_1/half", io.MultiReader(strings.NewReader(strings.Repeat("x", 1<<20)), failingReader{broken}))
		if !errors.Is(err, broken) {
			t.Errorf("put: %v", err)
		}
		if has, err := s.Has(ctx, "acme/ses_1/half"); err != nil || has {
			t.Errorf("has: %v %v", has, err)
		}
	})
	t.Run("a second Put replaces the object", func(t *testing.T) {
		t.Parallel()
		s, ctx := open(t), t.Context()
		for _, v := range []string{"one", "two"} {
			if err := s.Put(ctx, "acme/ses_1/again", strings.NewReader(v)); err != nil {
				t.Fatal(err)
			}
		}
		if got := readObject(t, s, "acme/ses_1/again"); string(got) != "two" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("an ended context is an error", func(t *testing.T) {
		t.Parallel()
		s := open(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := s.Put(ctx, "acme/ses_1/late", strings.NewReader("x")); !errors.Is(err, context.Canceled) {
			t.Errorf("put: %v", err)
		}
		if _, err := s.Get(ctx, "acme/ses_1/late"); !errors.Is(err, context.Canceled) {
			t.Errorf("get: %v", err)
		}
	})
}

func readObject(t *testing.T, s workspace.Store, name string) []byte {
	t.Helper()
	r, err := s.Get(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	content, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return content
}

// shortReader is a reader that returns at most 1000 bytes for each Read.
type shortReader struct{ left []byte }

func (d *shortReader) Read(p []byte) (int, error) {
	if len(d.left) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), 1000)], d.left)
	d.left = d.left[n:]
	return n, nil
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }
