package proxy

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// failure is an error that the proxy itself, and not an upstream server, returns to a sandbox.
type failure struct {
	status  int
	code    string // of events.EgressDenied, or one of those below
	message string
}

// Codes of failures that are not journaled as denials.
const (
	codeNoCredential       = "NO_CREDENTIAL"
	codeUpstream           = "UPSTREAM"
	codeTimeout            = "TIMEOUT"
	codeJournalFull        = "JOURNAL_FULL"
	codeTooManyConnections = "TOO_MANY_CONNECTIONS"
	codeMalformed          = "MALFORMED"
	codeBodiesFull         = "BODIES_FULL"
)

// errorTypeByStatus maps HTTP statuses to the error types that the APIs of Anthropic and OpenAI use for them.
var errorTypeByStatus = map[int]string{
	400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 407: "authentication_error",
	429: "rate_limit_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error",
}

// body returns the failure as JSON that the clients of Anthropic's and of OpenAI's API can read.
func (f failure) body() []byte {
	kind := errorTypeByStatus[f.status]
	if kind == "" {
		kind = "api_error"
	}
	raw, err := json.Marshal(map[string]any{
		"type":  "error",
		"error": map[string]any{"type": kind, "message": f.message, "param": nil, "code": f.code},
	})
	if err != nil {
		return []byte(`{"type":"error"}`) // strings always marshal
	}
	return append(raw, '\n')
}

// CodeHeader is an HTTP header that only the proxy's own answers have, not those of upstream servers. Its
// value is the code of the failure.
const CodeHeader = "Spool-Egress"

// write answers a request with the failure.
func (f failure) write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(f.body())))
	h.Set(CodeHeader, f.code)
	if f.status == http.StatusForbidden || f.status == http.StatusUnauthorized {
		h.Set("X-Should-Retry", "false") // the clients of both providers follow it
	}
	w.WriteHeader(f.status)
	w.Write(f.body()) //nolint:errcheck // the sandbox is gone
}

// httpResponse returns the failure as the bytes of a whole HTTP response, for a connection that no HTTP
// server serves.
func (f failure) httpResponse() []byte {
	b := f.body()
	return append([]byte("HTTP/1.1 "+strconv.Itoa(f.status)+" "+http.StatusText(f.status)+
		"\r\nContent-Type: application/json\r\nContent-Length: "+strconv.Itoa(len(b))+"\r\n"+CodeHeader+": "+f.code+"\r\nConnection: close\r\n\r\n"), b...)
}
