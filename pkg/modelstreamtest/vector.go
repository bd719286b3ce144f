// Package modelstreamtest provides what OpenAI-compatible model servers really send, as test vectors with the right values, and a model server
// that replays them and refuses the requests that real servers refuse.
package modelstreamtest

import (
	"bytes"
	"embed"
	"fmt"
	"path"
	"strings"

	"go.yaml.in/yaml/v3"
)

//go:embed vectors/*.yaml
var files embed.FS

// Vector is one variant of what a model server sends, or of a history that an earlier build stored, with the right values.
type Vector struct {
	Name       string   `yaml:"-"`          // of the file, without its suffix
	Variant    string   `yaml:"variant"`    // what the server does, in one line
	Transcript string   `yaml:"transcript"` // messages of an earlier build of the built-in agent, one in JSON on each line
	Answers    []Answer `yaml:"answers"`    // to the first requests of the conversation
	Want       Want     `yaml:"want"`
}

// Answer is the answer of a model server to one request.
type Answer struct {
	Status      int    `yaml:"status"`      // 0 for 200
	ContentType string `yaml:"contentType"` // "" for text/event-stream
	Prefix      string `yaml:"prefix"`      // precedes the body
	Newline     string `yaml:"newline"`     // replaces the line feeds of the body; "" for a line feed
	Cut         string `yaml:"cut"`         // suffix that is removed from the body
	Body        string `yaml:"body"`

	Usage [2]uint32 `yaml:"usage"` // the tokens of input and output that the answer reports
	Error string    `yaml:"error"` // a part of the error that the answer reports
}

// Want holds the right values of a Vector. They are those of the turn that the answers belong to.
type Want struct {
	Outcome  string   `yaml:"outcome"`  // completed or failed
	Code     string   `yaml:"code"`     // of a failure
	Message  string   `yaml:"message"`  // a part of the failure's message
	Result   string   `yaml:"result"`   // of a completed turn; "" for the text of OK
	Requests int      `yaml:"requests"` // that the turn sends; 0 for one more than answers
	Thinking []string `yaml:"thinking"` // the contents of the blocks
	Text     []string `yaml:"text"`     // likewise, without the text of OK
	Calls    []Call   `yaml:"calls"`
}

// Call is a tool call in an answer, with its result.
type Call struct {
	Name   string `yaml:"name"`
	Input  string `yaml:"input"`  // JSON that the block shows
	Result string `yaml:"result"` // a part of what the model is told
	Failed bool   `yaml:"failed"`
}

// OK is the text with which the Server answers the requests after a vector's answers.
const OK = "All is well."

// Load returns all vectors, in the order of their names.
func Load() ([]Vector, error) {
	entries, err := files.ReadDir("vectors")
	if err != nil {
		return nil, err
	}
	var out []Vector
	for _, e := range entries {
		raw, err := files.ReadFile(path.Join("vectors", e.Name()))
		if err != nil {
			return nil, err
		}
		v := Vector{Name: strings.TrimSuffix(e.Name(), ".yaml")}
		dec := yaml.NewDecoder(bytes.NewReader(raw))
		dec.KnownFields(true)
		if err := dec.Decode(&v); err != nil {
			return nil, fmt.Errorf("%s: %w", e.Name(), err)
		}
		out = append(out, v)
	}
	return out, nil
}

// Bytes returns the body of the answer as the server sends it.
func (a Answer) Bytes() string {
	body := strings.TrimSuffix(a.Body, a.Cut)
	if a.Newline != "" {
		body = strings.ReplaceAll(body, "\n", a.Newline)
	}
	return a.Prefix + body
}

// MediaType returns the content type of the answer.
func (a Answer) MediaType() string {
	if a.ContentType == "" {
		return "text/event-stream"
	}
	return a.ContentType
}
