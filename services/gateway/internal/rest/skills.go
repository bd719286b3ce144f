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
	skillsPath    = "/api/skills"
	archiveSuffix = "/archive"
	typeZIP       = "application/zip"
)

// skillHandler returns the handler of a skill route whose body is not JSON, or nil for other routes.
func (h *Handler) skillHandler(r *http.Request) func(*statusRecorder, *http.Request) error {
	if r.URL.Path == skillsPath && r.Method == http.MethodPost {
		return h.pushSkill
	}
	rest, below := strings.CutPrefix(r.URL.Path, skillsPath+"/")
	slug, archive := strings.CutSuffix(rest, archiveSuffix)
	if !below || !archive || strings.Contains(slug, "/") {
		return nil
	}
	return func(w *statusRecorder, r *http.Request) error { return h.getArchive(w, r, slug) }
}

// pushSkill stores the request body, a ZIP, as a version of a skill.
func (h *Handler) pushSkill(w *statusRecorder, r *http.Request) error {
	w.route = skillsPath
	if err := allow(w, r); err != nil {
		return err
	}
	q, err := queryParametersExcept(r, "tag", "slug", "scope", "org", "tag", "dryRun", "sha256")
	if err != nil {
		return err
	}
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != typeZIP {
		return problem.Invalid("Content-Type", "a skill must be a ZIP, with Content-Type %s", typeZIP)
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
	if err := admissionOf(r).Take(admission.TransferCost); err != nil {
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
	_ = control.SetWriteDeadline(time.Now().Add(stallTimeout)) // a test's recorder has no connection
	writeJSON(w, status, out)
	return nil
}

// getArchive writes the ZIP of a skill's version.
func (h *Handler) getArchive(w *statusRecorder, r *http.Request, slug string) error {
	w.route = skillsPath + "/{slug}" + archiveSuffix
	if !slices.Contains([]string{http.MethodGet, http.MethodHead}, r.Method) {
		return notAllowed(r)
	}
	if err := allow(w, r); err != nil {
		return err
	}
	q, err := queryParameters(r, "scope", "org", "version", "minPosition")
	if err != nil {
		return err
	}
	ref := events.Reference{Scope: events.ReferenceScope(q.Get("scope")), Org: q.Get("org"), Slug: slug, Version: q.Get("version")}
	a, err := h.cfg.API.Archive(r.Context(), ref, q.Get("minPosition"))
	if err != nil {
		return err
	}
	if err := admissionOf(r).Take(min(a.Size, admission.TransferCost)); err != nil {
		return err
	}
	content := &contentSeeker{ctx: r.Context(), open: func(ctx context.Context) (io.ReadCloser, error) { return h.cfg.API.OpenArchive(ctx, a) }, size: a.Size}
	defer content.Close()
	// The first bytes are read before the header is sent, to find out whether the content is available.
	first := make([]byte, min(a.Size, 512))
	if _, err := io.ReadFull(content, first); err != nil {
		return err
	}
	h.setDownloadHeaders(w, typeZIP, a.Slug+".zip")
	w.Header().Set("ETag", `"`+a.Digest+`"`)
	if strings.Contains(r.Header.Get("Range"), ",") {
		r.Header.Del("Range") // each of several ranges would read the content from its start
	}
	content.rewind(first)
	http.ServeContent(h.pacedResponse(w), r, "", time.Time{}, content)
	if content.err != nil && r.Context().Err() == nil {
		h.abort(r, content.err)
	}
	return nil
}
