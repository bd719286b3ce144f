package server

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

// Request is a request that the server has seen.
type Request struct {
	N       int             `json:"n"` // 1, 2, 3… in order of arrival
	Time    time.Time       `json:"time"`
	Method  string          `json:"method"`
	URL     string          `json:"url"` // path and query
	Header  http.Header     `json:"header"`
	API     API             `json:"api,omitempty"`
	Model   string          `json:"model,omitempty"`
	Stream  bool            `json:"stream,omitempty"`
	Rule    string          `json:"rule,omitempty"` // the rule that answered
	Outcome string          `json:"outcome"`        // open, complete, broken, interrupted (by the client), or error and the status
	Body    json.RawMessage `json:"body,omitempty"`
}

// records keeps the newest requests that the server has received, up to a number and a total size.
type records struct {
	mu       sync.Mutex
	max      int
	maxBytes int64
	bytes    int64
	count    int
	all      []*Request
}

// record is the entry of one request in records, while the request is being answered.
type record struct {
	in  *records
	req *Request
}

// begin records a new request, whose outcome is open. Keys in its headers are redacted.
func (rs *records) begin(r *http.Request, now time.Time) *record {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.count++
	header := r.Header.Clone()
	// Every user of this machine can read the list, so it must not contain keys.
	for _, name := range []string{"Authorization", "X-Api-Key"} {
		if header.Get(name) != "" {
			header.Set(name, "redacted")
		}
	}
	req := &Request{N: rs.count, Time: now, Method: r.Method, URL: r.URL.RequestURI(), Header: header, Outcome: "open"}
	rs.all = append(rs.all, req)
	rs.trim()
	return &record{in: rs, req: req}
}

// trim drops the oldest requests beyond the limits. The caller must hold mu.
func (rs *records) trim() {
	for len(rs.all) > rs.max || len(rs.all) > 1 && rs.bytes > rs.maxBytes {
		rs.bytes -= int64(len(rs.all[0].Body))
		rs.all[0].Body = nil
		rs.all = rs.all[1:]
	}
}

// change calls f with the request while it holds the lock.
func (r *record) change(f func(*Request)) {
	r.in.mu.Lock()
	defer r.in.mu.Unlock()
	f(r.req)
}

// setBody stores the body if it is JSON.
func (r *record) setBody(b []byte) {
	r.change(func(req *Request) {
		if !json.Valid(b) {
			return
		}
		req.Body = b
		r.in.bytes += int64(len(b))
		r.in.trim()
	})
}

func (r *record) setConversation(c *Conversation) {
	r.change(func(req *Request) { req.API, req.Model, req.Stream = c.API, c.Model, c.Stream })
}

func (r *record) setRule(name string) { r.change(func(req *Request) { req.Rule = name }) }

// end stores the outcome of the request.
func (r *record) end(outcome string) { r.change(func(req *Request) { req.Outcome = outcome }) }

// Requests returns the newest requests, oldest first. Keys are redacted.
func (s *Server) Requests() []Request {
	s.records.mu.Lock()
	defer s.records.mu.Unlock()
	all := make([]Request, len(s.records.all))
	for i, r := range s.records.all {
		all[i] = *r
	}
	return all
}

func (s *Server) listRequests(w http.ResponseWriter, _ *http.Request) {
	s.write(w, http.StatusOK, s.Requests())
}
