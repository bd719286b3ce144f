package model

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

// The defaults of Config.
const (
	DefaultRetries     = 4
	DefaultIdleTimeout = 2 * time.Minute
)

// Config configures a Client of a model API. The zero value stands for OpenAI's API.
type Config struct {
	BaseURL string // with /v1; "" for OpenAI's
	APIKey  string
	Retries int           // of a request whose stream has not begun, after 408, 409, 429, 5xx and lost connections; 0 for DefaultRetries, negative for none
	Idle    time.Duration // maximum time for which the endpoint may be silent; 0 for DefaultIdleTimeout
}

// Client requests answers from an OpenAI-compatible model API by streaming Chat Completions. It is safe for concurrent
// use.
type Client struct {
	api  openai.Client
	cfg  Config
	none *Error // set if the key is missing and the endpoint needs one
}

// NewClient returns a client of a model API. The client retries requests with jittered backoff, or after the endpoint's
// Retry-After. It does not retry a stream that has begun: the caller has its pieces already.
func NewClient(cfg Config) *Client {
	if cfg.Retries == 0 {
		cfg.Retries = DefaultRetries
	}
	cfg.Idle = cmp.Or(cfg.Idle, DefaultIdleTimeout)
	opts := []option.RequestOption{option.WithMaxRetries(max(cfg.Retries, 0))}
	if cfg.BaseURL != "" {
		opts = append(opts, option.WithBaseURL(cfg.BaseURL))
	}
	c := &Client{cfg: cfg}
	switch {
	case cfg.APIKey != "":
		opts = append(opts, option.WithAPIKey(cfg.APIKey))
	case cfg.BaseURL == "":
		c.none = &Error{Code: "MODEL_UNAUTHORIZED", Message: "no key for the model: set OPENAI_API_KEY, or OPENAI_BASE_URL to an endpoint that needs none"}
	default:
		opts = append(opts, option.WithAPIKey("none")) // the client refuses to send without one
	}
	c.api = openai.NewClient(opts...)
	return c
}

// Stream requests an answer of the model, and calls each with every piece as it arrives. If it returns an error, which
// is that of ctx or an *Error, the answer holds what arrived before. Whatever the endpoint sends, the answer's calls have
// ids that are unique in the conversation, and arguments that are valid JSON.
func (c *Client) Stream(ctx context.Context, r Request, each func(Delta)) (Answer, error) {
	if c.none != nil {
		return Answer{}, c.none
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := &Error{Code: "MODEL_ERROR", Message: fmt.Sprintf("the model sent nothing for %s", c.cfg.Idle)}
	idle := time.AfterFunc(c.cfg.Idle, func() { cancel(silent) })
	defer idle.Stop()
	progress := func() { idle.Reset(c.cfg.Idle) }
	r.Messages = validHistory(r.Messages)
	stream, err := c.send(ctx, r, progress)
	if err != nil {
		return Answer{}, endError(ctx, silent, err, r.Model, false)
	}
	defer stream.body.Close() //nolint:errcheck // reading reports failures
	a := newAnswerAssembly(r.Messages, each)
	for err == nil {
		var chunk wireChunk
		if chunk, err = stream.next(); err == nil {
			a.addChunk(chunk)
		}
	}
	answer := a.finish()
	canceled := ctx.Err() != nil && !errors.Is(context.Cause(ctx), silent)
	// Nothing is missing in a finished answer whose stream then breaks or stays open. A second request would repeat the answer.
	if !errors.Is(err, io.EOF) && (!a.finished || canceled || errors.As(err, new(*failure))) {
		return answer, endError(ctx, silent, err, r.Model, true)
	}
	switch {
	case a.failed != nil:
		return answer, a.failed
	case !a.finished:
		return answer, &Error{Code: "MODEL_ERROR", Message: "the model's stream ended before its answer was finished"}
	}
	return answer, nil
}

// send sends a request, with retries, and returns the stream of the answer. The error is a *failure if the endpoint
// reported it. progress is called when an attempt begins and for everything that is received.
func (c *Client) send(ctx context.Context, r Request, progress func()) (*answerStream, error) {
	var stream *answerStream // of the last attempt, as refused
	var refused *failure
	var res *http.Response
	err := c.api.Post(ctx, "chat/completions", requestParams(r), &res, option.WithJSONSet("stream", true),
		option.WithHeader("Accept", "text/event-stream"),
		option.WithMiddleware(func(req *http.Request, next option.MiddlewareNext) (*http.Response, error) {
			progress() // each attempt gets the full time
			stream, refused = nil, nil
			res, err := next(req)
			if err != nil {
				return res, err
			}
			stream, refused = awaitAnswer(res, progress)
			return res, nil
		}))
	if err != nil && refused != nil {
		return nil, refused
	}
	return stream, err
}

// isConnectionLoss reports whether an error means that a connection ended, and not that the endpoint sent an error.
func isConnectionLoss(err error) bool {
	var lost *net.OpError
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &lost)
}

// endError converts the error with which a request ended. silent is the cause of ctx if the endpoint was silent for too
// long. answered reports whether the endpoint has begun to answer.
func endError(ctx context.Context, silent, err error, model string, answered bool) error {
	var f *failure
	switch {
	case errors.Is(context.Cause(ctx), silent):
		return silent
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &f):
		return f.modelError(model)
	case answered:
		return &Error{Code: "MODEL_ERROR", Message: "the model's stream broke: " + err.Error(), Err: err, Lost: isConnectionLoss(err)}
	}
	return &Error{Code: "MODEL_ERROR", Message: "the model's endpoint cannot be reached: " + err.Error(), Err: err}
}
