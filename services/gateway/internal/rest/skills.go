package rest

import (
	"context"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	skillsPath     = "/api/skills"
	archiveSuffix  = "/archive"
	contentTypeZIP = "application/zip"
)

// skillHandler returns the handler for the upload or download of a skill's ZIP, or nil for other routes.
func (h *Handler) skillHandler(r *http.Request) func(*statusRecorder, *http.Request) error {
	if r.URL.Path == skillsPath && r.Method == http.MethodPost {
		return h.pushSkill
	}
	rest, below := strings.CutPrefix(r.URL.Path, skillsPath+"/")
	slug, archive := strings.CutSuffix(rest, archiveSuffix)
	if !below || !archive || strings.Contains(slug, "/") {
		return nil
	}
	return func(w *statusRecorder, r *http.Request) error { return h.getSkillArchive(w, r, slug) }
}

// pushSkill stores the request body, a ZIP, as a version of a skill.
func (h *Handler) pushSkill(w *statusRecorder, r *http.Request) error {
	w.route = skillsPath
	if err := checkAllowed(w, r); err != nil {
		return err
	}
	q, err := queryParametersExcept(r, "tag", "slug", "scope", "org", "tag", "dryRun", "sha256")
	if err != nil {
		return err
	}
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != contentTypeZIP {
		return problem.Invalid("Content-Type", "a skill must be a ZIP, with Content-Type %s", contentTypeZIP)
	}
	from := api.SkillUpload{
		Ref: events.Reference{Scope: events.ReferenceScope(q.Get("scope")), Org: q.Get("org"), Slug: q.Get("slug")}, Tags: q["tag"], SHA256: q.Get("sha256"), Length: r.ContentLength,
	}
	switch dry := q.Get("dryRun"); dry {
	case "", "false":
	case "true":
		from.DryRun = true
	default:
		return problem.Invalid("dryRun", "must be true or false, not %+q", truncate.Text(dry, 100))
	}
	if err := admissionOf(r).ReserveBytes(admission.FileTransferCost); err != nil {
		return err
	}
	control := http.NewResponseController(w)
	in := &minRateBody{transferLimit: transferLimit{allowance: h.cfg.ReadTimeout}, from: r.Body, control: control}
	from.Body = in
	out, err := h.cfg.API.PushSkill(r.Context(), from)
	if err := in.bodyError(r, err); err != nil {
		return err
	}
	status := http.StatusCreated
	if out.Same || from.DryRun {
		status = http.StatusOK
	}
	_ = control.SetWriteDeadline(time.Now().Add(transferStallTimeout)) // a test's recorder has no connection
	writeJSON(w, status, out)
	return nil
}

// getSkillArchive sends the ZIP of a version of a skill.
func (h *Handler) getSkillArchive(w *statusRecorder, r *http.Request, slug string) error {
	w.route = skillsPath + "/{slug}" + archiveSuffix
	if !slices.Contains([]string{http.MethodGet, http.MethodHead}, r.Method) {
		return methodNotAllowed(r)
	}
	if err := checkAllowed(w, r); err != nil {
		return err
	}
	q, err := queryParameters(r, "scope", "org", "version", "minPosition")
	if err != nil {
		return err
	}
	ref := events.Reference{Scope: events.ReferenceScope(q.Get("scope")), Org: q.Get("org"), Slug: slug, Version: q.Get("version")}
	a, err := h.cfg.API.FindSkillArchive(r.Context(), ref, q.Get("minPosition"))
	if err != nil {
		return err
	}
	if err := admissionOf(r).ReserveBytes(min(a.Size, admission.FileTransferCost)); err != nil {
		return err
	}
	content := &contentSeeker{ctx: r.Context(), open: func(ctx context.Context) (io.ReadCloser, error) { return h.cfg.API.OpenSkillArchive(ctx, a) }, size: a.Size}
	defer content.Close()
	// The first bytes are read before the header is sent, to find out whether the content is available.
	first := make([]byte, min(a.Size, 512))
	if _, err := io.ReadFull(content, first); err != nil {
		return err
	}
	h.setDownloadHeaders(w, contentTypeZIP, a.Slug+".zip")
	w.Header().Set("ETag", `"`+a.Digest+`"`)
	if strings.Contains(r.Header.Get("Range"), ",") {
		r.Header.Del("Range") // each of several ranges would read the content from its start
	}
	content.rewind(first)
	http.ServeContent(h.pacedResponse(w), r, "", time.Time{}, content)
	if content.err != nil && r.Context().Err() == nil {
		h.abortResponse(r, content.err)
	}
	return nil
}
