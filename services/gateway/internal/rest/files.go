package rest

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	filesSuffix = "/files"
	typeTar     = "application/x-tar"
	// stall bounds how long the client may be silent during a file transfer.
	stall = 30 * time.Second
	// minRate is the lowest average speed of a file transfer, in bytes per second.
	minRate = 16 << 10
)

// filesOf parses the path of a file route. has reports whether the path names a file; ok reports whether it is a file
// route.
func filesOf(urlPath string) (session, file string, has, ok bool) {
	rest, ok := strings.CutPrefix(urlPath, streamPrefix)
	if !ok {
		return "", "", false, false
	}
	session, rest, _ = strings.Cut(rest, "/")
	switch {
	case "/"+rest == filesSuffix:
		return session, "", false, true
	case strings.HasPrefix("/"+rest, filesSuffix+"/"):
		return session, rest[len(filesSuffix):], true, true
	}
	return "", "", false, false
}

// files serves the workspace's files: reads from snapshots or the sandbox, and changes.
func (h *Handler) files(w *answer, r *http.Request, session, file string, has bool) error {
	w.route = streamPrefix + "{session_id}" + filesSuffix
	serve := map[string]func() error{
		http.MethodGet: func() error { return h.listFiles(w, r, session) }, http.MethodHead: func() error { return h.listFiles(w, r, session) },
		http.MethodPut: func() error { return h.putTar(w, r, session) },
	}
	if has {
		w.route += "/{path}"
		get := func() error { return h.getFile(w, r, session, file) }
		serve = map[string]func() error{
			http.MethodGet: get, http.MethodHead: get,
			http.MethodPut:    func() error { return h.putFile(w, r, session, file) },
			http.MethodDelete: func() error { return h.removeFile(w, r, session, file) },
		}
	}
	do := serve[r.Method]
	if do == nil {
		return notAllowed(r)
	}
	if err := allow(w, r); err != nil {
		return err
	}
	return do()
}

// paramAt is the parameter that selects the event at which files are read.
const paramAt = "at"

// requestedVersion returns which version of the files is requested: live, after an event, or, without either, the last snapshot.
func requestedVersion(q url.Values) (live bool, at *uint32, err error) {
	if live, err = isLive(q); err != nil || !q.Has(paramAt) {
		return live, nil, err
	}
	if live {
		return live, nil, problem.Invalid(paramAt, "at and live exclude each other")
	}
	n, err := wirejson.ParseCursor(paramAt, q.Get(paramAt))
	return false, &n, fieldProblem(err)
}

// queryParameters returns the query parameters, or an error if one is unknown or repeated.
func queryParameters(r *http.Request, known ...string) (url.Values, error) {
	return queryParametersExcept(r, "", known...)
}

// queryParametersExcept is like queryParameters, but the parameter many may be repeated.
func queryParametersExcept(r *http.Request, many string, known ...string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, problem.Invalid("", "the query of the URL is not valid")
	}
	for name, values := range q {
		switch {
		case !slices.Contains(known, name):
			return nil, problem.Invalid(truncate.Valid(name, 100), "there is no such parameter; there are %s", strings.Join(known, ", "))
		case len(values) > 1 && name != many:
			return nil, problem.Invalid(name, "the parameter is given more than once")
		}
	}
	return q, nil
}

// putFile uploads a file.
func (h *Handler) putFile(w *answer, r *http.Request, session, file string) error {
	q, err := queryParameters(r, "mode")
	if err != nil {
		return err
	}
	f := api.FileSource{Path: file}
	if m := q.Get("mode"); m != "" {
		n, err := strconv.ParseUint(m, 8, 32)
		if err != nil || n == 0 || n > 0o777 {
			return problem.Invalid("mode", "%+q is not a valid mode: write it in octal, such as 644 or 755", truncate.Text(m, 100))
		}
		f.Mode = uint32(n)
	}
	return h.put(w, r, session, f)
}

// putTar uploads an archive.
func (h *Handler) putTar(w *answer, r *http.Request, session string) error {
	q, err := queryParameters(r, "dir")
	if err != nil {
		return err
	}
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != typeTar {
		return problem.Invalid("Content-Type", "many files come as one tar, with Content-Type %s; one file goes to /api/sessions/{id}/files/{path}", typeTar)
	}
	return h.put(w, r, session, api.FileSource{Path: q.Get("dir"), Archive: true})
}

func (h *Handler) put(w *answer, r *http.Request, session string, f api.FileSource) error {
	if err := heldBy(r).Take(admission.TransferCost); err != nil {
		return err
	}
	control := http.NewResponseController(w)
	in := &pacedBody{pace: pace{patience: h.cfg.ReadTimeout}, from: r.Body, control: control}
	f.Body, f.Length, f.Limit = in, r.ContentLength, h.cfg.MaxFile
	accepted, err := h.cfg.API.PutFile(r.Context(), session, f)
	if err := in.outcome(r, err); err != nil {
		return err
	}
	_ = control.SetWriteDeadline(time.Now().Add(stall)) // a test's recorder has no connection
	writeJSON(w, http.StatusAccepted, accepted)
	return nil
}

// pace bounds how long the gateway waits for a client during a file transfer: at most stall for one read or write,
// and in total patience plus the time that the bytes take at minRate.
type pace struct {
	patience time.Duration
	moved    int64 // bytes
	waited   time.Duration
}

// deadline returns the deadline of a wait that begins now.
func (p *pace) deadline(now time.Time) time.Time {
	return now.Add(min(stall, p.patience+time.Duration(p.moved)*time.Second/minRate-p.waited))
}

// add counts the bytes that were moved during a wait.
func (p *pace) add(n int, waited time.Duration) {
	p.moved += int64(n)
	p.waited += waited
}

// pacedBody is a body with a minimum speed.
type pacedBody struct {
	pace
	from    io.Reader
	control *http.ResponseController
	err     error // why the body ended early
}

func (b *pacedBody) Read(p []byte) (int, error) {
	began := time.Now()
	_ = b.control.SetReadDeadline(b.deadline(began)) // a test's recorder has no connection
	n, err := b.from.Read(p)
	b.add(n, time.Since(began))
	if err != nil {
		_ = b.control.SetReadDeadline(time.Time{})
		if !errors.Is(err, io.EOF) {
			b.err = err
		}
	}
	return n, err
}

// outcome returns the error of the body, or else the error with which it was refused. It reads the rest of a refused
// body if that is not too large: the connection of a client that is still sending would be reset, and the client
// would lose the answer. Of a body of unknown length only a part is read. A client that waits for 100 Continue sends
// nothing.
func (b *pacedBody) outcome(r *http.Request, refused error) error {
	switch {
	case b.err != nil:
		return b.problem()
	case refused == nil:
		return nil
	}
	rest := int64(maxDrain)
	if r.ContentLength < 0 {
		rest = maxBody
	}
	if sends := b.moved > 0 || r.Header.Get("Expect") == ""; sends && r.ContentLength <= rest {
		_, _ = io.CopyN(io.Discard, b, rest)
	}
	return refused
}

// problem returns the problem for a body that ended early.
func (b *pacedBody) problem() error {
	return problem.Invalid("", "the body is incomplete: it ended early, no data arrived for %s, or it arrived slower than %d bytes per second", stall, minRate).Because(b.err)
}

func (h *Handler) removeFile(w *answer, r *http.Request, session, file string) error {
	if _, err := queryParameters(r); err != nil {
		return err
	}
	position, err := h.cfg.API.RemoveFile(r.Context(), session, file)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusAccepted, map[string]string{"position": position})
	return nil
}

// listFiles lists the entries below a folder, or returns them as a tar.
func (h *Handler) listFiles(w *answer, r *http.Request, session string) error {
	q, err := queryParameters(r, "dir", "minPosition", paramLive, paramAt)
	if err != nil {
		return err
	}
	live, at, err := requestedVersion(q)
	if err != nil {
		return err
	}
	if live {
		return h.listLive(w, r, session, q.Get("dir"))
	}
	ws, err := h.cfg.API.WorkspaceAt(r.Context(), session, q.Get("minPosition"), at)
	if err != nil {
		return err
	}
	list, err := ws.Below(q.Get("dir"))
	if err != nil {
		return err
	}
	if err := heldBy(r).Take(admission.TransferCost); err != nil {
		return err
	}
	w.Header().Add("Vary", "Accept")
	out := h.pacedResponse(w)
	if wantsTar(r) {
		h.secure(w, typeTar, session+".tar")
		w.WriteHeader(http.StatusOK)
		if r.Method == http.MethodHead {
			return nil
		}
		h.abort(r, h.cfg.API.Tar(r.Context(), ws, q.Get("dir"), out))
		return nil
	}
	var by map[string]string
	if at == nil { // the rows contain only the last change
		if by, err = h.cfg.API.Reads.FileChanges(r.Context(), ws.Tenant, session); err != nil {
			return err
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		buffered := bufio.NewWriterSize(out, 64<<10)
		h.abort(r, errors.Join(writeListing(buffered, ws, list, by), buffered.Flush()))
	}
	return nil
}

// abort aborts the connection if a response cannot be completed, so that the client does not take it for complete.
func (h *Handler) abort(r *http.Request, err error) {
	if err == nil {
		return
	}
	if r.Context().Err() == nil {
		h.cfg.Logger.Warn("file response aborted", "path", r.URL.Path, "error", err)
	}
	panic(http.ErrAbortHandler)
}

func wantsTar(r *http.Request) bool {
	for _, accept := range r.Header.Values("Accept") {
		for one := range strings.SplitSeq(accept, ",") {
			if media, _, err := mime.ParseMediaType(one); err == nil && media == typeTar {
				return true
			}
		}
	}
	return false
}

// fileEntry is an entry in the API's JSON form.
type fileEntry struct {
	Path        string     `json:"path"`
	PathBase64  []byte     `json:"pathBase64,omitempty"` // bytes of a path that is not UTF-8
	Kind        string     `json:"kind"`                 // file, dir, symlink
	Size        int64      `json:"size"`                 // bytes
	Mode        uint32     `json:"mode"`
	ModTime     *time.Time `json:"modTime,omitempty"`
	SHA256      string     `json:"sha256,omitempty"` // for files of up to 1 MiB
	ETag        string     `json:"etag,omitempty"`   // for all files
	Target      string     `json:"target,omitempty"`
	ExecutionID string     `json:"executionId,omitempty"` // the execution that changed it last
}

// writeListing writes entries one by one, because there may be a hundred thousand.
func writeListing(w io.Writer, ws api.Workspace, list []workspace.Entry, by map[string]string) error {
	head, err := json.Marshal(map[string]any{"snapshot": ws.Snapshot, "at": ws.At})
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, `%s,"files":[`, head[:len(head)-1]); err != nil {
		return err
	}
	for i, e := range list {
		line, err := json.Marshal(newFileEntry(e, by))
		if err != nil {
			return err
		}
		if i > 0 {
			line = append([]byte{','}, line...)
		}
		if _, err := w.Write(line); err != nil {
			return err
		}
	}
	_, err = io.WriteString(w, "]}\n")
	return err
}

func newFileEntry(e workspace.Entry, by map[string]string) fileEntry {
	l := fileEntry{Path: e.Path, Kind: string(e.Kind), Size: e.Size, Mode: e.Mode, Target: strings.ToValidUTF8(e.Target, "\uFFFD"), ExecutionID: by[e.Path]}
	if !utf8.ValidString(e.Path) {
		l.Path, l.PathBase64 = strings.ToValidUTF8(e.Path, "\uFFFD"), []byte(e.Path)
	}
	if !e.ModTime.IsZero() {
		l.ModTime = &e.ModTime
	}
	if e.Kind == workspace.File {
		l.ETag = etag(e)
		if len(e.Blocks) <= 1 {
			l.SHA256 = l.ETag
		}
	}
	return l
}

// etag returns the SHA-256 of a file's content if the snapshot has it, which is the case for files of one block, and
// otherwise a hash of the hashes of its blocks.
func etag(e workspace.Entry) string {
	if len(e.Blocks) == 1 {
		return e.Blocks[0].String()
	}
	h := sha256.New()
	for _, b := range e.Blocks {
		h.Write(b[:])
	}
	sum := hex.EncodeToString(h.Sum(nil))
	if len(e.Blocks) == 0 {
		return sum
	}
	return "b-" + sum
}

// getFile returns a file's content. Its headers prevent browsers from displaying the file in the API's origin.
func (h *Handler) getFile(w *answer, r *http.Request, session, file string) error {
	q, err := queryParameters(r, "minPosition", paramLive, paramAt)
	if err != nil {
		return err
	}
	live, at, err := requestedVersion(q)
	if err != nil {
		return err
	}
	if live {
		return h.getLive(w, r, session, file)
	}
	ws, err := h.cfg.API.WorkspaceAt(r.Context(), session, q.Get("minPosition"), at)
	if err != nil {
		return err
	}
	e, err := ws.Find(file)
	if err != nil {
		return err
	}
	if err := heldBy(r).Take(min(e.Size, admission.TransferCost)); err != nil {
		return err
	}
	content := &seeker{ctx: r.Context(), open: func(ctx context.Context) (io.ReadCloser, error) { return h.cfg.API.Open(ctx, ws, file) }, size: e.Size}
	defer content.Close()
	kind := mime.TypeByExtension(path.Ext(file))
	// The first bytes are read before the header is sent: they determine the type, and show whether the content is
	// available.
	first := make([]byte, min(e.Size, 512))
	if _, err := io.ReadFull(content, first); err != nil {
		return err
	}
	if kind == "" {
		kind = http.DetectContentType(first)
	}
	h.secure(w, kind, path.Base(file))
	w.Header().Set("ETag", `"`+etag(e)+`"`)
	if strings.Contains(r.Header.Get("Range"), ",") {
		r.Header.Del("Range") // each of several ranges would read the file from its start
	}
	content.rewind(first)
	out := h.pacedResponse(w)
	http.ServeContent(out, r, "", e.ModTime, content)
	if content.err != nil && r.Context().Err() == nil {
		h.abort(r, content.err)
	}
	return nil
}

// secure sets headers that prevent content of an agent from being executed in the API's origin.
func (h *Handler) secure(w http.ResponseWriter, kind, name string) {
	head := w.Header()
	head.Set("Content-Type", kind)
	head.Set("Content-Disposition", disposition(name))
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	head.Set("Cache-Control", "private, no-cache")
}

// disposition returns a Content-Disposition for an attachment, with an encoded name if it has characters beyond ASCII
// (RFC 6266).
func disposition(name string) string {
	plain := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || r == '"' || r == '\\' {
			return '_'
		}
		return r
	}, name)
	s := `attachment; filename="` + plain + `"`
	if plain != name {
		s += "; filename*=UTF-8''" + url.PathEscape(name)
	}
	return s
}

// pacedResponse is a response that the client must read at a minimum speed.
type pacedResponse struct {
	pace
	*answer
	control *http.ResponseController
}

func (h *Handler) pacedResponse(w *answer) *pacedResponse {
	return &pacedResponse{pace: pace{patience: h.cfg.ReadTimeout}, answer: w, control: http.NewResponseController(w)}
}

func (p *pacedResponse) Write(b []byte) (int, error) {
	began := time.Now()
	_ = p.control.SetWriteDeadline(p.deadline(began)) // a test's recorder has no connection
	n, err := p.answer.Write(b)
	p.add(n, time.Since(began))
	return n, err
}

// seeker implements io.ReadSeeker for content that can only be read from its beginning.
type seeker struct {
	ctx   context.Context
	open  func(context.Context) (io.ReadCloser, error)
	size  int64
	at    int64 // offset of the next read
	from  io.ReadCloser
	read  int64  // offset of from
	first []byte // the first bytes, kept in memory
	err   error
}

// rewind sets the offset to 0; first are the first bytes of the content.
func (s *seeker) rewind(first []byte) { s.first, s.at = first, 0 }

// Seek implements io.Seeker.
func (s *seeker) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += s.at
	case io.SeekEnd:
		offset += s.size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	s.at = offset
	return offset, nil
}

// Read implements io.Reader.
func (s *seeker) Read(p []byte) (int, error) {
	if s.at < int64(len(s.first)) {
		n := copy(p, s.first[s.at:])
		s.at += int64(n)
		return n, nil
	}
	if err := s.reach(); err != nil {
		s.err = err
		return 0, err
	}
	n, err := s.from.Read(p)
	s.at += int64(n)
	s.read = s.at
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// reach opens or skips content up to the offset of the next read.
func (s *seeker) reach() (err error) {
	if s.from != nil && s.read > s.at {
		s.Close()
	}
	if s.from == nil {
		if s.from, err = s.open(s.ctx); err != nil {
			return err
		}
	}
	if _, err = io.CopyN(io.Discard, s.from, s.at-s.read); err != nil {
		return fmt.Errorf("read up to byte %d: %w", s.at, err)
	}
	s.read = s.at
	return nil
}

// Close closes the open content.
func (s *seeker) Close() {
	if s.from != nil {
		_ = s.from.Close() // its content was only read
		s.from, s.read = nil, 0
	}
}
