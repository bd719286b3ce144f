package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// stallTimeout is the time without progress after which a transfer fails.
const stallTimeout = time.Minute

// typeTar is the media type of a tar.
const typeTar = "application/x-tar"

// Files and transcripts are sent as raw bytes over REST only, so spool.proto does not describe their routes.

// File is an entry of a session's workspace: a file, a folder or a symbolic link.
type File struct {
	Path        string     `json:"path"`
	Kind        string     `json:"kind"` // file, dir or symlink
	Size        int64      `json:"size"` // bytes
	Mode        uint32     `json:"mode"`
	ModTime     *time.Time `json:"modTime"`
	Target      string     `json:"target"`
	ExecutionID string     `json:"executionId"`
}

// Listing is the response to a request for the entries below a folder of a workspace.
type Listing struct {
	Snapshot string      `json:"snapshot"`
	At       time.Time   `json:"at"`
	Files    []Doc[File] `json:"files"`
}

// Put is the response to an upload of files.
type Put struct {
	Position string `json:"position"`
	SHA256   string `json:"sha256"`
	Size     uint64 `json:"size"`
}

// AsOf selects the state of the files to read. The zero AsOf means the last snapshot.
type AsOf struct {
	Live bool    // the present state in the sandbox
	At   *uint32 // the last snapshot before the event with this seq; not with Live
}

// addTo adds the parameters to a query, which it returns.
func (a AsOf) addTo(q url.Values) url.Values {
	if a.Live {
		q.Set("live", "1")
	}
	if a.At != nil {
		q.Set("at", strconv.FormatUint(uint64(*a.At), 10))
	}
	return q
}

// Files lists the entries below a folder of a session's workspace; "" is the workspace.
func (c *Client) Files(ctx context.Context, session, dir string, as AsOf) (listing Listing, err error) {
	raw, err := c.do(ctx, call{method: http.MethodGet, path: filesPath(session), query: as.addTo(filter("dir", dir)), repeatable: true})
	if err != nil {
		return listing, err
	}
	return listing, c.decodeError(json.Unmarshal(raw, &listing))
}

// RemoveFile removes a file or a folder.
func (c *Client) RemoveFile(ctx context.Context, session, path string) (json.RawMessage, error) {
	return c.do(ctx, call{method: http.MethodDelete, path: filePath(session, path), repeatable: true})
}

func filesPath(session string) []string { return []string{"api", "sessions", session, "files"} }

// filePath returns the route of a file. Slashes in the file's path separate segments.
func filePath(session, path string) []string {
	return append(filesPath(session), strings.Split(path, "/")...)
}

// GetFile opens a file. size is -1 if the server does not send it.
func (c *Client) GetFile(ctx context.Context, session, path string, as AsOf) (content io.ReadCloser, size int64, err error) {
	r := call{method: http.MethodGet, path: filePath(session, path), query: as.addTo(url.Values{})}
	return c.download(ctx, r, "*/*")
}

// Tar opens a tar of the entries below a folder; "" is the workspace.
func (c *Client) Tar(ctx context.Context, session, dir string, as AsOf) (io.ReadCloser, error) {
	r, _, err := c.download(ctx, call{method: http.MethodGet, path: filesPath(session), query: as.addTo(filter("dir", dir))}, typeTar)
	return r, err
}

// PutFile uploads a file. mode is in octal; "" means the server's default. size is -1 if it is unknown.
func (c *Client) PutFile(ctx context.Context, session, path, mode string, content io.Reader, size int64) (Doc[Put], error) {
	return upload[Put](ctx, c, call{method: http.MethodPut, path: filePath(session, path), query: filter("mode", mode)}, "application/octet-stream", content, size)
}

// PutTar uploads a tar into a folder; "" is the workspace.
func (c *Client) PutTar(ctx context.Context, session, dir string, content io.Reader) (Doc[Put], error) {
	return upload[Put](ctx, c, call{method: http.MethodPut, path: filesPath(session), query: filter("dir", dir)}, typeTar, content, -1)
}

// Transcript is an uploaded transcript with which a session can start.
type Transcript struct {
	Transcript     string `json:"transcript"` // the reference for CreateSessionRequest
	Architecture   string `json:"architecture"`
	AgentSessionID string `json:"agentSessionId"`
	Messages       uint32 `json:"messages"`
}

// PutTranscript uploads a transcript of size bytes.
func (c *Client) PutTranscript(ctx context.Context, content io.Reader, size int64) (Doc[Transcript], error) {
	return upload[Transcript](ctx, c, call{method: http.MethodPost, path: []string{"api", "transcripts"}}, "application/octet-stream", content, size)
}

// transfer is a request whose body or response may take any time, as long as bytes arrive within stallTimeout.
type transfer struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
}

var errStalled = errors.New("no data was transferred for a minute")

func newTransfer(ctx context.Context) *transfer {
	t := &transfer{}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	t.timer = time.AfterFunc(stallTimeout, func() { t.cancel(errStalled) })
	return t
}

func (t *transfer) end() {
	t.timer.Stop()
	t.cancel(nil)
}

// progressReader restarts the timer of its transfer with each read.
type progressReader struct {
	io.Reader
	t *transfer
}

// Read implements io.Reader.
func (r progressReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.t.timer.Reset(stallTimeout)
	return n, err
}

// open sends a transfer's request and returns the response, or the error that the server returned.
func (c *Client) open(ctx context.Context, t *transfer, req *http.Request) (*http.Response, error) {
	resp, err := c.cfg.HTTP.Do(req) //nolint:bodyclose // the caller closes it
	if err != nil {
		if cause := context.Cause(t.ctx); ctx.Err() == nil && cause != nil {
			err = cause
		}
		return nil, c.unreachableError(ctx, err)
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, c.unreachableError(ctx, err)
	}
	return nil, c.responseError(resp, body)
}

func (c *Client) download(ctx context.Context, r call, accept string) (io.ReadCloser, int64, error) {
	t := newTransfer(ctx)
	req, err := c.request(t.ctx, r, nil)
	if err != nil {
		t.end()
		return nil, 0, err
	}
	req.Header.Set("Accept", accept)
	resp, err := c.open(ctx, t, req)
	if err != nil {
		t.end()
		return nil, 0, err
	}
	// Without this header the response is a page of another program.
	if disposition, _, err := mime.ParseMediaType(resp.Header.Get("Content-Disposition")); err != nil || disposition != "attachment" {
		t.end()
		_ = resp.Body.Close()
		return nil, 0, &Error{Status: resp.StatusCode, Detail: fmt.Sprintf("%s is not a Spool server (the response is not an attachment): pass --url", c.base)}
	}
	return &download{progressReader{resp.Body, t}, resp.Body, c, ctx}, resp.ContentLength, nil
}

// download is the body of a response, the content of a downloaded file or archive.
type download struct {
	progressReader
	body io.Closer
	c    *Client
	ctx  context.Context // the caller's
}

// Read implements io.Reader. A broken connection is an *UnreachableError.
func (d *download) Read(p []byte) (int, error) {
	n, err := d.progressReader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := context.Cause(d.t.ctx); d.ctx.Err() == nil && cause != nil {
			err = cause
		}
		err = d.c.unreachableError(d.ctx, err)
	}
	return n, err
}

// Close ends the transfer.
func (d *download) Close() error {
	d.t.end()
	return d.body.Close()
}

// upload sends content of a media type. size is -1 if it is unknown.
func upload[T any](ctx context.Context, c *Client, r call, media string, content io.Reader, size int64) (out Doc[T], err error) {
	t := newTransfer(ctx)
	defer t.end()
	req, err := c.request(t.ctx, r, io.NopCloser(progressReader{content, t}))
	if err != nil {
		return out, err
	}
	req.ContentLength = size
	if size == 0 {
		req.Body = http.NoBody
	}
	req.Header.Set("Content-Type", media)
	resp, err := c.open(ctx, t, req)
	if err != nil {
		return out, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return out, c.unreachableError(ctx, err)
	}
	return out, c.decodeError(out.UnmarshalJSON(body))
}
