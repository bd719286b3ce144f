package model

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
)

// Texts that stand in a request for what a message in the transcript does not have.
const (
	noResultText     = "[the result of this call was not recorded]"
	emptyMessageText = "[empty message]"
	namelessTool     = "unnamed_tool"
)

// maxToolNameBytes is the maximum length of the name of a tool that model APIs accept.
const maxToolNameBytes = 64

// invalidNameCharacters matches the characters that model APIs do not accept in the name of a tool.
var invalidNameCharacters = regexp.MustCompile(`[^A-Za-z0-9_-]`)

// validHistory returns the messages in a form that strict model APIs accept, because a transcript holds what models and servers really sent, and an
// API that refuses one message would refuse the conversation for ever. Answers without text and calls are left out, as are texts of white space alone; arguments that are not an object
// become an empty one; ids are made unique; and each call has exactly one result, after the answer with the call. For the beginning of a
// conversation the result is always the same, so that caches of prompts stay valid. validHistory does not change messages.
func validHistory(messages []Message) []Message {
	var out []Message
	used := map[string]bool{}
	for i, m := range messages {
		if m.Role != RoleTool && strings.TrimSpace(m.Text) == "" {
			m.Text = "" // beside calls and images too, APIs refuse white space as a text
		}
		switch {
		case m.Role == RoleTool:
			// The calls take their results.
		case m.Role == RoleAssistant && m.IsEmpty():
		case m.Role == RoleAssistant:
			m.Calls, m.CallID = validCalls(m.Calls, used), ""
			out = append(out, m)
			for n, result := range resultsOf(messages[i].Calls, messages[i+1:]) {
				result.CallID = m.Calls[n].ID
				out = append(out, result)
			}
		default:
			if m.Text == "" && len(m.Images) == 0 {
				m.Text = emptyMessageText
			}
			out = append(out, m)
		}
	}
	return out
}

// validCalls returns the calls with ids that are not in used, to which it adds them, and with names and arguments that model APIs accept.
func validCalls(calls []Call, used map[string]bool) []Call {
	var out []Call
	for i, c := range calls {
		if c.ID == "" {
			c.ID = fmt.Sprintf("call_%d", i+1)
		}
		c.ID = uniqueID(c.ID, used)
		if c.Name = invalidNameCharacters.ReplaceAllString(c.Name, "_"); c.Name == "" {
			c.Name = namelessTool
		}
		c.Name = c.Name[:min(len(c.Name), maxToolNameBytes)]
		if !c.HasObject() {
			c.Arguments = json.RawMessage("{}")
		}
		out = append(out, c)
	}
	return out
}

// resultsOf returns one result for each call, from the results that come in rest before the next answer. The nth call with an id has the nth result
// for that id.
func resultsOf(calls []Call, rest []Message) []Message {
	results := map[string][]Message{}
	for _, m := range rest {
		if m.Role == RoleAssistant && !m.IsEmpty() {
			break
		}
		if m.Role == RoleTool {
			results[m.CallID] = append(results[m.CallID], m)
		}
	}
	var out []Message
	for _, c := range calls {
		result := Message{Role: RoleTool, Text: noResultText}
		if found := results[c.ID]; len(found) > 0 {
			result, results[c.ID] = found[0], found[1:]
		}
		out = append(out, result)
	}
	return out
}

// uniqueID returns id, or id with a suffix if it is in used, and adds it to used.
func uniqueID(id string, used map[string]bool) string {
	unique := id
	for n := 2; used[unique]; n++ {
		unique = fmt.Sprintf("%s_%d", id, n)
	}
	used[unique] = true
	return unique
}

// OpenCalls returns the calls of the last answer in messages that have no result.
func OpenCalls(messages []Message) []Call {
	for i := len(messages) - 1; i >= 0; i-- {
		if messages[i].Role != RoleAssistant || len(messages[i].Calls) == 0 {
			continue
		}
		var open []Call
		answered := map[string]int{}
		for _, m := range messages[i+1:] {
			if m.Role == RoleTool {
				answered[m.CallID]++
			}
		}
		for _, c := range messages[i].Calls {
			if answered[c.ID]--; answered[c.ID] < 0 {
				open = append(open, c)
			}
		}
		return open
	}
	return nil
}
