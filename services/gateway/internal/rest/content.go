package rest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/spoolhq/spool/services/gateway/internal/admission"
)

// getFile sends the content of a workspace file. Its headers prevent browsers from displaying the file in the API's
// origin.
func (h *Handler) getFile(w *statusRecorder, r *http.Request, session, file string) error {
	q, err := queryParameters(r, "minPosition", paramLive, paramAt)
	if err != nil {
		return err
	}
	live, at, err := requestedVersion(q)
	if err != nil {
		return err
	}
	if live {
		return h.getLiveFile(w, r, session, file)
	}
	ws, err := h.cfg.API.WorkspaceAt(r.Context(), session, q.Get("minPosition"), at)
	if err != nil {
		return err
	}
	e, err := ws.FindFile(file)
	if err != nil {
		return err
	}
	if err := admissionOf(r).ReserveBytes(min(e.Size, admission.FileTransferCost)); err != nil {
		return err
	}
	content := &contentSeeker{ctx: r.Context(), open: func(ctx context.Context) (io.ReadCloser, error) { return h.cfg.API.OpenFile(ctx, ws, file) }, size: e.Size}
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
	h.setDownloadHeaders(w, kind, path.Base(file))
	w.Header().Set("ETag", `"`+entryETag(e)+`"`)
	if strings.Contains(r.Header.Get("Range"), ",") {
		r.Header.Del("Range") // each of several ranges would read the file from its start
	}
	content.rewind(first)
	out := h.pacedResponse(w)
	http.ServeContent(out, r, "", e.ModTime, content)
	if content.err != nil && r.Context().Err() == nil {
		h.abortResponse(r, content.err)
	}
	return nil
}

// setDownloadHeaders sets headers that prevent content of an agent from being executed in the API's origin.
func (h *Handler) setDownloadHeaders(w http.ResponseWriter, kind, name string) {
	head := w.Header()
	head.Set("Content-Type", kind)
	head.Set("Content-Disposition", contentDisposition(name))
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	head.Set("Cache-Control", "private, no-cache")
}

// contentDisposition returns a Content-Disposition for an attachment, with an encoded name if it has characters beyond ASCII
// (RFC 6266).
func contentDisposition(name string) string {
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

// contentSeeker implements io.ReadSeeker for content that can only be read from its beginning.
type contentSeeker struct {
	ctx    context.Context
	open   func(context.Context) (io.ReadCloser, error)
	size   int64
	offset int64 // offset of the next read
	from   io.ReadCloser
	read   int64  // offset of from
	first  []byte // the first bytes, kept in memory
	err    error
}

// rewind sets the offset of the next read to 0; first are the first bytes of the content, which were already read.
func (s *contentSeeker) rewind(first []byte) { s.first, s.offset = first, 0 }

// Seek implements io.Seeker.
func (s *contentSeeker) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += s.offset
	case io.SeekEnd:
		offset += s.size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	s.offset = offset
	return offset, nil
}

// Read implements io.Reader.
func (s *contentSeeker) Read(p []byte) (int, error) {
	if s.offset < int64(len(s.first)) {
		n := copy(p, s.first[s.offset:])
		s.offset += int64(n)
		return n, nil
	}
	if err := s.skipToOffset(); err != nil {
		s.err = err
		return 0, err
	}
	n, err := s.from.Read(p)
	s.offset += int64(n)
	s.read = s.offset
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// skipToOffset opens the content if needed, and discards bytes up to the offset of the next read.
func (s *contentSeeker) skipToOffset() (err error) {
	if s.from != nil && s.read > s.offset {
		s.Close()
	}
	if s.from == nil {
		if s.from, err = s.open(s.ctx); err != nil {
			return err
		}
	}
	if _, err = io.CopyN(io.Discard, s.from, s.offset-s.read); err != nil {
		return fmt.Errorf("read up to byte %d: %w", s.offset, err)
	}
	s.read = s.offset
	return nil
}

// Close closes the open content.
func (s *contentSeeker) Close() {
	if s.from != nil {
		_ = s.from.Close() // its content was only read
		s.from, s.read = nil, 0
	}
}
