package proxy

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spoolhq/spool/services/executor/internal/egress/meter"
	"github.com/spoolhq/spool/services/executor/internal/egress/modelbody"
)

// RouteKind is the model provider's API that a route leads to.
type RouteKind string

// The kinds.
const (
	KindAnthropic RouteKind = "anthropic"
	KindOpenAI    RouteKind = "openai"
	KindPlain     RouteKind = "" // not metered
)

// Route maps the first element of the path of a sandbox's request to an upstream that the operator configured. The upstream's
// address may be private, unlike those of hosts that sandboxes name.
type Route struct {
	Name   string
	Kind   RouteKind
	Base   *url.URL // without /v1 for Anthropic, with it for OpenAI
	Header string   // of the credential; "" for none
	Scheme string   // before the credential: Bearer; "" for none
	Secret string   // the credential; "" when there is none
	Unset  string   // the answer if the route needs a credential and has none: what the operator has to set; "" otherwise
	All    bool     // serves every path, not only those by which models are called
}

// credentialHeaders are the headers in which clients send credentials. The proxy removes them from requests that it forwards
// through a route.
var credentialHeaders = []string{"Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "Cookie", "Proxy-Authorization"}

// accountHeaders are the headers by which a client chooses the organization, project or stored files of an account, in which the
// credential of a route is valid. The operator chooses these.
var accountHeaders = []string{
	"Openai-Organization", "Openai-Project", "Anthropic-Organization-Id", "Anthropic-Workspace-Id", "X-Goog-User-Project",
	"Nvcf-Input-Asset-References", "Nvcf-Function-Asset-Ids",
}

// removeHeaders removes the named headers. Some servers read an underscore in the name of a header as a hyphen, so removeHeaders
// removes these spellings too.
func removeHeaders(h http.Header, names ...[]string) {
	for name := range h {
		canonical := http.CanonicalHeaderKey(strings.ReplaceAll(name, "_", "-"))
		for _, list := range names {
			if slices.Contains(list, canonical) {
				delete(h, name)
			}
		}
	}
}

// replaceCredentials replaces the credentials in the headers h and the URL u of a request by the credential of the route. It also
// removes the headers by which the client would choose the account or another method.
func (rt *Route) replaceCredentials(h http.Header, u *url.URL) {
	removeHeaders(h, credentialHeaders, accountHeaders, overrideHeaders, []string{rt.Header})
	if q := u.Query(); q.Has("key") || q.Has("api_key") || q.Has("api-key") {
		q.Del("key")
		q.Del("api_key")
		q.Del("api-key")
		u.RawQuery = q.Encode()
	}
	if rt.Header == "" {
		return
	}
	switch {
	case rt.Secret == "":
	case rt.Scheme != "":
		h.Set(rt.Header, rt.Scheme+" "+rt.Secret)
	default:
		h.Set(rt.Header, rt.Secret)
	}
}

// targetURL returns the URL to which a request is forwarded. It keeps escapes in the path as they are.
func (rt *Route) targetURL(in *url.URL) *url.URL {
	out := *rt.Base
	cut := len("/" + rt.Name)
	out.Path = strings.TrimSuffix(rt.Base.Path, "/") + in.Path[cut:]
	out.RawPath = ""
	if in.RawPath != "" { // a route's name needs no escapes, so cut is right for both forms
		out.RawPath = strings.TrimSuffix(rt.Base.EscapedPath(), "/") + in.EscapedPath()[cut:]
	}
	out.RawQuery = in.RawQuery
	return &out
}

// allowedPaths are the methods and paths below a route's base URL that sandboxes may use. With the route's credential, other
// paths would reach files, batches and stored answers of other tenants.
var allowedPaths = map[RouteKind]map[string][]string{
	KindAnthropic: {
		http.MethodPost: {"/v1/messages", "/v1/messages/count_tokens"},
		http.MethodGet:  {"", "/", "/v1/models", "/v1/models/*"},
	},
	KindOpenAI: {
		http.MethodPost: {"/chat/completions", "/completions", "/embeddings", "/responses", "/responses/compact", "/responses/input_tokens"},
		http.MethodGet:  {"", "/", "/models", "/models/*"},
	},
}

// allowsRequest reports whether the route forwards a request with a method and a path.
func (rt *Route) allowsRequest(method, path string) bool {
	if rt.All || rt.Kind == KindPlain {
		return true
	}
	if method == http.MethodHead {
		method = http.MethodGet
	}
	return slices.ContainsFunc(allowedPaths[rt.Kind][method], func(p string) bool {
		if below, ok := strings.CutSuffix(p, "*"); ok {
			return len(path) > len(below) && strings.HasPrefix(path, below)
		}
		return path == p
	})
}

// bodyProtocol returns the modelbody.Protocol by which the bodies of the route's requests are checked.
func (rt *Route) bodyProtocol() modelbody.Protocol {
	if rt.Kind == KindAnthropic {
		return modelbody.ProtocolAnthropic
	}
	return modelbody.ProtocolOpenAI
}

// checksBody reports whether the proxy checks the body of a request before it forwards the request. A route with the field All
// forwards requests to paths other than those of model calls unchecked.
func (rt *Route) checksBody(method, path string) bool {
	if rt.Kind == KindPlain || method != http.MethodPost {
		return false
	}
	var elements []string // a server may ignore empty path elements
	for _, e := range strings.Split(strings.ToLower(path), "/") {
		if e != "" {
			elements = append(elements, e)
		}
	}
	path = "/" + strings.Join(elements, "/")
	return slices.Contains(allowedPaths[rt.Kind][method], path) || meter.DialectOf(path) != meter.DialectNone
}

// answerDialect returns the form in which the model provider's answer to a request reports usage, or meter.DialectNone if the
// request is not a model call.
func (rt *Route) answerDialect(method, path string) meter.Dialect {
	if rt.Kind == KindPlain || method != http.MethodPost {
		return meter.DialectNone
	}
	return meter.DialectOf(path)
}

// splitRouteName splits the path of a request into the name of the route and the rest, which is "" or begins with a slash.
func splitRouteName(path string) (name, rest string) {
	name = strings.TrimPrefix(path, "/")
	if i := strings.IndexByte(name, '/'); i >= 0 {
		return name[:i], name[i:]
	}
	return name, ""
}

// hasDotElement reports whether a path has an element that some server could read as "." or "..".
func hasDotElement(path string) bool {
	return slices.ContainsFunc(strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '\\' }), func(e string) bool {
		e, _, _ = strings.Cut(e, ";")
		return e == "." || e == ".."
	})
}
