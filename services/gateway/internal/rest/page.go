package rest

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// isPagePath reports whether a path may belong to the inspector: whether it is no route of the gateway. A path with a
// segment api is none, so that a client that uses a wrong path prefix gets an error instead of a page.
func isPagePath(path string) bool {
	segments := strings.Split(strings.TrimPrefix(path, "/"), "/")
	return !isGatewayRoute(segments[0]) && !slices.Contains(segments, "api")
}

// isGatewayRoute reports whether paths with this first segment are routes of the gateway.
func isGatewayRoute(segment string) bool {
	switch segment {
	case "api", "health", "healthz", "readyz", "metrics":
		return true
	}
	return false
}

// servePage serves the inspector, which needs no key: it has no data, and signs in to the API.
func (h *Handler) servePage(w *statusRecorder, r *http.Request) error {
	w.route = pageRoute
	if h.cfg.Page == nil {
		return problem.New(problem.NotFound, "", "this gateway does not serve the inspector, because --no-web (SPOOL_NO_WEB) is set; /api/openapi.json lists the routes of the API")
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		return methodNotAllowed(r)
	}
	if r.URL.Path == h.cfg.PathPrefix && r.URL.Path != "" {
		// The page's URL ends with a slash, as the path of its cookie does.
		to := url.URL{Path: h.cfg.PathPrefix + "/", RawQuery: r.URL.RawQuery}
		http.Redirect(w, r, to.String(), http.StatusTemporaryRedirect)
		return nil
	}
	file := h.cfg.Page.Find(r.URL.Path)
	if file == nil {
		return routeNotFound(r)
	}
	file.ServeHTTP(h.pacedResponse(w), r)
	return nil
}
