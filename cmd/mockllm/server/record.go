package server

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

// RecordedRequest is a request that the server has received, with its outcome, for tests that inspect it.
type RecordedRequest struct {
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

// requestLog keeps the newest requests that the server has received, up to a number and a total size.
type requestLog struct {
	mu       sync.Mutex
	max      int
	maxBytes int64
	bytes    int64
	count    int
	all      []*RecordedRequest
}

// requestRecord is the entry of one request in a requestLog. It is updated while the server answers the request.
type requestRecord struct {
	in  *requestLog
	req *RecordedRequest
}

// addRequest appends a request whose outcome is open to the log. Keys in the request's headers are redacted.
func (rs *requestLog) addRequest(r *http.Request, now time.Time) *requestRecord {
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
	req := &RecordedRequest{N: rs.count, Time: now, Method: r.Method, URL: r.URL.RequestURI(), Header: header, Outcome: "open"}
	rs.all = append(rs.all, req)
	rs.dropOldest()
	return &requestRecord{in: rs, req: req}
}

// dropOldest drops the oldest requests until the log is within its limits. The caller must hold mu.
func (rs *requestLog) dropOldest() {
	for len(rs.all) > rs.max || len(rs.all) > 1 && rs.bytes > rs.maxBytes {
		rs.bytes -= int64(len(rs.all[0].Body))
		rs.all[0].Body = nil
		rs.all = rs.all[1:]
	}
}

// updateRequest calls f with the recorded request while it holds the lock of the log.
func (r *requestRecord) updateRequest(f func(*RecordedRequest)) {
	r.in.mu.Lock()
	defer r.in.mu.Unlock()
	f(r.req)
}

// setBody stores the body of the request if it is valid JSON.
func (r *requestRecord) setBody(b []byte) {
	r.updateRequest(func(req *RecordedRequest) {
		if !json.Valid(b) {
			return
		}
		req.Body = b
		r.in.bytes += int64(len(b))
		r.in.dropOldest()
	})
}

func (r *requestRecord) setConversation(c *Conversation) {
	r.updateRequest(func(req *RecordedRequest) { req.API, req.Model, req.Stream = c.API, c.Model, c.Stream })
}

func (r *requestRecord) setRule(name string) {
	r.updateRequest(func(req *RecordedRequest) { req.Rule = name })
}

// setOutcome records how the server answered the request.
func (r *requestRecord) setOutcome(outcome string) {
	r.updateRequest(func(req *RecordedRequest) { req.Outcome = outcome })
}

// Requests returns the newest requests, oldest first. Keys are redacted.
func (s *Server) Requests() []RecordedRequest {
	s.records.mu.Lock()
	defer s.records.mu.Unlock()
	all := make([]RecordedRequest, len(s.records.all))
	for i, r := range s.records.all {
		all[i] = *r
	}
	return all
}

func (s *Server) handleListRequests(w http.ResponseWriter, _ *http.Request) {
	s.writeJSON(w, http.StatusOK, s.Requests())
}
