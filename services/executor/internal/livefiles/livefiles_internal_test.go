package livefiles

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/livefiles"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// box is a sandbox with the given files.
type box struct {
	sandbox.Sandbox
	get  func() (io.ReadCloser, error)
	list []sandbox.File
}

func (b *box) Files() sandbox.Files { return folder{b: b} }

// folder is the workspace of a box.
type folder struct {
	sandbox.Files
	b *box
}

func (f folder) Get(context.Context, string) (io.ReadCloser, error)   { return f.b.get() }
func (f folder) List(context.Context, string) ([]sandbox.File, error) { return f.b.list, nil }

// endless is a file whose bytes never end.
type endless struct{ closed bool }

func (e *endless) Read(p []byte) (int, error) { return len(p), nil }
func (e *endless) Close() error               { e.closed = true; return nil }

func TestRead_ReturnsWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	stuck, w := io.Pipe() // nobody writes
	defer w.Close()
	ctx, cancel := context.WithCancel(t.Context())
	reads := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		_, err := copyContent(ctx, &box{get: func() (io.ReadCloser, error) { close(reads); return stuck, nil }}, livefiles.Request{Op: livefiles.OpGetFile, Path: "a"}, io.Discard)
		done <- err
	}()
	<-reads
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestRead_RefusesWhatIsTooLarge(t *testing.T) {
	t.Parallel()
	file := &endless{}
	many := &box{get: func() (io.ReadCloser, error) { return file, nil }, list: make([]sandbox.File, livefiles.MaxListingEntries+1)}
	long := &box{list: make([]sandbox.File, livefiles.MaxListingEntries)}
	for i := range long.list {
		long.list[i].Path = strings.Repeat("x", 4096)
	}
	for what, x := range map[string]struct {
		box *box
		op  livefiles.Operation
	}{"a file": {many, livefiles.OpGetFile}, "many entries": {many, livefiles.OpListFiles}, "a listing of many bytes": {long, livefiles.OpListFiles}} {
		var refused *livefiles.Error
		if _, err := copyContent(t.Context(), x.box, livefiles.Request{Op: x.op, Path: "a"}, io.Discard); !errors.As(err, &refused) || refused.Code != livefiles.CodeTooLarge {
			t.Errorf("%s: %v", what, err)
		}
	}
	if !file.closed {
		t.Error("the file was left open")
	}
	var out bytes.Buffer
	few := &box{list: make([]sandbox.File, livefiles.MaxListingEntries)}
	if n, err := copyContent(t.Context(), few, livefiles.Request{Op: livefiles.OpListFiles}, &out); err != nil || n != int64(out.Len()) {
		t.Errorf("as many entries as are listed: %d bytes, %v", n, err)
	}
}

func TestRefusal_HasTheCodeOfItsCause(t *testing.T) {
	t.Parallel()
	for want, cause := range map[livefiles.ErrorCode]error{
		livefiles.CodeNotFound: sandbox.ErrNotFound, livefiles.CodeOutsideWorkspace: sandbox.ErrOutsideWorkspace, livefiles.CodeUnreadable: fs.ErrPermission, livefiles.CodeBusy: &livefiles.Error{Code: livefiles.CodeBusy},
	} {
		var refused *livefiles.Error
		if err := refusalError(fmt.Errorf("path %q: %w", "a", cause)); !errors.As(err, &refused) || refused.Code != want {
			t.Errorf("%v: %v, want %s", cause, err, want)
		}
	}
	var refused *livefiles.Error
	if err := refusalError(fmt.Errorf("path %q: %w", "pipe", fs.ErrInvalid)); !errors.As(err, &refused) || refused.Code != livefiles.CodeNotFound {
		t.Errorf("a pipe: %v", err)
	}
	if err := refusalError(io.ErrUnexpectedEOF); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a failure without a code became %v", err)
	}
}
