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

// stallTimeout is the time after which an upload or a download fails if no data was transferred.
const stallTimeout = time.Minute

// tarMediaType is the media type of a tar archive.
const tarMediaType = "application/x-tar"

// Files and transcripts are sent as raw bytes over REST only, so spool.proto does not describe their routes.

// WorkspaceFile is an entry in a session's workspace: a file, a folder or a symbolic link.
type WorkspaceFile struct {
	Path        string     `json:"path"`
	Kind        string     `json:"kind"` // file, dir or symlink
	Size        int64      `json:"size"` // bytes
	Mode        uint32     `json:"mode"`
	ModTime     *time.Time `json:"modTime"`
	Target      string     `json:"target"`
	ExecutionID string     `json:"executionId"`
}

// FileListing is the response to a request for the entries of a workspace, or of one of its folders.
type FileListing struct {
	Snapshot string                     `json:"snapshot"`
	At       time.Time                  `json:"at"`
	Files    []APIObject[WorkspaceFile] `json:"files"`
}

// UploadResult is the response to an upload of files.
type UploadResult struct {
	Position string `json:"position"`
	SHA256   string `json:"sha256"`
	Size     uint64 `json:"size"`
}

// WorkspaceVersion selects the state of a workspace from which files are read. The zero value selects the last
// snapshot.
type WorkspaceVersion struct {
	Live bool    // the present state in the sandbox
	At   *uint32 // the last snapshot before the event with this seq; not with Live
}

// addParameters sets the query parameters that select the version, and returns the query.
func (a WorkspaceVersion) addParameters(q url.Values) url.Values {
	if a.Live {
		q.Set("live", "1")
	}
	if a.At != nil {
		q.Set("at", strconv.FormatUint(uint64(*a.At), 10))
	}
	return q
}

// ListFiles lists the entries below a folder of a session's workspace. An empty dir is the whole workspace.
func (c *Client) ListFiles(ctx context.Context, session, dir string, version WorkspaceVersion) (listing FileListing, err error) {
	raw, err := c.sendWithRetries(ctx, apiCall{method: http.MethodGet, path: filesRoute(session), query: version.addParameters(optionalParameter("dir", dir)), repeatable: true})
	if err != nil {
		return listing, err
	}
	return listing, c.wrapDecodeError(json.Unmarshal(raw, &listing))
}

// RemoveFile removes a file or a folder of a session's workspace.
func (c *Client) RemoveFile(ctx context.Context, session, path string) (json.RawMessage, error) {
	return c.sendWithRetries(ctx, apiCall{method: http.MethodDelete, path: fileRoute(session, path), repeatable: true})
}

// filesRoute returns the segments of the API path of a session's files.
func filesRoute(session string) []string { return []string{"api", "sessions", session, "files"} }

// fileRoute returns the segments of the API path of one file. Each element of the file's path is a segment.
func fileRoute(session, path string) []string {
	return append(filesRoute(session), strings.Split(path, "/")...)
}

// GetFile opens a file of a session's workspace for reading. size is -1 if the server does not send the size.
func (c *Client) GetFile(ctx context.Context, session, path string, version WorkspaceVersion) (content io.ReadCloser, size int64, err error) {
	r := apiCall{method: http.MethodGet, path: fileRoute(session, path), query: version.addParameters(url.Values{})}
	return c.startDownload(ctx, r, "*/*")
}

// GetTar opens a tar archive of the entries below a folder of a session's workspace. An empty dir is the whole
// workspace.
func (c *Client) GetTar(ctx context.Context, session, dir string, version WorkspaceVersion) (io.ReadCloser, error) {
	r, _, err := c.startDownload(ctx, apiCall{method: http.MethodGet, path: filesRoute(session), query: version.addParameters(optionalParameter("dir", dir))}, tarMediaType)
	return r, err
}

// PutFile uploads a file to a session's workspace. mode is in octal; "" means the server's default. size is -1 if the
// size is unknown.
func (c *Client) PutFile(ctx context.Context, session, path, mode string, content io.Reader, size int64) (APIObject[UploadResult], error) {
	return upload[UploadResult](ctx, c, apiCall{method: http.MethodPut, path: fileRoute(session, path), query: optionalParameter("mode", mode)}, "application/octet-stream", content, size)
}

// PutTar uploads a tar archive, whose entries the server extracts into a folder of a session's workspace. An empty dir
// is the workspace itself.
func (c *Client) PutTar(ctx context.Context, session, dir string, content io.Reader) (APIObject[UploadResult], error) {
	return upload[UploadResult](ctx, c, apiCall{method: http.MethodPut, path: filesRoute(session), query: optionalParameter("dir", dir)}, tarMediaType, content, -1)
}

// UploadedTranscript describes a transcript that was uploaded, from which a new session can continue.
type UploadedTranscript struct {
	Transcript     string `json:"transcript"` // the reference for CreateSessionRequest
	Architecture   string `json:"architecture"`
	AgentSessionID string `json:"agentSessionId"`
	Messages       uint32 `json:"messages"`
}

// PutTranscript uploads an agent's transcript of size bytes.
func (c *Client) PutTranscript(ctx context.Context, content io.Reader, size int64) (APIObject[UploadedTranscript], error) {
	return upload[UploadedTranscript](ctx, c, apiCall{method: http.MethodPost, path: []string{"api", "transcripts"}}, "application/octet-stream", content, size)
}

// transfer is an upload or a download. It may take any time, as long as data is transferred at least once within
// stallTimeout.
type transfer struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
}

// errStalled is returned when no data was transferred for stallTimeout.
var errStalled = errors.New("no data was transferred for a minute")

func newTransfer(ctx context.Context) *transfer {
	t := &transfer{}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	t.timer = time.AfterFunc(stallTimeout, func() { t.cancel(errStalled) })
	return t
}

// stop stops the timer of the transfer, and cancels its context.
func (t *transfer) stop() {
	t.timer.Stop()
	t.cancel(nil)
}

// progressReader is a reader that restarts the stall timer of its transfer with each read.
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

// sendTransfer sends the request of a transfer and returns the response. It returns an error if the status of the
// response is not a success.
func (c *Client) sendTransfer(ctx context.Context, t *transfer, req *http.Request) (*http.Response, error) {
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
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponseBytes))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, c.unreachableError(ctx, err)
	}
	return nil, c.responseError(resp, body)
}

// startDownload requests content that the server sends as an attachment. It returns the content and its size; the size
// is -1 if the server does not send it.
func (c *Client) startDownload(ctx context.Context, r apiCall, accept string) (io.ReadCloser, int64, error) {
	t := newTransfer(ctx)
	req, err := c.newRequest(t.ctx, r, nil)
	if err != nil {
		t.stop()
		return nil, 0, err
	}
	req.Header.Set("Accept", accept)
	resp, err := c.sendTransfer(ctx, t, req)
	if err != nil {
		t.stop()
		return nil, 0, err
	}
	// Without this header the response is a page of another program.
	if disposition, _, err := mime.ParseMediaType(resp.Header.Get("Content-Disposition")); err != nil || disposition != "attachment" {
		t.stop()
		_ = resp.Body.Close()
		return nil, 0, &Error{Status: resp.StatusCode, Detail: fmt.Sprintf("%s is not a Spool server (the response is not an attachment): pass --url", c.base)}
	}
	return &downloadBody{progressReader{resp.Body, t}, resp.Body, c, ctx}, resp.ContentLength, nil
}

// downloadBody is the content of a downloaded file or archive, which is read while it is received.
type downloadBody struct {
	progressReader
	body io.Closer
	c    *Client
	ctx  context.Context // the context of the caller
}

// Read implements io.Reader. It returns an *UnreachableError if the connection breaks.
func (d *downloadBody) Read(p []byte) (int, error) {
	n, err := d.progressReader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := context.Cause(d.t.ctx); d.ctx.Err() == nil && cause != nil {
			err = cause
		}
		err = d.c.unreachableError(d.ctx, err)
	}
	return n, err
}

// Close stops the download and closes the connection's body.
func (d *downloadBody) Close() error {
	d.t.stop()
	return d.body.Close()
}

// upload uploads content of a media type and returns the decoded response. size is -1 if the size is unknown.
func upload[T any](ctx context.Context, c *Client, r apiCall, media string, content io.Reader, size int64) (out APIObject[T], err error) {
	t := newTransfer(ctx)
	defer t.stop()
	req, err := c.newRequest(t.ctx, r, io.NopCloser(progressReader{content, t}))
	if err != nil {
		return out, err
	}
	req.ContentLength = size
	if size == 0 {
		req.Body = http.NoBody
	}
	req.Header.Set("Content-Type", media)
	resp, err := c.sendTransfer(ctx, t, req)
	if err != nil {
		return out, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponseBytes))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return out, c.unreachableError(ctx, err)
	}
	return out, c.wrapDecodeError(out.UnmarshalJSON(body))
}
