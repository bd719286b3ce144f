package rest

import (
	"net/http"
	"time"

	"github.com/spoolhq/spool/pkg/transcript"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
)

const transcriptsPath = "/api/transcripts"

// putTranscript stores the request body as a transcript, and answers with a reference to the transcript.
func (h *Handler) putTranscript(w *statusRecorder, r *http.Request) error {
	w.route = transcriptsPath
	if r.Method != http.MethodPost {
		return methodNotAllowed(r)
	}
	if err := checkAllowed(w, r); err != nil {
		return err
	}
	if _, err := queryParameters(r); err != nil {
		return err
	}
	if err := admissionOf(r).ReserveBytes(admission.FileTransferCost + transcript.MaxLineLength); err != nil {
		return err
	}
	control := http.NewResponseController(w)
	in := &minRateBody{transferLimit: transferLimit{allowance: h.cfg.ReadTimeout}, from: r.Body, control: control}
	out, err := h.cfg.API.PutTranscript(r.Context(), in, r.ContentLength, h.cfg.MaxTranscript)
	if err := in.bodyError(r, err); err != nil {
		return err
	}
	_ = control.SetWriteDeadline(time.Now().Add(transferStallTimeout)) // a test's recorder has no connection
	writeJSON(w, http.StatusCreated, out)
	return nil
}
