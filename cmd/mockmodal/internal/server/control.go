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

// controlAPI returns the handler of the HTTP API with which tests control the server.
func (s *Server) controlAPI() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /latency", func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			OneWayMs float64 `json:"oneWayMs"`
		}
		if decodeBody(w, r, &body) {
			s.port.setLatency(time.Duration(body.OneWayMs * float64(time.Millisecond)))
			replyResult(w, nil)
		}
	})
	mux.HandleFunc("POST /faults", func(w http.ResponseWriter, r *http.Request) {
		var body injectedFault
		if decodeBody(w, r, &body) {
			replyResult(w, s.calls.addFault(body))
		}
	})
	mux.HandleFunc("DELETE /faults", func(w http.ResponseWriter, _ *http.Request) {
		s.calls.mu.Lock()
		defer s.calls.mu.Unlock()
		s.calls.faults = nil
		replyResult(w, nil)
	})
	mux.HandleFunc("POST /outage", func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			On bool `json:"on"`
		}
		if !decodeBody(w, r, &body) {
			return
		}
		if body.On {
			s.port.turnOff()
			replyResult(w, nil)
			return
		}
		replyResult(w, s.port.turnOn())
	})
	mux.HandleFunc("POST /sandboxes/{sandbox}/end", s.handleEndSandbox)
	mux.HandleFunc("GET /sandboxes", func(w http.ResponseWriter, _ *http.Request) { replyJSON(w, s.describeSandboxes()) })
	mux.HandleFunc("GET /calls", func(w http.ResponseWriter, _ *http.Request) {
		s.calls.mu.Lock()
		counts := maps.Clone(s.calls.counts)
		s.calls.mu.Unlock()
		replyJSON(w, counts)
	})
	mux.HandleFunc("GET /violations", func(w http.ResponseWriter, _ *http.Request) {
		s.calls.mu.Lock()
		violations := append([]apiViolation{}, s.calls.violations...)
		s.calls.mu.Unlock()
		replyJSON(w, violations)
	})
	return mux
}

// decodeBody decodes the JSON body of a request into body. If the JSON is invalid, decodeBody answers with 400 and
// returns false.
func decodeBody(w http.ResponseWriter, r *http.Request, body any) bool {
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}

// replyResult answers a request with 204 if err is nil, and otherwise with 400 and the error.
func replyResult(w http.ResponseWriter, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// replyJSON answers a request with a value as JSON.
func replyJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(mustMarshal(value)) // a client that is gone needs no answer
}

// controlEndResults maps the values of the field "how", with which a test ends a sandbox, to the result that clients
// then receive for the sandbox.
var controlEndResults = map[string]*pb.GenericResult{"preempted": preemptedResult, "timeout": timeoutResult, "oom": outOfMemoryResult}

// handleEndSandbox ends the running sandbox whose id or name is in the path of the request, as if Modal had ended it in
// the way that the body names.
func (s *Server) handleEndSandbox(w http.ResponseWriter, r *http.Request) {
	var body struct {
		How string `json:"how"`
	}
	if !decodeBody(w, r, &body) {
		return
	}
	result := controlEndResults[body.How]
	if result == nil {
		replyResult(w, fmt.Errorf("how must be one of %q", slices.Sorted(maps.Keys(controlEndResults))))
		return
	}
	idOrName := r.PathValue("sandbox")
	s.mu.Lock()
	var found *modalSandbox
	for _, sb := range s.sandboxes {
		if sb.isRunning() && (sb.id == idOrName || sb.name == idOrName) {
			found = sb
		}
	}
	s.mu.Unlock()
	if found == nil {
		http.Error(w, "no sandbox of that id or name runs", http.StatusNotFound)
		return
	}
	s.endSandbox(found, result)
	replyResult(w, nil)
}

// sandboxDescription is the JSON form of a sandbox in the control API.
type sandboxDescription struct {
	ID        string              `json:"id"`
	Name      string              `json:"name"`
	App       string              `json:"app"`
	Tags      map[string]string   `json:"tags"`
	State     string              `json:"state"`  // starting, running or ended
	Result    string              `json:"result"` // result of a sandbox that has ended
	Created   time.Time           `json:"created"`
	Image     string              `json:"image"`
	Network   networkDescription  `json:"network"`
	Resources resourceDescription `json:"resources"`
	Regions   []string            `json:"regions"`
	Timeout   uint32              `json:"timeoutSeconds"`
	Execs     int                 `json:"execs"`
}

// networkDescription is the JSON form of a sandbox's network policy in the control API.
type networkDescription struct {
	Type    string   `json:"type"` // OPEN, BLOCKED or ALLOWLIST
	CIDRs   []string `json:"cidrs"`
	Domains []string `json:"domains"`
}

// resourceDescription is the JSON form of the resources that a sandbox requested, and of its limits.
type resourceDescription struct {
	MilliCPU    uint32 `json:"milliCPU"`
	MilliCPUMax uint32 `json:"milliCPUMax"`
	MemoryMB    uint32 `json:"memoryMB"`
	MemoryMBMax uint32 `json:"memoryMBMax"`
}

// describeSandboxes returns the JSON descriptions of all sandboxes, oldest first.
func (s *Server) describeSandboxes() []sandboxDescription {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := []sandboxDescription{}
	for _, sb := range s.sandboxes {
		state := sb.stateName()
		sb.mu.Lock()
		d := sb.definition
		item := sandboxDescription{
			ID: sb.id, Name: sb.name, App: sb.app.name, Tags: sb.tags, State: state,
			Created: time.UnixMicro(int64(sb.created * 1e6)).UTC(), Image: sb.image.id, Execs: len(sb.execs),
			Network: networkDescription{sb.network.GetNetworkAccessType().String(), sb.network.GetAllowedCidrs(), sb.network.GetAllowedDomains()},
			Regions: d.GetSchedulerPlacement().GetRegions(), Timeout: d.GetTimeoutSecs(),
			Resources: resourceDescription{
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
