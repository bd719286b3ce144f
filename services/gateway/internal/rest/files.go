package rest

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
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
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	filesSuffix    = "/files"
	contentTypeTar = "application/x-tar"
)

// parseFilesPath parses the path of a request for workspace files. hasFile reports whether the path names a file; ok
// reports whether it is such a path at all.
func parseFilesPath(urlPath string) (session, file string, hasFile, ok bool) {
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

// serveFiles serves requests for workspace files: reads from a snapshot or the running sandbox, and changes.
func (h *Handler) serveFiles(w *statusRecorder, r *http.Request, session, file string, hasFile bool) error {
	w.route = streamPrefix + "{session_id}" + filesSuffix
	serve := map[string]func() error{
		http.MethodGet: func() error { return h.listFiles(w, r, session) }, http.MethodHead: func() error { return h.listFiles(w, r, session) },
		http.MethodPut: func() error { return h.putTar(w, r, session) },
	}
	if hasFile {
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
		return methodNotAllowed(r)
	}
	if err := checkAllowed(w, r); err != nil {
		return err
	}
	return do()
}

// paramAt is the query parameter that selects the event after which files are read.
const paramAt = "at"

// requestedVersion returns from where a request reads files: from the running sandbox (live), from the snapshot after
// the event at, or, without either, from the last snapshot.
func requestedVersion(q url.Values) (live bool, at *uint32, err error) {
	if live, err = wantsLiveFiles(q); err != nil || !q.Has(paramAt) {
		return live, nil, err
	}
	if live {
		return live, nil, problem.Invalid(paramAt, "at and live exclude each other")
	}
	n, err := wirejson.ParseCursor(paramAt, q.Get(paramAt))
	return false, &n, fieldProblem(err)
}

// putFile stores the request body as a file of the workspace, and answers with the result.
func (h *Handler) putFile(w *statusRecorder, r *http.Request, session, file string) error {
	q, err := queryParameters(r, "mode")
	if err != nil {
		return err
	}
	f := api.FileUpload{Path: file}
	if m := q.Get("mode"); m != "" {
		n, err := strconv.ParseUint(m, 8, 32)
		if err != nil || n == 0 || n > 0o777 {
			return problem.Invalid("mode", "%+q is not a valid mode: write it in octal, such as 644 or 755", truncate.Text(m, 100))
		}
		f.Mode = uint32(n)
	}
	return h.uploadFile(w, r, session, f)
}

// putTar unpacks the request body, a tar archive, into the workspace.
func (h *Handler) putTar(w *statusRecorder, r *http.Request, session string) error {
	q, err := queryParameters(r, "dir")
	if err != nil {
		return err
	}
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != contentTypeTar {
		return problem.Invalid("Content-Type", "send several files as one tar, with Content-Type %s; send one file to /api/sessions/{id}/files/{path}", contentTypeTar)
	}
	return h.uploadFile(w, r, session, api.FileUpload{Path: q.Get("dir"), Archive: true})
}

// uploadFile stores the request body as the file f of a workspace. It refuses a client that sends more slowly than
// minTransferRate.
func (h *Handler) uploadFile(w *statusRecorder, r *http.Request, session string, f api.FileUpload) error {
	if err := admissionOf(r).ReserveBytes(admission.FileTransferCost); err != nil {
		return err
	}
	control := http.NewResponseController(w)
	in := &minRateBody{transferLimit: transferLimit{allowance: h.cfg.ReadTimeout}, from: r.Body, control: control}
	f.Body, f.Length, f.Limit = in, r.ContentLength, h.cfg.MaxFile
	accepted, err := h.cfg.API.PutFile(r.Context(), session, f)
	if err := in.bodyError(r, err); err != nil {
		return err
	}
	_ = control.SetWriteDeadline(time.Now().Add(transferStallTimeout)) // a test's recorder has no connection
	writeJSON(w, http.StatusAccepted, accepted)
	return nil
}

// removeFile removes a file or a folder from the workspace.
func (h *Handler) removeFile(w *statusRecorder, r *http.Request, session, file string) error {
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
func (h *Handler) listFiles(w *statusRecorder, r *http.Request, session string) error {
	q, err := queryParameters(r, "dir", "minPosition", paramLive, paramAt)
	if err != nil {
		return err
	}
	live, at, err := requestedVersion(q)
	if err != nil {
		return err
	}
	if live {
		return h.listLiveFiles(w, r, session, q.Get("dir"))
	}
	ws, err := h.cfg.API.WorkspaceAt(r.Context(), session, q.Get("minPosition"), at)
	if err != nil {
		return err
	}
	list, err := ws.EntriesBelow(q.Get("dir"))
	if err != nil {
		return err
	}
	if err := admissionOf(r).ReserveBytes(admission.FileTransferCost); err != nil {
		return err
	}
	w.Header().Add("Vary", "Accept")
	out := h.pacedResponse(w)
	if wantsTar(r) {
		h.setDownloadHeaders(w, contentTypeTar, session+".tar")
		w.WriteHeader(http.StatusOK)
		if r.Method == http.MethodHead {
			return nil
		}
		h.abortResponse(r, h.cfg.API.WriteTar(r.Context(), ws, q.Get("dir"), out))
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
		h.abortResponse(r, errors.Join(writeListing(buffered, ws, list, by), buffered.Flush()))
	}
	return nil
}

// abortResponse closes the connection if err is the reason why a response cannot be completed, so that the client
// does not treat the response as complete.
func (h *Handler) abortResponse(r *http.Request, err error) {
	if err == nil {
		return
	}
	if r.Context().Err() == nil {
		h.cfg.Logger.Warn("file response aborted", "path", r.URL.Path, "error", err)
	}
	panic(http.ErrAbortHandler)
}

// wantsTar reports whether the client accepts a tar archive instead of a JSON list.
func wantsTar(r *http.Request) bool {
	for _, accept := range r.Header.Values("Accept") {
		for one := range strings.SplitSeq(accept, ",") {
			if media, _, err := mime.ParseMediaType(one); err == nil && media == contentTypeTar {
				return true
			}
		}
	}
	return false
}

// fileEntry is the JSON form of a workspace entry in the API.
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

// writeListing writes workspace entries as JSON. changedBy has the execution that changed a file last, by the path of
// the file. writeListing encodes and writes each entry separately, because a workspace may have a hundred thousand of
// them.
func writeListing(w io.Writer, ws api.WorkspaceSnapshot, list []workspace.Entry, changedBy map[string]string) error {
	head, err := json.Marshal(map[string]any{"snapshot": ws.Snapshot, "at": ws.At})
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, `%s,"files":[`, head[:len(head)-1]); err != nil {
		return err
	}
	for i, e := range list {
		line, err := json.Marshal(newFileEntry(e, changedBy))
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

// newFileEntry returns the JSON form of a workspace entry. changedBy has the execution that changed a file last, by
// the path of the file.
func newFileEntry(e workspace.Entry, changedBy map[string]string) fileEntry {
	l := fileEntry{Path: e.Path, Kind: string(e.Kind), Size: e.Size, Mode: e.Mode, Target: strings.ToValidUTF8(e.Target, "\uFFFD"), ExecutionID: changedBy[e.Path]}
	if !utf8.ValidString(e.Path) {
		l.Path, l.PathBase64 = strings.ToValidUTF8(e.Path, "\uFFFD"), []byte(e.Path)
	}
	if !e.ModTime.IsZero() {
		l.ModTime = &e.ModTime
	}
	if e.Kind == workspace.KindFile {
		l.ETag = entryETag(e)
		if len(e.Blocks) <= 1 {
			l.SHA256 = l.ETag
		}
	}
	return l
}

// entryETag returns the ETag of a workspace file: the SHA-256 of its content if the snapshot has it, which is the
// case for files of one block, and otherwise a hash of the hashes of its blocks.
func entryETag(e workspace.Entry) string {
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
