package proxy

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spoolhq/spool/services/executor/internal/egress/meter"
	"github.com/spoolhq/spool/services/executor/internal/egress/modelbody"
)

// Kind is whose protocol a route speaks.
type Kind string

// The kinds.
const (
	Anthropic Kind = "anthropic"
	OpenAI    Kind = "openai"
	Plain     Kind = "" // not metered
)

// Route leads from the first path element of a sandbox's request to a host that
// the operator named. Its address may be private, unlike those that sandboxes name.
type Route struct {
	Name   string
	Kind   Kind
	Base   *url.URL // without /v1 for Anthropic, with it for OpenAI
	Header string   // that the credential goes into; "" for none
	Scheme string   // before the credential: Bearer; "" for none
	Secret string   // the credential; "" when there is none
	Unset  string   // what the operator has to set, where the route cannot serve without a credential and has none; "" otherwise
	All    bool     // serves every path, not only those by which models are called
}

// credentials are the headers by which a sandbox could name itself to a host;
// none of them passes a route.
var credentials = []string{"Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "Cookie", "Proxy-Authorization"}

// authorize takes the sandbox's credentials off and puts the real one in.
func (rt *Route) authorize(h http.Header, u *url.URL) {
	for _, name := range credentials {
		h.Del(name)
	}
	if q := u.Query(); q.Has("key") || q.Has("api_key") || q.Has("api-key") {
		q.Del("key")
		q.Del("api_key")
		q.Del("api-key")
		u.RawQuery = q.Encode()
	}
	if rt.Header == "" {
		return
	}
	h.Del(rt.Header)
	switch {
	case rt.Secret == "":
	case rt.Scheme != "":
		h.Set(rt.Header, rt.Scheme+" "+rt.Secret)
	default:
		h.Set(rt.Header, rt.Secret)
	}
}

// target is where a request to path goes. Escapes stay as they are.
func (rt *Route) target(in *url.URL) *url.URL {
	out := *rt.Base
	cut := len("/" + rt.Name)
	out.Path = strings.TrimSuffix(rt.Base.Path, "/") + in.Path[cut:]
	out.RawPath = ""
	if in.RawPath != "" { // the name has nothing to escape, so both begin alike
		out.RawPath = strings.TrimSuffix(rt.Base.EscapedPath(), "/") + in.EscapedPath()[cut:]
	}
	out.RawQuery = in.RawQuery
	return &out
}

// inference are the paths by which models are called, below a base URL. The
// credential opens more than them, of other sandboxes' too: files, batches,
// stored answers.
var inference = map[Kind]map[string][]string{
	Anthropic: {
		http.MethodPost: {"/v1/messages", "/v1/messages/count_tokens"},
		http.MethodGet:  {"", "/", "/v1/models", "/v1/models/*"},
	},
	OpenAI: {
		http.MethodPost: {"/chat/completions", "/completions", "/embeddings", "/responses", "/responses/compact", "/responses/input_tokens"},
		http.MethodGet:  {"", "/", "/models", "/models/*"},
	},
}

// serves tells whether a request below the route's name is one that the route passes on.
func (rt *Route) serves(method, path string) bool {
	if rt.All || rt.Kind == Plain {
		return true
	}
	if method == http.MethodHead {
		method = http.MethodGet
	}
	return slices.ContainsFunc(inference[rt.Kind][method], func(p string) bool {
		if below, ok := strings.CutSuffix(p, "*"); ok {
			return len(path) > len(below) && strings.HasPrefix(path, below)
		}
		return path == p
	})
}

// protocol is what the bodies of the route's requests are written in.
func (rt *Route) protocol() modelbody.Protocol {
	if rt.Kind == Anthropic {
		return modelbody.Anthropic
	}
	return modelbody.OpenAI
}

// checks reports whether the body of a request is read before it is sent on. With All, what lies at other paths than
// those by which models are called passes unread, as the operator wants.
func (rt *Route) checks(method, path string) bool {
	if rt.Kind == Plain || method != http.MethodPost {
		return false
	}
	var elements []string // a server may take a path with empty elements for the one without
	for _, e := range strings.Split(strings.ToLower(path), "/") {
		if e != "" {
			elements = append(elements, e)
		}
	}
	path = "/" + strings.Join(elements, "/")
	return slices.Contains(inference[rt.Kind][method], path) || meter.DialectOf(path) != meter.None
}

// dialect is how the answer to a request tells its usage; none for what is no call of a model.
func (rt *Route) dialect(method, path string) meter.Dialect {
	if rt.Kind == Plain || method != http.MethodPost {
		return meter.None
	}
	return meter.DialectOf(path)
}

// split takes a path apart into the route's name and the rest, which is "" or begins with a slash.
func split(path string) (name, rest string) {
	name = strings.TrimPrefix(path, "/")
	if i := strings.IndexByte(name, '/'); i >= 0 {
		return name[:i], name[i:]
	}
	return name, ""
}

// climbs tells whether a path has an element that a server could take to lead upward.
func climbs(path string) bool {
	return slices.ContainsFunc(strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '\\' }), func(e string) bool {
		e, _, _ = strings.Cut(e, ";")
		return e == "." || e == ".."
	})
}
