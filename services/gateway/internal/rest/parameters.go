package rest

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// queryParameters returns the query parameters of a request, or an error if one is not in known or is repeated.
func queryParameters(r *http.Request, known ...string) (url.Values, error) {
	return queryParametersExcept(r, "", known...)
}

// queryParametersExcept is like queryParameters, but the parameter with the name repeatable may be repeated.
func queryParametersExcept(r *http.Request, repeatable string, known ...string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, problem.Invalid("", "the query of the URL is not valid")
	}
	for name, values := range q {
		switch {
		case !slices.Contains(known, name):
			return nil, problem.Invalid(truncate.ValidText(name, 100), "unknown parameter; must be one of %s", strings.Join(known, ", "))
		case len(values) > 1 && name != repeatable:
			return nil, problem.Invalid(name, "the parameter is given more than once")
		}
	}
	return q, nil
}
