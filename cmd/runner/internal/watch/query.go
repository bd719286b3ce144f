package watch

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"
)

// SocketName is the name of the socket in the state folder at which a watcher answers which folders have changed. Snapshots do not contain it.
const SocketName = ".spool-changes"

const (
	// queryTimeout is the time limit for a query to the watcher and its answer.
	queryTimeout = 5 * time.Second
	// maxRequestBytes is the maximum size of a request to the watcher in bytes.
	maxRequestBytes = 4 << 10
	// maxQueries is the maximum number of queries to the watcher (connections to the socket) at a time.
	maxQueries = 16
	// maxAnswersBytes is the maximum size in bytes of all answers on a connection to the watcher. It is limited because the agent can listen in the
	// watcher's place.
	maxAnswersBytes = 64 << 20
)

// ChangeAnswer lists the folders in which something may have changed.
type ChangeAnswer struct {
	Token   string          `json:"token,omitempty"`
	All     bool            `json:"all,omitempty"`    // something may have changed in any folder
	Reason  string          `json:"reason,omitempty"` // of All
	Folders []ChangedFolder `json:"-"`
	// Mapped are files that a process has mapped into its memory for writing: it can change them without a change of
	// their times.
	Mapped []string `json:"-"`
}

// changeAnswerJSON is an Answer as it is sent over the socket. Paths are bytes, because they need not be UTF-8.
type changeAnswerJSON struct {
	ChangeAnswer
	Shallow [][]byte `json:"shallow,omitempty"`
	Deep    [][]byte `json:"deep,omitempty"`
	Files   [][]byte `json:"mapped,omitempty"`
	Error   string   `json:"error,omitempty"`
}

// queryRequest is one request of a snapshot to the watcher. A connection sends one with Since, then others.
type queryRequest struct {
	Since   *string `json:"since,omitempty"`   // asks for changes after the answer with this token
	Again   bool    `json:"again,omitempty"`   // asks for changes after the answer of this connection
	Confirm bool    `json:"confirm,omitempty"` // the answer of this connection is in a snapshot
}

// ServeQueries answers queries of snapshots at the socket in the state folder until ctx ends. Run must be running. processes returns the processes
// whose mapped files are in answers; nil means none.
func (w *Watcher) ServeQueries(ctx context.Context, state string, processes func() []int) error {
	dir, err := os.Open(state)
	if err != nil {
		return fmt.Errorf("answer queries for changed folders: %w", err)
	}
	defer dir.Close()                                  //nolint:errcheck // only a handle
	workspace, err := filepath.EvalSymlinks(w.cfg.Dir) // as the kernel names mapped files
	if err != nil {
		return fmt.Errorf("answer queries for changed folders: %w", err)
	}
	own := filepath.Join(state, SocketName)
	if err := os.Remove(own); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("answer queries for changed folders: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socketPath(dir), Net: "unix"})
	if err != nil {
		return fmt.Errorf("answer queries for changed folders: %w", err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(own, 0o600); err != nil {
		return errors.Join(fmt.Errorf("answer queries for changed folders: %w", err), l.Close())
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // Accept returns the error
	defer stop()
	var all sync.WaitGroup
	slots := make(chan struct{}, maxQueries)
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			all.Wait()
			if err == nil {
				_ = c.Close()
			}
			if err := os.Remove(own); err != nil && !errors.Is(err, fs.ErrNotExist) {
				w.cfg.Log.Warn("the socket of changes stays", "err", err)
			}
			return nil
		}
		if err != nil {
			all.Wait()
			return errors.Join(fmt.Errorf("answer queries for changed folders: %w", err), l.Close())
		}
		select {
		case slots <- struct{}{}:
		default:
			_ = c.Close() // its snapshot looks at all files
			continue
		}
		all.Go(func() {
			defer func() { <-slots }()
			end := context.AfterFunc(ctx, func() { _ = c.Close() }) // reads return the error
			defer end()
			w.answerSnapshot(ctx, c, func() []string {
				if processes == nil {
					return nil
				}
				return mappedFiles(workspace, processes())
			})
			_ = c.Close()
		})
	}
}

// socketPath returns a path of the socket in the folder dir that is short enough for the system, however long the path of the folder is.
func socketPath(dir *os.File) string {
	return "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + SocketName //nolint:gosec // a descriptor
}

// answerSnapshot answers the requests of one snapshot over a connection. If the connection ends without a confirmation, the next snapshot gets the
// same changes.
func (w *Watcher) answerSnapshot(ctx context.Context, c net.Conn, mapped func() []string) {
	token := ""
	defer func() { w.tracker.returnAnswer(token) }()
	lines := bufio.NewScanner(c)
	lines.Buffer(nil, maxRequestBytes)
	for lines.Scan() {
		var r queryRequest
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return
		}
		var out changeAnswerJSON
		switch {
		case r.Since != nil:
			w.awaitTracked(ctx)
			w.tracker.returnAnswer(token)
			out.ChangeAnswer = w.tracker.takeAnswer(*r.Since)
			token = out.Token
			out.Files = pathBytes(mapped())
		case r.Again:
			w.awaitTracked(ctx)
			out.ChangeAnswer = w.tracker.peekAnswer()
		case r.Confirm:
			if err := w.tracker.confirmAnswer(token); err != nil {
				out.Error = err.Error()
			}
		}
		for _, f := range out.Folders {
			if f.Deep {
				out.Deep = append(out.Deep, []byte(f.Path))
			} else {
				out.Shallow = append(out.Shallow, []byte(f.Path))
			}
		}
		raw, err := json.Marshal(out)
		if err == nil {
			err = c.SetWriteDeadline(time.Now().Add(queryTimeout))
		}
		if err == nil {
			_, err = c.Write(append(raw, '\n'))
		}
		if err != nil {
			w.cfg.Log.Debug("a snapshot did not take the answer", "err", err)
			return
		}
	}
}

// pathBytes converts paths to bytes, which JSON encodes without loss.
func pathBytes(list []string) [][]byte {
	out := make([][]byte, len(list))
	for i, s := range list {
		out[i] = []byte(s)
	}
	return out
}

// awaitTracked blocks until the changeTracker has recorded all changes that happened before the call. If that takes longer than flushTimeout,
// awaitTracked records that everything may have changed.
func (w *Watcher) awaitTracked(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, flushTimeout)
	defer cancel()
	done := make(chan struct{})
	select {
	case w.syncs <- done:
		select {
		case <-done:
			return
		case <-ctx.Done():
		}
	case <-ctx.Done():
	}
	w.tracker.markAll("the watcher did not answer in time")
}

// ChangeQuery is the query of a snapshot to the watcher, with the answer and the open connection. It is not safe for concurrent use.
type ChangeQuery struct {
	ChangeAnswer
	c     net.Conn
	lines *bufio.Reader
}

// QueryChanges asks the watcher that serves in the state folder which folders may have changed since the answer with the token since. The caller
// calls Confirm once the snapshot with these changes is stored, and Close in any case. An error means that no watcher answers, so that anything may
// have changed.
func QueryChanges(ctx context.Context, state, since string) (*ChangeQuery, error) {
	dir, err := os.Open(state)
	if err != nil {
		return nil, fmt.Errorf("query the watcher for changed folders: %w", err)
	}
	defer dir.Close() //nolint:errcheck // only a handle
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", socketPath(dir))
	if err != nil {
		return nil, fmt.Errorf("query the watcher for changed folders: %w", err)
	}
	q := &ChangeQuery{c: c, lines: bufio.NewReader(io.LimitReader(c, maxAnswersBytes))}
	if q.ChangeAnswer, err = q.sendRequest(queryRequest{Since: &since}); err != nil {
		return nil, errors.Join(fmt.Errorf("query the watcher for changed folders: %w", err), c.Close())
	}
	return q, nil
}

// sendRequest sends a request to the watcher and returns the answer.
func (q *ChangeQuery) sendRequest(r queryRequest) (ChangeAnswer, error) {
	raw, err := json.Marshal(r)
	if err == nil {
		err = q.c.SetDeadline(time.Now().Add(queryTimeout))
	}
	if err == nil {
		_, err = q.c.Write(append(raw, '\n'))
	}
	var line []byte
	if err == nil {
		line, err = q.lines.ReadBytes('\n')
	}
	var in changeAnswerJSON
	if err == nil {
		err = json.Unmarshal(line, &in)
	}
	if err == nil && in.Error != "" {
		err = errors.New(in.Error)
	}
	if err != nil {
		return ChangeAnswer{}, err
	}
	for _, p := range in.Shallow {
		in.Folders = append(in.Folders, ChangedFolder{string(p), false})
	}
	for _, p := range in.Deep {
		in.Folders = append(in.Folders, ChangedFolder{string(p), true})
	}
	for _, p := range in.Files {
		in.Mapped = append(in.Mapped, string(p))
	}
	return in.ChangeAnswer, nil
}

// QueryAgain returns the folders that have changed since the answer of QueryChanges. The next snapshot gets these changes too.
func (q *ChangeQuery) QueryAgain() (ChangeAnswer, error) {
	return q.sendRequest(queryRequest{Again: true})
}

// Confirm informs the watcher that a stored snapshot contains all changes of the answer, so that later answers leave them out.
func (q *ChangeQuery) Confirm() error {
	_, err := q.sendRequest(queryRequest{Confirm: true})
	return err
}

// Close closes the connection to the watcher. Without Confirm, the next answer has the same changes again.
func (q *ChangeQuery) Close() {
	if q != nil {
		_ = q.c.Close() // nothing is buffered
	}
}
