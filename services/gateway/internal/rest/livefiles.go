package rest

import (
	"bytes"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// paramLive is the query parameter that selects files of the running sandbox instead of the last snapshot.
const paramLive = "live"

// wantsLiveFiles reports whether the query parameter live is set. It returns INVALID_REQUEST for an invalid value, or if
// minPosition is set too.
func wantsLiveFiles(q url.Values) (bool, error) {
	switch v := q.Get(paramLive); {
	case !q.Has(paramLive) || v == "0" || v == "false":
		return false, nil
	case v != "1" && v != "true":
		return false, problem.Invalid(paramLive, "%+q is neither 1 nor 0", truncate.Text(v, 100))
	}
	if q.Has("minPosition") {
		return false, problem.Invalid("minPosition", "a live read is newer than any position; leave minPosition out")
	}
	return true, nil
}

// listLiveFiles lists the entries below a folder of the running sandbox.
func (h *Handler) listLiveFiles(w *statusRecorder, r *http.Request, session, dir string) error {
	if wantsTar(r) {
		return problem.Invalid(paramLive, "a tar can only be made from the last snapshot: leave live out, or list the files")
	}
	if err := admissionOf(r).ReserveBytes(admission.FileTransferCost); err != nil {
		return err
	}
	at := time.Now().UTC()
	list, err := h.cfg.API.ListLiveFiles(r.Context(), session, dir)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(map[string]any{"live": true, "snapshot": "", "at": at, "files": list})
	if err != nil {
		return err
	}
	w.Header().Add("Vary", "Accept")
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		_, err = h.pacedResponse(w).Write(append(raw, '\n'))
		h.abortResponse(r, err)
	}
	return nil
}

// getLiveFile returns a file's content from the running sandbox.
func (h *Handler) getLiveFile(w *statusRecorder, r *http.Request, session, file string) error {
	if err := admissionOf(r).ReserveBytes(admission.FileTransferCost); err != nil {
		return err
	}
	content, size, err := h.cfg.API.OpenLiveFile(r.Context(), session, file)
	if err != nil {
		return err
	}
	defer content.Close() //nolint:errcheck // it was read to its end, or the connection was aborted
	kind := mime.TypeByExtension(path.Ext(file))
	first := make([]byte, min(size, 512))
	if _, err := io.ReadFull(content, first); err != nil {
		return problem.New(problem.Unavailable, "", "the transfer of the file was interrupted; try again").WithCause(err)
	}
	if kind == "" {
		kind = http.DetectContentType(first)
	}
	h.setDownloadHeaders(w, kind, path.Base(file))
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return nil
	}
	_, err = io.Copy(h.pacedResponse(w), io.MultiReader(bytes.NewReader(first), content))
	h.abortResponse(r, err)
	return nil
}
