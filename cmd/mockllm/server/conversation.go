package server

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// API names one of the three model APIs, with the word that the condition `api` of a script uses for it.
type API string

// The three dialects.
const (
	Anthropic API = "anthropic" // Anthropic Messages
	Responses API = "responses" // OpenAI Responses
	Chat      API = "chat"      // OpenAI Chat Completions
)

// Conversation is the content of one model request, independent of the API. The server derives its answer from the
// conversation and from no other state.
type Conversation struct {
	API    API
	Model  string
	System string // every system and developer text, joined by newlines
	Stream bool
	Usage  bool // Chat Completions: the client wants a usage chunk

	tools       []string
	customTools map[string]bool // Responses: tools that take free text
	namespaces  map[string]bool // Responses: namespaces of tools that are called by namespace and name
	inputBytes  int             // total length of texts, tool calls, results and tool definitions
	calls       []string        // ids of tool calls without a result yet
	entries     []conversationEntry
}

// conversationEntryKind states the author and the type of an entry of a conversation.
type conversationEntryKind int

const (
	entryUserText conversationEntryKind = iota
	entryAssistantText
	entryToolCall
	entryToolResult
)

// conversationEntry is one part of a conversation: a text of the user or of the assistant, a tool call, or a tool
// result.
type conversationEntry struct {
	kind conversationEntryKind
	text string
}

// userTurn holds consecutive texts of the user, and the tool results that follow them in the conversation.
type userTurn struct {
	texts   []string
	results []string
}

// cliSectionPattern matches the sections, such as system reminders, that agent CLIs insert into the user's text.
var cliSectionPattern = regexp.MustCompile(`(?s)<system-reminder>.*?</system-reminder>|<environment_context>.*?</environment_context>|` +
	`<subagent_notification>.*?</subagent_notification>`)

// interruptionMarkers are the texts with which agent CLIs record that the user interrupted a turn. A marker ends a
// turn: the user's next text starts another turn, although no assistant message is between them.
var interruptionMarkers = []string{"[Request interrupted by user", "<turn_aborted>"}

// addEntry appends an entry to the conversation and adds its length to the counted input bytes.
func (c *Conversation) addEntry(kind conversationEntryKind, text string) {
	c.inputBytes += len(text)
	c.entries = append(c.entries, conversationEntry{kind, text})
}

// addSystem appends a system or developer message to the system text of the conversation.
func (c *Conversation) addSystem(text string) {
	if text == "" {
		return
	}
	c.inputBytes += len(text)
	if c.System != "" {
		c.System += "\n"
	}
	c.System += text
}

// turns splits the conversation into turns at the texts of the user. The sections that agent CLIs insert into these
// texts are left out.
func (c *Conversation) turns() []userTurn {
	var all []userTurn
	open := false // another user text would join the last turn
	for _, e := range c.entries {
		switch e.kind {
		case entryUserText:
			text := strings.TrimSpace(cliSectionPattern.ReplaceAllString(e.text, ""))
			if text == "" {
				continue
			}
			if isInterruption(text) {
				open = false
				continue
			}
			if !open {
				all = append(all, userTurn{})
				open = true
			}
			last := &all[len(all)-1]
			last.texts = append(last.texts, text)
		case entryToolResult:
			open = false
			if len(all) > 0 {
				last := &all[len(all)-1]
				last.results = append(last.results, e.text)
			}
		case entryAssistantText, entryToolCall:
			open = false
		}
	}
	return all
}

// isInterruption reports whether a text of the user records that a turn was interrupted.
func isInterruption(text string) bool {
	for _, prefix := range interruptionMarkers {
		if strings.HasPrefix(text, prefix) {
			return true
		}
	}
	return false
}

// offersTool reports whether the request declares a tool with the name.
func (c *Conversation) offersTool(name string) bool {
	for _, t := range c.tools {
		if t == name {
			return true
		}
	}
	return false
}

// contentHash returns a hash of the conversation without the system prompt. Ids are derived from the hash, and the
// system prompt contains dates and folders that differ from run to run.
func (c *Conversation) contentHash() string {
	return hashEntries(string(c.API), c.Model, c.entries)
}

// stableID returns an id of the conversation that stays the same while messages are appended.
func (c *Conversation) stableID() string {
	var first []conversationEntry
	for _, e := range c.entries {
		if e.kind != entryUserText {
			break
		}
		first = append(first, e)
	}
	return hashEntries(string(c.API), c.Model, first)
}

// hashEntries returns a hash of an API, a model and the entries of a conversation.
func hashEntries(api, model string, entries []conversationEntry) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%s\x00", api, model)
	for _, e := range entries {
		fmt.Fprintf(h, "%d:%d:%s", e.kind, len(e.text), e.text)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// estimateTokens converts a number of bytes to a number of tokens: four bytes count as one token, rounded up.
func estimateTokens(bytes int) int { return (bytes + 3) / 4 }

// addUser appends a text of the user. It returns an error if a tool call before the text has no result, as the real
// services do.
func (c *Conversation) addUser(text string) error {
	if err := c.checkToolCallsAnswered(); err != nil {
		return err
	}
	c.addEntry(entryUserText, text)
	return nil
}

// addToolCall appends a tool call of the assistant. The conversation is invalid until its result follows.
func (c *Conversation) addToolCall(id, name, input string) {
	c.addEntry(entryToolCall, name+" "+input)
	c.calls = append(c.calls, id)
}

// addToolResult adds the result of the open tool call with an id. It returns an error if there is no such call.
func (c *Conversation) addToolResult(id, text string) error {
	i := slices.Index(c.calls, id)
	if i < 0 {
		return fmt.Errorf("a tool result answers %q, which is not an open tool call", id)
	}
	c.calls = slices.Delete(c.calls, i, i+1)
	c.addEntry(entryToolResult, text)
	return nil
}

// checkToolCallsAnswered returns an error if a tool call has no result.
func (c *Conversation) checkToolCallsAnswered() error {
	if len(c.calls) > 0 {
		return fmt.Errorf("tool call %q has no result", c.calls[0])
	}
	return nil
}

// addTool adds a tool's definition. Only its name is used.
func (c *Conversation) addTool(raw json.RawMessage) error {
	c.inputBytes += len(raw)
	return c.addToolName(raw, "")
}

// implicitNamespace is the namespace of tools that clients of the Responses API call by their name alone, without the
// namespace.
const implicitNamespace = "functions"

// addToolName adds the name of a declared tool, or, for a namespace, the names of its tools as "namespace.name".
func (c *Conversation) addToolName(raw json.RawMessage, namespace string) error {
	var t struct {
		Type  string            `json:"type"`
		Name  string            `json:"name"`
		Tools []json.RawMessage `json:"tools"`
	}
	if err := json.Unmarshal(raw, &t); err != nil {
		return err
	}
	switch {
	case t.Name == "":
		return nil // a hosted tool
	case t.Type == "namespace" && c.API == Responses && namespace == "":
		for i, tool := range t.Tools {
			if err := c.addToolName(tool, t.Name); err != nil {
				return fmt.Errorf("tools[%d]: %w", i, err)
			}
		}
		return nil
	}
	name := t.Name
	if namespace != "" && namespace != implicitNamespace {
		name = namespace + "." + name
		if c.namespaces == nil {
			c.namespaces = map[string]bool{}
		}
		c.namespaces[namespace] = true
	}
	c.tools = append(c.tools, name)
	if t.Type == "custom" && c.API == Responses {
		if c.customTools == nil {
			c.customTools = map[string]bool{}
		}
		c.customTools[name] = true
	}
	return nil
}

// splitToolName splits the name "namespace.name" of a tool; the namespace is "" for a tool without one.
func (c *Conversation) splitToolName(name string) (namespace, short string) {
	if namespace, short, ok := strings.Cut(name, "."); ok && c.namespaces[namespace] {
		return namespace, short
	}
	return "", name
}

// validate returns an error if the conversation is one that none of the model APIs accepts.
func (c *Conversation) validate() error {
	if c.Model == "" {
		return errors.New("model: Field required")
	}
	if len(c.entries) == 0 {
		return errors.New("messages: at least one message is required")
	}
	return c.checkToolCallsAnswered()
}
