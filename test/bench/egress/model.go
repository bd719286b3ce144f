package egress

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"
)

// Headers of a request for a streamed answer. Without them the model sends whole.
const (
	// tokenCountHeader is the request header that sets how many tokens the model sends as a streamed answer.
	tokenCountHeader = "X-Bench-Tokens"
	// tokenPauseHeader is the request header that sets the pause between two tokens that the model sends.
	tokenPauseHeader = "X-Bench-Pace"
)

// unstreamedAnswer is the model's answer to a request that does not ask for a streamed answer.
const unstreamedAnswer = `{"id":"msg_1","type":"message","role":"assistant","model":"bench","content":[{"type":"text","text":"Yes."}],` +
	`"stop_reason":"end_turn","usage":{"input_tokens":10,"output_tokens":2}}`

// startModel starts the model on a port of loopback. It returns its URL and a function that stops it.
func startModel() (url string, stop func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := &http.Server{Handler: http.HandlerFunc(serveModelRequest), ReadHeaderTimeout: benchmarkTimeout}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	return "http://" + l.Addr().String(), func() error {
		err := server.Close()
		if serr := <-ended; !errors.Is(serr, http.ErrServerClosed) {
			err = errors.Join(err, serr)
		}
		return err
	}, nil
}

// serveModelRequest is the HTTP handler of the model. It sends an answer in Anthropic's format, at once or as a stream
// of tokens. The text of each token is the time at which it was written, in nanoseconds.
func serveModelRequest(w http.ResponseWriter, r *http.Request) {
	tokens, err := strconv.Atoi(r.Header.Get(tokenCountHeader))
	if err != nil {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, unstreamedAnswer) //nolint:errcheck // the client reports an incomplete answer
		return
	}
	pace, err := time.ParseDuration(r.Header.Get(tokenPauseHeader))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	flush := http.NewResponseController(w)
	event := func(name, data string) error {
		if _, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", name, data); err != nil {
			return err
		}
		return flush.Flush()
	}
	err = event("message_start", `{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"bench","content":[],"usage":{"input_tokens":10,"output_tokens":1}}}`)
	var tick <-chan time.Time
	if pace > 0 {
		t := time.NewTicker(pace)
		defer t.Stop()
		tick = t.C
	}
	for i := 0; i < tokens && err == nil; i++ {
		if tick != nil {
			<-tick
		}
		err = event("content_block_delta", fmt.Sprintf(`{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%d"}}`, time.Now().UnixNano()))
	}
	if err == nil {
		_ = event("message_delta", fmt.Sprintf(`{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":%d}}`, tokens))
		_ = event("message_stop", `{"type":"message_stop"}`) // the client reports an incomplete answer
	}
}
