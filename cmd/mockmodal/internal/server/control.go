package server

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
)

// controlAPI is the HTTP API by which tests control the server.
func (s *Server) controlAPI() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /latency", func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			OneWayMs float64 `json:"oneWayMs"`
		}
		if decode(w, r, &body) {
			s.port.setLatency(time.Duration(body.OneWayMs * float64(time.Millisecond)))
			reply(w, nil)
		}
	})
	mux.HandleFunc("POST /faults", func(w http.ResponseWriter, r *http.Request) {
		var body fault
		if decode(w, r, &body) {
			reply(w, s.calls.addFault(body))
		}
	})
	mux.HandleFunc("DELETE /faults", func(w http.ResponseWriter, _ *http.Request) {
		s.calls.mu.Lock()
		defer s.calls.mu.Unlock()
		s.calls.faults = nil
		reply(w, nil)
	})
	mux.HandleFunc("POST /outage", func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			On bool `json:"on"`
		}
		if !decode(w, r, &body) {
			return
		}
		if body.On {
			s.port.turnOff()
			reply(w, nil)
			return
		}
		reply(w, s.port.turnOn())
	})
	mux.HandleFunc("POST /sandboxes/{sandbox}/end", s.endByControl)
	mux.HandleFunc("GET /sandboxes", func(w http.ResponseWriter, _ *http.Request) { replyJSON(w, s.describe()) })
	mux.HandleFunc("GET /calls", func(w http.ResponseWriter, _ *http.Request) {
		s.calls.mu.Lock()
		counts := maps.Clone(s.calls.counts)
		s.calls.mu.Unlock()
		replyJSON(w, counts)
	})
	mux.HandleFunc("GET /violations", func(w http.ResponseWriter, _ *http.Request) {
		s.calls.mu.Lock()
		violations := append([]violation{}, s.calls.violations...)
		s.calls.mu.Unlock()
		replyJSON(w, violations)
	})
	return mux
}

// decode decodes the body of a request. If it is invalid, decode answers with 400 and returns false.
func decode(w http.ResponseWriter, r *http.Request, body any) bool {
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}

// reply answers with 204, or with 400 and the error.
func reply(w http.ResponseWriter, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// replyJSON answers with a value as JSON.
func replyJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(marshal(value)) // a client that is gone needs no answer
}

// endResults maps the values of "how" in a request of the control API to end a sandbox to the result that clients then
// get for the sandbox.
var endResults = map[string]*pb.GenericResult{"preempted": preemptedResult, "timeout": timeoutResult, "oom": outOfMemoryResult}

// endByControl ends the running sandbox with the id or name in the path, in the way that the body names.
func (s *Server) endByControl(w http.ResponseWriter, r *http.Request) {
	var body struct {
		How string `json:"how"`
	}
	if !decode(w, r, &body) {
		return
	}
	result := endResults[body.How]
	if result == nil {
		reply(w, fmt.Errorf("how must be one of %q", slices.Sorted(maps.Keys(endResults))))
		return
	}
	asked := r.PathValue("sandbox")
	s.mu.Lock()
	var found *sandbox
	for _, sb := range s.sandboxes {
		if sb.isRunning() && (sb.id == asked || sb.name == asked) {
			found = sb
		}
	}
	s.mu.Unlock()
	if found == nil {
		http.Error(w, "no sandbox of that id or name runs", http.StatusNotFound)
		return
	}
	s.end(found, result)
	reply(w, nil)
}

// description is the JSON form of a sandbox in the control API.
type description struct {
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	App       string            `json:"app"`
	Tags      map[string]string `json:"tags"`
	State     string            `json:"state"`  // starting, running or ended
	Result    string            `json:"result"` // of one that has ended
	Created   time.Time         `json:"created"`
	Image     string            `json:"image"`
	Network   networkState      `json:"network"`
	Resources resourceState     `json:"resources"`
	Regions   []string          `json:"regions"`
	Timeout   uint32            `json:"timeoutSeconds"`
	Execs     int               `json:"execs"`
}

// networkState is the JSON form of a sandbox's network policy in the control API.
type networkState struct {
	Type    string   `json:"type"` // OPEN, BLOCKED or ALLOWLIST
	CIDRs   []string `json:"cidrs"`
	Domains []string `json:"domains"`
}

// resourceState holds the resources that a sandbox requested and its limits.
type resourceState struct {
	MilliCPU    uint32 `json:"milliCPU"`
	MilliCPUMax uint32 `json:"milliCPUMax"`
	MemoryMB    uint32 `json:"memoryMB"`
	MemoryMBMax uint32 `json:"memoryMBMax"`
}

// describe returns the descriptions of all sandboxes, oldest first.
func (s *Server) describe() []description {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := []description{}
	for _, sb := range s.sandboxes {
		state := sb.state()
		sb.mu.Lock()
		d := sb.definition
		item := description{
			ID: sb.id, Name: sb.name, App: sb.app.name, Tags: sb.tags, State: state,
			Created: time.UnixMicro(int64(sb.created * 1e6)).UTC(), Image: sb.image.id, Execs: len(sb.execs),
			Network: networkState{sb.network.GetNetworkAccessType().String(), sb.network.GetAllowedCidrs(), sb.network.GetAllowedDomains()},
			Regions: d.GetSchedulerPlacement().GetRegions(), Timeout: d.GetTimeoutSecs(),
			Resources: resourceState{
				MilliCPU: d.GetResources().GetMilliCpu(), MilliCPUMax: d.GetResources().GetMilliCpuMax(),
				MemoryMB: d.GetResources().GetMemoryMb(), MemoryMBMax: d.GetResources().GetMemoryMbMax(),
			},
		}
		if sb.result != nil {
			item.Result = sb.result.GetStatus().String()
		}
		sb.mu.Unlock()
		list = append(list, item)
	}
	return list
}
