package client

import (
	"context"
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

// stall bounds how long a transfer may stand still.
const stall = time.Minute

// typeTar is the media type of an archive.
const typeTar = "application/x-tar"

// File is an entry of a workspace's last snapshot.
type File struct {
	Path        string     `json:"path"`
	Kind        string     `json:"kind"` // file, dir or symlink
	Size        int64      `json:"size"` // bytes
	Mode        uint32     `json:"mode"`
	ModTime     *time.Time `json:"modTime"`
	Target      string     `json:"target"`
	ExecutionID string     `json:"executionId"`
}

// Listing is what lies below a folder.
type Listing struct {
	Snapshot string      `json:"snapshot"`
	At       time.Time   `json:"at"`
	Files    []Doc[File] `json:"files"`
}

// Put is the answer to a file that was stored.
type Put struct {
	Position string `json:"position"`
	SHA256   string `json:"sha256"`
	Size     uint64 `json:"size"`
}

// AsOf says as of when files are wanted; the zero AsOf is as the last snapshot has them.
type AsOf struct {
	Live bool    // as they are in the sandbox now
	At   *uint32 // as the last snapshot before this event has them; not with Live
}

func (a AsOf) into(q url.Values) url.Values {
	if a.Live {
		q.Set("live", "1")
	}
	if a.At != nil {
		q.Set("at", strconv.FormatUint(uint64(*a.At), 10))
	}
	return q
}

// Files lists what lies below a folder of a session's workspace, "" for all of it.
func (c *Client) Files(ctx context.Context, session, dir string, as AsOf) (Listing, error) {
	var out Listing
	q := as.into(filter("dir", dir))
	err := c.get(ctx, &out, q, "api", "sessions", session, "files")
	return out, err
}

// RemoveFile removes a file or a folder.
func (c *Client) RemoveFile(ctx context.Context, session, path string) (Doc[Accepted], error) {
	var out Doc[Accepted]
	err := c.do(ctx, call{method: http.MethodDelete, path: filePath(session, path), repeat: true}, &out)
	return out, err
}

// filePath is the route of a file; its slashes stay.
func filePath(session, path string) []string {
	return append([]string{"api", "sessions", session, "files"}, strings.Split(path, "/")...)
}

// GetFile opens a file; size is -1 where the server does not say.
func (c *Client) GetFile(ctx context.Context, session, path string, as AsOf) (content io.ReadCloser, size int64, err error) {
	r := call{method: http.MethodGet, path: filePath(session, path), query: as.into(url.Values{})}
	return c.download(ctx, r, "*/*")
}

// Tar opens an archive of all that lies below a folder; "" is all.
func (c *Client) Tar(ctx context.Context, session, dir string, as AsOf) (io.ReadCloser, error) {
	r, _, err := c.download(ctx, call{method: http.MethodGet, path: []string{"api", "sessions", session, "files"}, query: as.into(filter("dir", dir))}, typeTar)
	return r, err
}

// PutFile sends a file. mode is in octal, "" for the server's; size is -1 if it is not known.
func (c *Client) PutFile(ctx context.Context, session, path, mode string, content io.Reader, size int64) (Doc[Put], error) {
	return upload[Put](ctx, c, call{method: http.MethodPut, path: filePath(session, path), query: filter("mode", mode)}, "application/octet-stream", content, size)
}

// PutTar sends an archive, which goes into a folder; "" is the workspace.
func (c *Client) PutTar(ctx context.Context, session, dir string, content io.Reader) (Doc[Put], error) {
	return upload[Put](ctx, c, call{method: http.MethodPut, path: []string{"api", "sessions", session, "files"}, query: filter("dir", dir)}, typeTar, content, -1)
}

// Transcript is a transcript that a session can begin with.
type Transcript struct {
	Transcript     string `json:"transcript"` // the reference for a NewSession
	Architecture   string `json:"architecture"`
	AgentSessionID string `json:"agentSessionId"`
	Messages       uint32 `json:"messages"`
}

// PutTranscript sends a transcript.
func (c *Client) PutTranscript(ctx context.Context, content io.Reader, size int64) (Doc[Transcript], error) {
	return upload[Transcript](ctx, c, call{method: http.MethodPost, path: []string{"api", "transcripts"}}, "application/octet-stream", content, size)
}

// transfer is a request whose body, or answer, is as long as it likes, and must keep moving.
type transfer struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
}

var errStalled = errors.New("nothing moved for a minute")

func newTransfer(ctx context.Context) *transfer {
	t := &transfer{}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	t.timer = time.AfterFunc(stall, func() { t.cancel(errStalled) })
	return t
}

func (t *transfer) end() {
	t.timer.Stop()
	t.cancel(nil)
}

// moving is a reader that tells its transfer when something moves.
type moving struct {
	io.Reader
	t *transfer
}

func (m moving) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	m.t.timer.Reset(stall)
	return n, err
}

// request makes one of a transfer.
func (c *Client) request(t *transfer, r call, body io.Reader) (*http.Request, error) {
	u := c.base.JoinPath(escaped(r.path)...)
	u.RawQuery = r.query.Encode()
	req, err := http.NewRequestWithContext(t.ctx, r.method, u.String(), body)
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	req.Header = c.header()
	return req, nil
}

// open sends a transfer's request and gives an answer that is no refusal.
func (c *Client) open(ctx context.Context, t *transfer, req *http.Request) (*http.Response, error) {
	resp, err := c.cfg.HTTP.Do(req) //nolint:bodyclose // the caller closes it
	if err != nil {
		if cause := context.Cause(t.ctx); ctx.Err() == nil && cause != nil {
			err = cause
		}
		return nil, c.unreachable(ctx, err)
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, c.unreachable(ctx, err)
	}
	return nil, c.problem(resp, body)
}

func (c *Client) download(ctx context.Context, r call, accept string) (io.ReadCloser, int64, error) {
	t := newTransfer(ctx)
	req, err := c.request(t, r, nil)
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
	// What is not served as an attachment is another program's page.
	if how, _, err := mime.ParseMediaType(resp.Header.Get("Content-Disposition")); err != nil || how != "attachment" {
		t.end()
		_ = resp.Body.Close()
		return nil, 0, &Error{Status: resp.StatusCode, Detail: fmt.Sprintf("%s is not a Spool server (its answer is no attachment): pass --url", c.base)}
	}
	return &downloaded{moving{resp.Body, t}, resp.Body, t, c, ctx}, resp.ContentLength, nil
}

// downloaded is an answer on its way.
type downloaded struct {
	moving
	body io.Closer
	t    *transfer
	c    *Client
	ctx  context.Context
}

// Read reads; a connection that broke is told as such.
func (d *downloaded) Read(p []byte) (int, error) {
	n, err := d.moving.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := context.Cause(d.t.ctx); d.ctx.Err() == nil && cause != nil {
			err = cause
		}
		err = d.c.unreachable(d.ctx, err)
	}
	return n, err
}

// Close ends the transfer.
func (d *downloaded) Close() error {
	d.t.end()
	return d.body.Close()
}

func upload[T any](ctx context.Context, c *Client, r call, media string, content io.Reader, size int64) (out Doc[T], err error) {
	t := newTransfer(ctx)
	defer t.end()
	req, err := c.request(t, r, io.NopCloser(moving{content, t}))
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
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return out, c.unreachable(ctx, err)
	}
	if err := out.UnmarshalJSON(body); err != nil {
		return out, fmt.Errorf("%s answered what is not understood: %w", c.base, err)
	}
	return out, nil
}
