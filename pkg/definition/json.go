package definition

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
)

// JSON is not a subset of YAML: YAML has no surrogate pairs (\ud83d\ude00), which many encoders write, and
// rejects control characters that JSON allows. A JSON file is therefore parsed by encoding/json, into the same
// nodes.

// isJSON reports whether a file is parsed as JSON: because of its name, or because it is valid JSON.
func isJSON(name string, data []byte) bool {
	if strings.EqualFold(filepath.Ext(name), ".json") {
		return true
	}
	if !bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte{'{'}) {
		return false
	}
	for dec := json.NewDecoder(bytes.NewReader(data)); ; {
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return errors.Is(err, io.EOF)
		}
	}
}

// jsonError is returned for a file that is not valid JSON.
type jsonError struct {
	FilePosition
	err error
}

func (e *jsonError) Error() string { return e.err.Error() }
func (e *jsonError) Unwrap() error { return e.err }

// jsonReader converts JSON into YAML nodes, so that JSON and YAML files are read by the same code.
type jsonReader struct {
	data []byte
	dec  *json.Decoder
	line FilePosition // of the offset at
	at   int
}

// readJSON reads consecutive JSON values and returns them as YAML nodes.
func readJSON(data []byte) ([]*yaml.Node, error) {
	r := &jsonReader{data: data, dec: json.NewDecoder(bytes.NewReader(data)), line: FilePosition{1, 1}}
	r.dec.UseNumber()
	var list []*yaml.Node
	for {
		n, err := r.readValue(maxNestingDepth + 1)
		switch {
		case errors.Is(err, io.EOF) && len(bytes.TrimSpace(data[r.dec.InputOffset():])) == 0:
			return list, nil
		case err != nil:
			if errors.Is(err, errTooDeep) {
				return list, err
			}
			r.advanceTo(int(r.dec.InputOffset()))
			return list, &jsonError{r.line, fmt.Errorf("is not JSON: %w", err)}
		}
		list = append(list, n)
	}
}

// advanceTo advances the line and column of the reader to a byte offset.
func (r *jsonReader) advanceTo(to int) {
	for _, c := range string(r.data[r.at:to]) {
		if r.line.Column++; c == '\n' {
			r.line = FilePosition{r.line.Line + 1, 1}
		}
	}
	r.at = to
}

// nextTokenPosition returns the line and column of the next JSON token.
func (r *jsonReader) nextTokenPosition() FilePosition {
	at := int(r.dec.InputOffset())
	for at < len(r.data) && bytes.IndexByte([]byte(" \t\r\n,:"), r.data[at]) >= 0 {
		at++
	}
	r.advanceTo(at)
	return r.line
}

// readValue reads the next JSON value. depth is the number of further levels of nesting that are allowed.
func (r *jsonReader) readValue(depth int) (*yaml.Node, error) {
	p := r.nextTokenPosition()
	t, err := r.dec.Token()
	if err != nil {
		return nil, err
	}
	n := &yaml.Node{Kind: yaml.ScalarNode, Line: p.Line, Column: p.Column}
	switch t := t.(type) {
	case json.Delim:
		if depth == 0 {
			return nil, &jsonError{p, errTooDeep}
		}
		return n, r.readChildren(n, t, depth-1)
	case string:
		n.Tag, n.Value = tagText, t
	case json.Number:
		n.Tag, n.Value = tagFloat, t.String()
		if !strings.ContainsAny(n.Value, ".eE") {
			n.Tag = tagInt
		}
	case bool:
		n.Tag, n.Value = tagBool, fmt.Sprint(t)
	default:
		n.Tag = tagNull
	}
	return n, nil
}

// readChildren reads the elements of a JSON object or list, up to its end.
func (r *jsonReader) readChildren(n *yaml.Node, open json.Delim, depth int) error {
	n.Kind, n.Tag = yaml.SequenceNode, "!!seq"
	if open == '{' {
		n.Kind, n.Tag = yaml.MappingNode, "!!map"
	}
	for r.dec.More() {
		c, err := r.readValue(depth)
		if err != nil {
			return replaceEOF(err)
		}
		n.Content = append(n.Content, c)
	}
	_, err := r.dec.Token()
	return replaceEOF(err)
}

// replaceEOF replaces io.EOF by io.ErrUnexpectedEOF, because a file must not end within a value.
func replaceEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
