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

// API names one of the wire dialects, as a script's `api` condition spells it.
type API string

// The three dialects.
const (
	Anthropic API = "anthropic" // Anthropic Messages
	Responses API = "responses" // OpenAI Responses
	Chat      API = "chat"      // OpenAI Chat Completions
)

// Conversation is the content of one request, independent of its dialect. An answer is derived from it and from no
// other state.
type Conversation struct {
	API    API
	Model  string
	System string // every system and developer text, joined by newlines
	Stream bool
	Usage  bool // Chat Completions: the client wants a usage chunk

	tools       []string
	customTools map[string]bool // Responses: tools that take free text
	namespaces  map[string]bool // Responses: of tools that are called by namespace and name
	inputBytes  int             // texts, tool calls, results and tool definitions
	calls       []string        // ids of tool calls without a result yet
	entries     []entry
}

// entryKind is the author and the type of an entry of a conversation.
type entryKind int

const (
	userText entryKind = iota
	assistantText
	toolCall
	toolResult
)

// entry is one part of a conversation: a text of the user or of the assistant, a tool call, or a tool result.
type entry struct {
	kind entryKind
	text string
}

// turn holds consecutive texts of the user, and the tool results that follow them in the conversation.
type turn struct {
	texts   []string
	results []string
}

// reminder matches the sections that CLIs add to the text of a user.
var reminder = regexp.MustCompile(`(?s)<system-reminder>.*?</system-reminder>|<environment_context>.*?</environment_context>|` +
	`<subagent_notification>.*?</subagent_notification>`)

// interruptions are the texts with which CLIs record that a turn was interrupted. They end a turn: the text that
// follows belongs to the next turn, although no assistant message is in between.
var interruptions = []string{"[Request interrupted by user", "<turn_aborted>"}

// add appends an entry and counts its bytes.
func (c *Conversation) add(kind entryKind, text string) {
	c.inputBytes += len(text)
	c.entries = append(c.entries, entry{kind, text})
}

// addSystem appends a system or developer text.
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

// turns splits the conversation by the texts of users. Reminders that a CLI adds to such a text are not part of it.
func (c *Conversation) turns() []turn {
	var all []turn
	open := false // another user text would join the last turn
	for _, e := range c.entries {
		switch e.kind {
		case userText:
			text := strings.TrimSpace(reminder.ReplaceAllString(e.text, ""))
			if text == "" {
				continue
			}
			if interruption(text) {
				open = false
				continue
			}
			if !open {
				all = append(all, turn{})
				open = true
			}
			last := &all[len(all)-1]
			last.texts = append(last.texts, text)
		case toolResult:
			open = false
			if len(all) > 0 {
				last := &all[len(all)-1]
				last.results = append(last.results, e.text)
			}
		case assistantText, toolCall:
			open = false
		}
	}
	return all
}

// interruption reports whether a text records that a turn was interrupted.
func interruption(text string) bool {
	for _, prefix := range interruptions {
		if strings.HasPrefix(text, prefix) {
			return true
		}
	}
	return false
}

// offers reports whether the request declares a tool with the name.
func (c *Conversation) offers(name string) bool {
	for _, t := range c.tools {
		if t == name {
			return true
		}
	}
	return false
}

// digest identifies the content of the conversation without the system prompt, which contains dates and folders: ids
// must not depend on those.
func (c *Conversation) digest() string {
	return digest(string(c.API), c.Model, c.entries)
}

// identity identifies the conversation: it stays the same while the conversation grows.
func (c *Conversation) identity() string {
	var first []entry
	for _, e := range c.entries {
		if e.kind != userText {
			break
		}
		first = append(first, e)
	}
	return digest(string(c.API), c.Model, first)
}

// digest returns a hash of a conversation: the API, the model and the entries.
func digest(api, model string, entries []entry) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%s\x00", api, model)
	for _, e := range entries {
		fmt.Fprintf(h, "%d:%d:%s", e.kind, len(e.text), e.text)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// tokens counts four bytes as one token, rounded up.
func tokens(bytes int) int { return (bytes + 3) / 4 }

// addUser adds text of the user. A tool call that has no result then is an error of the client, which the real services
// refuse as well.
func (c *Conversation) addUser(text string) error {
	if err := c.checkAnswered(); err != nil {
		return err
	}
	c.add(userText, text)
	return nil
}

// addCall adds a tool call of the assistant, which needs a result.
func (c *Conversation) addCall(id, name, input string) {
	c.add(toolCall, name+" "+input)
	c.calls = append(c.calls, id)
}

// addResult adds the result of the open tool call with an id. It returns an error if there is no such call.
func (c *Conversation) addResult(id, text string) error {
	i := slices.Index(c.calls, id)
	if i < 0 {
		return fmt.Errorf("a tool result answers %q, which is not an open tool call", id)
	}
	c.calls = slices.Delete(c.calls, i, i+1)
	c.add(toolResult, text)
	return nil
}

// checkAnswered returns an error if a tool call has no result.
func (c *Conversation) checkAnswered() error {
	if len(c.calls) > 0 {
		return fmt.Errorf("tool call %q has no result", c.calls[0])
	}
	return nil
}

// addTool adds a tool's definition. Only its name is used.
func (c *Conversation) addTool(raw json.RawMessage) error {
	c.inputBytes += len(raw)
	return c.nameTool(raw, "")
}

// ownNamespace is the namespace of tools that Responses calls by their name alone, without the namespace.
const ownNamespace = "functions"

// nameTool adds the name of a tool, or of the tools of a namespace as "namespace.name".
func (c *Conversation) nameTool(raw json.RawMessage, namespace string) error {
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
			if err := c.nameTool(tool, t.Name); err != nil {
				return fmt.Errorf("tools[%d]: %w", i, err)
			}
		}
		return nil
	}
	name := t.Name
	if namespace != "" && namespace != ownNamespace {
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

// splitName splits the name of a tool in a namespace.
func (c *Conversation) splitName(name string) (namespace, short string) {
	if namespace, short, ok := strings.Cut(name, "."); ok && c.namespaces[namespace] {
		return namespace, short
	}
	return "", name
}

// check returns an error for a request that no dialect accepts.
func (c *Conversation) check() error {
	if c.Model == "" {
		return errors.New("model: Field required")
	}
	if len(c.entries) == 0 {
		return errors.New("messages: at least one message is required")
	}
	return c.checkAnswered()
}
