package transcript

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/architecture"
)

// checkExport validates a transcript of OpenCode, the output of `opencode export`: {"info": …, "messages": [{"info": …,
// "parts": […]}, …]}. It decodes one message at a time.
func checkExport(r io.Reader) (Info, error) {
	e := &exportReader{in: json.NewDecoder(&strictReader{r: r}), info: Info{Architecture: architecture.OpenCode}, seen: map[string]bool{}}
	err := e.readDocument()
	var syntax *json.SyntaxError
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &syntax) && strings.Contains(syntax.Error(), "unexpected end"):
		return Info{}, refusedError(e.n, "is cut off: write the output of `opencode export` to the file again")
	case errors.As(err, &syntax):
		return Info{}, refusedError(e.n, "is not JSON: %v; "+unknownFormatDetail, err)
	case err != nil:
		return Info{}, setErrorLine(e.n, err)
	}
	return requireMessages(e.info)
}

type exportReader struct {
	in   *json.Decoder
	info Info
	seen map[string]bool // ids of messages
	n    int             // number of the message
}

// readDocument validates the whole output of `opencode export`.
func (e *exportReader) readDocument() error {
	if err := e.expectDelimiter(json.Delim('{')); err != nil {
		return err
	}
	for e.in.More() {
		key, err := e.in.Token()
		if err != nil {
			return err
		}
		switch key {
		case "info":
			err = e.readSession()
		case "messages":
			err = e.readMessages()
		default:
			err = refusedError(0, "has the unknown member %.100q; "+unknownFormatDetail, key)
		}
		if err != nil {
			return err
		}
	}
	if err := e.expectDelimiter(json.Delim('}')); err != nil {
		return err
	}
	if _, err := e.in.Token(); !errors.Is(err, io.EOF) {
		return refusedError(0, "has data after the end of the transcript")
	}
	if e.info.AgentSessionID == "" {
		return refusedError(0, "info is missing; "+unknownFormatDetail)
	}
	return nil
}

func (e *exportReader) expectDelimiter(want json.Delim) error {
	got, err := e.in.Token()
	if err != nil {
		return err
	}
	if got != want {
		return refusedError(0, unknownFormatDetail)
	}
	return nil
}

// readValue reads the next JSON value, which must be an object.
func (e *exportReader) readValue() (map[string]json.RawMessage, error) {
	var raw json.RawMessage
	if err := e.in.Decode(&raw); err != nil {
		return nil, err
	}
	if len(raw) > MaxLineLength {
		return nil, refusedError(0, "is longer than %d bytes", MaxLineLength)
	}
	return parseObject(raw)
}

func (e *exportReader) readSession() error {
	m, err := e.readValue()
	if err != nil {
		return err
	}
	id := stringValue(m["id"])
	if !openCodeIDPattern.MatchString(id) || !strings.HasPrefix(id, "ses_") {
		return refusedError(0, "info.id is not the id of an OpenCode session")
	}
	e.info.AgentSessionID = id
	return nil
}

func (e *exportReader) readMessages() error {
	if e.info.AgentSessionID == "" {
		return refusedError(0, "info must come before messages; "+unknownFormatDetail)
	}
	if err := e.expectDelimiter(json.Delim('[')); err != nil {
		return err
	}
	for e.in.More() {
		if e.n++; e.n > MaxEntries {
			return refusedError(0, "has more than %d messages", MaxEntries)
		}
		m, err := e.readValue()
		if err != nil {
			return err
		}
		if err := e.readMessage(m); err != nil {
			return err
		}
	}
	return e.expectDelimiter(json.Delim(']'))
}

// readMessage validates a message of OpenCode and its parts.
func (e *exportReader) readMessage(m map[string]json.RawMessage) error {
	info := innerObject(m["info"])
	id, role := stringValue(info["id"]), stringValue(info["role"])
	switch parent := stringValue(info["parentID"]); {
	case !openCodeIDPattern.MatchString(id) || !strings.HasPrefix(id, "msg_"):
		return refusedError(0, "info.id is not the id of an OpenCode message")
	case stringValue(info["sessionID"]) != e.info.AgentSessionID:
		return refusedError(0, "info.sessionID is the id of another session")
	case role != "user" && role != "assistant":
		return refusedError(0, "info.role must be user or assistant")
	case role == "assistant" && !e.seen[parent]:
		return refusedError(0, "info.parentID is not the id of an earlier message: a part of the transcript is missing")
	}
	e.seen[id] = true
	e.info.Messages++
	var parts []json.RawMessage
	if json.Unmarshal(m["parts"], &parts) != nil {
		return refusedError(0, "parts must be a list")
	}
	for _, raw := range parts {
		p := innerObject(raw)
		own := stringValue(p["id"])
		if !openCodeIDPattern.MatchString(own) || !strings.HasPrefix(own, "prt_") || stringValue(p["messageID"]) != id || stringValue(p["sessionID"]) != e.info.AgentSessionID {
			return refusedError(0, "the ids of a part do not match its message")
		}
	}
	return nil
}

// strictReader is a reader that fails if JSON text is not UTF-8, is nested too deep, or contains a value longer than
// MaxLineLength, before a decoder buffers that text.
type strictReader struct {
	r      io.Reader
	depth  int
	held   int // number of bytes that the decoder must buffer: those since the start of the current message
	inText bool
	escape bool
	rest   []byte // the first bytes of a character whose other bytes are not read yet
}

// messageListDepth is the nesting depth of the messages in the output of `opencode export`: {"messages": [ … ]}.
const messageListDepth = 2

func (s *strictReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if bad := s.checkBytes(p[:n]); bad != nil {
		return 0, bad
	}
	if errors.Is(err, io.EOF) && len(s.rest) > 0 {
		return 0, refusedError(0, "is not valid UTF-8")
	}
	return n, err
}

func (s *strictReader) checkBytes(p []byte) error {
	if !s.isValidUTF8(p) {
		return refusedError(0, "is not valid UTF-8")
	}
	for _, c := range p {
		s.held++
		switch {
		case s.escape:
			s.escape = false
		case s.inText && c == '\\':
			s.escape = true
		case c == '"':
			s.inText = !s.inText
		case s.inText:
		case c == '{' || c == '[':
			s.depth++
		case c == '}' || c == ']':
			s.depth--
		}
		if s.depth <= messageListDepth && !s.inText && strings.IndexByte("{}[],: \t\r\n", c) >= 0 {
			s.held = 0
		}
		if s.depth > MaxNestingDepth {
			return refusedError(0, "is nested deeper than %d levels", MaxNestingDepth)
		}
		if s.held > MaxLineLength {
			return refusedError(0, "is longer than %d bytes", MaxLineLength)
		}
	}
	return nil
}

// isValidUTF8 reports whether the text is valid UTF-8 up to the end of p, the bytes that were read last.
func (s *strictReader) isValidUTF8(p []byte) bool {
	p = append(bytes.Clone(s.rest), p...)
	end := len(p)
	for back := 1; back < utf8.UTFMax && back <= len(p); back++ {
		if c := p[len(p)-back]; utf8.RuneStart(c) {
			if !utf8.FullRune(p[len(p)-back:]) {
				end = len(p) - back
			}
			break
		}
	}
	s.rest = bytes.Clone(p[end:])
	return utf8.Valid(p[:end])
}
