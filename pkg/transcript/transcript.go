// Package transcript validates transcripts of agents' own command lines, which clients upload so that a session
// continues the conversation. It reads a transcript once, from its start, and holds at most one line or one message
// of it in memory.
//
// It supports three formats.
//
//	claude-code  a session file of Claude Code: JSON lines with type, uuid, parentUuid and sessionId
//	codex        a rollout file of Codex: JSON lines with type and payload, the first one a session_meta
//	opencode     what `opencode export` prints: one JSON object with info and messages
package transcript

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/architecture"
)

const (
	// MaxLineLength is the maximum length in bytes of a line of a transcript, or of a message of OpenCode.
	MaxLineLength = 16 << 20
	// MaxNestingDepth is the maximum nesting of JSON in a transcript.
	MaxNestingDepth = 200
	// MaxEntries is the maximum number of lines or messages of a transcript.
	MaxEntries = 500_000
)

// Info describes a valid transcript: the architecture, the session id and the number of messages.
type Info struct {
	Architecture   string `json:"architecture"`
	AgentSessionID string `json:"agentSessionId"` // the agent's own session or thread id
	Messages       uint32 `json:"messages"`       // messages of user and agent, without results of tools
}

// Error is returned for a transcript that Spool refuses because no session could continue it.
type Error struct {
	Line   int    // number of the line, or of the message for OpenCode, from 1; 0 for the whole file
	Detail string // the problem and its remedy
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return e.Detail
	}
	return fmt.Sprintf("line %d: %s", e.Line, e.Detail)
}

func refusedError(line int, format string, args ...any) error {
	return &Error{line, fmt.Sprintf(format, args...)}
}

// unknownFormatDetail is the detail of the error for a file in none of the three transcript formats.
const unknownFormatDetail = "must be a transcript of Claude Code (~/.claude/projects/…/*.jsonl), Codex (~/.codex/sessions/…/rollout-*.jsonl) or OpenCode (the output of `opencode export`)"

// Check reads a transcript to its end and validates it. The error is an *Error, or an error of r.
func Check(r io.Reader) (Info, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	first, err := readLine(in)
	if err != nil && !errors.Is(err, io.EOF) {
		return Info{}, setErrorLine(1, err)
	}
	trimmed := bytes.TrimSpace(first)
	if len(trimmed) == 0 && err != nil {
		return Info{}, refusedError(0, "is empty")
	}
	if head, ok := objectMembers(trimmed); ok {
		switch {
		case head["payload"] != nil:
			return checkLines(in, first, err, &codexFormat{})
		case head["type"] != nil:
			return checkLines(in, first, err, newClaudeFormat())
		}
	}
	if bytes.HasPrefix(trimmed, []byte("{")) {
		return checkExport(io.MultiReader(bytes.NewReader(first), removedNewline(err), in))
	}
	return Info{}, refusedError(0, unknownFormatDetail)
}

// removedNewline returns a reader of the newline that readLine removed from the first line, or of nothing if readLine
// reached the end of the file.
func removedNewline(end error) io.Reader {
	if end != nil {
		return bytes.NewReader(nil)
	}
	return bytes.NewReader([]byte("\n"))
}

// setErrorLine sets the line number of err if err is an *Error without one.
func setErrorLine(n int, err error) error {
	var e *Error
	if errors.As(err, &e) && e.Line == 0 {
		return &Error{n, e.Detail}
	}
	return err
}

// readLine returns the next line without its newline. At the end of the file it returns io.EOF together with the text
// after the last newline.
func readLine(in *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		piece, err := in.ReadSlice('\n')
		line = append(line, piece...)
		switch {
		case len(line) > MaxLineLength:
			return nil, refusedError(0, "is longer than %d bytes", MaxLineLength)
		case errors.Is(err, bufio.ErrBufferFull):
		case err != nil:
			return line, err
		default:
			return line[:len(line)-1], nil
		}
	}
}

// lineFormat validates the lines of a transcript in the format of one architecture.
type lineFormat interface {
	// checkLine validates a line that is a JSON object.
	checkLine(m map[string]json.RawMessage) error
	// end validates what depends on the whole transcript.
	end() (Info, error)
}

// checkLines validates the JSON lines of a transcript. line is the first line, which was already read, and end the
// error with which it was read.
func checkLines(in *bufio.Reader, line []byte, end error, f lineFormat) (Info, error) {
	for n := 1; ; n++ {
		if n > MaxEntries {
			return Info{}, refusedError(0, "has more than %d lines", MaxEntries)
		}
		if len(bytes.TrimSpace(line)) > 0 {
			m, err := parseObject(line)
			if err != nil && end != nil && !isTooDeep(line) && !json.Valid(line) {
				return Info{}, refusedError(n, "is cut off: copy the file again while the agent does not write to it")
			}
			if err == nil {
				err = f.checkLine(m)
			}
			if err != nil {
				return Info{}, setErrorLine(n, err)
			}
		}
		if end != nil {
			return f.end()
		}
		line, end = readLine(in)
		if end != nil && !errors.Is(end, io.EOF) {
			return Info{}, setErrorLine(n+1, end)
		}
	}
}

// parseObject returns the members of a transcript line, which must be a JSON object.
func parseObject(raw []byte) (map[string]json.RawMessage, error) {
	switch {
	case !utf8.Valid(raw):
		return nil, refusedError(0, "is not valid UTF-8")
	case isTooDeep(raw):
		return nil, refusedError(0, "is nested deeper than %d levels", MaxNestingDepth)
	}
	m, ok := objectMembers(raw)
	if !ok {
		return nil, refusedError(0, "must be a JSON object")
	}
	return m, nil
}

func objectMembers(raw []byte) (m map[string]json.RawMessage, ok bool) {
	if isTooDeep(raw) {
		return nil, false
	}
	return m, json.Unmarshal(raw, &m) == nil && m != nil
}

// isTooDeep reports whether JSON is nested deeper than MaxNestingDepth. It does not recurse itself.
func isTooDeep(raw []byte) bool {
	depth, inText := 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case inText && c == '\\':
			i++
		case c == '"':
			inText = !inText
		case inText:
		case c == '{' || c == '[':
			if depth++; depth > MaxNestingDepth {
				return true
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return false
}

// stringValue returns the value of a JSON string, or "" for other values.
func stringValue(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

func innerObject(raw json.RawMessage) map[string]json.RawMessage {
	m, _ := objectMembers(raw)
	return m
}

var (
	uuidPattern       = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	openCodeIDPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`)
)

// uuid is the binary form of a UUID.
type uuid [16]byte

func parseUUID(s string) (id uuid, ok bool) {
	if !uuidPattern.MatchString(s) {
		return id, false
	}
	n := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c == '-' {
			continue
		}
		v := c - '0'
		if c >= 'a' {
			v = c - 'a' + 10
		}
		id[n/2] |= v << (4 * (1 - n%2))
		n++
	}
	return id, true
}

// claudeFormat validates the lines of a session file of Claude Code.
type claudeFormat struct {
	info    Info
	seen    map[uuid]bool
	parents map[uuid]int // the first line that names each parent
	n       int
}

func newClaudeFormat() *claudeFormat {
	return &claudeFormat{info: Info{Architecture: architecture.ClaudeCode}, seen: map[uuid]bool{}, parents: map[uuid]int{}}
}

func (c *claudeFormat) checkLine(m map[string]json.RawMessage) error {
	c.n++
	kind := stringValue(m["type"])
	if kind == "" {
		return refusedError(0, "type is missing; "+unknownFormatDetail)
	}
	if raw, ok := m["sessionId"]; ok {
		session := stringValue(raw)
		if !uuidPattern.MatchString(session) {
			return refusedError(0, "sessionId must be a UUID")
		}
		c.info.AgentSessionID = session
	}
	raw, ok := m["uuid"]
	if !ok { // a line of the CLI that is not part of the conversation
		if kind == "user" || kind == "assistant" {
			return refusedError(0, "uuid is missing")
		}
		return nil
	}
	id, ok := parseUUID(stringValue(raw))
	if !ok {
		return refusedError(0, "uuid must be a UUID")
	}
	c.seen[id] = true
	if parent, has := m["parentUuid"]; has && string(parent) != "null" {
		id, ok := parseUUID(stringValue(parent))
		if !ok {
			return refusedError(0, "parentUuid must be null or a UUID")
		}
		if _, known := c.parents[id]; !known {
			c.parents[id] = c.n
		}
	}
	if kind == "user" || kind == "assistant" {
		return c.checkMessage(kind, innerObject(m["message"]))
	}
	return nil
}

// checkMessage validates the field message of a transcript line, which must have the role kind.
func (c *claudeFormat) checkMessage(kind string, m map[string]json.RawMessage) error {
	if stringValue(m["role"]) != kind {
		return refusedError(0, "message.role must be %s", kind)
	}
	switch content := bytes.TrimSpace(m["content"]); {
	case len(content) > 0 && content[0] == '"':
	case len(content) > 0 && content[0] == '[':
		var blocks []struct {
			Type string `json:"type"`
		}
		if json.Unmarshal(content, &blocks) != nil {
			return refusedError(0, "message.content must be a list of blocks")
		}
		if len(blocks) > 0 && blocks[0].Type == "tool_result" {
			return nil
		}
	default:
		return refusedError(0, "message.content must be text or a list of blocks")
	}
	c.info.Messages++
	return nil
}

func (c *claudeFormat) end() (Info, error) {
	for id, line := range c.parents {
		if !c.seen[id] {
			return Info{}, refusedError(line, "parentUuid is not the uuid of a line of the file: a part of the transcript is missing")
		}
	}
	if c.info.AgentSessionID == "" {
		return Info{}, refusedError(0, unknownFormatDetail)
	}
	return requireMessages(c.info)
}

// requireMessages returns i, or an error if the transcript has no messages.
func requireMessages(i Info) (Info, error) {
	if i.Messages == 0 {
		return Info{}, refusedError(0, "has no messages to continue from")
	}
	return i, nil
}

// codexFormat validates the lines of a rollout file of Codex.
type codexFormat struct {
	info Info
	n    int
}

func (c *codexFormat) checkLine(m map[string]json.RawMessage) error {
	c.n++
	kind, payload := stringValue(m["type"]), innerObject(m["payload"])
	switch {
	case kind == "":
		return refusedError(0, "type is missing; "+unknownFormatDetail)
	case payload == nil:
		return refusedError(0, "payload must be a JSON object")
	case c.n == 1 && kind != "session_meta":
		return refusedError(0, "type must be session_meta: the beginning of the transcript is missing")
	case c.n == 1:
		return c.checkSessionMeta(payload)
	case kind == "response_item" && stringValue(payload["type"]) == "message":
		if role := stringValue(payload["role"]); role == "user" || role == "assistant" {
			c.info.Messages++
		}
	}
	return nil
}

func (c *codexFormat) checkSessionMeta(payload map[string]json.RawMessage) error {
	id := stringValue(payload["id"])
	if !uuidPattern.MatchString(id) {
		return refusedError(0, "payload.id must be a UUID")
	}
	c.info = Info{Architecture: architecture.Codex, AgentSessionID: id}
	return nil
}

func (c *codexFormat) end() (Info, error) { return requireMessages(c.info) }
