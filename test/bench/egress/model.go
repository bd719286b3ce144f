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
	tokensHeader = "X-Bench-Tokens"
	paceHeader   = "X-Bench-Pace"
)

// wholeAnswer is the model's answer to a request that does not ask for a stream.
const wholeAnswer = `{"id":"msg_1","type":"message","role":"assistant","model":"bench","content":[{"type":"text","text":"Yes."}],` +
	`"stop_reason":"end_turn","usage":{"input_tokens":10,"output_tokens":2}}`

// listen starts the model on loopback. It returns its URL and a function that stops it.
func listen() (url string, stop func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := &http.Server{Handler: http.HandlerFunc(answer), ReadHeaderTimeout: timeout}
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

// answer is the handler of the model. It sends an Anthropic answer at once, or a stream of tokens, each of which is the
// time at which it was written, in nanoseconds.
func answer(w http.ResponseWriter, r *http.Request) {
	tokens, err := strconv.Atoi(r.Header.Get(tokensHeader))
	if err != nil {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, wholeAnswer) //nolint:errcheck // the client reports an incomplete answer
		return
	}
	pace, err := time.ParseDuration(r.Header.Get(paceHeader))
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
