package rest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

// prefixPattern matches a path prefix: one or more segments of characters that need no escape in a URL or a cookie.
var prefixPattern = regexp.MustCompile(`^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$`)

// ValidatePathPrefix returns an error unless s can be Config.PathPrefix. A prefix that begins with a route of the gateway
// would be ambiguous, because paths are served with and without the prefix.
func ValidatePathPrefix(s string) error {
	if s == "" {
		return nil
	}
	if len(s) > 200 || !prefixPattern.MatchString(s) {
		return fmt.Errorf("path-prefix: %.100q is not a path such as /spool: it begins with a slash and does not end with one, and its segments have letters, digits and -._~ and do not begin with a dot", s)
	}
	if first, _, _ := strings.Cut(s[1:], "/"); isGatewayRoute(first) {
		return fmt.Errorf("path-prefix: %.100q begins with a route of the gateway; choose another path", s)
	}
	return nil
}

// withoutPrefix returns the request without the path prefix. A request without the prefix is returned as it is: it comes
// from a proxy that removes the prefix, or from the gateway's own network.
func (h *Handler) withoutPrefix(r *http.Request) *http.Request {
	prefix := h.cfg.PathPrefix
	if prefix == "" || !strings.HasPrefix(r.URL.Path, prefix+"/") || r.URL.RawPath != "" && !strings.HasPrefix(r.URL.RawPath, prefix+"/") {
		return r
	}
	u := new(url.URL)
	*u = *r.URL
	u.Path, u.RawPath = strings.TrimPrefix(u.Path, prefix), strings.TrimPrefix(u.RawPath, prefix)
	out := new(http.Request)
	*out = *r
	out.URL = u
	return out
}

// openAPIDocument returns the OpenAPI document, whose server is the path prefix.
func openAPIDocument(prefix string) ([]byte, error) {
	if prefix == "" {
		return spoolv1.OpenAPI, nil
	}
	var doc map[string]json.RawMessage
	if err := json.Unmarshal(spoolv1.OpenAPI, &doc); err != nil {
		return nil, fmt.Errorf("OpenAPI document: %w", err)
	}
	servers, err := json.Marshal([]map[string]string{{"url": prefix}})
	if err != nil {
		return nil, fmt.Errorf("OpenAPI document: %w", err)
	}
	doc["servers"] = servers
	return json.Marshal(doc)
}
