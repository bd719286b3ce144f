package client

import (
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"
)

// DeadLetter is a message between services that was given up.
type DeadLetter struct {
	ID        string `json:"id"`
	Time      string `json:"time"`
	Reason    string `json:"reason"`
	Subject   string `json:"subject"`
	Handler   string `json:"handler"`
	Delivered uint32 `json:"delivered"`
	SessionID string `json:"sessionId"`
	Retryable bool   `json:"retryable"`
	Message   string `json:"message"` // absent in lists
}

// DeadLetters yields dead letters, the oldest first.
func (c *Client) DeadLetters(ctx context.Context) iter.Seq2[Doc[DeadLetter], error] {
	return pages[DeadLetter](ctx, c, "deadLetters", url.Values{}, "api", "dead")
}

// DeadLetter returns one with its message.
func (c *Client) DeadLetter(ctx context.Context, id string) (Doc[DeadLetter], error) {
	var out Doc[DeadLetter]
	err := c.get(ctx, &out, url.Values{}, "api", "dead", id)
	return out, err
}

// RetryDeadLetter has the session of one looked at again, and removes it.
func (c *Client) RetryDeadLetter(ctx context.Context, id string) (json.RawMessage, error) {
	var out json.RawMessage
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "dead", id, "retry"}}, &out)
	return out, err
}

// DropDeadLetter removes one.
func (c *Client) DropDeadLetter(ctx context.Context, id string) (json.RawMessage, error) {
	var out json.RawMessage
	err := c.do(ctx, call{method: http.MethodDelete, path: []string{"api", "dead", id}, repeat: true}, &out)
	return out, err
}
